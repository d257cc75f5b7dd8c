"""The manifest of a pruned model: the widths of its layers, and the plan that made them."""

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
READABLE = (1, 2)  # version 1 held neither a card nor what transformers needs to read it alone


# of the weights since they were pruned; "converted": to another dtype, which hides all else
Weights = Literal["unchanged", "converted", "changed", "unknown"]
_ROUND = (
    *("dense_fingerprint", "ffn_groups", "pruned_units", "gains", "selection_fingerprint"),
    "weights_since_pruning",
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The model a plan was cut out of, as it was before.

    Attributes:
        dense_fingerprint: `loading.fingerprint_model` of it.
        manifest: its own, where it had been pruned before.
    """

    dense_fingerprint: str
    manifest: Mapping[str, Any] | None = None


def manifest_of(architecture: Architecture, selection: Selection, origin: Origin) -> dict[str, Any]:
    """What `load_pruned` needs (widths, dtype) and what a reader wants to know (plan, ratios)."""
    source, earlier = str(architecture.model.config._name_or_path), origin.manifest
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
    """The manifest's fields on the weights as they are now, against those it was written for.

    They fingerprint the weights alone: a saved folder may have another configuration.

    Args:
        model: the model; manifest: its own.
        marks: `loading.weight_marks` of it, where they were taken already.

    Returns:
        "weights_fingerprint", of now, and "weights_since_pruning" (`Weights`): "changed" and
        "unknown" stay so in every later save, "converted" unless more is found.
    """
    marks = weight_marks(model) if marks is None else marks
    mark, now = manifest.get("weights_fingerprint"), fingerprint(marks)
    state: Weights = manifest.get("weights_since_pruning", "unknown")
    if mark is None:
        state = "unknown"
    elif now != mark and model_dtype(model) == manifest["dtype"]:
        state = "changed"
    elif now != mark and state == "unchanged":
        state = "converted"
    return {"weights_fingerprint": now, "weights_since_pruning": state}


def _rounds(earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rounds of pruning a model went through, oldest first."""
    return [*earlier.get("earlier_rounds", ()), {name: earlier.get(name) for name in _ROUND}]


def widths_of(architecture: Architecture) -> list[dict[str, int]]:
    """Each layer's widths under the manifest's names, as they are now."""
    return [
        {
            "attention_columns": architecture.width(layer, "attention"),
            "key_value_heads": architecture.num_groups(layer),
            "ffn_columns": architecture.width(layer, "ffn"),
        }
        for layer in range(len(architecture.layers))
    ]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a saved folder.

    Raises:
        FileFormatError: there is none, it is damaged, or of another format or version.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FileFormatError(f"there is no folder {folder}. Give one that save_pruned wrote.")
    if not path.exists():
        raise FileFormatError(
            f"{folder} has no {MANIFEST}: it is not a model saved by save_pruned. A dense model "
            "loads with load_model."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = (manifest["format"], manifest["version"])
        for widths in manifest["layers"]:
            for kind in KINDS:
                if type(widths[f"{kind}_columns"]) is not int:
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
