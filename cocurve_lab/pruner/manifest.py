"""The manifest of a pruned model: the widths of its layers, and the plan behind them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import FileFormatError
from ..models.architectures import Architecture
from ..models.families import KINDS
from ..models.identity import MANIFEST, model_dtype, weight_marks
from ..models.loading import read_dtype
from ..solver.selection import Selection
from ..storage import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-pruned", 2
READABLE = (1, 2)  # version 1 has no card, and its folders load with load_pruned alone

# The weights since pruning. "converted" means to another dtype: the fingerprint then differs anyway
# and can no longer show whether anything else changed.
Weights = Literal["unchanged", "converted", "changed", "unknown"]
_ROUND = (
    *("dense_fingerprint", "ffn_groups", "pruned_units", "gains", "selection_fingerprint"),
    "weights_since_pruning",
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The model that a plan was cut out of, as it was before.

    Attributes:
        dense_fingerprint: its `identity.fingerprint_model`.
        manifest: its own manifest, if it had been pruned before.
    """

    dense_fingerprint: str
    manifest: Mapping[str, Any] | None = None


def manifest_of(architecture: Architecture, selection: Selection, origin: Origin) -> dict[str, Any]:
    """Make the manifest: widths and dtype for `load_pruned`; plan and ratios for a reader.

    Args:
        architecture: the pruned model.
        selection: the plan.
        origin: the model before.

    Returns:
        A dict of JSON values. Costs are in parameters, the risk in nats per token.
    """
    source, earlier = str(architecture.model.config._name_or_path), origin.manifest
    # a path on this machine tells others nothing: keep its last part
    base = Path(source).name if Path(source).exists() else source
    left = architecture.model.num_parameters()
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": model_dtype(architecture.model),
        "base_model": base if earlier is None else earlier.get("base_model"),
        "dense_fingerprint": origin.dense_fingerprint,
        "weights_fingerprint": fingerprint(weight_marks(architecture.model)),
        "weights_since_pruning": "unchanged",
        "earlier_rounds": [] if earlier is None else _rounds(earlier),
        "layers": widths_of(architecture),
        "ffn_groups": selection.units.ffn_groups,
        "guards": dataclasses.asdict(selection.guards),
        "removed_parameters": selection.pruned_cost,
        "requested_ratio": selection.requested_ratio,
        "target": None if selection.target is None else str(selection.target),
        "uniform": selection.uniform,
        "realized_ratio": selection.realized_ratio,
        "params_removed_fraction": selection.pruned_cost / (left + selection.pruned_cost),
        "interaction_strength": selection.interaction_strength,
        "predicted_risk": selection.predicted_risk,
        "pruned_units": [selection.units.units[i].name for i in selection.pruned],
        "gains": {selection.units.units[i].name: gain for i, gain in selection.gains.items()},
        "selection_fingerprint": selection.fingerprint,
        "curvature_fingerprint": selection.curvature_fingerprint,
    }


def weights_now(
    model: PreTrainedModel, manifest: Mapping[str, Any], marks: list[list[str]] | None = None
) -> dict[str, str]:
    """Compare the weights with those that a manifest was written for.

    The weights alone are fingerprinted, because a saved folder may have another configuration.

    Args:
        model: the pruned model.
        manifest: its own.
        marks: its `identity.weight_marks`, if they are known already.

    Returns:
        The manifest's fields "weights_fingerprint" (of the weights as they are now) and
        "weights_since_pruning" (`Weights`). "changed" and "unknown" stay so in every later save;
        "converted" stays until a change is found.
    """
    marks = weight_marks(model) if marks is None else marks
    mark, now = manifest.get("weights_fingerprint"), fingerprint(marks)
    state: Weights = manifest.get("weights_since_pruning", "unknown")
    if mark is None:  # a manifest of version 1
        state = "unknown"
    elif now != mark and model_dtype(model) == manifest["dtype"]:
        state = "changed"
    elif now != mark and state == "unchanged":  # another dtype, and so other bits in any case
        state = "converted"
    return {"weights_fingerprint": now, "weights_since_pruning": state}


def _rounds(earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rounds of pruning that a model went through, oldest first."""
    return [*earlier.get("earlier_rounds", ()), {name: earlier.get(name) for name in _ROUND}]


def widths_of(architecture: Architecture) -> list[dict[str, int]]:
    """Each layer's current widths, under the names of the manifest."""
    return [
        {
            "attention_columns": architecture.width(layer, "attention"),
            "key_value_heads": architecture.num_groups(layer),
            "ffn_columns": architecture.width(layer, "ffn"),
        }
        for layer in range(len(architecture.layers))
    ]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a saved folder.

    Raises:
        FileFormatError: there is none, or it is damaged or of another format or version.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FileFormatError(f"there is no folder {folder}. Give one that save_pruned wrote.")
    if not path.exists():
        raise FileFormatError(
            f"{folder} has no {MANIFEST}: it was not written by save_pruned. Load a dense model "
            "with load_model."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = (manifest["format"], manifest["version"])
        for widths in manifest["layers"]:
            for kind in KINDS:
                if type(widths[f"{kind}_columns"]) is not int:  # bool is an int to isinstance
                    raise ValueError(f"{kind}_columns is {widths[f'{kind}_columns']!r}")
        read_dtype(manifest["dtype"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is damaged ({type(error).__name__}: {error}). Save the model again."
        ) from None
    if found[0] != FORMAT or found[1] not in READABLE:
        raise FileFormatError(
            f"{path} is {found[0]!r} version {found[1]}; this code reads {FORMAT!r} versions "
            f"{READABLE[0]} to {READABLE[-1]}. Load it with the release that wrote it."
        )
    return manifest
