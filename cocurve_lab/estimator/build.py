"""The loop of a build over sequences, with checkpoints, resuming and a clean stop on Ctrl-C.

Algorithm 1 on one sequence is algorithm1.py, and workers run it (worker.py). Here its results are
summed, saved and reported.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.arguments import require_threads
from ..base.atomic import is_full, previous, write_atomically
from ..base.errors import CocurveError, FileFormatError
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
from ..base.tables import fold
from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..curvature.merging import shard_sequences
from ..curvature.settings import (
    MAY_BE_ABSENT,
    RUNTIME,
    STORED_SETTINGS,
    SUMS,
    BuildOptions,
    require_sums,
)
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.runtime import device_name
from ..models.units import UnitSet
from .batches import SMALLER
from .risks import is_guess, told_fit
from .sums import GroupSums, Measured, Value, within_memory
from .worker import Executor, LocalExecutor, WorkerPool, WorkItem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "cocurve-build", 1
_BY_HAND = "Interrupted."
_CHECKPOINT: Schema = {
    "format": TEXT,
    "version": COUNT,
    "settings": OBJECT,
    "runtime": OBJECT,
    "done": POSITIVE,
    "losses": Field("nats per token of each sequence", list_of(is_number), optional=True),
    "seconds": Field("seconds of each sequence", list_of(SECONDS.fits)),
    "events": TEXTS,
    **SUMS,
}


@dataclass
class Build:
    """State of a build between two sequences: its inputs, and everything a checkpoint holds.

    Attributes:
        settings: the settings that decide H, from `build_settings`; a checkpoint must agree.
        runtime: threads, batch size and kind of device, which decide only the last bits.
        sums: Grams, risks and positions of the sequences done.
        numbers: the sequences to do, in order.
        events: what a reader of the result should know: moves, retries, early stops.
        stopped: why the build ended before its last sequence; "" while it runs, and once done.
    """

    settings: dict[str, Any]
    name: str  # of the model, for the bar and the provenance
    units: UnitSet
    calibration: CalibrationSet
    options: BuildOptions
    checkpoint: Path | None
    sums: GroupSums
    runtime: dict[str, Any]
    executor: Executor
    numbers: list[int]
    events: list[str] = field(default_factory=list)
    stopped: str = ""

    @classmethod
    def start(
        cls,
        settings: dict[str, Any],
        name: str,
        units: UnitSet,
        calibration: CalibrationSet,
        options: BuildOptions,
        checkpoint: str | os.PathLike[str] | None,
        executor: Executor | None = None,
    ) -> Build:
        """Set up a build, and resume it if its checkpoint exists."""
        groups = settings["groups"]
        executor = executor or LocalExecutor()
        if options.shard is not None:  # a setting, so that no other shard resumes its checkpoint
            settings = settings | {"shard": list(options.shard)}
        threads = require_threads(options.num_threads or executor.threads(), "num_threads")
        runtime: dict[str, Any] = dict.fromkeys(RUNTIME)
        runtime |= {"num_threads": threads, "units_per_batch": options.units_per_batch}
        build = cls(
            settings,
            name,
            units,
            calibration,
            options,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            sums=GroupSums(groups, len(units), with_risks=True),
            runtime=runtime,
            executor=executor,
            numbers=shard_sequences(options.shard, groups, len(calibration)),
        )
        if build.checkpoint is not None:
            build.resume()
        return build

    @property
    def total(self) -> int:
        """Number of sequences of this build or shard."""
        return len(self.numbers)

    @property
    def done(self) -> int:
        """Number of sequences done."""
        return self.sums.done

    @property
    def seconds(self) -> list[float]:
        """Duration of each sequence done, seconds."""
        return self.sums.seconds

    @property
    def positions(self) -> np.ndarray:
        """Scored positions done in each group [G], int64."""
        return self.sums.positions

    # Running ------------------------------------------------------------------------------------

    def run(self, model: PreTrainedModel, *, progress: Progress) -> Curvature:
        """Measure the remaining sequences and return H over all that are done.

        After Ctrl-C with at least one sequence done, H is over those, and the checkpoint is saved.
        Ctrl-C before that is raised.
        """
        device = device_name(model_device(model))
        if self.done < self.total:
            with self.executor.open(model, self._work()) as pool:
                device = pool.device
                self._settle_runtime(pool)
                self._go_on(pool, progress, describe(model).vocabulary)
        curvature = self.sums.curvature(self.units, self._provenance(device))
        if self.stopped != _BY_HAND:
            tell_text(curvature, model, progress)
        return curvature

    def _go_on(self, pool: WorkerPool, progress: Progress, vocabulary: int) -> None:
        """Measure and add the remaining sequences, saving in between."""
        saved, size = time.monotonic(), len(self.units)
        with open_bar(
            progress,
            total=self.total * size,
            initial=self.done * size,
            desc=f"H of {self.name}",
            unit="ablation",
        ) as bar:
            try:
                # results come in the order of `numbers`, also from many workers: so the sums have
                # the same bits, and the sequences done are always the first `done` of them
                results = pool.measure(self.numbers[self.done :], bar.update, self._note)
                while self.done < self.total:
                    begun = time.monotonic()
                    measured = self._within_memory(lambda: next(results))
                    self._book(measured, time.monotonic() - begun)
                    # hours of work on a text that the model cannot read end here, if anybody looks
                    first = progress and self.done == 1 < self.total
                    if first and is_guess(self.sums.losses, vocabulary):
                        bar.write(fold(told_fit(self.sums.losses, vocabulary)))
                    last = self.done == self.total
                    if last or time.monotonic() - saved >= self.options.checkpoint_seconds:
                        self.save()
                        saved = time.monotonic()
                    self._tell_watcher()
            except KeyboardInterrupt as stop:
                self.save()
                if self.done == 0:
                    raise
                self.stopped = str(stop) or _BY_HAND
                with suppress(KeyboardInterrupt):  # a watcher may stop the build only once
                    self._tell_watcher()
                bar.leave = False  # the text says how far it came
                text = f"{self.stopped} H over {self.done} of {self.total} sequences is kept. "
                text += "Run again to go on."
                bar.write(fold(text + " (Give checkpoint= for that.)" * (not self.checkpoint)))
            except CocurveError:  # the last worker died, say: save the hours of work before that
                self.save()
                raise

    def _tell_watcher(self) -> None:
        if self.options.on_sequence is not None:
            self.options.on_sequence(self)

    def _book(self, measured: Measured, seconds: float) -> None:
        for note in measured.notes:
            self._note(note)
        # a batch size that did not fit once is not tried again, here or after resuming; set before
        # the sums, so that an interrupt in between cannot save a sequence without it
        batch = min(self.runtime["units_per_batch"], measured.units_per_batch)
        self.runtime["units_per_batch"] = batch
        self.sums.add(measured, seconds)

    def so_far(self, groups: slice = slice(None)) -> Curvature:
        """Return H over the sequences done, or over some of their groups."""
        return self.sums.curvature(self.units, {"sequences_done": self.done}, groups)

    def _within_memory(self, step: Callable[[], Value]) -> Value:
        number = self.numbers[self.done]
        why = f"memory runs out on sequence {number} outside the ablations ({{error}}). {SMALLER}"
        return within_memory(step, why)

    def _work(self) -> WorkItem:
        options = replace(
            self.options,
            on_sequence=None,
            groups=self.settings["groups"],
            num_threads=self.runtime["num_threads"],
            units_per_batch=self.runtime["units_per_batch"],
        )
        return WorkItem(self.units, self.calibration, self.settings["top_r"], options)

    def _settle_runtime(self, pool: WorkerPool) -> None:
        stored = self.runtime["device_kind"]
        if stored not in (None, pool.device_kind):
            self._note(f"moved from {stored} to {pool.device_kind}")
        self.runtime["device_kind"] = pool.device_kind
        self.runtime["units_per_batch"] = pool.units_per_batch

    def _provenance(self, device: str) -> dict[str, Any]:
        facts = {
            "model_name": self.name,
            "runtime": dict(self.runtime),
            "events": list(self.events),
            "device": device,
        }
        return self.settings | facts | self.sums.facts(self.calibration, self.numbers)

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
            "losses": self.sums.losses,
            "events": self.events,
            **{name: getattr(self.sums, name) for name in SUMS},
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

    def resume(self) -> None:
        """Load the checkpoint, or the one before it if the newest cannot be read."""
        assert self.checkpoint is not None
        content = None
        for path in (self.checkpoint, previous(self.checkpoint)):
            if not path.exists():
                continue
            try:
                content = self._stored(path)
                break
            except FileFormatError as error:
                if path != self.checkpoint or not previous(path).exists():
                    raise
                log.warning("%s; falling back to %s", error, previous(path))
        if content is None:
            return
        # what is not a setting is compared too: the checkpoint of a shard is not that of the whole
        # build, and risks on two supports cannot be added
        asked_for = {"shard": None} | MAY_BE_ABSENT | self.settings
        require_settings(content["settings"], asked_for, f"the checkpoint {path}")
        with reading(path, "Delete it and build again."):
            self._require_consistent(content)
        for name in (*SUMS, "seconds"):
            setattr(self.sums, name, content[name])
        self.sums.losses = content.get("losses", [])
        self.events = content["events"]
        asked = self.runtime
        # with the stored threads and batch size the result has the bits of an uninterrupted build
        self.runtime = content["runtime"]
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

    def _require_consistent(self, content: dict[str, Any]) -> None:
        done, groups = content["done"], self.settings["groups"]
        if done != len(content["seconds"]):  # sequences would be counted twice
            raise FileFormatError(
                f"{done} sequences are done, but there are the seconds of "
                f"{len(content['seconds'])}: it is damaged"
            )
        require_sums({name: content.get(name) for name in SUMS}, len(self.units))
        numbers = np.array(self.numbers[:done], np.int64)
        wanted = np.bincount(numbers % groups, minlength=groups)
        wanted *= self.calibration.positions_per_sequence
        if not np.array_equal(content["positions"], wanted):
            raise FileFormatError(
                f"{done} sequences are done, but its groups have {content['positions'].tolist()} "
                f"positions, not {wanted.tolist()}: it is damaged"
            )


def tell_text(curvature: Curvature, model: PreTrainedModel, progress: Progress) -> None:
    """Print what a build found of model and text, unless progress is False.

    The dense model's perplexity (`told_fit`), and a saturated teacher (`Saturation.warning`).
    """
    losses = curvature.provenance.get("sequence_losses", ())
    if progress and (fit := told_fit(losses, describe(model).vocabulary)):
        print(fold(fit), flush=True)
    if progress and curvature.saturation is not None and curvature.saturation.saturated:
        print(fold(curvature.saturation.warning), flush=True)


def remedy(error: OSError) -> str:
    """Word the remedy for a file that could not be written, as a clause in the imperative."""
    return "free some space" if is_full(error) else "make its folder writable"
