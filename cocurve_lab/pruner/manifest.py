"""The manifest of a pruned model: the widths of its layers, and the plan behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..base.atomic import clean
from ..base.errors import FileFormatError
from ..base.origin import LOADED, RECORD, Record, Verdict
from ..base.schema import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    SHARE,
    TEXT,
    TEXTS,
    Field,
    Schema,
    dict_of,
    is_number,
    is_object,
    list_of,
    nullable,
    optional,
    read_json,
    reading,
    require_fields,
)
from ..base.storage import fingerprint
from ..models.architectures import UNIT_KINDS, Architecture, describe
from ..models.identity import (
    MANIFEST,
    Marks,
    hub_id,
    known_record,
    model_dtype,
    require_sealed,
    require_source,
    weight_marks,
)
from ..models.kinds import KINDS
from ..models.loading import read_dtype
from ..models.units import list_units
from ..solver.plan_json import UNIFORM, guards_to_plain
from ..solver.selection import Selection
from .folder import Loader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-pruned", 3

# The weights since pruning. "refitted" means by `repair`, "trained" by `recover`, and not changed
# since; the fields "repair" and "recovery" say how. "converted" means to another dtype: the
# fingerprint then differs anyway and can no longer show whether anything else changed. "trained
# elsewhere": another tool saved the model, and its plan is not known.
Weights = Literal["unchanged", "refitted", "trained", "converted", "changed", "trained elsewhere"]
KNOWN: tuple[Weights, ...] = ("unchanged", "refitted", "trained")  # no other change is possible


def _matching(pattern: str, words: str) -> Field:
    return Field(
        words, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value, re.A))
    )


def _one_of(*values: str) -> Field:
    return Field(f"one of {', '.join(values)}", lambda value: value in values)


_HEX = _matching("[0-9a-f]{64}", "64 hexadecimal digits")
_UNIT = _matching(rf"L\d+\.({'|'.join(UNIT_KINDS)})\[\d+\]", "the name of a unit")  # `Unit.name`
_OBJECTS = Field("a list of objects", list_of(is_object))
_WIDTHS: Schema = {
    # where a layer has such a block
    **optional({f"{kind}_columns": COUNT for kind in UNIT_KINDS}),
    **optional({"key_value_heads": COUNT}),
}
_LAYERED: Schema = {"per_layer_config": Field("an object of objects", dict_of(is_object))}
_TEXT: Schema = {
    "calibration": TEXT,
    "calibration_fingerprint": _HEX,
    "sequences": COUNT,
    "positions": COUNT,
}
_REPAIR: Schema = {
    "method": TEXT,
    "sequential": FLAG,
    "target": _one_of("gap", "stream", "dense"),
    "kinds": Field("a list of kinds of units", list_of(lambda value: value in KINDS)),
    "ridge": NUMBER,
    **_TEXT,
}
_RECOVERY: Schema = {
    "method": TEXT,
    "learning_rate": NUMBER,
    **dict.fromkeys(("rank", "epochs", "rows_per_step", "seed", "epoch"), COUNT),
    "minutes": nullable(NUMBER),
    **_TEXT,
}
_UNITS = Field("a list of units", list_of(_UNIT.fits))
_GAINS = Field(
    "finite numbers by unit",
    lambda value: dict_of(is_number)(value) and all(map(_UNIT.fits, value)),
)


@dataclass(frozen=True)
class Origin:
    """The model before the cut: its record, what must be told, and its manifest if it has one."""

    record: Record
    told: str = ""
    manifest: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, selection: Selection, marks: Marks | None = None) -> Origin:
        """Describe a model that is about to be cut, and require that the plan is of its weights.

        Reads all weights unless their `tensor_marks` are given.
        """
        record = known_record(model, marks, fresh=True)
        verdict = require_source(model, selection)
        earlier: Any = manifest_on(model)
        if earlier is not None:
            own = [[name, marks[name][LOADED]] for name in sorted(marks)] if marks else None
            earlier = earlier | weights_now(model, earlier, own)
        return cls(record, verdict.note, earlier)


# every field in the order of the file
_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "dtype": TEXT,
    "base_model": nullable(TEXT),
    "dense_fingerprint": nullable(_HEX),
    "origin": OBJECT,
    "weights_fingerprint": _HEX,
    "weights_since_pruning": _one_of(*get_args(Weights)),
    "repair": nullable(OBJECT),
    "recovery": nullable(OBJECT),
    "earlier_rounds": _OBJECTS,
    "layers": _OBJECTS,
    "ffn_groups": COUNT,
    "guards": OBJECT,
    "removed_parameters": COUNT,
    "requested_ratio": SHARE,
    "target": nullable(TEXT),
    "uniform": UNIFORM,
    "realized_ratio": SHARE,
    "params_removed_fraction": SHARE,
    "interaction_strength": nullable(NUMBER),
    "predicted_risk": nullable(NUMBER),
    "pruned_units": _UNITS,
    "gains": _GAINS,
    "selection_fingerprint": _HEX,
    "curvature_fingerprint": nullable(_HEX),
}
_SCHEMA: Schema = {
    **_FIELDS,
    "parameters": COUNT,  # these two are known when the model is saved
    "loads_with": _one_of(*get_args(Loader)),
    **optional(
        {
            "weights": Field("a mark by weight", dict_of(_HEX.fits)),
            "files": Field("a checksum by file", dict_of(_HEX.fits)),
            "accepted": TEXTS,
        }
    ),
}
# a round of pruning; a model that went through several has one record of each
_ROUND: Schema = {
    name: _SCHEMA[name]
    for name in (
        "dense_fingerprint",
        "ffn_groups",
        "pruned_units",
        "gains",
        "selection_fingerprint",
        "weights_since_pruning",
        "repair",
        "recovery",
        "origin",
    )
}


def manifest_of(
    pruned: Architecture,
    plan: Selection,
    origin: Origin,
    marks: list[list[str]] | None = None,
) -> dict[str, Any]:
    """Make the manifest of a model that was just cut, as JSON values.

    Costs are in parameters, the risk in nats per token. `marks` are the pruned model's
    `weight_marks` if they are known already.
    """
    model, earlier, units = pruned.model, origin.manifest, plan.units.units
    rounds: list[dict[str, Any]] = []
    if earlier is None:
        place = hub_id(str(model.config._name_or_path))
        # a path on this machine tells others nothing: keep its last part
        base_model = Path(place).name if Path(place).exists() else place
    else:
        base_model = earlier["base_model"]
        last = {name: earlier[name] for name in _ROUND}
        rounds = [*earlier["earlier_rounds"], last]
    source = {
        **origin.record,
        "H": plan.curvature_fingerprint,
        "plan": plan.fingerprint,
        "text": (plan.origin or {}).get("text"),
        "told": origin.told or None,
    }
    removed = plan.pruned_cost
    uniform = plan.made.uniform
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": model_dtype(model),
        "base_model": base_model,
        "dense_fingerprint": origin.record.get("checkpoint", {}).get(LOADED),
        "origin": {name: value for name, value in source.items() if value},
        "weights_fingerprint": fingerprint(weight_marks(model) if marks is None else marks),
        "weights_since_pruning": "unchanged",
        "repair": None,
        "recovery": None,
        "earlier_rounds": rounds,
        "layers": widths_of(pruned),
        "ffn_groups": plan.units.ffn_groups,
        "guards": guards_to_plain(plan.guards, plan.units),
        "removed_parameters": removed,
        "requested_ratio": plan.requested_ratio,
        "target": plan.made.target and str(plan.made.target),
        "uniform": list(uniform) if isinstance(uniform, tuple) else uniform,
        "realized_ratio": plan.realized_ratio,
        "params_removed_fraction": removed / (model.num_parameters() + removed),
        "interaction_strength": plan.interaction_strength,
        "predicted_risk": plan.predicted_risk,
        "pruned_units": [units[index].name for index in plan.pruned],
        "gains": {units[index].name: gain for index, gain in plan.gains.items()},
        "selection_fingerprint": plan.fingerprint,
        "curvature_fingerprint": plan.curvature_fingerprint,
    }


def manifest_on(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the manifest that a pruned model carries; None if it was not pruned.

    A model that comes back from another tool carries none, and gets one without a plan.
    """
    found: dict[str, Any] | None = getattr(model, "cocurve_manifest", None)
    known = found is not None or not type(model).__name__.startswith("Cocurve")
    return found if known else manifest_elsewhere(describe(model))


