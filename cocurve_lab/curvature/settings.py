"""The settings of a build, each declared once: its options, what decides H, what a file may hold.

A setting that decides H is part of its file name, and of what is compared when H or a checkpoint is
loaded. Options at their default, the paper's, leave no trace there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from ..base.arguments import as_float, as_int, require_threads
from ..base.errors import FileFormatError, InputError, NumericalError, shown
from ..base.origin import RECORD
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
from ..base.text_windows import is_record
from .groups import Groups

FULL_VOCABULARY = "full vocabulary"
Facts = dict[str, Any]  # what is known of a build, as a file keeps it: see FACTS
Shard = tuple[int, int]  # (number of the shard from 1, number of shards)


# Options ------------------------------------------------------------------------------------------


def as_shard(value: Any, name: str) -> Shard:
    """Return the numbers (i, n) of a shard as Python ints; `shard_groups` checks their range."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"{name} is {shown(value)}. Give two numbers, such as (1, 2).")
    return as_int(value[0], name), as_int(value[1], name)


def _as_seconds(value: Any, name: str) -> float:
    seconds = as_float(value, name)
    if not seconds >= 0:
        raise InputError(f"{name} is {seconds}. Give 0 seconds or more.")
    return seconds


def _option(default: Any, check: Callable[[Any, str], Any] | None = None) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build; none of them changes H but in its last bits.

    Attributes:
        units_per_batch: ablations per forward pass; None chooses by free memory. It is halved when
            memory runs out.
        groups: number of groups of sequences whose Grams are kept separately, for error bars.
        checkpoint_seconds: least time between two checkpoints; 0 writes one after every sequence.
        num_threads: CPU threads; None keeps torch's current number.
        on_sequence: called with the Build after each sequence, for monitors. It may read `done`,
            `total`, `seconds`, `stopped` and `so_far()`. If it returns a text, the build stops for
            that reason and gives H over the sequences done; it is then called once more with
            `stopped` set, as it is after Ctrl-C.
        shard: (i, n), i from 1: do only part i of n. `Curvature.merge` of all n has the bits of one
            build.
        full_vocabulary: measure the KL of removing each unit alone (`Curvature.single_unit_risk`)
            over the full vocabulary, not on the top-r support. H keeps its bits.
    """

    units_per_batch: int | None = _option(None, partial(as_int, least=1))
    groups: int = _option(16, partial(as_int, least=1))
    checkpoint_seconds: float = _option(60.0, _as_seconds)
    num_threads: int | None = _option(None, require_threads)
    on_sequence: Callable[[Any], str | None] | None = _option(None)
    shard: Shard | None = _option(None, as_shard)
    full_vocabulary: bool = _option(False, lambda value, _: bool(value))

    def __post_init__(self) -> None:
        for each in fields(self):
            value, check = getattr(self, each.name), each.metadata["check"]
            if check is not None and (value is not None or each.default is not None):
                object.__setattr__(self, each.name, check(value, each.name))

    def marks(self) -> dict[str, Any]:
        """Return what the options change in a result, as it is stored; empty by default."""
        return {"risk_support": FULL_VOCABULARY} if self.full_vocabulary else {}


# What decides H -----------------------------------------------------------------------------------


BUILT: Schema = {  # the settings of every build
    **dict.fromkeys(("model_fingerprint", "model_dtype", "units_fingerprint"), TEXT),
    "calibration_fingerprint": nullable(TEXT),  # null in a merged H
    **dict.fromkeys(("num_sequences", "seq_len", "positions_per_sequence", "top_r"), POSITIVE),
    "method": TEXT,
    "groups": POSITIVE,
}
# whole builds that are merged need not agree in these; units are compared one by one
_MAY_DIFFER = {"units_fingerprint", "calibration_fingerprint", "num_sequences", "groups"}
SETTINGS = tuple(BUILT)
# what a plain build lacks, and what to compare there
MAY_BE_ABSENT: dict[str, Any] = {"risk_support": None}
MERGE_KEYS = (*(name for name in BUILT if name not in _MAY_DIFFER), *MAY_BE_ABSENT)


def settings_of(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with which a curvature was built, from its provenance."""
    further = {key: provenance[key] for key in MAY_BE_ABSENT if provenance.get(key)}
    return {key: provenance.get(key) for key in SETTINGS} | further


# What a file may hold -----------------------------------------------------------------------------


def _is_shard(value: Any) -> bool:
    return list_of(is_count)(value) and len(value) == 2 and 1 <= value[0] <= value[1]


