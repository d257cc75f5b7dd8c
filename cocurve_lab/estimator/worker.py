"""Workers, which measure sequences, and the interface for running them elsewhere.

A `Worker` runs Algorithm 1 on one sequence after the other. An `Executor` provides a `Crew` of
workers for a build: `LocalExecutor` one in this process, cluster.py several on Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ..calibration import CalibrationSet
from ..extensions.surrogates.refit_aware import Leftovers, Preparing, leftovers, require_refittable
from ..extensions.surrogates.shifts import Shifts
from ..extensions.surrogates.sketch import SequenceSketch
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.layers import source_of
from ..models.runtime import device_name, is_out_of_memory, measuring
from ..models.units import UnitSet
from .algorithm1 import sequence_gram
from .batches import Batches, Room, Tick, by_layer, choose_batch, choose_block, sweeps
from .fisher import kl_divergence
from .replay import Replay
from .teacher import Teacher, row
from .vocabulary import FullVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Note = Callable[[str], object]  # called with each event that belongs in the provenance


@dataclass(frozen=True)
class Job:
    """The inputs of a worker, apart from the model.

    Attributes:
        units, calibration, top_r: as given to the build.
        num_threads: CPU threads of each worker.
        units_per_batch: ablations per forward pass; None chooses by free memory.
        sequences: number of sequences left to do, for the estimate of the time.
        full_vocabulary: measure the KL of single units over the full vocabulary.
        sketch: (positions, tokens) of the sketch of shifts to keep; None keeps none.
        groups: number of groups of sequences.
        temperature: by which logits are divided.
        removed: indices of units that are masked throughout.
        refit_ratio: share of a block's other units that are expected to be gone where they make up
            for an ablation (refitted.py); 0: they do not.
    """

    units: UnitSet
    calibration: CalibrationSet
    top_r: int
    num_threads: int
    units_per_batch: int | None
    sequences: int
    full_vocabulary: bool = False
    sketch: tuple[int, int] | None = None
    groups: int = 1
    temperature: float = 1.0
    removed: tuple[int, ...] = ()
    refit_ratio: float = 0.0

    @property
    def left(self) -> list[int]:
        """Indices of the units that are ablated one by one."""
        removed = set(self.removed)
        return [index for index in range(len(self.units)) if index not in removed]


class Measured(NamedTuple):
    """One finished sequence.

    Attributes:
        number: number of the sequence in the calibration.
        gram: [M, M] float64, sum over its positions (eq. gram), nats.
        risks: [M] float64, sum over its positions of the KL of removing each unit alone, nats.
        positions: number of scored positions.
        units_per_batch: the batch size that fitted in memory.
        notes: events that belong in the provenance.
        sure: number of positions where the teacher is sure (`saturation.SURE`), and the part of
            `risks` there [M] float64, nats; None if unknown.
        shifts: this sequence's part of the sketch; None if none is kept.
    """

    number: int
    gram: np.ndarray
    risks: np.ndarray
    positions: int
    units_per_batch: int
    notes: tuple[str, ...] = ()
    sure: tuple[int, np.ndarray] | None = None
    shifts: Shifts | None = None


class Crew(Protocol):
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
        """Estimate the duration of the job in seconds; None if it is not known beforehand."""
        ...

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        """Measure the sequences of these numbers; yield the results in the order of `numbers`."""
        ...


class Executor(Protocol):
    """The place where the sequences of a build are measured."""

    def threads(self) -> int:
        """Return the CPU threads of a worker if the options give none."""
        ...

    def open(self, model: PreTrainedModel, job: Job) -> AbstractContextManager[Crew]:
        """Provide workers for a job; they end with the context."""
        ...


class Worker:
    """Measures sequences with one model; the caller holds the model in `measuring`.

    Args:
        model, job: what is measured.
        sharing: how many workers share the memory of the device.
    """

    def __init__(self, model: PreTrainedModel, job: Job, sharing: int = 1) -> None:
        self.architecture, self.job = describe(model), job
        room = Room.of(model)
        if job.refit_ratio:
            require_refittable(self.architecture)
        self.preparing = Preparing.of(self.architecture, job.calibration, job.refit_ratio)
        room = replace(room, free=room.free / sharing - self.preparing.kept)
        chosen = (self.architecture, job.units, job.calibration, job.top_r)
        self.units_per_batch = job.units_per_batch or choose_batch(
            *chosen, job.full_vocabulary, room
        )
        self.block = choose_block(*chosen, self.units_per_batch, job.full_vocabulary, room)
        self.full_kl = None
        # a support that is the whole vocabulary has nothing to add
        if job.full_vocabulary and job.top_r < self.architecture.vocabulary:
            self.full_kl = FullVocabulary(self.architecture, job.temperature).kl
        self.leftovers: Leftovers | None = None  # made for the first sequence
        device = model_device(model)
        self.device_kind, self.device = device.type, device_name(device)

    def measure_one(self, number: int, tick: Tick) -> Measured:
        """Run Algorithm 1 on one sequence.

        Raises:
            InputError: one ablation alone does not fit in memory.
            NumericalError: NaN or infinite logits.
        """
        job, size = self.job, len(self.job.units)
        if job.refit_ratio and self.leftovers is None:
            self.leftovers = leftovers(
                self.architecture, job.units, job.calibration, job.refit_ratio
            )
        batches = Batches(self.units_per_batch, tick, self.block)
        left, gone = job.left, [job.units[index] for index in job.removed]
        inputs = ([job.units[index] for index in left], job.calibration, number, job.top_r)
        sketch = None
        if job.sketch is not None:
            sketch = SequenceSketch(
                number, len(job.calibration), size, left, job.sketch, job.groups
            )
        found = sequence_gram(
            *(self.architecture, *inputs, batches),
            full_kl=self.full_kl,
            sketch=sketch,
            temperature=job.temperature,
            removed=gone,
            leftovers=self.leftovers,
        )
        gram, risks, sure_risks = (_spread(a, left, size) for a in (*found[:2], found[2][1]))
        sure = found[2][0], sure_risks
        # a halved batch stays halved for later sequences
        self.units_per_batch, self.block = batches.size, batches.block
        positions = len(job.calibration.scored[number])
        notes = tuple(batches.notes)
        shifts = None if sketch is None else sketch.kept()
        return Measured(number, gram, risks, positions, batches.size, notes, sure, shifts)

    def seconds(self) -> float | None:
        """Estimate the duration of the job in seconds from a few ablations.

        None if a batch does not fit in memory yet. For a refit_ratio the passes over the rows
        count, but not the inverses of the moments.
        """
        job, left = self.job, [self.job.units[index] for index in self.job.left]
        layers = [units for _, units in by_layer(left)]
        ids, positions = row(self.architecture, job.calibration, 0)
        streamed = source_of(self.architecture.model) is not None
        for _ in range(1 if streamed else 2):  # the first one warms up
            replay: Any = None
            teacher: Any = None  # else there would be two for a while
            begun = time.monotonic()
            replay = Replay(self.architecture, ids, positions)
            teacher = Teacher(self.architecture, replay.scored_hidden, job.top_r, 0)
            teacher_seconds = time.monotonic() - begun
        per_ablation = []
        # the first one warms up; of a streamed model all would be read for a batch of layer 0
        first = [] if streamed else [layers[0]]
        for units in (layers[-1], layers[-1], *first):
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
        preparing = teacher_seconds * len(job.calibration) if job.refit_ratio else 0.0
        if replay.stream is not None:
            # a unit runs half of the layers on average; a teacher pass takes as long as reading
            mean = per_ablation[-1] + self._layer_seconds(replay) * (len(layers) - 1) / 2
            starts = sweeps(left, self.units_per_batch, self.block, bool(job.removed))
            whole = replay.stream.bytes_from(0)
            passes = sum(map(replay.stream.bytes_from, starts)) / whole
            preparing = teacher_seconds * self.preparing.bytes_read / whole
            return preparing + job.sequences * (teacher_seconds * passes + len(left) * mean)
        # an ablation runs the layers above it, so its cost falls linearly with its layer: the mean
        # of the last and the first layer is the mean of all
        mean = sum(per_ablation[1:]) / 2
        return preparing + job.sequences * (teacher_seconds + len(left) * mean)

    def _layer_seconds(self, replay: Replay) -> float:
        """Duration of one layer for one ablation, in seconds, once its weights are there."""
        last = len(replay.calls) - 1  # no other is fetched meanwhile
        hidden = replay.calls[last].hidden.expand(self.units_per_batch, -1, -1)
        with replay.held(last):
            begun = time.monotonic()
            replay.run(last, hidden)
            return (time.monotonic() - begun) / self.units_per_batch


def _spread(values: np.ndarray, left: list[int], size: int) -> np.ndarray:
    """Values [m] or [m, m] of the units left, as [M] or [M, M] with 0 for the others."""
    if len(left) == size:  # nothing was removed: no copy of H for every sequence
        return values
    whole = np.zeros((size,) * values.ndim)
    whole[np.ix_(*[left] * values.ndim)] = values
    return whole


class LocalCrew(Worker):
    """The one worker of this process."""

    workers = 1

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        for number in numbers:
            yield self.measure_one(number, tick)


class LocalExecutor:
    """One worker in this process: the default."""

    def threads(self) -> int:
        return torch.get_num_threads()

    @contextmanager
    def open(self, model: PreTrainedModel, job: Job) -> Iterator[LocalCrew]:
        with measuring(model, job.num_threads):
            yield LocalCrew(model, job)
