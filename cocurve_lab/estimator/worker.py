"""A worker turns sequences into Grams; an executor says where workers are: here, or elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from ..calibration import CalibrationSet
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.runtime import device_name, is_out_of_memory, measuring
from ..models.units import UnitSet
from .batches import Batches, Tick, by_layer, choose_batch
from .features import Teacher, row, sequence_gram
from .fisher import kl_divergence
from .replay import Replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Note = Callable[[str], object]  # told what should be kept with the result


@dataclass(frozen=True)
class Job:
    """What a worker needs beside the model.

    Attributes:
        units, calibration, top_r: as given to the build.
        num_threads: CPU threads of each worker.
        units_per_batch: ablations per forward; None = from free memory.
        sequences: how many are left to do; what a large job says before it starts.
    """

    units: UnitSet
    calibration: CalibrationSet
    top_r: int
    num_threads: int
    units_per_batch: int | None
    sequences: int


class Measured(NamedTuple):
    """One finished sequence: Gram [M, M] and summed risks [M], float64, over its positions."""

    number: int
    gram: np.ndarray
    risks: np.ndarray
    positions: int
    units_per_batch: int  # what fitted in memory
    notes: tuple[str, ...] = ()


class Crew(Protocol):
    """Workers that are ready.

    Attributes:
        units_per_batch: the batch they settled on.
        device_kind: "cpu" or "cuda".
        device: names of the devices.
    """

    units_per_batch: int
    device_kind: str

    @property
    def device(self) -> str: ...

    def seconds(self) -> float | None:
        """What the job may take, or None where that is not known beforehand."""
        ...

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        """The sequences of these numbers, finished, in the order of `numbers`."""
        ...


class Executor(Protocol):
    """Where the sequences of a build are measured."""

    def threads(self) -> int:
        """CPU threads of a worker where the options leave them open."""
        ...

    def open(self, model: PreTrainedModel, job: Job) -> AbstractContextManager[Crew]:
        """Workers for a job, ready until the context ends."""
        ...


class Worker:
    """One model that measures sequences; whoever calls it holds the model in `measuring`."""

    def __init__(self, model: PreTrainedModel, job: Job) -> None:
        self.architecture, self.job = describe(model), job
        self.units_per_batch = job.units_per_batch or choose_batch(
            self.architecture, job.units, job.calibration, job.top_r
        )
        device = model_device(model)
        self.device_kind, self.device = device.type, device_name(device)

    def measure_one(self, number: int, tick: Tick) -> Measured:
        """Algorithm 1 on one sequence.

        Raises:
            InputError: one ablation alone does not fit in memory.
            NumericalError: NaN or infinite logits.
        """
        job, batches = self.job, Batches(self.units_per_batch, tick)
        gram, risks = sequence_gram(
            self.architecture, job.units, job.calibration, number, job.top_r, batches
        )
        self.units_per_batch = batches.size
        positions = len(job.calibration.scored[number])
        return Measured(number, gram, risks, positions, batches.size, tuple(batches.notes))

    def seconds(self) -> float | None:
        """Time a few ablations; what the job will take, or None where a batch is too large yet."""
        job, layers = self.job, [units for _, units in by_layer(self.job.units)]
        ids, positions = row(self.architecture, job.calibration, 0)
        for _ in range(2):  # the first one warms up
            begun = time.monotonic()
            replay = Replay(self.architecture, ids, positions)
            teacher = Teacher(self.architecture, replay.scored_hidden, job.top_r, 0)
            teacher_seconds = time.monotonic() - begun
        per_ablation = []
        for units in (layers[-1], layers[-1], layers[0]):  # the first one warms up
            batch = units[: self.units_per_batch]
            begun = time.monotonic()
            try:
                shift = teacher.head(replay.ablated_hidden(batch)) - teacher.logits
                kl_divergence(teacher.probabilities, shift)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None  # the build itself halves the batch and says so
            per_ablation.append((time.monotonic() - begun) / len(batch))
        # the cost of an ablation falls linearly with its layer
        mean = sum(per_ablation[1:]) / 2
        return job.sequences * (teacher_seconds + len(job.units) * mean)


class LocalCrew(Worker):
    """The one worker of this process."""

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        for number in numbers:
            yield self.measure_one(number, tick)


class LocalExecutor:
    """One worker, in this process: what a build does where no executor is given."""

    def threads(self) -> int:
        return torch.get_num_threads()

    @contextmanager
    def open(self, model: PreTrainedModel, job: Job) -> Iterator[LocalCrew]:
        with measuring(model, job.num_threads):
            yield LocalCrew(model, job)