def _is_matrix(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind == "f"


def _array(dtype: str, dimensions: int) -> Field:
    return Field(f"finite {dtype} in {dimensions} dimensions", array_of(dtype, dimensions))


# the sums over positions that a checkpoint and an H share, in the checkpoint's names
SUMS: Schema = {
    "grams": _array("float64", 3),
    "positions": _array("int64", 1),
    "risks": _array("float64", 2),
    "sure_positions": _array("int64", 1),
    "sure_risks": _array("float64", 2),
}
RUNTIME: Schema = {
    "num_threads": POSITIVE,
    "units_per_batch": nullable(POSITIVE),
    "device_kind": nullable(TEXT),
}
STORED_SETTINGS: Schema = {
    **BUILT,
    **optional(dict.fromkeys(MAY_BE_ABSENT, TEXT)),
    "shard": Field(
        "the number of a shard and how many there are, or null", or_none(_is_shard), True
    ),
}
WINDOWS = Field("a record of the text, or null", is_record)
FACTS: Schema = optional(  # of a build; a released matrix has few of them
    {
        **STORED_SETTINGS,
        "model_name": TEXT,
        "checkpoint": RECORD["checkpoint"],
        "runtime": OBJECT,
        "events": TEXTS,
        "device": Field("text, or texts", lambda value: is_text(value) or list_of(is_text)(value)),
        "sequences_done": COUNT,
        "complete": FLAG,
        "row_fingerprints": TEXTS,
        "text_windows": WINDOWS,
        "calibration_source": TEXT,
        "seed": Field("a whole number, or null", or_none(lambda value: type(value) is int)),
        "seconds": SECONDS,
        "sequence_seconds": Field("seconds of each sequence", list_of(SECONDS.fits)),
        "sequence_losses": Field("nats per token of each sequence", list_of(is_number)),
        "versions": Field("texts by name", dict_of(is_text)),
        "merged_from": TEXTS,
    }
)
_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "matrix": Field("a matrix of finite numbers", _is_matrix),
    "units": OBJECT,
    "provenance": OBJECT,
    **optional({f"group_{name}": field for name, field in SUMS.items()}),
}


def require_stored(content: dict[str, Any]) -> None:
    """Check the fields of a stored H, and its numbers of rows against each other."""
    require_fields(content, _FIELDS)
    known = require_fields(content["provenance"], FACTS, inside="provenance", others=True)
    done, rows = known.get("sequences_done"), known.get("row_fingerprints")
    if done is not None and rows is not None and len(rows) != done:
        raise FileFormatError(
            f"provenance.sequences_done is {done}, but {len(rows)} row_fingerprints are there"
        )
    if done is not None and done > known.get("num_sequences", done):
        raise FileFormatError(
            f"provenance.sequences_done is {done} of {known['num_sequences']} sequences"
        )


def require_own_grams(matrix: np.ndarray, groups: Groups) -> None:
    """Check that H [M, M] is the sum of its group Grams over their positions (eq. gram)."""
    if groups.grams.shape[1:] != matrix.shape:
        raise InputError(
            f"group_grams has shape {groups.grams.shape}, but there are {len(matrix)} units. Take "
            "groups and units from one build."
        )
    own = groups.matrix
    gap = np.abs((own + own.T) / 2 - matrix)  # H is made symmetric, as float32 Grams nearly are
    if gap.max(initial=0.0) > 1e-9 * np.abs(matrix).max(initial=0.0):  # a merge may round anew
        u, v = np.unravel_index(gap.argmax(), gap.shape)
        raise InputError(
            f"H[{u}, {v}] is {matrix[u, v]:.6g}, but its group Grams come to another value, "
            f"{gap[u, v]:.3g} away: one of them was changed. Give the H that was built, or one "
            "without groups."
        )


def require_matrix(matrix: np.ndarray, size: int) -> None:
    """Check that a matrix is an H of `size` units."""
    if matrix.shape != (size, size):
        raise InputError(
            f"H has shape {matrix.shape}, but there are {size} units. Give one row and one column "
            "per unit."
        )
    if not np.isfinite(matrix).all():
        u, v = np.argwhere(~np.isfinite(matrix))[0]
        raise NumericalError(
            f"H[{u}, {v}] is {matrix[u, v]}. Build H again, in bfloat16 or float32 if it was "
            "float16, which may overflow."
        )
    scale = float(np.abs(matrix).max(initial=0.0))
    # a Gram in float32 is symmetric only up to the rounding of its largest entry
    gap = float(np.abs(matrix - matrix.T).max(initial=0.0))
    if gap > 1e-5 * scale:
        raise NumericalError(
            f"H is not symmetric: largest |H_uv - H_vu| is {gap:.3g} against entries up to "
            f"{scale:.3g}. It is not a Gram matrix; check its source."
        )
    lowest = float(np.diagonal(matrix).min(initial=0.0))
    if lowest < -1e-9 * scale:
        raise NumericalError(
            f"H has a negative diagonal entry {lowest:.3g}, impossible for a Gram matrix "
            "(Proposition gram). Check its source."
        )
