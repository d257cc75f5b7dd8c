"""A sketch of the shifts that a build measured: the effect of each unit alone on the logits.

H contains products of shifts only. With the shifts d_u = z_{-u} - z_0 themselves, and p_0 the
teacher, the KL of removing u alone is

    F({u}) = E KL(p_0 || softmax(z_0 + d_u)),

and if shifts add up, that of a set S is F(S) = E KL(p_0 || softmax(z_0 + sum of d_u over S)), the
additive KL. The Hessian of F at the empty set is H. A sketch contains the shifts at some of the
scored positions, on the first tokens of the support there. pair_kl.py and additive.py read it.

A build may start where a set S is already removed: D_0 = z_S - z_0 is then stored as `base`,
d_u = z_{S+u} - z_S, and F(S + T) = E KL(p_0 || softmax(z_0 + D_0 + sum of d_u over T)) is exact at
S. The teacher stays p_0, and its likeliest tokens are the ones stored.

This departs from the paper, which uses H alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...base.arguments import require_choice
from ...base.atomic import write_atomically
from ...base.errors import FileFormatError, InputError, MismatchError
from ...base.schema import COUNT, TEXT, Field, Schema, array_of, reading, require_fields
from ...base.storage import dump_npz, load_npz

FORMAT, VERSION = "cocurve-shifts", 1
SHIFTS: Schema = {  # its arrays, here and in a checkpoint
    "values": Field("finite float16 [units, positions, tokens]", array_of("float16", 3)),
    "probabilities": Field("finite float32 [positions, tokens]", array_of("float32", 2)),
    "sequences": Field("int64 [positions]", array_of("int64", 1)),
    "groups": Field("int64 [positions]", array_of("int64", 1)),
    "base": Field("finite float32 [positions, tokens]", array_of("float32", 2), True),
}
_FILE: Schema = {"format": TEXT, "version": COUNT, "curvature": TEXT, **SHIFTS}

# A plan looks too cheap at the positions that it was solved on. So one group in four can be set
# aside for prices: "price" are its positions, "fit" those of the others, "all" both.
Part = Literal["all", "fit", "price"]
_PRICE_EVERY = 4


@dataclass(frozen=True, eq=False)
class Shifts:
    """Logit shifts of each unit alone, at S positions and on K tokens each.

    Attributes:
        values: d [M, S, K] float16, nats, up to a constant per unit and position, which no softmax
            sees.
        probabilities: p_0 [S, K] float32, summing to 1 over the K tokens.
        sequences: [S] int64, the number of each position's sequence in the calibration.
        groups: [S] int64, the group of sequences of each position, as in `Curvature.group_grams`.
        base: D_0 [S, K] float32, nats, the shift of the units already removed before the build; d
            is then what each other unit adds to it, and 0 for them. None if none was removed.
    """

    values: np.ndarray
    probabilities: np.ndarray
    sequences: np.ndarray
    groups: np.ndarray
    base: np.ndarray | None = None

    def __post_init__(self) -> None:
        positions, tokens = self.probabilities.shape
        base = self.probabilities if self.base is None else self.base
        shapes = (self.values.shape[1:], base.shape, self.sequences.shape, self.groups.shape)
        if shapes != ((positions, tokens), (positions, tokens), (positions,), (positions,)):
            raise InputError(
                f"shifts of shape {self.values.shape}, probabilities {self.probabilities.shape}, "
                f"sequences {self.sequences.shape} and groups {self.groups.shape} do not fit. Take "
                "them from one build."
            )

    def __len__(self) -> int:
        """Number of positions."""
        return len(self.sequences)

    def __repr__(self) -> str:
        units, positions, tokens = self.values.shape
        return f"Shifts of {units} units at {positions} positions, on {tokens} tokens each"

    def of(self, part: Part) -> Shifts:
        """Return the shifts at the positions of a part."""
        require_choice(part, Part, "part")
        price = self.groups % _PRICE_EVERY == _PRICE_EVERY - 1
        mine = {"all": np.ones_like(price), "fit": ~price, "price": price}[part]
        if not mine.any():
            raise InputError(
                f"the sketch has no position of part {part!r}, because its build has "
                f"{len(np.unique(self.groups))} groups of sequences. Build with at least "
                f"{_PRICE_EVERY} sequences, or take part='all'."
            )
        return self if part == "all" else self._at(mine)

    def _at(self, positions: np.ndarray) -> Shifts:
        rest = {name: array[positions] for name, array in self.arrays().items() if name != "values"}
        return Shifts(self.values[:, positions], **rest)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, without an absent base."""
        return {name: array for name, array in vars(self).items() if array is not None}

    @property
    def start(self) -> np.ndarray:
        """p_S [S, K] float64, where the shifts start: p_0, or without the units already removed."""
        p = self.probabilities.astype(np.float64)
        if self.base is not None:
            z = np.log(np.maximum(p, np.finfo(p.dtype).tiny)) + self.base
            p = np.exp(z - z.max(axis=-1, keepdims=True))
        start: np.ndarray = p / p.sum(axis=-1, keepdims=True)
        return start

    @property
    def teacher(self) -> np.ndarray | None:
        """p_0 [S, K] where `start` is another distribution; None where it is p_0 itself."""
        return None if self.base is None else self.probabilities

    @classmethod
    def joined(cls, parts: Sequence[Shifts], *, in_order: bool = False) -> Shifts:
        """Put the positions of several sketches together; `in_order` of their sequences."""
        kinds = {(len(p.values), p.probabilities.shape[1], p.base is None) for p in parts}
        if len(kinds) != 1:
            raise InputError(
                f"these sketches do not fit: {', '.join(map(str, parts))}. Build them alike."
            )
        arrays = {
            name: np.concatenate([part.arrays()[name] for part in parts], int(name == "values"))
            for name in parts[0].arrays()
        }
        whole = cls(**arrays)
        return whole._at(np.argsort(whole.sequences, kind="stable")) if in_order else whole

    # Files --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], curvature: str) -> None:
        """Write to an `.npz`, with the fingerprint of the H it belongs to."""
        content = {"format": FORMAT, "version": VERSION, "curvature": curvature} | self.arrays()
        write_atomically(path, dump_npz(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str], curvature: str) -> Shifts:
        """Read the shifts of the H with this fingerprint."""
        content = load_npz(path, format_name=FORMAT, version=VERSION)
        with reading(path, "Build again to have it again."):
            require_fields(content, _FILE)
            if (content["probabilities"] < 0).any() or (content["groups"] < 0).any():
                raise FileFormatError("probabilities or groups are negative")
            found = cls(**{name: content[name] for name in SHIFTS if name in content})
        if content["curvature"] != curvature:
            raise MismatchError(
                f"{path} has the shifts of another H than the one beside it. Build again, or put "
                "the two files of one build together."
            )
        return found


def shifts_path(path: Path) -> Path:
    """Return the file of the shifts of the H at `path`: `H_demo_1f2e.shifts.npz`."""
    return path.with_name(f"{path.stem}.shifts.npz")


def share_of(number: int, sequences: int, positions: int) -> int:
    """Return the share of the sketch's positions for sequence `number`; all sum to `positions`."""
    return (number + 1) * positions // sequences - number * positions // sequences
