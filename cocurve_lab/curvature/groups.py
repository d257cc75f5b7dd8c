"""Sums over groups of sequences, from which H, its error bars and merges follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..base.errors import InputError


@dataclass(frozen=True, eq=False)
class Groups:
    """Sums over the scored positions of each group of sequences; sequence i is in group i mod G.

    Attributes:
        grams: [G, M, M] float64, products of features (eq. gram), nats.
        positions: [G] int64, scored positions.
        risks: [G, M] float64, the measured KL of removing each unit alone, nats; None if unknown.
        sure_positions: [G] int64, those of the positions where the teacher's first choice has more
            than 0.99 (`SURE`); None if they were not counted.
        sure_risks: [G, M] float64, the part of `risks` at these positions, nats.
    """

    grams: np.ndarray
    positions: np.ndarray
    risks: np.ndarray | None = None
    sure_positions: np.ndarray | None = None
    sure_risks: np.ndarray | None = None

    def __post_init__(self) -> None:
        count, size = len(self.grams), self.grams.shape[-1]
        axes = {"grams": (size, size), "risks": (size,), "sure_risks": (size,)}
        for name, array in self.arrays.items():
            wanted = (count, *axes.get(name, ()))
            if array.shape != wanted:
                raise InputError(
                    f"group_{name} has shape {array.shape}, not {wanted}, where group_grams has "
                    f"shape {self.grams.shape}. Take all sums from one build."
                )
        positions, sure = self.positions, self.sure_positions
        if (positions < 0).any():
            raise InputError(f"group_positions has {positions.min()}, which is no count.")
        if sure is not None and ((sure < 0).any() or (sure > positions).any()):
            raise InputError("group_sure_positions are not among group_positions.")

    @classmethod
    def empty(cls, count: int, size: int) -> Groups:
        """Make the sums over no sequence yet, of `count` groups and `size` units."""
        return cls(
            np.zeros((count, size, size)),
            np.zeros(count, np.int64),
            np.zeros((count, size)),
            np.zeros(count, np.int64),
            np.zeros((count, size)),
        )

    @classmethod
    def named(cls, arrays: Mapping[str, Any]) -> Groups | None:
        """Take the sums out of a mapping that has them as "group_grams" and so on, as a file."""
        found: dict[str, Any] = {
            each.name: arrays.get(f"group_{each.name}") for each in fields(cls)
        }
        if all(array is None for array in found.values()):
            return None
        if found["grams"] is None or found["positions"] is None:
            raise InputError("there are sums by group, but no group_grams and group_positions.")
        return cls(**found)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are known, by name."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: array for name, array in known.items() if array is not None}

    @property
    def matrix(self) -> np.ndarray:
        """H [M, M] = sum of group Grams / number of positions (eq. gram), nats per token."""
        total = int(self.positions.sum())
        if total == 0:
            raise InputError("no scored position yet. Finish at least one sequence first.")
        # always summed in group order: merged shards then give the bits of one build
        return self.grams.sum(axis=0) / total

    def part(self, chosen: slice | np.ndarray) -> Groups:
        """Return some of the groups."""
        return Groups(**{name: array[chosen] for name, array in self.arrays.items()})


# How sure the teacher is --------------------------------------------------------------------------

# Where the teacher's first choice has nearly all the probability, the Fisher metric p_0 (1 - p_0)
# is nearly 0, so H has nearly no entry for the position. The KL is not small there: a removal can
# make another token many times likelier.
SURE = 0.99  # a position is sure where the first choice has more than this
SATURATED = 0.5  # the share of positions, or of the KL, above which a teacher is called saturated


@dataclass(frozen=True)
class Saturation:
    """Shares of the sure positions in a build; made by `Curvature.saturation`.

    Attributes:
        positions: share of the scored positions that are sure, in [0, 1].
        risk: share of the measured KL of all units, each removed alone, that falls on them, in
            [0, 1]; NaN where no removal changes anything.
    """

    positions: float
    risk: float

    @property
    def saturated(self) -> bool:
        """Whether either share is above one half."""
        return self.positions > SATURATED or self.risk > SATURATED

    @property
    def warning(self) -> str:
        """The two shares and what to do, in a few sentences; empty for an unsaturated teacher."""
        if not self.saturated:
            return ""
        return (
            f"The teacher is saturated on the calibration text: at {self.positions:.0%} of its "
            f"positions the first choice has more than {SURE:.0%}, and these carry "
            f"{self.risk:.0%} of the measured KL of single units. H hardly sees them, and what it "
            "predicts there is too small. Calibrate on a text that leaves the model a choice, and "
            "judge plans by measured KL (measure_plans)."
        )
