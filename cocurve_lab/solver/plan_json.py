"""Validation of a plan in JSON: its fields, and the values each may hold.

Plan files are passed between people, so every field is checked before it is used. The tables of
allowed values are at the end of the file; `Selection.from_json` checks fields against each other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from ..errors import FileFormatError
from ..models.families import KINDS

FORMAT, VERSION = "cocurve-selection", 1
Checks = dict[str, tuple[str, Callable[[Any], bool]]]


def read_fields(text: str) -> dict[str, Any]:
    """Parse a plan in JSON and return its fields, checked one by one, without format and version.

    Raises:
        FileFormatError: not JSON, not an object, another format or version, or a field that is
            missing, unknown, or has a value of the wrong type or range (the field is named).
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # deep nesting exhausts the stack
        raise no_plan(f"it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise no_plan(f"it is {_shown(content)}, not an object with fields")
    found = (content.pop("format", None), content.pop("version", None))
    if found != (FORMAT, VERSION):
        raise no_plan(f"its format is {_shown(found[0])} version {_shown(found[1])}")
    for whole, checks, optional in (
        ("", _FIELDS, ("target", "uniform", "forced")),
        ("units.", _UNIT_FIELDS, ()),
        ("guards.", _GUARD_FIELDS, tuple(_GUARD_FIELDS)),
    ):
        parts = content[whole[:-1]] if whole else content
        for name in (*checks, *parts):  # the expected fields, and the fields there are
            if name not in checks:
                raise no_plan(f"no field is called {_shown(whole + name)}")
            if name not in parts and name not in optional:
                raise no_plan(f"{whole}{name} is missing")
            words, fits = checks[name]
            if name in parts and not fits(parts[name]):
                raise no_plan(f"{whole}{name} is {_shown(parts[name])}, not {words}")
    for name in ("node_terms", "edge_terms"):
        if content[name] is not None and len(content[name]) != len(content["pruned"]):
            raise no_plan(
                f"{name} has {len(content[name])} numbers for {len(content['pruned'])} pruned units"
            )
    return content


def no_plan(fact: str) -> FileFormatError:
    """Make the error for a file that is not a plan; `fact` has no full stop."""
    return FileFormatError(f"not a selection: {fact}. Use a file that Selection.to_json wrote.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_integer(value: Any) -> bool:
    """Whether a value is a count that fits int64."""
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    """Whether a value is a finite float64."""
    # not isinstance: true and false are int, but no numbers; 10**400 is int, but no float64
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_unit(value: Any) -> bool:
    """Whether a value is a row of `UnitSet.to_plain`: kind, layer, index, start, stop, cost."""
    if not isinstance(value, list) or len(value) != 6:
        return False
    return value[0] in KINDS and all(map(_is_integer, value[1:]))


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


_BOOL = ("true or false", lambda value: isinstance(value, bool))
_INTEGER = ("a whole number from 0", _is_integer)
_INTEGER_OR_NULL = ("a whole number from 0, or null", _or_null(_is_integer))
_NUMBER_OR_NULL = ("a finite number, or null", _or_null(_is_number))
_TERMS = (
    "a list of finite numbers, or null",
    _or_null(lambda value: _is_list(value, _is_number)),
)
_FIELDS: Checks = {
    "pruned": ("a list of unit indices", lambda value: _is_list(value, _is_integer)),
    "units": ("an object", lambda value: isinstance(value, dict)),
    "requested_ratio": ("a share from 0 to 1", _is_share),
    "ordered": _BOOL,
    "node_terms": _TERMS,
    "edge_terms": _TERMS,
    "interaction_strength": (
        "a finite number from 0, or null",
        _or_null(lambda value: _is_number(value) and value >= 0),
    ),
    "guards": ("an object", lambda value: isinstance(value, dict)),
    "gains": (
        "finite numbers by unit index",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
    "curvature_fingerprint": ("text, or null", _or_null(lambda value: isinstance(value, str))),
    "forced": _INTEGER,
    "target": ("an object", lambda value: isinstance(value, dict)),
    "uniform": _BOOL,
}
_UNIT_FIELDS: Checks = {
    "units": ("rows of kind, layer, index, start, stop, cost", lambda v: _is_list(v, _is_unit)),
    "ffn_groups": _INTEGER_OR_NULL,
    "total_parameters": _INTEGER_OR_NULL,
    "model_layers": _INTEGER_OR_NULL,
}
_GUARD_FIELDS: Checks = {
    "layer_cap": _NUMBER_OR_NULL,
    "layer_cap_factor": _NUMBER_OR_NULL,
    "protect_first": _INTEGER,
    "protect_last": _INTEGER,
    "kinds": ("a list of kinds", lambda value: _is_list(value, lambda kind: kind in KINDS)),
}
