"""What judges a bake-off, and its options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cocurve_lab.base.arguments import as_int
from cocurve_lab.base.errors import InputError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.settings import guards_grid
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.solver.guards import Guards


class Judges(NamedTuple):
    """Text that judges plans: rows to search guards on, other rows and questions to report on."""

    held_out: CalibrationSet
    test: CalibrationSet
    questions: Sequence[Question] = ()


@dataclass(frozen=True)
class CompareOptions:
    """Options of `compare`.

    Attributes:
        folder: keeps evidence, measurements and cells; None keeps nothing.
        guards: the grid in which every row's guards are searched, by its own held-out KL with its
            own options and repair; empty: no search. It is that of `choose_guards`.
        ffn_groups: FFN groups per layer.
        progress: show progress bars.
        curvatures: H that CoCurve and its controls take where they are of the same calibration and
            support; another H is built, and kept in `folder`.
        unguarded: also measure rows without guards, where their guards are searched.
        repaired: where weights are repaired, how many of a row's plans are repaired on the whole
            calibration and compared on the held-out rows: those of lowest held-out KL, refitted on
            a quarter of it, or as pruned where the repair is no refit. None: all of them.
    """

    folder: str | os.PathLike[str] | None = None
    guards: Sequence[Guards] = guards_grid()
    ffn_groups: int = 16
    progress: bool = True
    curvatures: Sequence[Curvature] = ()
    unguarded: bool = True
    repaired: int | None = None

    def __post_init__(self) -> None:
        if self.repaired is not None and as_int(self.repaired, "repaired") < 1:
            raise InputError(f"repaired is {self.repaired}. Give at least 1, or None for all.")
