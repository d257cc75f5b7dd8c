"""A worker turns sequences into Grams; an executor says where workers are: here, or elsewhere."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from ..calibration import CalibrationSet
from ..errors import InputError
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.runtime import device_name, measuring
from ..models.units import UnitSet
from .features import AblatedSequence, by_layer, choose_batch, gram_matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SMALLER = "Use shorter rows, fewer positions, bfloat16 weights, or a larger device."


Tick = Callable[[int], object]  # told the number of ablations that are done


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
        """The teacher, all units, the Gram of one sequence.

        Raises:
            InputError: one ablation alone does not fit in memory.
            NumericalError: NaN or infinite logits.
        """
        sequence = self._open(number)
        features = sequence.new_features(len(self.job.units))
        risks = torch.zeros(len(self.job.units), dtype=torch.float64)
        notes: list[str] = []
        for first, layer_units in by_layer(self.job.units):
            start = 0
            while start < len(layer_units):
                batch = layer_units[start : start + self.units_per_batch]
                rows = slice(first + start, first + start + len(batch))
                found = sequence.try_ablate(batch, features[rows])
                if found is None:
                    notes.append(self._halve_batch())
                    continue
                risks[rows] = found
                start += len(batch)
                tick(len(batch))
        positions = len(self.job.calibration.scored[number])
        return Measured(
            number,
            gram_matrix(features),
            risks.numpy(),
            positions,
            self.units_per_batch,
            tuple(notes),
        )

    def seconds(self) -> float | None:
        """Time a few ablations; what the job will take, or None where a batch is too large yet."""
        for _ in range(2):  # the first one warms up
            begun = time.monotonic()
            sequence = self._open(0)
            teacher = time.monotonic() - begun
        layers = list(by_layer(self.job.units))
        probes = []
        for _, layer_units in (layers[-1], layers[-1], layers[0]):  # the first one warms up
            batch = layer_units[: self.units_per_batch]
            features = sequence.new_features(len(batch))
            begun = time.monotonic()
            if sequence.try_ablate(batch, features) is None:
                return None  # the build itself halves the batch and says so
            probes.append((time.monotonic() - begun) / len(batch))
        # the cost of an ablation falls linearly with its layer
        return self.job.sequences * (teacher + len(self.job.units) * sum(probes[1:]) / 2)

    def _open(self, number: int) -> AblatedSequence:
        calibration = self.job.calibration
        ids, positions = calibration.input_ids[number : number + 1], calibration.scored[number]
        return AblatedSequence(self.architecture, ids, positions, self.job.top_r, number)

    def _halve_batch(self) -> str:
        if self.units_per_batch == 1:
            raise InputError(f"memory runs out with one ablation per batch. {SMALLER}")
        self.units_per_batch //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"out of memory, {self.units_per_batch} units per batch from here on"


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