def manifest_elsewhere(pruned: Architecture) -> dict[str, Any]:
    """Make the manifest of a pruned model whose plan is not known; reads no weights."""
    plan = Selection.from_pruned(list_units(pruned), [])
    known = manifest_of(pruned, plan, Origin({}), [])
    return known | {"base_model": None, "weights_since_pruning": "trained elsewhere"}


def require_dense(model: PreTrainedModel, pruned: PreTrainedModel | dict[str, Any]) -> Verdict:
    """Require that a pruned model, or one of that manifest, was cut from this one in some round.

    Raises MismatchError if it was cut from other weights. A model that was not pruned here is
    compared with nothing.
    """
    manifest = pruned if isinstance(pruned, dict) else manifest_on(pruned)
    if manifest is None:
        return Verdict("same")
    records = [each["origin"] for each in (manifest, *manifest["earlier_rounds"])]
    return require_source(model, *records, what="the model from which the pruned one was cut")


def weights_now(
    model: PreTrainedModel, manifest: Mapping[str, Any], marks: list[list[str]] | None = None
) -> dict[str, str]:
    """Return the manifest's fields on the weights of a pruned model as they are now.

    The weights alone are fingerprinted, because a saved folder may have another configuration.
    "changed" and "trained elsewhere" stay so in every later save; "converted" stays until a change
    is found.
    """
    now = fingerprint(weight_marks(model) if marks is None else marks)
    state: Weights = manifest["weights_since_pruning"]
    if now != manifest["weights_fingerprint"] and state != "trained elsewhere":
        if model_dtype(model) == manifest["dtype"]:
            state = "changed"
        elif state in KNOWN:  # another dtype, and so other bits in any case
            state = "converted"
    return {"weights_fingerprint": now, "weights_since_pruning": state}


