"""The manifest of a pruned model: the widths of its layers, and the plan behind them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..base.atomic import clean
from ..base.errors import FileFormatError
from ..base.schema import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    SHARE,
    TEXT,
    Field,
    Schema,
    dict_of,
    is_number,
    is_object,
    list_of,
    nullable,
    optional,
    parse_json,
    reading,
    require_fields,
    told,
)
from ..base.storage import fingerprint
from ..extensions.repairing.least_squares_refit import Target
from ..models.architectures import Architecture
from ..models.families import KINDS
from ..models.identity import MANIFEST, fingerprint_model, model_dtype, weight_marks
from ..models.loading import read_dtype
from ..solver.selection import Selection
from .folder import Loader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-pruned", 2
READABLE = (1, 2)  # version 1 has no card, and its folders load with load_pruned alone

# The weights since pruning. "refitted" means by `repair`, "trained" by `recover`, and not changed
# since; the fields "repair" and "recovery" tell how. "converted" means to another dtype: the
# fingerprint then differs anyway and can no longer show whether anything else changed.
Weights = Literal["unchanged", "refitted", "trained", "converted", "changed", "unknown"]
KNOWN: tuple[Weights, ...] = ("unchanged", "refitted", "trained")  # no other change is possible
_HEX = Field("64 hexadecimal digits", lambda value: _matches("[0-9a-f]{64}", value))
_UNIT = r"L\d+\.(attention|ffn)\[\d+\]"  # `Unit.name`
_WIDTHS: Schema = {f"{kind}_columns": COUNT for kind in KINDS}
_REPAIR: Schema = {
    "method": TEXT,
    "sequential": FLAG,
    "target": Field(
        f"one of {', '.join(get_args(Target))}", lambda value: value in get_args(Target)
    ),
    "kinds": Field("a list of kinds of units", list_of(lambda value: value in KINDS)),
    "ridge": NUMBER,
    "calibration": TEXT,
    "calibration_fingerprint": _HEX,
    "sequences": COUNT,
    "positions": COUNT,
}
_RECOVERY: Schema = {
    "method": TEXT,
    "rank": COUNT,
    "learning_rate": NUMBER,
    "epochs": COUNT,
    "rows_per_step": COUNT,
    "seed": COUNT,
    "epoch": COUNT,
    "calibration": TEXT,
    "calibration_fingerprint": _HEX,
    "sequences": COUNT,
    "positions": COUNT,
}
# a round of pruning; a model that went through several has one record of each
_ROUND: Schema = {
    "dense_fingerprint": nullable(_HEX),
    "ffn_groups": nullable(COUNT),
    "pruned_units": nullable(
        Field("a list of units", list_of(lambda value: _matches(_UNIT, value)))
    ),
    "gains": nullable(
        Field(
            "finite numbers by unit",
            lambda value: (
                dict_of(is_number)(value) and all(_matches(_UNIT, name) for name in value)
            ),
        )
    ),
    "selection_fingerprint": nullable(_HEX),
    "weights_since_pruning": Field(
        f"one of {', '.join(get_args(Weights))}, or null",
        lambda value: value is None or value in get_args(Weights),
    ),
    **optional({"repair": nullable(OBJECT), "recovery": nullable(OBJECT)}),
}
_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "dtype": TEXT,
    "layers": Field("a list of objects", list_of(is_object)),
    # the first version lacks some, and the numbers of a plan may be unknown
    **optional(
        {
            **_ROUND,
            "base_model": nullable(TEXT),
            "weights_fingerprint": nullable(_HEX),
            "earlier_rounds": Field("a list of objects", list_of(is_object)),
            "guards": OBJECT,
            "removed_parameters": COUNT,
            "parameters": COUNT,
            "requested_ratio": SHARE,
            "target": nullable(TEXT),
            "uniform": FLAG,
            "realized_ratio": SHARE,
            "params_removed_fraction": SHARE,
            "interaction_strength": nullable(NUMBER),
            "predicted_risk": nullable(NUMBER),
            "curvature_fingerprint": nullable(_HEX),
            "loads_with": Field(
                f"one of {', '.join(get_args(Loader))}", lambda value: value in get_args(Loader)
            ),
        }
    ),
}


def _matches(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


@dataclasses.dataclass(frozen=True)
class Origin:
    """The model that a plan was cut out of, as it was before.

    Attributes:
        dense_fingerprint: its `identity.fingerprint_model`.
        manifest: its own manifest, if it had been pruned before.
    """

    dense_fingerprint: str
    manifest: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, marks: list[list[str]] | None = None) -> Origin:
        """The origin of a model that is about to be cut; `marks` are its `identity.weight_marks`.

        All weights are read for the marks, if they are not given.
        """
        marks = weight_marks(model) if marks is None else marks
        earlier: Any = getattr(model, "cocurve_manifest", None)
        if earlier is not None:
            earlier = earlier | weights_now(model, earlier, marks)
        return cls(fingerprint_model(model, marks), earlier)


def manifest_of(
    architecture: Architecture,
    selection: Selection,
    origin: Origin,
    marks: list[list[str]] | None = None,
) -> dict[str, Any]:
    """Make the manifest: widths and dtype for `load_pruned`; plan and ratios for a reader.

    Args:
        architecture: the pruned model.
        selection: the plan.
        origin: the model before.
        marks: the pruned model's `identity.weight_marks`, if they are known already.

    Returns:
        A dict of JSON values. Costs are in parameters, the risk in nats per token.
    """
    source, earlier = str(architecture.model.config._name_or_path), origin.manifest
    # a path on this machine tells others nothing: keep its last part
    base = Path(source).name if Path(source).exists() else source
    left = architecture.model.num_parameters()
    marks = weight_marks(architecture.model) if marks is None else marks
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": model_dtype(architecture.model),
        "base_model": base if earlier is None else earlier.get("base_model"),
        "dense_fingerprint": origin.dense_fingerprint,
        "weights_fingerprint": fingerprint(
            weight_marks(architecture.model) if marks is None else marks
        ),
        "weights_since_pruning": "unchanged",
        "repair": None,
        "recovery": None,
        "earlier_rounds": [] if earlier is None else _rounds(earlier),
        "layers": widths_of(architecture),
        "ffn_groups": selection.units.ffn_groups,
        "guards": selection.guards.to_plain(),
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
    elif now != mark and state in KNOWN:  # another dtype, and so other bits in any case
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
        clean(folder.parent)  # a save that was killed while it replaced the folder
    if not folder.is_dir():
        raise FileFormatError(f"there is no folder {folder}. Give one that save_pruned wrote.")
    if not path.exists():
        raise FileFormatError(
            f"{folder} has no {MANIFEST}: it was not written by save_pruned. Load a dense model "
            "with load_model."
        )
    damaged = "It is damaged, or of another release. Save the model again with this one."
    with reading(path, damaged):
        manifest = parse_json(path.read_text(encoding="utf-8"))
        if not is_object(manifest):
            raise FileFormatError(f"it is {told(manifest)}, not an object")
        found = manifest.get("format"), manifest.get("version")
        if found[0] != FORMAT or found[1] not in READABLE:
            raise FileFormatError(
                f"it is {found[0]!r} version {found[1]!r}; this code reads {FORMAT!r} versions "
                f"{READABLE[0]} to {READABLE[-1]}"
            )
        require_fields(manifest, _FIELDS, others=True)
        for number, widths in enumerate(manifest["layers"]):
            require_fields(widths, _WIDTHS, inside=f"layers[{number}]", others=True)
        for number, earlier in enumerate(manifest.get("earlier_rounds", ())):
            require_fields(earlier, _ROUND, inside=f"earlier_rounds[{number}]")
        for name, schema in (("repair", _REPAIR), ("recovery", _RECOVERY)):
            if manifest.get(name) is not None:
                require_fields(manifest[name], schema, inside=name, others=True)
        read_dtype(manifest["dtype"])
    return manifest
