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
    parse_json,
    reading,
    require_fields,
    told,
)
from ..base.storage import fingerprint
from ..models.architectures import Architecture
from ..models.families import KINDS
from ..models.identity import MANIFEST, fingerprint_model, model_dtype, weight_marks
from ..models.loading import read_dtype
from ..solver.selection import Selection
from .folder import Loader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-pruned", 3

# The weights since pruning. "refitted" means by `repair`, "trained" by `recover`, and not changed
# since; the fields "repair" and "recovery" say how. "converted" means to another dtype: the
# fingerprint then differs anyway and can no longer show whether anything else changed.
Weights = Literal["unchanged", "refitted", "trained", "converted", "changed"]
KNOWN: tuple[Weights, ...] = ("unchanged", "refitted", "trained")  # no other change is possible


def _matching(pattern: str, words: str) -> Field:
    return Field(
        words, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value, re.A))
    )


def _one_of(*values: str) -> Field:
    return Field(f"one of {', '.join(values)}", lambda value: value in values)


_HEX = _matching("[0-9a-f]{64}", "64 hexadecimal digits")
_UNIT = _matching(r"L\d+\.(attention|ffn)\[\d+\]", "the name of a unit")  # `Unit.name`
_OBJECTS = Field("a list of objects", list_of(is_object))
_WIDTHS: Schema = dict.fromkeys(("attention_columns", "key_value_heads", "ffn_columns"), COUNT)
_TEXT: Schema = {
    "calibration": TEXT,
    "calibration_fingerprint": _HEX,
    "sequences": COUNT,
    "positions": COUNT,
}
_REPAIR: Schema = {
    "method": TEXT,
    "sequential": FLAG,
    "target": _one_of("stream", "write", "dense"),
    "kinds": Field("a list of kinds of units", list_of(lambda value: value in KINDS)),
    "ridge": NUMBER,
    **_TEXT,
}
_RECOVERY: Schema = {
    "method": TEXT,
    "learning_rate": NUMBER,
    **dict.fromkeys(("rank", "epochs", "rows_per_step", "seed", "epoch"), COUNT),
    **_TEXT,
}
# a round of pruning; a model that went through several has one record of each
_ROUND: Schema = {
    "dense_fingerprint": _HEX,
    "ffn_groups": COUNT,
    "pruned_units": Field("a list of units", list_of(_UNIT.fits)),
    "gains": Field(
        "finite numbers by unit",
        lambda value: dict_of(is_number)(value) and all(map(_UNIT.fits, value)),
    ),
    "selection_fingerprint": _HEX,
    "weights_since_pruning": _one_of(*get_args(Weights)),
    "repair": nullable(OBJECT),
    "recovery": nullable(OBJECT),
}
_FIELDS: Schema = {
    **_ROUND,
    "format": TEXT,
    "version": COUNT,
    "dtype": TEXT,
    "layers": _OBJECTS,
    "base_model": nullable(TEXT),
    "weights_fingerprint": _HEX,
    "earlier_rounds": _OBJECTS,
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
    "loads_with": _one_of(*get_args(Loader)),
}


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
        """Describe a model that is about to be cut; all weights are read unless `marks` are given.

        Args:
            model: the model.
            marks: its `identity.weight_marks`.
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
    """Make the manifest of a pruned model, as JSON values.

    Costs are in parameters, the risk in nats per token.

    Args:
        architecture: the pruned model.
        selection: the plan.
        origin: the model before.
        marks: the pruned model's `identity.weight_marks`, if they are known already.
    """
    model, earlier = architecture.model, origin.manifest
    source, units = str(model.config._name_or_path), selection.units.units
    marks = weight_marks(model) if marks is None else marks
    rounds = (
        [] if earlier is None else [*earlier["earlier_rounds"], {n: earlier[n] for n in _ROUND}]
    )
    # a path on this machine tells others nothing: keep its last part
    base = Path(source).name if Path(source).exists() else source
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": model_dtype(model),
        "base_model": base if earlier is None else earlier["base_model"],
        "dense_fingerprint": origin.dense_fingerprint,
        "weights_fingerprint": fingerprint(marks),
        "weights_since_pruning": "unchanged",
        "repair": None,
        "recovery": None,
        "earlier_rounds": rounds,
        "layers": widths_of(architecture),
        "ffn_groups": selection.units.ffn_groups,
        "guards": selection.guards.to_plain(),
        "removed_parameters": selection.pruned_cost,
        "requested_ratio": selection.requested_ratio,
        "target": None if selection.target is None else str(selection.target),
        "uniform": selection.uniform,
        "realized_ratio": selection.realized_ratio,
        "params_removed_fraction": selection.pruned_cost
        / (model.num_parameters() + selection.pruned_cost),
        "interaction_strength": selection.interaction_strength,
        "predicted_risk": selection.predicted_risk,
        "pruned_units": [units[i].name for i in selection.pruned],
        "gains": {units[i].name: gain for i, gain in selection.gains.items()},
        "selection_fingerprint": selection.fingerprint,
        "curvature_fingerprint": selection.curvature_fingerprint,
    }


def weights_now(
    model: PreTrainedModel, manifest: Mapping[str, Any], marks: list[list[str]] | None = None
) -> dict[str, str]:
    """Compare the weights of a pruned model with those that its manifest was written for.

    The weights alone are fingerprinted, because a saved folder may have another configuration.

    Returns:
        The manifest's fields "weights_fingerprint" (of the weights as they are now) and
        "weights_since_pruning". "changed" stays so in every later save; "converted" stays until a
        change is found.
    """
    now = fingerprint(weight_marks(model) if marks is None else marks)
    state: Weights = manifest["weights_since_pruning"]
    if now != manifest["weights_fingerprint"]:
        if model_dtype(model) == manifest["dtype"]:
            state = "changed"
        elif state in KNOWN:  # another dtype, and so other bits in any case
            state = "converted"
    return {"weights_fingerprint": now, "weights_since_pruning": state}


def widths_of(architecture: Architecture) -> list[dict[str, int]]:
    """Return each layer's current widths, under the names of the manifest."""
    return [
        {
            "attention_columns": architecture.width(layer, "attention"),
            "key_value_heads": architecture.num_groups(layer),
            "ffn_columns": architecture.width(layer, "ffn"),
        }
        for layer in range(len(architecture.layers))
    ]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a saved folder; raise FileFormatError if it is missing or damaged."""
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
        if found != (FORMAT, VERSION):
            raise FileFormatError(
                f"it is {found[0]!r} version {found[1]!r}; this code reads {FORMAT!r} version "
                f"{VERSION}"
            )
        require_fields(manifest, _FIELDS)
        for name, schema in (("layers", _WIDTHS), ("earlier_rounds", _ROUND)):
            for number, part in enumerate(manifest[name]):
                require_fields(part, schema, inside=f"{name}[{number}]")
        for name, schema in (("repair", _REPAIR), ("recovery", _RECOVERY)):
            if manifest[name] is not None:
                require_fields(manifest[name], schema, inside=name)
        read_dtype(manifest["dtype"])
    return manifest