def widths_of(architecture: Architecture) -> list[dict[str, int]]:
    """Return each layer's current widths, under the names of the manifest."""
    found = []
    for layer in range(len(architecture.layers)):
        kinds = architecture.kinds(layer)
        widths = {f"{kind}_columns": architecture.width(layer, kind) for kind in kinds}
        if "attention" in kinds:
            widths["key_value_heads"] = architecture.num_groups(layer)
        found.append(widths)
    return found


def widths_in(folder: Path, architecture: Architecture) -> list[dict[str, int]]:
    """Read each layer's widths from config.json alone; of the dense model, counts that it omits."""
    path, found = folder / "config.json", []
    with reading(path, "Save the model again."):
        content = read_json(path)
        own = require_fields(content, _LAYERED, others=True)["per_layer_config"]
        for layer in range(len(architecture.layers)):
            counts = own.get(str(layer), {})
            every = {**architecture.model.config.to_dict(), **counts}
            every["head_dim"] = architecture.head_dim(layer)
            gone = counts.get("skip") or ()
            if "attention" in gone:
                every |= {"num_attention_heads": 0, "num_key_value_heads": 0}
            kinds, named = architecture.kinds(layer), dict[str, int]()
            for kind in kinds:
                named |= UNIT_KINDS[kind].from_settings(every)
            own_names = {"key_value_heads", *(f"{kind}_columns" for kind in kinds)}
            widths = {name: width for name, width in named.items() if name in own_names}
            if "mlp" in gone:
                widths["ffn_columns"] = 0
            found.append(require_fields(widths, _WIDTHS, inside=f"layer {layer}"))
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a saved folder; raise FileFormatError if it is missing or damaged."""
    path = folder / MANIFEST
    if not folder.is_dir():
        clean(folder.parent)  # a save that was killed while it replaced the folder
    if not folder.is_dir():
        raise FileFormatError(f"there is no folder {folder}. Give one that save_pruned wrote.")
    if not path.exists():
        raise FileFormatError(
            f"{folder} has no {MANIFEST}, and its config.json names no widths of layers: it is no "
            "pruned model. Load a dense one with load_model."
        )
    damaged = "It is damaged, or of another release. Save the model again with this one."
    with reading(path, damaged):
        manifest = require_sealed(folder)
        found = manifest.get("format"), manifest.get("version")
        if found != (FORMAT, VERSION):
            raise FileFormatError(
                f"it is {found[0]!r} version {found[1]!r}; this code reads {FORMAT!r} version "
                f"{VERSION}"
            )
        require_fields(manifest, _SCHEMA)
        for name, schema in (("layers", _WIDTHS), ("earlier_rounds", _ROUND)):
            for number, part in enumerate(manifest[name]):
                require_fields(part, schema, inside=f"{name}[{number}]")
        for part in (manifest, *manifest["earlier_rounds"]):
            require_fields(part["origin"], RECORD, inside="origin")
        for name, schema in (("repair", _REPAIR), ("recovery", _RECOVERY)):
            if manifest[name] is not None:
                require_fields(manifest[name], schema, inside=name)
        read_dtype(manifest["dtype"])
    return manifest
