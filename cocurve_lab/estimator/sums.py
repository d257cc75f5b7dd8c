"""The sum over sequences: Grams added up by group, and the curvature they come to (eq. gram).

Sequences outside, units inside: the Gram of one sequence is added and its features are dropped, so
memory does not grow with the calibration, an interrupted build is already an estimate, and builds
over other sequences can be merged. Groups are kept apart for error bars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..base.errors import InputError
from ..base.interrupts import uninterrupted
from ..base.text_windows import record, windows
from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..models.runtime import is_out_of_memory, software_versions
from ..models.units import UnitSet

if TYPE_CHECKING:
    pass

Value = TypeVar("Value")


class Measured(NamedTuple):
    """One finished sequence.

    Attributes:
        number: number of the sequence in the calibration.
        gram: [M, M] float64, sum over its positions (eq. gram), nats.
        risks: [M] float64, sum over its positions of the KL of removing each unit alone, nats;
            None where units are not removed.
        positions: number of scored positions.
        units_per_batch: the batch size that fitted in memory.
        notes: events that belong in the provenance.
        sure: number of positions where the teacher is sure (`saturation.SURE`), and the part of
            `risks` there [M] float64, nats; None if unknown.
        loss: the dense model's nats per scored token; None if unknown.
    """

    number: int
    gram: np.ndarray
    risks: np.ndarray | None
    positions: int
    units_per_batch: int = 1
    notes: tuple[str, ...] = ()
    sure: tuple[int, np.ndarray] | None = None
    loss: float | None = None


class GroupSums:
    """Sums over the positions of the sequences done, by group; sequence i is in group i mod G.

    Attributes:
        grams, positions, risks, sure_positions, sure_risks: as `group_...` of `Curvature`; the last
            three are None where units are not removed.
        seconds: what each sequence done took.
        losses: `Measured.loss` of each sequence that has one.
    """

    def __init__(self, groups: int, size: int, *, with_risks: bool) -> None:
        self.grams = np.zeros((groups, size, size))
        self.positions = np.zeros(groups, np.int64)
        self.risks = np.zeros((groups, size)) if with_risks else None
        self.sure_positions = np.zeros(groups, np.int64) if with_risks else None
        self.sure_risks = np.zeros((groups, size)) if with_risks else None
        self.seconds: list[float] = []
        self.losses: list[float] = []

    @property
    def done(self) -> int:
        """Number of sequences in the sums."""
        return len(self.seconds)

    def add(self, measured: Measured, seconds: float) -> None:
        """Add one sequence."""
        group = measured.number % len(self.grams)
        # an interrupt between these lines must not leave a sequence counted by half
        with uninterrupted():
            self.grams[group] += measured.gram
            if self.risks is not None:
                self.risks[group] += measured.risks
            sure = measured.sure
            if sure is not None and self.sure_positions is not None and self.sure_risks is not None:
                self.sure_positions[group] += sure[0]
                self.sure_risks[group] += sure[1]
            self.positions[group] += measured.positions
            self.seconds.append(seconds)
            if measured.loss is not None:
                self.losses.append(measured.loss)

    def curvature(
        self, units: UnitSet, provenance: dict[str, Any], groups: slice = slice(None)
    ) -> Curvature:
        """Return H over the sequences done, or over some of the groups of them."""
        risks, *sure = (
            None if array is None else array[groups]
            for array in (self.risks, self.sure_positions, self.sure_risks)
        )
        parts = (self.grams[groups], self.positions[groups], risks)
        return Curvature.from_groups(units, *parts, provenance, *sure)

    def facts(self, calibration: CalibrationSet, numbers: list[int]) -> dict[str, Any]:
        """Return what the provenance records of the sequences done, the first of `numbers`."""
        rows = calibration.row_fingerprints
        known = {"sequence_losses": list(self.losses)} if len(self.losses) == self.done else {}
        return known | {
            "sequences_done": self.done,
            "complete": self.done == len(calibration),
            "row_fingerprints": [rows[number] for number in numbers[: self.done]],
            "text_windows": record(windows(calibration.input_ids[numbers[: self.done]].numpy())),
            "calibration_source": calibration.source,
            "seed": calibration.seed,
            "seconds": sum(self.seconds),
            "sequence_seconds": list(self.seconds),
            "versions": software_versions(),
        }


def within_memory(step: Callable[[], Value], message: str) -> Value:
    """Take a step, and turn memory that runs out into an InputError; "{error}" is what it said."""
    try:
        return step()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(message.replace("{error}", str(error))) from error
