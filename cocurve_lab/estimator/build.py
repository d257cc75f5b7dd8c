"""A build: the loop over sequences, with checkpoints, resuming and a clean stop on Ctrl-C.

Sequences outside, units inside: the Gram of one sequence is added and its features are dropped, so
memory does not grow with the calibration, an interrupted build is already an estimate, and builds
over other sequences can be merged. Algorithm 1 on one sequence is algorithm1.py; `Worker` runs it
with the KL of each unit and the dense model's loss, in this process or elsewhere.
"""

from __future__ import annotations

import logging
import os
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..base.arguments import require_threads
from ..base.atomic import is_full, previous, write_atomically
from ..base.errors import FileFormatError, InputError
from ..base.interrupts import uninterrupted
from ..base.progress import Progress, open_bar
from ..base.schema import (
    COUNT,
    OBJECT,
    POSITIVE,
    SECONDS,
    TEXT,
    TEXTS,
    Field,
    Schema,
    is_number,
    list_of,
    reading,
    require_fields,
)
from ..base.storage import dump_plain, load_plain, require_settings
from ..base.text_windows import record, windows
from ..calibration import CalibrationSet
from ..curvature.groups import Groups
from ..curvature.matrix import Curvature
from ..curvature.merging import shard_sequences
from ..curvature.settings import (
    MAY_BE_ABSENT,
    RUNTIME,
    STORED_SETTINGS,
    SUMS,
    BuildOptions,
    Facts,
)
from ..models.architectures import describe
from ..models.identity import known_record, model_device
from ..models.runtime import device_name, is_out_of_memory, measuring, software_versions
from ..models.units import UnitSet
from .algorithm1 import Listener, sequence_gram
from .batches import SMALLER, Batches, Room, Tick
from .risks import FullVocabulary, Risks, is_guess, told_fit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "cocurve-build", 1
_CHECKPOINT: Schema = {
    "format": TEXT,
    "version": COUNT,
    "settings": OBJECT,
    "runtime": OBJECT,
    "done": POSITIVE,
    "losses": Field("nats per token of each sequence", list_of(is_number)),
    "seconds": Field("seconds of each sequence", list_of(SECONDS.fits)),
    "events": TEXTS,
    **SUMS,
}


# The loop -----------------------------------------------------------------------------------------


