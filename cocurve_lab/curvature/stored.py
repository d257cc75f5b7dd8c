"""What a file of H may hold, and how its parts must fit together.

The matrix is in a file twice: as H, and as the Grams of its groups, whose sum it is. A file in
which the two differ was changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.errors import FileFormatError
from ..base.schema import (
    COUNT,
    FLAG,
    OBJECT,
    POSITIVE,
    SECONDS,
    TEXT,
    TEXTS,
    Field,
    Schema,
    array_of,
    dict_of,
    is_count,
    is_number,
    is_text,
    list_of,
    nullable,
    optional,
    or_none,
    require_fields,
)
from .merging import REFIT_RATIO, REMOVED, RISK_SUPPORT, TEMPERATURE


def _array(dtype: str, dimensions: int) -> Field:
    shape = ("", "one dimension", "two dimensions", "three dimensions")[dimensions]
    return Field(f"finite {dtype} in {shape}", array_of(dtype, dimensions))


# the sums over positions that a checkpoint and an H share, in the checkpoint's names
SUMS: Schema = {
    "grams": _array("float64", 3),
    "positions": _array("int64", 1),
    "risks": _array("float64", 2),
    "sure_positions": Field(
        "finite int64 in one dimension, or null", or_none(array_of("int64", 1)), True
    ),
    "sure_risks": Field(
        "finite float64 in two dimensions, or null", or_none(array_of("float64", 2)), True
    ),
}
RUNTIME: Schema = {
    "num_threads": POSITIVE,
    "units_per_batch": nullable(POSITIVE),
    "device_kind": nullable(TEXT),
}
# what decides H; a preview has further settings
SETTINGS: Schema = {
    "model_fingerprint": TEXT,
    "model_dtype": TEXT,
    "units_fingerprint": TEXT,
    "calibration_fingerprint": nullable(TEXT),  # null in a merged H
    "num_sequences": POSITIVE,
    "seq_len": POSITIVE,
    "positions_per_sequence": POSITIVE,
    "top_r": POSITIVE,
    "method": TEXT,
    "groups": POSITIVE,
    "shard": Field(
        "the number of a shard and how many there are, or null",
        lambda value: (
            value is None
            or (list_of(is_count)(value) and len(value) == 2 and 1 <= value[0] <= value[1])
        ),
        True,
    ),
    RISK_SUPPORT: TEXT._replace(optional=True),
    TEMPERATURE: Field("a number above 0", lambda v: is_number(v) and v > 0, True),
    REMOVED: Field("a list of unit indices", list_of(is_count), True),
    REFIT_RATIO: Field("a number above 0, at most 1", lambda v: is_number(v) and 0 < v <= 1, True),
}
_PROVENANCE: Schema = optional(
    {
        **SETTINGS,
        "model_name": TEXT,
        "runtime": OBJECT,
        "events": TEXTS,
        "device": Field("text, or texts", lambda value: is_text(value) or list_of(is_text)(value)),
        "sequences_done": COUNT,
        "complete": FLAG,
        "row_fingerprints": TEXTS,
        "calibration_source": TEXT,
        "seed": Field("a whole number, or null", or_none(lambda value: type(value) is int)),
        "seconds": SECONDS,
        "sequence_seconds": Field("seconds of each sequence", list_of(SECONDS.fits)),
        "versions": Field("texts by name", dict_of(is_text)),
        "merged_from": TEXTS,
    }
)
_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "matrix": Field("a matrix of finite numbers", lambda v: _is_matrix(v)),
    "units": OBJECT,
    "provenance": OBJECT,
    **optional({f"group_{name}": field for name, field in SUMS.items()}),
}


def _is_matrix(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind == "f"


def require_stored(content: dict[str, Any]) -> None:
    """Check the fields of a stored H, one by one and against each other.

    Raises:
        FileFormatError: a field has a value of the wrong type, range or shape; the message is the
            fact alone.
    """
    require_fields(content, _FIELDS)
    known = require_fields(content["provenance"], _PROVENANCE, inside="provenance", others=True)
    done, rows = known.get("sequences_done"), known.get("row_fingerprints")
    if done is not None and rows is not None and len(rows) != done:
        raise FileFormatError(
            f"provenance.sequences_done is {done}, but {len(rows)} row_fingerprints are there"
        )
    if done is not None and done > known.get("num_sequences", done):
        raise FileFormatError(
            f"provenance.sequences_done is {done} of {known['num_sequences']} sequences"
        )
    sums = {name: content.get(f"group_{name}") for name in SUMS}
    require_sums(sums, len(content["matrix"]), prefix="group_")


def require_sums(sums: dict[str, Any], size: int, *, prefix: str = "") -> None:
    """Check that sums by group fit each other, in their shapes and in their positions.

    Args:
        sums: the arrays under the names of SUMS; None where there is none.
        size: M.
        prefix: of the names in the file, for the error.

    Raises:
        FileFormatError: they do not; the message is the fact alone.
    """
    positions, sure = sums["positions"], sums["sure_positions"]
    there = {name: array for name, array in sums.items() if array is not None}
    for name, array in there.items():
        wanted = (len(next(iter(there.values()))), *[size] * (array.ndim - 1))
        if array.shape != wanted:
            raise FileFormatError(f"{prefix}{name} has shape {array.shape}, not {wanted}")
    if positions is not None and (positions < 0).any():
        raise FileFormatError(f"{prefix}positions has {positions.min()}, which is no count")
    if sure is not None and (positions is None or (sure < 0).any() or (sure > positions).any()):
        raise FileFormatError(f"{prefix}sure_positions are not among {prefix}positions")


def require_own_grams(
    matrix: np.ndarray, group_grams: np.ndarray | None, group_positions: np.ndarray | None
) -> None:
    """Check that H [M, M] is the sum of its group Grams over their positions (eq. gram).

    Raises:
        FileFormatError: it is not, so one of the two was changed; the message is the fact alone.
    """
    if group_grams is None or group_positions is None or not group_positions.sum():
        return
    gap = np.abs(group_grams.sum(axis=0) / group_positions.sum() - matrix)
    if gap.max(initial=0.0) > 1e-9 * np.abs(matrix).max(initial=0.0):  # a merge may round anew
        u, v = np.unravel_index(gap.argmax(), gap.shape)
        raise FileFormatError(
            f"H[{u}, {v}] is {matrix[u, v]:.6g}, but its group Grams come to another value, "
            f"{gap[u, v]:.3g} away: one of them was changed"
        )
