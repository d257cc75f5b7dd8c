"""Workers, which measure sequences, and the interface for running them elsewhere.

A `Worker` runs Algorithm 1 on one sequence after the other. An `Executor` provides a `WorkerPool`
for a build: `LocalExecutor` one worker in this process, an extension several on Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..calibration import CalibrationSet
from ..curvature.settings import BuildOptions
from ..models.architectures import describe
from ..models.families import UNIT_KINDS
from ..models.identity import model_device
from ..models.layers import source_of
from ..models.runtime import device_name, is_out_of_memory, measuring
from ..models.units import UnitSet
from .algorithm1 import Listener, sequence_gram
from .batches import Batches, Room, Tick, by_layer, choose_batch, choose_block, sweeps
from .fisher import kl_divergence
from .replay import Replay
from .risks import FullVocabulary, RowLoss, UnitRisks, other_start
from .sums import Measured
from .teacher import Teacher, TeacherSetup, row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Note = Callable[[str], object]  # called with each event that belongs in the provenance


@dataclass(frozen=True)
class WorkItem:
    """What a worker measures, apart from the model.

    Attributes:
        units, calibration, top_r: as given to the build.
        options: of the build, with its groups and threads settled.
        sequences: number of sequences left to do, for the estimate of the time.
    """

    units: UnitSet
    calibration: CalibrationSet
    top_r: int
    options: BuildOptions
    sequences: int


class WorkerPool(Protocol):
    """Workers that are ready.

    Attributes:
        units_per_batch: ablations per forward pass that all of them use.
        block: ablations that advance together (`batches.choose_block`).
        workers: how many they are.
        device_kind: "cpu" or "cuda".
        device: names of the devices, as text.
    """

    units_per_batch: int
    block: int
    workers: int
    device_kind: str

    @property
    def device(self) -> str: ...

    def seconds(self) -> float | None:
        """Estimate the duration of the work in seconds; None if it is not known beforehand."""
        ...

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

    workers = 1

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

    def seconds(self) -> float | None:
        """Estimate the duration of the work in seconds from a few ablations.

        None if a batch does not fit in memory yet.
        """
        item, left = self.item, list(self.item.units)
        layers = [units for _, units in by_layer(left)]
        # units of an image tower take whole passes, the same for each
        whole = [units for units in layers if UNIT_KINDS[units[0].kind].inside]
        layers = layers[: len(layers) - len(whole)] or whole
        ids, positions = row(self.architecture, item.calibration, 0)
        streamed = source_of(self.architecture.model) is not None
        for _ in range(1 if streamed else 2):  # the first one warms up
            replay: Any = None
            teacher: Any = None  # else there would be two for a while
            begun = time.monotonic()
            replay = Replay(self.architecture, ids, positions)
            teacher = Teacher(self.architecture, replay.scored_hidden, item.top_r, 0)
            teacher_seconds = time.monotonic() - begun
        per_ablation = []
        # the first one warms up; of a streamed model all would be read for a batch of layer 0
        first = [] if streamed else [layers[0]]
        for units in (layers[-1], layers[-1], *first, *whole[:1]):
            batch = units[: self.units_per_batch]
            begun = time.monotonic()
            try:
                hidden = replay.ablated_hidden(batch)
                kl_divergence(teacher.probabilities, teacher.head(hidden) - teacher.logits)
                if self.full_kl is not None:
                    self.full_kl(replay.scored_hidden, hidden)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None  # the build will halve the batch and report it
            per_ablation.append((time.monotonic() - begun) / len(batch))
        if replay.stream is not None:
            # a unit runs half of the layers on average; a teacher pass takes as long as reading
            mean = per_ablation[-1] + self._layer_seconds(replay) * (len(layers) - 1) / 2
            starts = sweeps(left, self.units_per_batch, self.block)
            whole = replay.stream.bytes_from(0)
            passes = sum(map(replay.stream.bytes_from, starts)) / whole
            return item.sequences * (teacher_seconds * passes + len(left) * mean)
        # an ablation runs the layers above it, so its cost falls linearly with its layer: the mean
        # of the last and the first layer is the mean of all
        mean, passes = sum(per_ablation[1:3]) / 2, sum(map(len, whole))
        ablations = (len(left) - passes) * mean + passes * per_ablation[-1]
        return item.sequences * (teacher_seconds + ablations)

    def _layer_seconds(self, replay: Replay) -> float:
        last = len(replay.calls) - 1  # no other is fetched meanwhile
        hidden = replay.calls[last].hidden.expand(self.units_per_batch, -1, -1)
        with replay.held(last):
            begun = time.monotonic()
            replay.run(last, hidden)
            return (time.monotonic() - begun) / self.units_per_batch