class Build:
    """State of a build between two sequences: its inputs, and everything a checkpoint holds.

    It resumes if its checkpoint exists.

    Attributes:
        settings: the settings that decide H, from `build_settings`; a checkpoint must agree.
        name: of the model, for the bar and the provenance.
        numbers: the sequences to do, in order.
        groups: the sums over the sequences done.
        runtime: threads, batch size and kind of device, which decide only the last bits.
        seconds: what each sequence done took.
        losses: the dense model's nats per scored token of each.
        events: what a reader of the result should know: moves, retries, early stops.
        devices: names of the devices that were used.
        stopped: why the build ended before its last sequence; "" while it runs, and once done.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        name: str,
        units: UnitSet,
        calibration: CalibrationSet,
        options: BuildOptions,
        checkpoint: str | os.PathLike[str] | None,
        workers: Measure | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.settings, self.name = settings, name
        self.units, self.calibration, self.options = units, calibration, options
        self.measure, self.listeners = workers or measure_here, listeners
        if options.shard is not None:  # a setting, so that no other shard resumes its checkpoint
            self.settings = settings | {"shard": list(options.shard)}
        self.numbers = shard_sequences(options.shard, settings["groups"], len(calibration))
        self.groups = Groups.empty(settings["groups"], len(units))
        threads = options.num_threads or (torch.get_num_threads() if workers is None else 1)
        self.runtime: dict[str, Any] = {
            "num_threads": require_threads(threads, "num_threads"),
            "units_per_batch": options.units_per_batch,
            "device_kind": None,
        }
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.events: list[str] = []
        self.devices: set[str] = set()
        self.stopped = ""
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        if self.checkpoint is not None:
            self.resume(self.checkpoint)

    @property
    def total(self) -> int:
        """Number of sequences of this build or shard."""
        return len(self.numbers)

    @property
    def done(self) -> int:
        """Number of sequences done."""
        return len(self.seconds)

    # Running ------------------------------------------------------------------------------------

    def run(self, model: PreTrainedModel, *, progress: Progress) -> Curvature:
        """Measure the remaining sequences and return H over all that are done.

        After Ctrl-C the checkpoint is saved, and KeyboardInterrupt says what it holds.
        """
        if self.done < self.total:
            self._go_on(model, progress)
        curvature = Curvature.from_groups(self.units, self.groups, self._facts(model))
        tell_text(curvature, model, progress)
        return curvature

    def _go_on(self, model: PreTrainedModel, progress: Progress) -> None:
        """Measure and add the remaining sequences, saving in between."""
        options = replace(
            self.options,
            on_sequence=None,
            num_threads=self.runtime["num_threads"],
            units_per_batch=self.runtime["units_per_batch"],
        )
        top_r, vocabulary = self.settings["top_r"], describe(model).vocabulary
        work = Work(self.units, self.calibration, top_r, options, self.listeners)
        with open_bar(
            progress,
            total=self.total * len(self.units),
            initial=self.done * len(self.units),
            desc=f"H of {self.name}",
            unit="ablation",
        ) as bar:
            try:
                # results come in the order of `numbers`, also from many workers: so the sums have
                # the same bits, and the sequences done are always the first `done` of them
                left = self.numbers[self.done :]
                saved = begun = time.monotonic()
                with closing(self.measure(model, work, left, bar.update)) as results:
                    for measured in results:
                        self.add(measured, time.monotonic() - begun)
                        # hours of work on a text that the model cannot read end here
                        first = progress and self.done == 1 < self.total
                        if first and is_guess(self.losses, vocabulary):
                            bar.write(textwrap.fill(told_fit(self.losses, vocabulary), 100))
                        due = time.monotonic() - saved >= self.options.checkpoint_seconds
                        if due or self.done == self.total:
                            self.save()
                            saved = time.monotonic()
                        reason = self._tell_watcher()
                        if reason is not None and self.done < self.total:
                            self._stop(reason)
                            bar.leave = False  # the text says how far it came
                            text = f"{reason} H is over {self.done} of {self.total} sequences."
                            bar.write(textwrap.fill(text, 100))
                            break
                        begun = time.monotonic()
            except KeyboardInterrupt:
                self._stop("Interrupted.")
                if self.done == 0:
                    raise
                raise KeyboardInterrupt(self._kept()) from None
            except Exception:  # the last worker died, say: save the hours of work before that
                self.save()
                raise

    def _tell_watcher(self) -> str | None:
        watcher = self.options.on_sequence
        return None if watcher is None else watcher(self)

    def _stop(self, reason: str) -> None:
        self.save()
        self.stopped = reason
        if self.done:
            self._tell_watcher()  # once more, now that it has ended

    def _kept(self) -> str:
        if self.checkpoint is None:
            return f"interrupted; no checkpoint keeps the {self.done} sequences that are done"
        return (
            f"interrupted; {self.done} of {self.total} sequences are kept in {self.checkpoint}, "
            "from where the same build goes on"
        )

    def add(self, measured: Measured, seconds: float) -> None:
        """Add one sequence to the sums of its group."""
        stored, kind = self.runtime["device_kind"], measured.device_kind
        if stored not in (None, kind):
            self._note(f"moved from {stored} to {kind}")
        for note in measured.notes:
            self._note(note)
        # a batch size that did not fit once is not tried again, here or after resuming; set before
        # the sums, so that an interrupt in between cannot save a sequence without it
        batch = self.runtime["units_per_batch"] or measured.units_per_batch
        self.runtime["units_per_batch"] = min(batch, measured.units_per_batch)
        self.runtime["device_kind"] = kind
        self.devices.add(measured.device)
        group = measured.number % len(self.groups)
        # an interrupt between these lines must not leave a sequence counted by half
        with uninterrupted():
            for name, sums in self.groups.arrays.items():
                sums[group] += measured.sums[name]
            self.seconds.append(seconds)
            self.losses.append(measured.loss)

    def so_far(self, groups: slice = slice(None)) -> Curvature:
        """Return H over the sequences done, or over some of their groups."""
        return Curvature.from_groups(
            self.units, self.groups.part(groups), {"sequences_done": self.done}
        )

    def _facts(self, model: PreTrainedModel) -> Facts:
        """Return what is known of the sequences done, the first of `numbers`."""
        rows, done = self.calibration.row_fingerprints, self.numbers[: self.done]
        return self.settings | {
            "model_name": self.name,
            "runtime": dict(self.runtime),
            "events": list(self.events),
            "device": ", ".join(sorted(self.devices)) or device_name(model_device(model)),
            "sequence_losses": list(self.losses),
            "sequences_done": self.done,
            "complete": self.done == len(self.calibration),
            "row_fingerprints": [rows[number] for number in done],
            "text_windows": record(windows(self.calibration.input_ids[done].numpy())),
            "calibration_source": self.calibration.source,
            "seed": self.calibration.seed,
            "seconds": sum(self.seconds),
            "sequence_seconds": list(self.seconds),
            "versions": software_versions(),
            "checkpoint": known_record(model)["checkpoint"],
        }

    # Checkpoints --------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint, if any sequence is done; a failure is logged, not raised."""
        if self.checkpoint is None or self.done == 0:
            return
        content = {
            "format": CHECKPOINT_FORMAT,
            "version": CHECKPOINT_VERSION,
            "settings": self.settings,
            "runtime": self.runtime,
            "done": self.done,
            "seconds": self.seconds,
            "losses": self.losses,
            "events": self.events,
            **self.groups.arrays,
        }
        try:
            write_atomically(self.checkpoint, dump_plain(content), keep_previous=True)
        except OSError as error:  # a full disk must not cost the hours that are done
            self._note(
                f"the checkpoint {self.checkpoint} could not be written ({error}). The build goes "
                f"on; {remedy(error)} before stopping it."
            )

    def _note(self, event: str) -> None:
        self.events.append(f"sequence {self.done}: {event}")
        log.warning(self.events[-1])

    def resume(self, checkpoint: Path) -> None:
        """Load the checkpoint, or the one before it if the newest cannot be read."""
        there = [path for path in (checkpoint, previous(checkpoint)) if path.exists()]
        if not there:
            return
        path = there[0]
        try:
            content = self._stored(path)
        except FileFormatError as error:
            if len(there) == 1:
                raise
            path = there[1]
            log.warning("%s; falling back to %s", error, path)
            content = self._stored(path)
        # what is not a setting is compared too: the checkpoint of a shard is not that of the whole
        # build, and risks on two supports cannot be added
        asked_for = {"shard": None} | MAY_BE_ABSENT | self.settings
        require_settings(content["settings"], asked_for, f"the checkpoint {path}")
        with reading(path, "Delete it and build again."):
            self.groups = self._consistent(content)
        self.seconds, self.losses = content["seconds"], content["losses"]
        self.events = content["events"]
        # with the stored threads and batch size the result has the bits of an uninterrupted build
        asked, self.runtime = self.runtime, content["runtime"]
        for name, value in self.runtime.items():
            if getattr(self.options, name, None) not in (None, value):
                self._note(f"resumed with the stored {name} {value}, not {asked[name]}")

    def _stored(self, path: Path) -> dict[str, Any]:
        content = load_plain(path, format_name=CHECKPOINT_FORMAT, version=CHECKPOINT_VERSION)
        with reading(path, "Delete it and build again."):
            require_fields(content, _CHECKPOINT)
            require_fields(content["settings"], STORED_SETTINGS, inside="settings", others=True)
            require_fields(content["runtime"], RUNTIME, inside="runtime")
        return content

    def _consistent(self, content: dict[str, Any]) -> Groups:
        """Return the sums in a checkpoint, if they are those of the first `done` sequences."""
        done, groups = content["done"], Groups(**{name: content[name] for name in SUMS})
        numbers = np.array(self.numbers[:done], np.int64)
        wanted = np.bincount(numbers % len(self.groups), minlength=len(self.groups))
        wanted *= self.calibration.positions_per_sequence
        told = {len(content["seconds"]), len(content["losses"])}
        fits = groups.grams.shape == self.groups.grams.shape and told == {done}
        if not fits or not np.array_equal(groups.positions, wanted):  # or some would count twice
            raise FileFormatError(
                f"{done} sequences are done, but its sums, seconds or losses are not those of "
                f"{done}: it is damaged"
            )
        return groups


