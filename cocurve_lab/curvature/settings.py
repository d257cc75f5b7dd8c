"""The settings of a build, each declared once: its options, what decides H, what a file may hold.

A setting that decides H is part of its mark: of its file name, and of what is compared when H or a
checkpoint is loaded. Options at their default, the paper's, leave no trace in the mark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..base.arguments import as_float, as_int, as_list, require_threads
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
from ..base.seams import is_offered
from ..base.text_windows import is_record
from ..models.units import Unit, UnitSet

FULL_VOCABULARY, BFLOAT16 = "full vocabulary", "bfloat16"
Shard = tuple[int, int]  # (number of the shard from 1, number of shards)


class Mark(NamedTuple):
    """How an option that decides H is stored.

    Attributes:
        key: its name in the provenance, where it is absent at its default.
        field: what a file may hold.
        store: from the option and the units to the stored value.
    """

    key: str
    field: Field
    store: Callable[[Any, UnitSet], Any] = lambda value, _: value


# Options ------------------------------------------------------------------------------------------


def as_shard(value: Any, name: str) -> Shard:
    """Return the numbers (i, n) of a shard as Python ints; `shard_groups` checks their range."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"{name} is {shown(value)}. Give two numbers, such as (1, 2).")
    return as_int(value[0], name), as_int(value[1], name)


def _as_count(value: Any, name: str) -> int:
    return as_int(value, name, 1)


def _number(fits: Callable[[float], bool], wanted: str) -> Callable[[Any, str], float]:
    """Return the check of a number; NaN fits nothing."""

    def check(value: Any, name: str) -> float:
        number = as_float(value, name)
        if not fits(number):
            raise InputError(f"{name} is {number}. Give {wanted}.")
        return number

    return check


def _indices(removed: Iterable[Unit | str | int], units: UnitSet) -> list[int]:
    gone = sorted(units.indices(removed))
    if len(gone) == len(units):
        raise InputError(f"all {len(gone)} units are removed, so none is left. Remove fewer.")
    return gone


def _option(
    default: Any,
    check: Callable[[Any, str], Any] | None = None,
    flag: str = "",
    mark: Mark | None = None,
    name: str = "",
) -> Any:
    return field(
        default=default, metadata={"check": check, "flag": flag, "mark": mark, "name": name}
    )


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build by ablations; only those that follow `sketch_top` change H.

    Attributes:
        units_per_batch: ablations per forward pass; None chooses by free memory. It is halved when
            memory runs out.
        groups: number of groups of sequences whose Grams are kept separately, for error bars.
        checkpoint_seconds: least time between two checkpoints; 0 writes one after every sequence.
        num_threads: CPU threads; None keeps torch's current number.
        on_sequence: called with the Build after each sequence, for monitors. It may read `done`,
            `total`, `seconds`, `stopped` and `so_far()`. An exception from it ends the build;
            KeyboardInterrupt ends it like Ctrl-C, and it is called once more with `stopped` set.
        shard: (i, n), i from 1: do only part i of n. `Curvature.merge` of all n has the bits of one
            build.
        sketch_positions, sketch_top: size of the sketch of shifts that is kept beside H, for
            `Curvature.pair_kl` and `Curvature.additive`: scored positions and tokens per position.
            0 positions keep none.
        full_vocabulary: measure the KL of removing each unit alone (`Curvature.single_unit_risk`)
            over the full vocabulary, not on the top-r support. H keeps its bits.
        temperature: T > 0: all logits are divided by it, so p_0 is softmax(z_0 / T) and shifts are
            1 / T of what they were. 1 is the paper's.
        removed: units, names or indices that are masked throughout, while the teacher stays the
            whole model: 1/2 s^T H s is what s adds to their KL, first-order term included. Their
            rows are 0. None in the paper; for `staged_plan`.
        refit_ratio: for plans that will be repaired: from each ablation is taken what the other
            units of its block make up for by least squares, if this share of them is gone too. 0 is
            the paper's.
        bfloat16_products: compute what ablations shift with products in bfloat16, for a float32
            model on a processor that is fast at them (AVX512-BF16, AMX, a GPU); all else stays in
            float32, and the teacher keeps its bits (extensions/big_models/products.py). On
            SmolLM2-135M 1.8 times as fast with AVX512-BF16 (tests/benchmarks/README.md).
    """

    method: ClassVar[str] = "ablation"  # as the provenance names it

    units_per_batch: int | None = _option(
        None, _as_count, "ablations per forward pass; default: as many as fit"
    )
    groups: int = _option(16, _as_count, "groups of rows, for error bars (16)")
    checkpoint_seconds: float = _option(
        60.0,
        _number(lambda seconds: seconds >= 0, "0 seconds or more"),
        "seconds between checkpoints (60)",
    )
    num_threads: int | None = _option(
        None, require_threads, "CPU threads; default: as torch chooses", name="threads"
    )
    on_sequence: Callable[[Any], None] | None = _option(None)
    shard: Shard | None = _option(None, as_shard)
    full_vocabulary: bool = _option(
        False,
        lambda value, _: bool(value),
        "measure the KL of removing each unit alone over the full vocabulary, not on the top-r "
        "support; H stays the same",
        Mark("risk_support", TEXT, lambda *_: FULL_VOCABULARY),
    )
    sketch_positions: int = _option(
        1024,
        as_int,
        "positions whose shifts are kept beside H, for `solve --surrogate` (1024; 0: none)",
    )
    sketch_top: int = _option(64, _as_count)
    temperature: float = _option(
        1.0,
        _number(lambda t: 0 < t < math.inf, "one above 0, by which logits are divided"),
        "divide the logits by this, for a teacher that is too sure (1.0, the paper's)",
        Mark("temperature", Field("a number above 0", lambda v: is_number(v) and v > 0)),
    )
    removed: tuple[Unit | str | int, ...] = _option(
        (),
        lambda value, name: tuple(as_list(value, name)),
        mark=Mark("removed", Field("a list of unit indices", list_of(is_count)), _indices),
    )
    refit_ratio: float = _option(
        0.0,
        _number(lambda share: 0 <= share <= 1, "a share of units, in [0, 1]"),
        "ratio of the plans that will be refitted: ablations are then those that the rest of their "
        "block makes up for (0, the paper's: masks)",
        Mark("refit_ratio", Field("in (0, 1]", lambda v: is_number(v) and 0 < v <= 1)),
    )
    bfloat16_products: bool = _option(
        False,
        lambda value, _: bool(value),
        "compute what ablations shift with bfloat16 products, where the processor is fast at them",
        Mark("products", TEXT, lambda *_: BFLOAT16),
    )

    @property
    def sketch(self) -> tuple[int, int] | None:
        """(positions, tokens) of the sketch of shifts; None if none is kept, or none can be."""
        kept = self.sketch_positions and is_offered("sketches of a build")
        return (self.sketch_positions, self.sketch_top) if kept else None

    def __post_init__(self) -> None:
        for each in fields(self):
            value, check = getattr(self, each.name), each.metadata["check"]
            if check is not None and (value is not None or each.default is not None):
                object.__setattr__(self, each.name, check(value, each.name))
        if self.removed and (self.full_vocabulary or self.refit_ratio):
            name = "full_vocabulary" if self.full_vocabulary else "refit_ratio"
            raise InputError(
                f"{name} is {getattr(self, name)} with {len(self.removed)} removed units, whose "
                "risks are of masks on the support. Omit one of the two."
            )

    def marks(self, units: UnitSet) -> dict[str, Any]:
        """Return what of the options decides H, as it is stored; empty for the paper's build."""
        return {
            each.metadata["mark"].key: each.metadata["mark"].store(value, units)
            for each in fields(self)
            if each.metadata["mark"] and (value := getattr(self, each.name)) != each.default
        }


