"""`cocurve inventory`: a model's removable units and their costs, from its configuration alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import InputError
from ..models.families import KINDS
from ..models.units import UnitSet, enumerate_units
from . import forecast as on_paper
from .common import add_verb, as_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DESCRIPTION = """\
List the removable units of a model: KV-aligned groups of attention heads and groups of FFN
channels, with the number of parameters of each. Only the configuration is read; no weights are
downloaded or loaded. It takes seconds to see whether a model is supported, and how large H (M x M)
becomes. --build tells what a build of H takes on GPUs of four sizes, before you rent one."""
EXAMPLE = """\
  cocurve inventory demo
  cocurve inventory meta-llama/Llama-3.1-8B-Instruct --json
  cocurve inventory --paper
  cocurve inventory --paper --build --host-memory 256 --disk 6
  cocurve inventory --config some/folder/config.json --ffn-groups 32"""


def add_to(verbs: Any) -> None:
    """Add the verb `inventory`."""
    parser = add_verb(verbs, "inventory", run, DESCRIPTION, EXAMPLE)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("model", metavar="MODEL", nargs="?", help='"demo", a folder, or a hub id')
    place.add_argument("--paper", action="store_true", help="a table of the paper's models")
    place.add_argument(
        "--config", metavar="FILE", type=as_path, help="a config.json instead of MODEL"
    )
    parser.add_argument("--ffn-groups", type=int, default=16, help="FFN groups per layer (16)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    on_paper.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run `cocurve inventory`."""
    assumed = on_paper.settled(options)
    if options.paper:
        print(
            on_paper.plans(paper_models(), options, assumed) if options.build else _paper(options)
        )
        return 0
    model = _without_weights(options)
    if options.build:
        print(on_paper.plans([(str(options.model or options.config), model)], options, assumed))
        return 0
    units = enumerate_units(model, options.ffn_groups)
    facts = _facts(model, units)
    print(json.dumps(facts, indent=1) if options.json else _table(facts))
    return 0


def _without_weights(options: argparse.Namespace) -> PreTrainedModel:
    """Make the model on the meta device: shapes without weights."""
    from ..models.identity import MANIFEST
    from ..models.load_errors import require_place
    from ..models.loading import place_of, shapes_only
    from ..pruner.saving import empty_pruned

    # transformers would look for a missing file on the hub
    if options.config is not None and not options.config.exists():
        raise InputError(f"there is no {options.config}. Give a config.json, or a hub id as MODEL.")
    source = options.config or place_of(options.model)
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    if (folder / MANIFEST).exists():
        return empty_pruned(folder)
    if not options.config:
        require_place(source)
    model: PreTrainedModel = shapes_only(source)
    return model


def paper_models() -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield every model that the paper names, on the meta device, from data/paper_models.json."""
    from transformers import CONFIG_MAPPING

    from ..models.loading import demo_folder, shapes_only

    for name, values in json.loads(
        (demo_folder().parent / "paper_models.json").read_text(encoding="utf-8")
    ).items():
        kind = values.pop("model_type")
        # the padding token changes no shape, but Phi3's default is outside a small vocabulary
        yield name, shapes_only(CONFIG_MAPPING[kind](**values | {"pad_token_id": None}))


def _paper(options: argparse.Namespace) -> str:
    """The paper's models as a Markdown table."""
    lines = ["| model | class | M | removable parameters | share of all |", "|---|---|---|---|---|"]
    for name, model in paper_models():
        units = enumerate_units(model, options.ffn_groups)
        facts = _facts(model, units)
        lines.append(
            f"| {name} | {facts['class']} | {facts['units']:,} | "
            f"{facts['removable_parameters']:,} | {facts['removable_share']:.1%} |"
        )
    return "\n".join(lines)


def _facts(model: PreTrainedModel, units: UnitSet) -> dict[str, Any]:
    """The numbers of units and parameters, as a whole and by layer, for JSON."""
    layers = []
    for layer in range(units.num_layers):
        row: dict[str, Any] = {"layer": layer}
        for kind in KINDS:
            costs = units.costs[(units.layers == layer) & (units.kinds == kind)]
            row[kind] = {
                "units": len(costs),
                "parameters_each": [int(cost) for cost in np.unique(costs)],
                "parameters": int(costs.sum()),
            }
        layers.append(row)
    total = units.total_parameters
    return {
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
        f"{'layers':>9}  {'attention':>30}  {'FFN':>30}",
    ]
    layers = facts["layers"]
    start = 0
    for stop in range(1, len(layers) + 1):
        same = stop < len(layers) and all(layers[stop][k] == layers[start][k] for k in KINDS)
        if not same:
            name = str(start) if stop - start == 1 else f"{start} to {stop - 1}"
            cells = "".join(f"  {_cell(layers[start][kind]):>30}" for kind in KINDS)
            lines.append(f"{name:>9}{cells}")
            start = stop
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    """The units of one kind in a layer: their number and size."""
    if not row["units"]:
        return "none"
    each = row["parameters_each"]
    size = f"{each[0]:,}" if len(each) == 1 else f"{each[0]:,} to {each[-1]:,}"
    return f"{row['units']} x {size}"
