"""A plan in JSON: its fields, their allowed values, and how they must agree.

Plan files are passed between people, so every field is checked before it is used. A `plan` here is
a Selection, whose file imports this one.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from ..base.errors import FileFormatError
from ..base.origin import ALLOWED, RECORD
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
    is_count,
    is_number,
    is_text,
    list_of,
    nullable,
    optional,
    parse_json,
    require_fields,
    told,
)
from ..base.storage import SUM, unseal_json
from ..curvature.settings import WINDOWS
from ..models.architectures import UNIT_KINDS
from .guards import Guards
from .targets import Target, as_budget

FORMAT, VERSION = "cocurve-selection", 1
_CHANGED = (
    f"To change a plan by hand, remove its {SUM}; its origin and its predicted risk then count as "
    "unknown"
)

_TERMS = nullable(Field("a list of finite numbers", list_of(is_number)))
_TERM_NAMES = ("node_terms", "edge_terms")
_KINDS = list_of(lambda kind: is_text(kind) and kind in UNIT_KINDS)
UNIFORM = Field(
    "true, false or a list of kinds", lambda value: isinstance(value, bool) or _KINDS(value)
)
_WORDS = Field("words", lambda value: is_text(value) and bool(re.fullmatch(r"[\w ]+", value)))
_MADE: Schema = {
    "requested_ratio": SHARE,
    "ordered": FLAG,
    "interaction_strength": nullable(
        Field("a finite number from 0", lambda value: is_number(value) and value >= 0)
    ),
    "guards": OBJECT,
    "curvature_fingerprint": nullable(TEXT),
    "forced": COUNT,
    **optional({"target": OBJECT, "uniform": UNIFORM, "rule": TEXT, "origin": OBJECT}),
    "text_windows": WINDOWS._replace(optional=True),
}
_FIELDS: Schema = {
    **_MADE,
    "format": Field(FORMAT, lambda value: value == FORMAT),
    "version": Field(f"{VERSION}", lambda value: type(value) is int and value == VERSION),
    "units": OBJECT,
    "pruned": Field("a list of unit indices", list_of(is_count)),
    "node_terms": _TERMS,
    "edge_terms": _TERMS,
    "gains": Field(
        "finite numbers by unit index",
        lambda value: dict_of(is_number)(value) and all(map(str.isdecimal, value)),
    ),
    "surrogate": _WORDS._replace(optional=True),  # `Made.matrix`
}
_GUARDS: Schema = optional(
    {
        "layer_cap": nullable(NUMBER),
        "layer_cap_factor": nullable(NUMBER),
        "protect_first": COUNT,
        "protect_last": COUNT,
        "kinds": Field("a list of kinds", _KINDS),
    }
)


def guards_to_plain(guards: Any, units: Any) -> dict[str, Any]:
    """Return the fields of guards for JSON, without kinds of unit that only other models have."""
    kinds = guards.kinds or tuple(UNIT_KINDS)
    own = [kind for kind in kinds if UNIT_KINDS[kind].columns or kind in units.kinds]
    return vars(guards) | {"kinds": own}


def to_plain(plan: Any) -> dict[str, Any]:
    """Return the fields of a plan for JSON, the rare ones only where they are set."""
    made, terms = plan.made, plan.terms
    content = {
        "format": FORMAT,
        "version": VERSION,
        "units": plan.units.to_plain(),
        "pruned": list(plan.pruned),
        "requested_ratio": made.requested_ratio,
        "ordered": made.ordered,
        "node_terms": None if terms is None else terms.node.tolist(),
        "edge_terms": None if terms is None else terms.edge.tolist(),
        "interaction_strength": made.interaction_strength,
        "guards": guards_to_plain(made.guards, plan.units),
        "gains": {str(index): gain for index, gain in plan.gains.items()},
        "curvature_fingerprint": made.curvature_fingerprint,
        "forced": made.forced,
    }
    origin = made.origin
    if origin is not None:  # the mark lives in memory only
        origin = {name: value for name, value in origin.items() if name != ALLOWED}
    rare = {
        "target": None if made.target is None else made.target.to_plain(),
        "uniform": made.uniform or None,
        "rule": made.rule or None,
        "surrogate": None if made.matrix == "H" else made.matrix,
        "origin": origin,
        "text_windows": made.text_windows,
    }
    return content | {name: value for name, value in rare.items() if value is not None}


def made_from_plain(content: dict[str, Any], units: Any) -> dict[str, Any]:
    """Return the fields of `Made` in the fields of a plan."""
    made = {name: content[name] for name in _MADE if name in content}
    guards = dict(content["guards"])
    if set(guards.get("kinds", ())) >= set(units.kinds.tolist()):  # every kind of the model
        guards.pop("kinds", None)
    made["guards"] = Guards(**guards)
    if "target" in content:
        made["target"] = Target(**content["target"])
    if isinstance(content.get("uniform"), list):
        made["uniform"] = tuple(content["uniform"])
    return made | {"matrix": content.get("surrogate", "H")}


def read_fields(text: str) -> dict[str, Any]:
    """Parse a plan in JSON and return its fields, checked one by one.

    The fields of its units are checked by `UnitSet.from_plain`.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise FileFormatError(f"it is {told(content)}, not an object with fields")
    sealed = SUM in content
    if sealed:
        unseal_json(content, _CHANGED)
    else:  # by hand: its origin is not known
        content.pop("origin", None)
    require_fields(content, _FIELDS)
    require_fields(content["guards"], _GUARDS, inside="guards")
    require_fields(content.get("origin", {}), RECORD, inside="origin")
    counts = [None if content[name] is None else len(content[name]) for name in _TERM_NAMES]
    if counts not in ([None, None], [len(content["pruned"])] * 2):
        raise FileFormatError(
            f"node_terms and edge_terms have {counts[0]} and {counts[1]} numbers for "
            f"{len(content['pruned'])} pruned units"
        )
    # what an H predicts for the units of a plan changed by hand is not known either
    return content if sealed else content | dict.fromkeys((*_TERM_NAMES, "curvature_fingerprint"))


