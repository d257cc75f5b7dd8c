"""The loop of a build: sequences outside, units inside, checkpoints between, Ctrl-C any time."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from .architectures import Architecture, describe
from .calibration import CalibrationSet
from .curvature import Curvature, require_settings
from .errors import FileFormatError, InputError
from .features import AblatedSequence, by_layer, choose_batch, gram_matrix, memory_needed
from .loading import model_device
from .runtime import device_name, is_out_of_memory, uninterrupted
from .storage import dump_plain, load_plain, previous, write_atomically
from .units import UnitSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "cocurve-build", 1
_SMALLER = "Use shorter rows, fewer positions, bfloat16 weights, or a larger device."


@dataclass(frozen=True)
class BuildOptions:
    """Knobs of a build that do not change what is estimated.

    Attributes:
        units_per_batch: ablations per forward; None = from free memory. Halved when memory runs
            out.
        groups: groups of sequences whose Grams are kept apart (error bars, merging).
        checkpoint_seconds: write the checkpoint after the first sequence that ends this long after
            the last one; 0 writes after every sequence.
        num_threads: CPU threads; None = torch's current number.
        on_sequence: called with the Build after each sequence, in the building thread: a monitor.
            It reads `done`, `seconds` and `so_far()`; what it raises ends the build, which keeps
            what is done.
    """

    units_per_batch: int | None = None
    groups: int = 16
    checkpoint_seconds: float = 60.0
    num_threads: int | None = None
    on_sequence: Callable[[Build], None] | None = None

    def __post_init__(self) -> None:
        for name in ("units_per_batch", "groups", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1.")


@dataclass
class Build:
    """The state of a build between two sequences: everything a checkpoint holds, and the inputs."""

    settings: dict[str, Any]
    name: str  # of the model, for the bar and the provenance; it decides nothing
    units: UnitSet
    calibration: CalibrationSet
    options: BuildOptions
    checkpoint: Path | None
    grams: np.ndarray  # [G, M, M] float64, sums over positions
    risks: np.ndarray  # [G, M] float64, sums over positions
    positions: np.ndarray  # [G] int64
    runtime: dict[str, Any]
    done: int = 0
    seconds: list[float] = field(default_factory=list)  # of each sequence done
    events: list[str] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        settings: dict[str, Any],
        name: str,
        units: UnitSet,
        calibration: CalibrationSet,
        options: BuildOptions,
        checkpoint: str | os.PathLike[str] | None,
    ) -> Build:
        groups, size = settings["groups"], len(units)
        build = cls(
            settings,
            name,
            units,
            calibration,
            options,
            None if checkpoint is None else Path(checkpoint),
            np.zeros((groups, size, size)),
            np.zeros((groups, size)),
            np.zeros(groups, np.int64),
            {
                "num_threads": options.num_threads or torch.get_num_threads(),
                "units_per_batch": options.units_per_batch,
                "device_kind": None,
            },
        )
        if build.checkpoint is not None:
            build.resume()
        return build

    # Running ------------------------------------------------------------------------------------

    def run(self, model: PreTrainedModel, *, show: bool) -> Curvature:
        """Do the sequences that are left; H over all, or after Ctrl-C over those done."""
        architecture = describe(model)
        self._settle_runtime(architecture)
        if self.done < len(self.calibration) and show:
            self._within_memory(self._announce, architecture)
        saved = time.monotonic()
        total, size = len(self.calibration), len(self.units)
        bar = tqdm(
            total=total * size,
            initial=self.done * size,
            desc=f"H of {self.name}",
            unit="ablation",
            disable=not show,
        )
        with bar:
            try:
                while self.done < total:
                    self._within_memory(self._add_sequence, architecture, bar)
                    last = self.done == total
                    if last or time.monotonic() - saved >= self.options.checkpoint_seconds:
                        self.save()
                        saved = time.monotonic()
                    if self.options.on_sequence is not None:
                        self.options.on_sequence(self)
            except KeyboardInterrupt as stop:
                self.save()
                if self.done == 0:
                    raise
                why = str(stop) or "Interrupted."
                bar.write(
                    f"{why} H over {self.done} of {total} sequences is kept. "
                    "Run again to go on."
                    + ("" if self.checkpoint else " (Give checkpoint= for that.)")
                )
        return Curvature.from_groups(
            self.units, self.grams, self.positions, self.risks, self._provenance(model)
        )

    def so_far(self, groups: slice = slice(None)) -> Curvature:
        """H over the sequences done, or over some of the groups of them.

        Raises:
            InputError: no sequence of these groups is done.
        """
        parts = (self.grams[groups], self.positions[groups], self.risks[groups])
        return Curvature.from_groups(self.units, *parts, {"sequences_done": self.done})

    def _within_memory(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step; what does not fit in memory whatever the batch is a clear error."""
        try:
            step(*arguments)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.save()
            raise InputError(
                f"memory runs out on sequence {self.done} outside the ablations ({error}). "
                f"{_SMALLER}"
            ) from error

    def _add_sequence(self, architecture: Architecture, bar: Any) -> None:
        """One sequence: teacher, all units, Gram. State changes only once it is whole."""
        begun = time.monotonic()
        ids = self.calibration.input_ids[self.done : self.done + 1]
        positions = self.calibration.scored[self.done]
        sequence = AblatedSequence(architecture, ids, positions, self.settings["top_r"], self.done)
        features = sequence.new_features(len(self.units))
        risks = torch.zeros(len(self.units), dtype=torch.float64)
        for first, layer_units in by_layer(self.units):
            start = 0
            while start < len(layer_units):
                batch = layer_units[start : start + self.runtime["units_per_batch"]]
                rows = slice(first + start, first + start + len(batch))
                found = sequence.try_ablate(batch, features[rows])
                if found is None:
                    self._halve_batch()
                    continue
                risks[rows] = found
                start += len(batch)
                bar.update(len(batch))
        gram = gram_matrix(features)
        group = self.done % self.settings["groups"]
        # an interrupt between these lines must not leave a sequence counted by half
        with uninterrupted():
            self.grams[group] += gram
            self.risks[group] += risks.numpy()
            self.positions[group] += len(positions)
            self.seconds.append(time.monotonic() - begun)
            self.done += 1

    def _halve_batch(self) -> None:
        if self.runtime["units_per_batch"] == 1:
            raise InputError(f"memory runs out with one ablation per batch. {_SMALLER}")
        self.runtime["units_per_batch"] //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch = self.runtime["units_per_batch"]
        self._note(f"out of memory, {batch} units per batch from here on")

    def _settle_runtime(self, architecture: Architecture) -> None:
        """Batch size and device kind: from the checkpoint where there is one, so bits repeat."""
        device = model_device(architecture.model)
        stored = self.runtime["device_kind"]
        if stored not in (None, device.type):
            self._note(f"moved from {stored} to {device.type}")
        self.runtime["device_kind"] = device.type
        if self.runtime["units_per_batch"] is None:
            self.runtime["units_per_batch"] = choose_batch(
                architecture, self.units, self.calibration, self.settings["top_r"]
            )

    def _announce(self, architecture: Architecture) -> None:
        """Time a few ablations and say what the build will take."""
        ids, positions = self.calibration.input_ids[:1], self.calibration.scored[0]
        for _ in range(2):  # the first one warms up
            begun = time.monotonic()
            sequence = AblatedSequence(architecture, ids, positions, self.settings["top_r"], 0)
            teacher = time.monotonic() - begun
        layers = list(by_layer(self.units))
        probes = []
        for _, layer_units in (layers[-1], layers[-1], layers[0]):  # the first one warms up
            batch = layer_units[: self.runtime["units_per_batch"]]
            features = sequence.new_features(len(batch))
            begun = time.monotonic()
            if sequence.try_ablate(batch, features) is None:
                return  # the build itself halves the batch and says so
            probes.append((time.monotonic() - begun) / len(batch))
        remaining = len(self.calibration) - self.done
        # the cost of an ablation falls linearly with its layer
        seconds = remaining * (teacher + len(self.units) * sum(probes[1:]) / 2)
        memory = memory_needed(
            architecture,
            self.units,
            self.calibration,
            self.settings["top_r"],
            self.runtime["units_per_batch"],
        )
        print(
            f"{len(self.units)} units x {remaining} sequences of {self.calibration.seq_len} "
            f"tokens, {self.calibration.positions_per_sequence} scored each: about "
            f"{_duration(seconds)} and {memory / 1e9:.2g} GB beside the model "
            f"({self.settings['model_dtype']} on {self.runtime['device_kind']}, "
            f"{self.runtime['units_per_batch']} ablations per batch). Interrupt any time; what is "
            "done is kept."
        )

    def _provenance(self, model: PreTrainedModel) -> dict[str, Any]:
        import transformers

        from . import __version__

        return self.settings | {
            "model_name": self.name,
            "sequences_done": self.done,
            "complete": self.done == len(self.calibration),
            "row_fingerprints": self.calibration.row_fingerprints[: self.done],
            "calibration_source": self.calibration.source,
            "seed": self.calibration.seed,
            "seconds": sum(self.seconds),
            "sequence_seconds": list(self.seconds),
            "runtime": dict(self.runtime),
            "events": list(self.events),
            "device": device_name(model_device(model)),
            "versions": {
                "cocurve_lab": __version__,
                "torch": str(torch.__version__),  # a str subclass, which is not plain
                "transformers": transformers.__version__,
            },
        }

    # Checkpoints --------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint; a full disk is reported and does not stop the build."""
        if self.checkpoint is None:
            return
        content = {
            "format": CHECKPOINT_FORMAT,
            "version": CHECKPOINT_VERSION,
            "settings": self.settings,
            "runtime": self.runtime,
            "done": self.done,
            "seconds": self.seconds,
            "events": self.events,
            "grams": self.grams,
            "risks": self.risks,
            "positions": self.positions,
        }
        try:
            write_atomically(self.checkpoint, dump_plain(content), keep_previous=True)
        except OSError as error:
            self._note(
                f"the checkpoint {self.checkpoint} could not be written ({error}). The build goes "
                "on; free some space before stopping it."
            )

    def _note(self, event: str) -> None:
        """Keep an event with the result, and say it now."""
        self.events.append(f"sequence {self.done}: {event}")
        log.warning(self.events[-1])

    def resume(self) -> None:
        """Take up the checkpoint, or the one before it where the newest cannot be read."""
        assert self.checkpoint is not None
        content = None
        for path in (self.checkpoint, previous(self.checkpoint)):
            if not path.exists():
                continue
            try:
                content = load_plain(
                    path, format_name=CHECKPOINT_FORMAT, version=CHECKPOINT_VERSION
                )
                break
            except FileFormatError as error:
                if path != self.checkpoint or not previous(path).exists():
                    raise
                log.warning("%s; falling back to %s", error, previous(path))
        if content is None:
            return
        require_settings(content["settings"], self.settings, f"the checkpoint {path}")
        self.grams, self.risks = content["grams"], content["risks"]
        self.positions, self.done = content["positions"], content["done"]
        self.seconds, self.events = content["seconds"], content["events"]
        asked = self.runtime
        self.runtime = content["runtime"]
        for name, value in self.runtime.items():  # the stored ones repeat the bits
            if getattr(self.options, name, None) not in (None, value):
                self._note(f"resumed with the stored {name} {value}, not {asked[name]}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
