"""`cocurve inventory`: a model's removable units and their costs, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import InputError
from ..base.schema import read_json
from ..models import loading
from ..models.architectures import UNIT_KINDS, describe
from ..models.identity import demo_folder, is_pruned
from ..models.kinds import KINDS
from ..models.loading import place_of
from ..models.sources import OPENING
from ..models.units import enumerate_units
from ..pruner.saving import empty_pruned
from .options import Verb, argument, flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Inventory(Verb):
    """List the removable units of a model.

    They are KV-aligned groups of attention heads and groups of FFN channels, with the number of
    parameters of each. Only the configuration is read; no weights are downloaded or loaded. It
    takes seconds to see whether a model is supported, and how large H (M x M) becomes.

    Examples:
      cocurve inventory demo
      cocurve inventory meta-llama/Llama-3.1-8B-Instruct --json
      cocurve inventory --paper
      cocurve inventory --config some/folder/config.json --ffn-groups 32
    """

    model: str | None = argument(
        "MODEL", '"demo", a folder, or a hub id', nargs="?", one_of="place"
    )
    paper: bool = flag("a table of the paper's models", one_of="place")
    config: Path | None = flag("a config.json instead of MODEL", metavar="FILE", one_of="place")
    ffn_groups: int = flag("FFN groups per layer (16)", 16)
    json: bool = flag("print JSON")

    def run(self) -> int:
        """Run `cocurve inventory`."""
        if self.paper:
            print(_paper(self.ffn_groups))
        else:
            facts = _facts(self._without_weights(), self.ffn_groups)
            print(json.dumps(facts, indent=1) if self.json else _table(facts))
        return 0

    def _without_weights(self) -> PreTrainedModel:
        """Make the model on the meta device: shapes without weights."""
        # transformers would look for a missing file on the hub
        if self.config is not None and not self.config.exists():
            raise InputError(
                f"there is no {self.config}. Give a config.json, or a hub id as MODEL."
            )
        source = self.config or place_of(self.model or "")
        folder = Path(source).parent if Path(source).is_file() else Path(source)
        if is_pruned(folder):
            return empty_pruned(folder).model
        if not self.config:
            OPENING().require_place(source)
        model: PreTrainedModel = loading.shapes_only(source)
        return model


def paper_models() -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield every model that the paper names, on the meta device, from data/paper_models.json."""
    from transformers import CONFIG_MAPPING

    for name, values in read_json(demo_folder().parent / "paper_models.json").items():
        kind = values.pop("model_type")
        # the padding token changes no shape, but Phi3's default is outside a small vocabulary
        yield name, loading.shapes_only(CONFIG_MAPPING[kind](**values | {"pad_token_id": None}))


def _paper(ffn_groups: int) -> str:
    """The paper's models as a Markdown table."""
    lines = ["| model | class | M | removable parameters | share of all |", "|---|---|---|---|---|"]
    for name, model in paper_models():
        facts = _facts(model, ffn_groups)
        lines.append(
            f"| {name} | {facts['class']} | {facts['units']:,} | "
            f"{facts['removable_parameters']:,} | {facts['removable_share']:.1%} |"
        )
    return "\n".join(lines)


def _facts(model: PreTrainedModel, ffn_groups: int) -> dict[str, Any]:
    """The numbers of units and parameters, as a whole and by layer, for JSON."""
    units = enumerate_units(model, ffn_groups)
    layers = []
    for layer in range(units.num_layers):
        row: dict[str, Any] = {"layer": layer}
        for kind in dict.fromkeys([*KINDS, *units.kinds.tolist()]):
            costs = units.costs[(units.layers == layer) & (units.kinds == kind)]
            row[kind] = {
                "units": len(costs),
                "parameters_each": [int(cost) for cost in np.unique(costs)],
                "parameters": int(costs.sum()),
            }
        layers.append(row)
    total, architecture = units.total_parameters, describe(model)
    mixed = [n for n in range(units.num_layers) if architecture.mixers(n)]
    stays = {"stays": dict.fromkeys(architecture.family.mixers, mixed)} if mixed else {}
    return stays | {
        "class": type(model).__name__,
        "units": len(units),
        "removable_parameters": units.total_cost,
        "parameters": total,
        "removable_share": None if not total else units.total_cost / total,
        "matrix_bytes": 8 * len(units) ** 2,
        "layers": layers,
    }


def _table(facts: dict[str, Any]) -> str:
    """The facts as text; equal layers in a row share a line."""
    lines = [
        f"{facts['class']}: M = {facts['units']} units, {facts['removable_parameters']:,} of "
        f"{facts['parameters']:,} parameters can be removed ({facts['removable_share']:.1%}); H "
        f"takes {facts['matrix_bytes'] / 1e6:,.1f} MB",
    ]
    layers = facts["layers"]
    kinds = [kind for kind in UNIT_KINDS if kind in layers[0]]
    heads = "".join(f"  {UNIT_KINDS[kind].plural.split()[0]:>30}" for kind in kinds)
    lines.append(f"{'layers':>9}{heads}")
    for cells, equal in groupby(layers, lambda row: [_cell(row[kind]) for kind in kinds]):
        numbers = [row["layer"] for row in equal]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        lines.append(f"{name:>9}" + "".join(f"  {cell:>30}" for cell in cells))
    for name, mixed in facts.get("stays", {}).items():
        lines.append(f"{name} of {len(mixed)} layers has no units and stays.")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    """The units of one kind in a layer: their number and size."""
    if not row["units"]:
        return "none"
    each = row["parameters_each"]
    size = f"{each[0]:,}" if len(each) == 1 else f"{each[0]:,} to {each[-1]:,}"
    return f"{row['units']} x {size}"