def tell_text(curvature: Curvature, model: PreTrainedModel, progress: Progress) -> None:
    """Print what a build found of model and text, unless progress is False.

    The dense model's perplexity (`told_fit`), and a saturated teacher (`Saturation.warning`).
    """
    losses = curvature.provenance.get("sequence_losses", ())
    if progress and (fit := told_fit(losses, describe(model).vocabulary)):
        print(textwrap.fill(fit, 100), flush=True)
    if progress and curvature.saturation is not None and curvature.saturation.saturated:
        print(textwrap.fill(curvature.saturation.warning, 100), flush=True)


def remedy(error: OSError) -> str:
    """Word the remedy for a file that could not be written, as a clause in the imperative."""
    return "free some space" if is_full(error) else "make its folder writable"


# One sequence -------------------------------------------------------------------------------------


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
        scored = calibration.scored[number]
        risks = Risks(units, calibration.input_ids[number, scored + 1], self.full_kl)
        listeners: list[Listener] = [risks, *self.work.listeners]
        try:
            gram = sequence_gram(
                self.architecture, self.work.top_r, units, calibration, number, batches, listeners
            )
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
            {"grams": gram, "positions": len(scored)} | risks.sums(number),
            risks.loss,
            batches.size,
            device.type,
            device_name(device),
            tuple(batches.notes),
        )
