"""Validation of a plan in JSON: its fields, and the values each may hold.

Plan files are passed between people, so every field is checked before it is used.
`Selection.from_json` checks fields against each other.
"""

from __future__ import annotations

from typing import Any

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
    is_count,
    is_number,
    list_of,
    nullable,
    optional,
    parse_json,
    require_fields,
    told,
)
from ..models.families import KINDS

FORMAT, VERSION = "cocurve-selection", 1

_TERMS = nullable(Field("a list of finite numbers", list_of(is_number)))
_FIELDS: Schema = {
    "pruned": Field("a list of unit indices", list_of(is_count)),
    "units": OBJECT,
    "requested_ratio": SHARE,
    "ordered": FLAG,
    "node_terms": _TERMS,
    "edge_terms": _TERMS,
    "interaction_strength": nullable(
        Field("a finite number from 0", lambda value: is_number(value) and value >= 0)
    ),
    "guards": OBJECT,
    "gains": Field("finite numbers by unit index", dict_of(is_number)),
    "curvature_fingerprint": nullable(TEXT),
    "forced": COUNT,
    **optional({"target": OBJECT, "uniform": FLAG, "surrogate": TEXT}),
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
        "kinds": Field("a list of kinds", list_of(lambda kind: kind in KINDS)),
    }
)


def read_fields(text: str) -> dict[str, Any]:
    """Parse a plan in JSON and return its fields, checked one by one, without format and version.

    The fields of its units are checked by `UnitSet.from_plain`.

    Raises:
        FileFormatError: not JSON, not an object, another format or version, or a field that is
            missing, unknown, or has a value of the wrong type or range (the field is named).
    """
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise FileFormatError(f"it is {told(content)}, not an object with fields")
        found = (content.pop("format", None), content.pop("version", None))
        if found != (FORMAT, VERSION):
            raise FileFormatError(f"its format is {told(found[0])} version {told(found[1])}")
        require_fields(content, _FIELDS)
        require_fields(content["guards"], _GUARDS, inside="guards")
    except FileFormatError as error:
        raise no_plan(str(error)) from None
    for name in ("node_terms", "edge_terms"):
        if content[name] is not None and len(content[name]) != len(content["pruned"]):
            raise no_plan(
                f"{name} has {len(content[name])} numbers for {len(content['pruned'])} pruned units"
            )
    return content


def no_plan(fact: str) -> FileFormatError:
    """Make the error for a file that is not a plan; `fact` has no full stop."""
    return FileFormatError(f"not a selection: {fact}. Use a file that Selection.to_json wrote.")
