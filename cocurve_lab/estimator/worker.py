"""Workers, which measure sequences, and the interface for running them elsewhere.

A `Worker` runs Algorithm 1 on one sequence after the other. An `Executor` provides a `WorkerPool`
for a build: `LocalExecutor` one worker in this process, an extension several on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from ..calibration import CalibrationSet
from ..curvature.settings import BuildOptions
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.runtime import device_name, measuring
from ..models.units import UnitSet
from .algorithm1 import Listener, sequence_gram
from .batches import Batches, Room, Tick, choose_batch, choose_block
from .risks import FullVocabulary, RowLoss, UnitRisks, other_start
from .sums import Measured
from .teacher import TeacherSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Note = Callable[[str], object]  # called with each event that belongs in the provenance


@dataclass(frozen=True)
class WorkItem:
    """What a worker measures, apart from the model.

    Attributes:
        units, calibration, top_r: as given to the build.
        options: of the build, with its groups and threads settled.
    """

    units: UnitSet
    calibration: CalibrationSet
    top_r: int
    options: BuildOptions


class WorkerPool(Protocol):
    """Workers that are ready.

    Attributes:
        units_per_batch: ablations per forward pass that all of them use.
        block: ablations that advance together (`batches.choose_block`).
        device_kind: "cpu" or "cuda".
        device: names of the devices, as text.
    """

    units_per_batch: int
    block: int
    device_kind: str

    @property
    def device(self) -> str: ...

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        """Measure the sequences of these numbers; yield the results in the order of `numbers`."""
        ...


class Executor(Protocol):
    """The place where the sequences of a build are measured."""

    def threads(self) -> int:
        """Return the CPU threads of a worker if the options give none."""
        ...

    def open(self, model: PreTrainedModel, item: WorkItem) -> AbstractContextManager[WorkerPool]:
        """Provide workers; they end with the context."""
        ...


class LocalExecutor:
    """One worker in this process: the default."""

    def threads(self) -> int:
        return torch.get_num_threads()

    @contextmanager
    def open(self, model: PreTrainedModel, item: WorkItem) -> Iterator[Worker]:
        with measuring(model, item.options.num_threads or self.threads()):
            yield Worker(model, item)


class Worker:
    """Measures sequences with one model, which the caller holds in `measuring`: a pool of one.

    Args:
        model, item: what is measured.
        sharing: how many workers share the memory of the device.
    """

    def __init__(self, model: PreTrainedModel, item: WorkItem, sharing: int = 1) -> None:
        self.architecture, self.item, self.options = describe(model), item, item.options
        room, options = Room.of(model), item.options
        room = replace(room, free=room.free / sharing)
        chosen = (self.architecture, item.units, item.calibration, item.top_r)
        full = options.full_vocabulary
        self.units_per_batch = options.units_per_batch or choose_batch(*chosen, full, room)
        self.block = choose_block(*chosen, self.units_per_batch, full, room)
        self.full_kl = None
        # a support that is the whole vocabulary has nothing to add
        if full and item.top_r < self.architecture.vocabulary:
            self.full_kl = FullVocabulary(self.architecture).kl
        self.setup = TeacherSetup(self.architecture, item.top_r)
        device = model_device(model)
        self.device_kind, self.device = device.type, device_name(device)

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        for number in numbers:
            yield self.measure_one(number, tick)

    def measure_one(self, number: int, tick: Tick) -> Measured:
        """Run Algorithm 1 on one sequence."""
        item, units = self.item, list(self.item.units)
        batches = Batches(self.units_per_batch, tick, self.block)
        risks = UnitRisks(units, self.full_kl)
        loss = RowLoss(self.architecture, item.calibration, number)
        listeners: list[Listener] = [risks, loss]
        if number == 0:
            note = other_start(self.architecture, item.calibration)
            batches.notes += [note] if note else []
        gram = sequence_gram(self.setup, units, item.calibration, number, batches, listeners)
        risk, sure, sure_risk = risks.of(number)
        # a halved batch stays halved for later sequences
        self.units_per_batch, self.block = batches.size, batches.block
        return Measured(
            number,
            gram,
            risk,
            len(item.calibration.scored[number]),
            batches.size,
            tuple(batches.notes),
            (sure, sure_risk),
            loss.mean,
        )
