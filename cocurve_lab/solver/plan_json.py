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
from ..base.origin import ALLOWED, RECORD, require_same_source
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
from .targets import ratio_budget

FORMAT, VERSION = "cocurve-selection", 1
_CHANGED = f"To change a plan by hand, remove its {SUM}; its origin then counts as unknown"

_TERMS = nullable(Field("a list of finite numbers", list_of(is_number)))
_KINDS = list_of(lambda kind: kind in UNIT_KINDS)
UNIFORM = Field(
    "true, false or a list of kinds", lambda value: isinstance(value, bool) or _KINDS(value)
)
_WORDS = Field("words", lambda value: is_text(value) and bool(re.fullmatch(r"[\w ]+", value)))
_FIELDS: Schema = {
    "units": OBJECT,
    "pruned": Field("a list of unit indices", list_of(is_count)),
    "requested_ratio": SHARE,
    "ordered": FLAG,
    "node_terms": _TERMS,
    "edge_terms": _TERMS,
    "interaction_strength": nullable(
        Field("a finite number from 0", lambda value: is_number(value) and value >= 0)
    ),
    "guards": OBJECT,
    "gains": Field(
        "finite numbers by unit index",
        lambda value: dict_of(is_number)(value) and all(map(str.isdecimal, value)),
    ),
    "curvature_fingerprint": nullable(TEXT),
    "forced": COUNT,
    **optional({"target": OBJECT, "uniform": UNIFORM, "surrogate": _WORDS, "origin": OBJECT}),
    "text_windows": WINDOWS._replace(optional=True),
    "stages": Field("a list of shares", list_of(SHARE.fits), True),
}
_GUARDS: Schema = optional(
    {
        "layer_cap": nullable(NUMBER),
        "layer_cap_factor": nullable(NUMBER),
        "protect_first": COUNT,
        "protect_last": COUNT,
        "tensor_parallel": COUNT,
        "align": COUNT,
        "depth": Field("block or layer", lambda value: value in ("block", "layer")),
        "kinds": Field("a list of kinds", _KINDS),
    }
)


def guards_to_plain(guards: Any, units: Any) -> dict[str, Any]:
    """Return the fields of guards for JSON, without kinds of unit that only other models have."""
    own = [kind for kind in guards.kinds if UNIT_KINDS[kind].columns or kind in units.kinds]
    return {**guards.to_plain(), "kinds": own}


def to_plain(plan: Any) -> dict[str, Any]:
    """Return the fields of a plan for JSON, the rare ones only where they are set."""
    terms = (plan.node_terms, plan.edge_terms)
    node, edge = (None if numbers is None else numbers.tolist() for numbers in terms)
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content |= {name: getattr(plan, name) for name in _FIELDS}
    content |= {
        "units": plan.units.to_plain(),
        "pruned": list(plan.pruned),
        "node_terms": node,
        "edge_terms": edge,
        "guards": guards_to_plain(plan.guards, plan.units),
        "gains": {str(index): gain for index, gain in plan.gains.items()},
        "target": plan.target and plan.target.to_plain(),
        "stages": list(plan.stages),
    }
    if plan.origin is not None:
        content["origin"] = {k: v for k, v in plan.origin.items() if k != ALLOWED}
    rare: dict[str, Any] = {"target": None, "uniform": False, "surrogate": "H", "stages": []}
    rare |= {"origin": None, "text_windows": None}
    return {k: v for k, v in content.items() if k not in rare or v != rare[k]}