def require_consistent(plan: Any) -> None:
    """Raise FileFormatError if two fields of a plan contradict each other; names both."""
    units, made = plan.units, plan.made
    budget = as_budget(units, made.target or made.requested_ratio)
    removed = budget.costs[list(plan.pruned)].sum().item()
    asked = "its target" if made.target else "requested_ratio"
    node = np.zeros(0) if plan.terms is None else plan.terms.node
    lowest, largest = node.min(initial=0.0), np.abs(node).max(initial=0.0)
    faults = {
        f"node_terms has {lowest:.3g}, but 1/2 H_uu is never negative": (
            made.matrix == "H" and lowest < -1e-9 * largest
        ),
        f"forced is {made.forced}, but {len(plan)} units are pruned": made.forced > len(plan),
        f"{asked} is {made.target or made.requested_ratio}, but its units come to "
        f"{budget.shown(removed)}": not budget.reached(plan.pruned),
        f"uniform is {told(made.uniform)}, but its layers lose different counts": (
            made.uniform and not _is_uniform(plan)
        ),
    }
    for fault, holds in faults.items():
        if holds:
            raise FileFormatError(fault)


def _is_uniform(plan: Any) -> bool:
    """Whether every layer loses the same counts of each kind and width.

    Or, of some kinds, every layer that has them.
    """
    uniform = plan.made.uniform
    kinds = tuple(UNIT_KINDS) if uniform is True else uniform
    lost = {layer: Counter[tuple[str, int]]() for layer in range(plan.units.num_layers)}
    if uniform is not True:
        lost = {unit.layer: Counter() for unit in plan.units if unit.kind in kinds}
    for unit in (plan.units[index] for index in plan.pruned):
        if unit.kind in kinds:  # by width too: FFN groups of a layer may differ by one channel
            lost[unit.layer][unit.kind, unit.stop - unit.start] += 1
    counts = list(lost.values())
    return all(count == counts[0] for count in counts)
