"""Measured risk of plans after a repair: KL of the dense and the repaired model.

A repair is any function (model, plan) that returns a new model, pruned and repaired. It may also
return a context manager inside which the model itself behaves as repaired, such as `ablate` with
gains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...base.errors import InputError, MismatchError
from ...base.progress import Progress, open_bar
from ...calibration import CalibrationSet
from ...measuring.plan_memory import FileKind
from ...measuring.risk import Meter, require_one_vocabulary
from ...models.architectures import describe
from ...models.runtime import measuring
from ...models.units import units_like
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
        # a repair in place changes the model, so the dense states are kept from before it
        super().__init__(model, text, checkpoint=checkpoint, keep_teacher=True)
        self.repair = repair
        self._doubted = bool(self.memory.values)
        self._last: tuple[str, PreTrainedModel] | None = None  # the repaired model measured last

    def fill(self, plans: dict[str, Selection], rows: list[int], progress: Progress) -> None:
        """Measure what the memory lacks, plan by plan: a repair may need room for a model."""
        todo = {mark: [n for n in rows if self.memory.absent([mark], n)] for mark in plans}
        if self._doubted:
            known = ((m, n) for m in plans for n in rows if n not in todo[m])
            for mark, number in known:
                todo[mark].append(number)
                break
        with measuring(self.model, torch.get_num_threads()):
            for number in sorted({n for numbers in todo.values() for n in numbers}):
                self.engine.teacher(number)
        total = sum(map(len, todo.values()))
        bar = open_bar(progress, total=total, desc="KL of repaired plans", unit="row")
        with bar:
            for mark, numbers in todo.items():
                if numbers:
                    with self._repaired(mark, plans[mark]) as student:
                        self._measure_student(mark, student, numbers, bar)

    def _measure_student(
        self, mark: str, student: PreTrainedModel, rows: list[int], bar: Any
    ) -> None:
        architecture = describe(student)
        require_one_vocabulary(self.engine.architecture, architecture)
        with measuring(student, torch.get_num_threads()):
            for number in rows:
                found = self.engine.measure_student(number, architecture)[:2]
                if self.memory.absent([mark], number):
                    self.memory.add([mark], number, found[None])
                else:
                    self._require_same(float(self.memory.values[mark][number, 0]), float(found[0]))
                bar.update()

    def _require_same(self, known: float, found: float) -> None:
        if not np.isclose(found, known, rtol=_SAME, atol=1e-9):
            raise MismatchError(
                f"{self.memory.path} holds a KL of {known:.6g} where this repair gives "
                f"{found:.6g}. Use another file for another repair."
            )
        self._doubted = False

    @contextmanager
    def _repaired(self, mark: str, plan: Selection) -> Iterator[PreTrainedModel]:
        """Repair a plan and give the model to measure; the last new model is kept."""
        plan.require_units(units_like(self.model, plan.units))
        if self._last is None or self._last[0] != mark:
            self._last = None  # first, so that two repaired models never share the memory
            made = self.repair(self.model, plan)
            if not isinstance(made, nn.Module) and hasattr(made, "__enter__"):
                with made as inside:
                    yield inside if isinstance(inside, nn.Module) else self.model  # type: ignore[misc]
                return
            if not isinstance(made, nn.Module) or made is self.model:
                what = "the dense model" if made is self.model else f"a {type(made).__name__}"
                raise InputError(
                    f"repair returned {what}. Return a new model, or a context manager that undoes "
                    "its changes."
                )
            self._last = (mark, made)  # type: ignore[assignment]
        assert self._last is not None
        yield self._last[1]