def read_fields(text: str) -> dict[str, Any]:
    """Parse a plan in JSON and return its fields, checked one by one, without format and version.

    The fields of its units are checked by `UnitSet.from_plain`.
    """
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise FileFormatError(f"it is {told(content)}, not an object with fields")
        if SUM in content:
            unseal_json(content, _CHANGED)
        else:  # by hand: its origin is not known
            content.pop("origin", None)
        found = (content.pop("format", None), content.pop("version", None))
        if found != (FORMAT, VERSION):
            raise FileFormatError(f"its format is {told(found[0])} version {told(found[1])}")
        require_fields(content, _FIELDS)
        require_fields(content["guards"], _GUARDS, inside="guards")
        require_fields(content.get("origin", {}), RECORD, inside="origin")
    except FileFormatError as error:
        raise no_plan(str(error)) from None
    for name in ("node_terms", "edge_terms"):
        numbers, units = content[name], len(content["pruned"])
        if numbers is not None and len(numbers) != units:
            raise no_plan(f"{name} has {len(numbers)} numbers for {units} pruned units")
    return content


def require_consistent(plan: Any) -> None:
    """Raise FileFormatError if two fields of a plan contradict each other; names both."""
    units, target = plan.units, plan.target
    terms = np.zeros(0) if plan.node_terms is None else plan.node_terms
    budget = ratio_budget(units, plan.requested_ratio) if target is None else target.budget(units)
    lowest = terms.min(initial=0.0)
    fault = None
    if plan.surrogate == "H" and lowest < -1e-9 * np.abs(terms).max(initial=0.0):
        fault = f"node_terms has {lowest:.3g}, but 1/2 H_uu is never negative"
    elif plan.forced > len(plan):
        fault = f"forced is {plan.forced}, but {len(plan)} units are pruned"
    elif not budget.reached(plan.pruned):
        removed = budget.costs[list(plan.pruned)].sum().item()
        asked = (
            f"its target is {target}" if target else f"requested_ratio is {plan.requested_ratio}"
        )
        fault = f"{asked}, but its units come to {budget.shown(removed)}"
    elif plan.uniform and not _is_uniform(plan):
        fault = f"uniform is {told(plan.uniform)}, but its layers lose different counts"
    if fault is not None:
        raise FileFormatError(fault)


def require_plan_of(plan: Any, curvature: Any, terms: bool = True) -> None:
    """Raise MismatchError unless plan and H are of the same units and weights.

    Terms that this H gave to the plan must be its own, else FileFormatError.
    """
    plan.units.require_same(curvature.units, mine="the selection", theirs="the curvature")
    if plan.origin is not None:
        require_same_source(curvature.origin, plan.origin, between=("H", "the plan"))
    same = plan.surrogate == "H" and plan.curvature_fingerprint == curvature.fingerprint
    if not terms or not same or plan.node_terms is None or plan.edge_terms is None:
        return
    block = curvature.matrix[np.ix_(plan.pruned, plan.pruned)]
    own = np.array([np.diagonal(block) / 2, np.tril(block, -1).sum(axis=1)])
    gap = np.abs(np.array([plan.node_terms, plan.edge_terms]) - own).max(initial=0.0)
    if gap > 1e-9 * np.abs(block).sum():
        raise FileFormatError(
            f"the terms of the plan are {gap:.3g} from those of its H: it was changed after it was "
            "solved. Solve it again."
        )


def _is_uniform(plan: Any) -> bool:
    """Whether every layer loses the same counts of each kind and width.

    Or, of some kinds, every layer that has them.
    """
    kinds = tuple(UNIT_KINDS) if plan.uniform is True else plan.uniform
    layers: dict[int, Counter[tuple[str, int]]] = {}
    for unit in (plan.units[index] for index in plan.pruned):
        if unit.kind in kinds:
            layers.setdefault(unit.layer, Counter())[unit.kind, unit.stop - unit.start] += 1
    # by width too: FFN groups of a layer may differ by one channel
    first, *others = layers.values() or [Counter()]
    every = {unit.layer for unit in plan.units if unit.kind in kinds}
    every = set(range(plan.units.num_layers)) if plan.uniform is True else every
    return set(layers) in (set(), every) and all(other == first for other in others)


def no_plan(fact: str) -> FileFormatError:
    """Make the error for a file that is not a plan; `fact` has no full stop."""
    return FileFormatError(f"not a selection: {fact}. Use a file that Selection.to_json wrote.")
