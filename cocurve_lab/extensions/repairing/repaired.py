"""Measured risk of plans after a repair: KL of the dense and the repaired model.

A repair is any function (model, plan) that returns a new model, pruned and repaired.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...base.errors import InputError, MismatchError
from ...base.progress import Progress, open_bar
from ...calibration import CalibrationSet
from ...measuring.plan_memory import FileKind
from ...measuring.risk import Meter
from ...models.architectures import Architecture, describe
from ...models.runtime import measuring
from ...solver.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Repair = Callable[[Any, Selection], Any]
# by how much a value measured again may differ: far more than threads and devices change it, and
# less than another repair does
_SAME = 1e-2


class RepairedMeter(Meter):
    """A `Meter` whose values are those of the repaired model.

    The checkpoint does not record which repair produced it, so its first value is measured again;
    another result raises MismatchError. The same plan must give the same model again.
    """

    kind = FileKind("cocurve-repaired-plans", 1, "repaired plans measured")  # columns as in risk.py

    def __init__(
        self,
        model: PreTrainedModel,
        text: CalibrationSet,
        repair: Repair,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(model, text, checkpoint=checkpoint, keep_teacher=True)
        self.repair = repair
        self._doubted = bool(self.memory.values)
        self._last: tuple[str, Architecture] | None = None  # the plan and model repaired last

    def fill(self, plans: dict[str, Selection], rows: list[int], progress: Progress) -> None:
        """Measure what the memory lacks, plan by plan: a repair may need room for a model."""
        wanted = [(mark, number) for mark in plans for number in rows]
        todo = [(mark, number) for mark, number in wanted if self.memory.absent([mark], number)]
        if self._doubted and len(todo) < len(wanted):
            mark, number = next(place for place in wanted if place not in todo)
            self._require_same(mark, number, plans)
        bar = open_bar(progress, total=len(todo), desc="KL of repaired plans", unit="row")
        with bar:
            for mark, number in todo:
                self.memory.add([mark], number, self._measured(mark, number, plans)[None])
                bar.update()

    def _require_same(self, mark: str, number: int, plans: dict[str, Selection]) -> None:
        known = self.memory.values[mark][number, 0]
        found = self._measured(mark, number, plans)[0]
        if not np.isclose(found, known, rtol=_SAME, atol=1e-9):
            raise MismatchError(
                f"{self.memory.path} holds a KL of {known:.6g} where this repair gives "
                f"{found:.6g}. Use another file for another repair."
            )
        self._doubted = False

    def _measured(self, mark: str, number: int, plans: dict[str, Selection]) -> np.ndarray:
        """KL and nll [2] of a row, of the model that the repair makes of a plan."""
        if self._last is None or self._last[0] != mark:
            self._last = None  # first, so that two repaired models never share the memory
            made = self.repair(self.model, plans[mark])
            if made is self.model:
                raise InputError("repair returned the dense model. Return a new model.")
            self._last = mark, describe(made)
        student = self._last[1]
        threads = torch.get_num_threads()
        with measuring(self.model, threads), measuring(student.model, threads):
            return self.engine.measure_student(number, student)[:2]