# What decides H -----------------------------------------------------------------------------------


FACTS: Schema = {  # of every build
    **dict.fromkeys(("model_fingerprint", "model_dtype", "units_fingerprint"), TEXT),
    "calibration_fingerprint": nullable(TEXT),  # null in a merged H
    **dict.fromkeys(("num_sequences", "seq_len", "positions_per_sequence", "top_r"), POSITIVE),
    "method": TEXT,
    "groups": POSITIVE,
}
# whole builds that are merged need not agree in these; units are compared one by one
_MAY_DIFFER = {"units_fingerprint", "calibration_fingerprint", "num_sequences", "groups"}
_MARKS: list[Mark] = [m for each in fields(BuildOptions) if (m := each.metadata["mark"])]
SETTINGS = tuple(FACTS)
# what a plain build lacks, and what to compare there
MAY_BE_ABSENT: dict[str, Any] = dict.fromkeys(mark.key for mark in _MARKS)
MERGE_KEYS = (*(name for name in FACTS if name not in _MAY_DIFFER), *MAY_BE_ABSENT)


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
    **FACTS,
    **optional({mark.key: mark.field for mark in _MARKS}),
    "shard": Field(
        "the number of a shard and how many there are, or null", or_none(_is_shard), True
    ),
}
WINDOWS = Field("a record of the text, or null", is_record)
_PROVENANCE: Schema = optional(
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
    """Check the fields of a stored H, one by one and against each other."""
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

    `sums` holds the arrays under the names of SUMS, None where there is none; `prefix` precedes
    these names in the file, for the error.
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
    """Check that H [M, M] is the sum of its group Grams over their positions (eq. gram)."""
    if group_grams is None or group_positions is None or not group_positions.sum():
        return
    gap = np.abs(group_grams.sum(axis=0) / group_positions.sum() - matrix)
    if gap.max(initial=0.0) > 1e-9 * np.abs(matrix).max(initial=0.0):  # a merge may round anew
        u, v = np.unravel_index(gap.argmax(), gap.shape)
        raise FileFormatError(
            f"H[{u}, {v}] is {matrix[u, v]:.6g}, but its group Grams come to another value, "
            f"{gap[u, v]:.3g} away: one of them was changed"
        )


def require_matrix(matrix: np.ndarray, size: int, *, signed: bool) -> None:
    """Check that a matrix is an H of `size` units; `signed`: its diagonal may be negative."""
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
    if lowest < -1e-9 * scale and not signed:
        raise NumericalError(
            f"H has a negative diagonal entry {lowest:.3g}, impossible for a Gram matrix "
            "(Proposition gram). Check its source."
        )
