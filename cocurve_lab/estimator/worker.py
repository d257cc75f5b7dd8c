"""Measures the sequences of a build: Algorithm 1 on one after the other, here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.errors import InputError
from ..calibration import CalibrationSet
from ..curvature.settings import BuildOptions
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.runtime import device_name, is_out_of_memory, measuring
from ..models.units import UnitSet
from .algorithm1 import Listener, sequence_gram
from .batches import SMALLER, Batches, Room, Tick
from .risks import FullVocabulary, RowLoss, UnitRisks
from .teacher import TeacherSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Work:
    """What is measured of each sequence; it can be sent to another machine.

    Attributes:
        units, calibration, top_r: as given to the build.
        options: of the build, with its threads settled.
        listeners: what else hears of the ablations.
    """

    units: UnitSet
    calibration: CalibrationSet
    top_r: int
    options: BuildOptions
    listeners: Sequence[Listener] = ()


class Measured(NamedTuple):
    """One finished sequence.

    Attributes:
        number: number of the sequence in the calibration.
        sums: its share of each array of `Groups`, by name.
        loss: the dense model's nats per scored token.
        units_per_batch: the batch size that fitted in memory.
        device_kind, device: "cpu" or "cuda", and the name of the device.
        notes: events that belong in the provenance.
    """

    number: int
    sums: dict[str, Any]
    loss: float
    units_per_batch: int
    device_kind: str
    device: str
    notes: tuple[str, ...] = ()


# measures sequences, and yields them in the order of their numbers
Measure = Callable[["PreTrainedModel", Work, Sequence[int], Tick], Generator[Measured, None, None]]


def measure_here(
    model: PreTrainedModel, work: Work, numbers: Sequence[int], tick: Tick
) -> Generator[Measured, None, None]:
    """Measure sequences in this process, one after the other."""
    with measuring(model, work.options.num_threads or 1):
        worker = Worker(model, work)
        for number in numbers:
            yield worker.measure_one(number, tick)


class Worker:
    """Measures sequences with one model, which the caller holds in `measuring`.

    Args:
        model, work: what is measured.
        sharing: how many workers share the memory of the device.
    """

    def __init__(self, model: PreTrainedModel, work: Work, sharing: int = 1) -> None:
        self.work, self.architecture = work, describe(model)
        self.setup = TeacherSetup(self.architecture, work.top_r)
        full, units = work.options.full_vocabulary, work.units
        room = Room.of(self.architecture, units, work.calibration, work.top_r, full, sharing)
        self.units_per_batch = work.options.units_per_batch or room.batch(units)
        self.block = room.block(units, self.units_per_batch)
        # a support that is the whole vocabulary has nothing to add
        full = full and work.top_r < self.architecture.vocabulary
        self.full_kl = FullVocabulary(self.architecture).kl if full else None

    def measure_one(self, number: int, tick: Tick) -> Measured:
        """Run Algorithm 1 on one sequence."""
        units, calibration = list(self.work.units), self.work.calibration
        batches = Batches(self.units_per_batch, tick, self.block)
        risks = UnitRisks(units, self.full_kl)
        loss = RowLoss(self.architecture, calibration, number)
        listeners: list[Listener] = [risks, loss, *self.work.listeners]
        try:
            gram = sequence_gram(self.setup, units, calibration, number, batches, listeners)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"memory runs out on sequence {number} outside the ablations ({error}). {SMALLER}"
            ) from error
        # a halved batch stays halved for later sequences
        self.units_per_batch, self.block = batches.size, batches.block
        device = model_device(self.architecture.model)
        return Measured(
            number,
            {"grams": gram, "positions": len(calibration.scored[number])} | risks.sums(number),
            loss.mean,
            batches.size,
            device.type,
            device_name(device),
            tuple(batches.notes),
        )
