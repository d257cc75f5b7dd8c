"""Workers, which measure sequences, and the interface for running them elsewhere.

A `Worker` runs Algorithm 1 on one sequence after the other. An `Executor` provides a `WorkerPool`
for a build: `LocalExecutor` one worker in this process, an extension several on Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ..base.seams import require_extension
from ..calibration import CalibrationSet
from ..curvature.settings import BuildOptions
from ..models.architectures import Architecture, describe
from ..models.identity import model_device
from ..models.layers import weights_of
from ..models.runtime import device_name, is_out_of_memory, measuring
from ..models.units import Unit, UnitSet
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
        options: of the build, with its groups, threads and `removed` (as indices) settled.
        sequences: number of sequences left to do, for the estimate of the time.
    """

    units: UnitSet
    calibration: CalibrationSet
    top_r: int
    options: BuildOptions
    sequences: int

    @property
    def left(self) -> list[int]:
        """Indices of the units that are ablated one by one."""
        removed = set(self.options.removed)
        return [index for index in range(len(self.units)) if index not in removed]

    @property
    def ablated(self) -> list[Unit]:
        """The units of `left`."""
        return [self.units[index] for index in self.left]


class Preparation(NamedTuple):
    """What a build takes for its options; nothing in the paper's.

    Attributes:
        peak: bytes before its first sequence, weights that come included.
        kept: bytes beside each sequence.
        bytes_read: bytes of weights that are read meanwhile.
    """

    peak: float = 0
    kept: int = 0
    bytes_read: int = 0

    @classmethod
    def of(
        cls, architecture: Architecture, calibration: CalibrationSet, options: BuildOptions
    ) -> Preparation:
        found = cls()
        if options.refit_ratio:
            find = require_extension("refit-aware preparation", "refit_ratio")
            found = find(architecture, calibration)
        if options.bfloat16_products:
            find = require_extension("bytes of bfloat16 products", "bfloat16_products")
            more = find(architecture, calibration.seq_len)
            found = cls(found.peak + more, found.kept + more, found.bytes_read)
        return found


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
        self.preparation = Preparation.of(self.architecture, item.calibration, options)
        room = replace(room, free=room.free / sharing - self.preparation.kept)
        chosen = (self.architecture, item.units, item.calibration, item.top_r)
        full = options.full_vocabulary
        self.units_per_batch = options.units_per_batch or choose_batch(*chosen, full, room)
        self.block = choose_block(*chosen, self.units_per_batch, full, room)
        self.full_kl = None
        # a support that is the whole vocabulary has nothing to add
        if full and item.top_r < self.architecture.vocabulary:
            self.full_kl = FullVocabulary(self.architecture, options.temperature).kl
        self.products: AbstractContextManager[None] = nullcontext()
        if options.bfloat16_products:
            self.products = require_extension("bfloat16 products", "bfloat16_products")(
                self.architecture
            )
        self.setup: TeacherSetup | None = None  # made for the first sequence
        device = model_device(model)
        self.device_kind, self.device = device.type, device_name(device)

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        for number in numbers:
            yield self.measure_one(number, tick)

    def measure_one(self, number: int, tick: Tick) -> Measured:
        """Run Algorithm 1 on one sequence."""
        item, size = self.item, len(self.item.units)
        batches = Batches(self.units_per_batch, tick, self.block)
        risks, sketch = UnitRisks(item.ablated, self.full_kl), None
        loss = RowLoss(self.architecture, item.calibration, number)
        listeners: list[Listener] = [risks, loss]
        if number == 0:
            note = other_start(self.architecture, item.calibration)
            batches.notes += [note] if note else []
        if self.options.sketch is not None:
            make = require_extension("sketch of a sequence", "sketch_positions")
            of_build = (item.left, self.options.sketch, self.options.groups)
            sketch = make(number, len(item.calibration), size, *of_build)
            listeners.append(sketch)
        setup = self._settle()
        inputs = (setup, item.ablated, item.calibration, number, batches, listeners)
        with self.products:
            gram = sequence_gram(*inputs)
        risk, sure, sure_risk = risks.of(number)
        # a halved batch stays halved for later sequences
        self.units_per_batch, self.block = batches.size, batches.block
        gram, risk, sure_risk = (_spread(a, item.left, size) for a in (gram, risk, sure_risk))
        return Measured(
            number,
            gram,
            risk,
            len(item.calibration.scored[number]),
            batches.size,
            tuple(batches.notes),
            (sure, sure_risk),
            None if sketch is None else sketch.kept(),
            loss.mean,
        )

    def _settle(self) -> TeacherSetup:
        if self.setup is None:
            scales, options, item = None, self.options, self.item
            if options.refit_ratio:
                make = require_extension("refit-aware ablations", "refit_ratio")
                inputs = (self.architecture, item.units, item.calibration)
                scales = make(*inputs, options.refit_ratio)
            gone = [item.units[unit] for unit in item.units.indices(options.removed)]
            of_options = (options.temperature, gone, scales)
            self.setup = TeacherSetup(self.architecture, item.top_r, *of_options)
        return self.setup

    def seconds(self) -> float | None:
        with self.products:
            return self._seconds()

    def _seconds(self) -> float | None:
        """Estimate the duration of the work in seconds from a few ablations.

        None if a batch does not fit in memory yet. For a refit_ratio the passes over the rows
        count, but not the inverses of the moments.
        """
        item, left = self.item, self.item.ablated
        layers = [units for _, units in by_layer(left)]
        ids, positions = row(self.architecture, item.calibration, 0)
        coming = bool(weights_of(self.architecture.model).devices)
        for _ in range(1 if coming else 2):  # the first one warms up
            replay: Any = None
            teacher: Any = None  # else there would be two for a while
            begun = time.monotonic()
            replay = Replay(self.architecture, ids, positions)
            teacher = Teacher(self.architecture, replay.scored_hidden, item.top_r, 0)
            teacher_seconds = time.monotonic() - begun
        per_ablation = []
        # the first one warms up; where weights come, all would be read for a batch of layer 0
        first = [] if coming else [layers[0]]
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
        preparing = teacher_seconds * len(item.calibration) if self.options.refit_ratio else 0.0
        if coming:
            # a unit runs half of the layers on average; a teacher pass takes as long as reading
            mean = per_ablation[-1] + self._layer_seconds(replay) * (len(layers) - 1) / 2
            starts = sweeps(left, self.units_per_batch, self.block, bool(self.options.removed))
            whole = replay.source.bytes_from(0)
            passes = sum(map(replay.source.bytes_from, starts)) / whole
            preparing = teacher_seconds * self.preparation.bytes_read / whole
            return preparing + item.sequences * (teacher_seconds * passes + len(left) * mean)
        # an ablation runs the layers above it, so its cost falls linearly with its layer: the mean
        # of the last and the first layer is the mean of all
        mean, passes = sum(per_ablation[1:3]) / 2, sum(map(len, whole))
        ablations = (len(left) - passes) * mean + passes * per_ablation[-1]
        return preparing + item.sequences * (teacher_seconds + ablations)

    def _layer_seconds(self, replay: Replay) -> float:
        last = len(replay.calls) - 1  # no other is fetched meanwhile
        hidden = replay.calls[last].hidden.expand(self.units_per_batch, -1, -1)
        with replay.source.present(last):
            begun = time.monotonic()
            replay.run(last, hidden)
            return (time.monotonic() - begun) / self.units_per_batch


def _spread(values: np.ndarray, left: list[int], size: int) -> np.ndarray:
    """Return values [m] or [m, m] of the units left as [M] or [M, M], 0 for the others."""
    if len(left) == size:  # nothing was removed: no copy of H for every sequence
        return values
    whole = np.zeros((size,) * values.ndim)
    whole[np.ix_(*[left] * values.ndim)] = values
    return whole
