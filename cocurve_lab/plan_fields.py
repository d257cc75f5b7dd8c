"""What each field of a plan in JSON may hold: a file from elsewhere is checked before use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .errors import FileFormatError
from .families import KINDS

Checks = dict[str, tuple[str, Callable[[Any], bool]]]


def require_fields(content: dict[str, Any]) -> None:
    """Raise FileFormatError, naming the field, where one of `to_json` holds what it cannot."""
    units, guards = content["units"], content["guards"]
    for whole, parts, checks in (
        ("", content, _FIELDS),
        ("units.", units, _UNIT_FIELDS),
        ("guards.", guards, _GUARD_FIELDS),
    ):
        for name, (words, fits) in checks.items():
            if name in parts and not fits(parts[name]):
                raise FileFormatError(
                    f"not a selection: {whole}{name} is {_shown(parts[name])}, not {words}. Give "
                    "what Selection.to_json wrote."
                )
    for name in ("node_terms", "edge_terms"):
        if content[name] is not None and len(content[name]) != len(content["pruned"]):
            raise FileFormatError(
                f"not a selection: {name} has {len(content[name])} numbers for "
                f"{len(content['pruned'])} pruned units. Give what Selection.to_json wrote."
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_integer(value: Any) -> bool:
    """A number of things that fits int64; true and false are no numbers."""
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    """A finite number of float64; true and false are none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_unit(value: Any) -> bool:
    """A row of `UnitSet.to_plain`: kind, layer, index, start, stop, cost."""
    if not isinstance(value, list) or len(value) != 6:
        return False
    return value[0] in KINDS and all(map(_is_integer, value[1:]))


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


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
    "requested_ratio": ("a finite number", _is_number),
    "ordered": _BOOL,
    "node_terms": _TERMS,
    "edge_terms": _TERMS,
    "interaction_strength": _NUMBER_OR_NULL,
    "gains": (
        "finite numbers by unit index",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
    "curvature_fingerprint": ("text, or null", _or_null(lambda value: isinstance(value, str))),
    "forced": _INTEGER,
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
}
