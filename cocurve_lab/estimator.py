"""Building H (Alg. 1): every unit ablated alone, features on a shared support, one Gram.

Sequences outside, units inside: the Gram of one sequence is added to a running sum and its features
are dropped, so memory does not grow with the calibration, an interrupted build is already an
estimate, and builds over other sequences can be merged.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from .architectures import Architecture, describe
from .calibration import CalibrationSet
from .curvature import Curvature, require_settings
from .errors import FileFormatError, InputError, NumericalError
from .fisher import center, kl_divergence
from .loading import (
    embedding_weight,
    fingerprint_model,
    model_device,
    model_dtype,
    model_name,
)
from .replay import Replay, SupportHead, top_support
from .storage import dump_plain, fingerprint, load_plain, previous, write_atomically
from .units import Unit, UnitSet, enumerate_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "cocurve-build", 1
_GRAM_COLUMNS = 1 << 14  # float32 products are summed over this many features, then in float64
_SMALLER = "Use shorter rows, fewer positions, bfloat16 weights, or a larger device."
_LARGEST_CPU_BATCH = 24  # rows beyond this only leave the cache


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
    """

    units_per_batch: int | None = None
    groups: int = 16
    checkpoint_seconds: float = 60.0
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("units_per_batch", "groups", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1.")


def estimate_curvature(
    model: PreTrainedModel,
    units: UnitSet | None,
    calibration: CalibrationSet,
    top_r: int = 256,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    method: Literal["ablation"] = "ablation",
    options: BuildOptions | None = None,
) -> Curvature:
    """Estimate H by single-unit ablations (eq. huv, eq. gram, Alg. 1).

    Each unit is masked alone, its logits are gathered on the teacher's top-r support with
    renormalised probabilities, and the whitened shifts form a Gram matrix. Replay is exact: the
    result agrees with naive full passes to 1e-5 in relative Frobenius norm in float32.

    Weights and layers run in the model's dtype; the head on the support, the whitening and the Gram
    run in float32, sums over positions in float64. On the embedded model (12 rows, all positions),
    against float64: float32 differs by {FLOAT32}, bfloat16 by {BFLOAT16} in Frobenius norm, and by
    {BFLOAT16_WORST} on the worst diagonal entry: weak units are differences of nearly equal logits.

    Args:
        model: a supported causal language model; measured in eval mode, left as it was.
        units: from `enumerate_units(model)`; None does that.
        calibration: rows and scored positions.
        top_r: r, size of the shared support, at most the vocabulary.
        checkpoint: file to resume from and to write to; None keeps nothing.
        progress: show the estimate and a progress bar.
        method: "ablation", the paper's.
        options: see BuildOptions.

    Returns:
        A Curvature [M, M] in nats per token. After Ctrl-C with at least one sequence done, the
        estimate over the sequences done, with provenance["complete"] False.

    Raises:
        InputError: top_r above the vocabulary, token ids or row length outside the model.
        MismatchError: the units are not the model's, or the checkpoint is of another build.
        NumericalError: the model gives NaN or infinite logits.
    """
    if method != "ablation":
        raise InputError(f"method is {method!r}; this release knows 'ablation'.")
    options = options or BuildOptions()
    units = units or enumerate_units(model)
    units.require_same(
        enumerate_units(model, units.ffn_groups or 16), mine="the unit set", theirs="the model"
    )
    _require_fit(model, calibration, top_r)
    settings = build_settings(model, units, calibration, top_r, method, options)
    build = _Build.start(settings, units, calibration, options, checkpoint)
    with measuring(model, build.runtime["num_threads"]):
        return build.run(model, show=progress)


def load_or_estimate(
    folder: str | os.PathLike[str],
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int = 256,
    *,
    progress: bool = True,
    options: BuildOptions | None = None,
) -> Curvature:
    """Load H from `folder` if this very build is there, else build it and save it.

    The file is named by the model and the fingerprint of all settings, so another model,
    calibration or r never overwrites it. An interrupted build resumes from the checkpoint beside
    it.

    Raises: as `estimate_curvature` and `Curvature.load`.
    """
    settings = build_settings(
        model, units, calibration, top_r, "ablation", options or BuildOptions()
    )
    path = Path(folder) / f"H_{settings['model_name']}_{fingerprint(settings)[:10]}.pkl"
    if path.exists():
        curvature = Curvature.load(path, expected=settings)
        if progress:
            print(f"Loaded H from {path} (nothing was rebuilt).")
        return curvature
    checkpoint = path.with_suffix(".ckpt")
    curvature = estimate_curvature(
        model, units, calibration, top_r, checkpoint=checkpoint, progress=progress, options=options
    )
    if not curvature.provenance["complete"]:
        return curvature  # the checkpoint stays; running again goes on from there
    try:
        curvature.save(path)
    except OSError as error:  # hours of work: hand them over, whatever the disk says
        log.warning("%s could not be written (%s). Free some space and call save(...)", path, error)
        return curvature
    for leftover in (checkpoint, previous(checkpoint)):
        leftover.unlink(missing_ok=True)
    if progress:
        print(f"Saved H to {path}.")
    return curvature


def build_settings(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    method: str,
    options: BuildOptions,
) -> dict[str, Any]:
    """Everything that decides what H is; stored with it and compared on resuming and loading."""
    return {
        "model_name": model_name(model),
        "model_fingerprint": fingerprint_model(model),
        "model_dtype": model_dtype(model),
        "units_fingerprint": units.fingerprint,
        "calibration_fingerprint": calibration.fingerprint,
        "num_sequences": len(calibration),
        "seq_len": calibration.seq_len,
        "positions_per_sequence": calibration.positions_per_sequence,
        "top_r": top_r,
        "method": method,
        "groups": min(options.groups, len(calibration)),
    }


@dataclass
class _Build:
    """The state of a build between two sequences: everything a checkpoint holds, and the inputs."""

    settings: dict[str, Any]
    units: UnitSet
    calibration: CalibrationSet
    options: BuildOptions
    checkpoint: Path | None
    grams: np.ndarray  # [G, M, M] float64, sums over positions
    risks: np.ndarray  # [G, M] float64, sums over positions
    positions: np.ndarray  # [G] int64
    runtime: dict[str, Any]
    done: int = 0
    seconds: float = 0.0
    events: list[str] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        settings: dict[str, Any],
        units: UnitSet,
        calibration: CalibrationSet,
        options: BuildOptions,
        checkpoint: str | os.PathLike[str] | None,
    ) -> _Build:
        groups, size = settings["groups"], len(units)
        build = cls(
            settings,
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
        architecture = describe(model)
        self._settle_runtime(architecture)
        if self.done < len(self.calibration) and show:
            self._announce(architecture)
        saved = begun = time.monotonic()
        before = self.seconds
        total, size = len(self.calibration), len(self.units)
        bar = tqdm(
            total=total * size,
            initial=self.done * size,
            desc=f"H of {self.settings['model_name']}",
            unit="ablation",
            disable=not show,
        )
        complete = True
        with bar:
            try:
                while self.done < total:
                    self._try_sequence(architecture, bar)
                    self.seconds = before + time.monotonic() - begun
                    last = self.done == total
                    if last or time.monotonic() - saved >= self.options.checkpoint_seconds:
                        self.save()
                        saved = time.monotonic()
            except KeyboardInterrupt:
                self.save()
                if self.done == 0:
                    raise
                complete = False
                bar.write(
                    f"Interrupted: H over {self.done} of {total} sequences is kept. "
                    "Run again to go on."
                    + ("" if self.checkpoint else " (Give checkpoint= for that.)")
                )
        return Curvature.from_groups(
            self.units, self.grams, self.positions, self.risks, self._provenance(model, complete)
        )

    def _try_sequence(self, architecture: Architecture, bar: Any) -> None:
        """One more sequence; what does not fit whatever the batch is a clear error."""
        try:
            self._add_sequence(architecture, bar)
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
        ids = self.calibration.input_ids[self.done : self.done + 1]
        positions = self.calibration.scored[self.done]
        sequence = _Sequence(architecture, ids, positions, self.settings["top_r"], self.done)
        features = sequence.new_features(len(self.units))
        risks = torch.zeros(len(self.units), dtype=torch.float64)
        counted = 0
        for first, layer_units in _by_layer(self.units):
            start = 0
            while start < len(layer_units):
                batch = layer_units[start : start + self.runtime["units_per_batch"]]
                rows = slice(first + start, first + start + len(batch))
                found = sequence.try_ablate(batch, features[rows])
                if found is None:
                    self._halve_batch(bar)
                    continue
                risks[rows] = found
                start += len(batch)
                counted += len(batch)
                bar.update(len(batch))
        gram = gram_matrix(features)
        group = self.done % self.settings["groups"]
        # an interrupt between these lines must not leave a sequence counted by half
        with _uninterrupted():
            self.grams[group] += gram
            self.risks[group] += risks.numpy()
            self.positions[group] += len(positions)
            self.done += 1

    def _halve_batch(self, bar: Any) -> None:
        if self.runtime["units_per_batch"] == 1:
            raise InputError(f"memory runs out with one ablation per batch. {_SMALLER}")
        self.runtime["units_per_batch"] //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        event = (
            f"sequence {self.done}: out of memory, {self.runtime['units_per_batch']} units per "
            "batch from here on"
        )
        self.events.append(event)
        log.warning(event)
        bar.write(event)

    def _settle_runtime(self, architecture: Architecture) -> None:
        """Batch size and device kind: from the checkpoint where there is one, so bits repeat."""
        device = model_device(architecture.model)
        stored = self.runtime["device_kind"]
        if stored not in (None, device.type):
            self.events.append(f"sequence {self.done}: moved from {stored} to {device.type}")
        self.runtime["device_kind"] = device.type
        if self.runtime["units_per_batch"] is None:
            self.runtime["units_per_batch"] = choose_batch(
                architecture, self.units, self.calibration, self.settings["top_r"]
            )

    def _announce(self, architecture: Architecture) -> None:
        """Time a few ablations and say what the build will take."""
        ids, positions = self.calibration.input_ids[:1], self.calibration.scored[0]
        begun = time.monotonic()
        sequence = _Sequence(architecture, ids, positions, self.settings["top_r"], 0)
        teacher = time.monotonic() - begun
        layers = list(_by_layer(self.units))
        probes = []
        for _, layer_units in (layers[0], layers[-1]):
            batch = layer_units[: self.runtime["units_per_batch"]]
            features = sequence.new_features(len(batch))
            begun = time.monotonic()
            if sequence.try_ablate(batch, features) is None:
                return  # the build itself halves the batch and says so
            probes.append((time.monotonic() - begun) / len(batch))
        remaining = len(self.calibration) - self.done
        # the cost of an ablation falls linearly with its layer
        seconds = remaining * (teacher + len(self.units) * sum(probes) / 2)
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

    def _provenance(self, model: PreTrainedModel, complete: bool) -> dict[str, Any]:
        import transformers

        from . import __version__

        return self.settings | {
            "sequences_done": self.done,
            "complete": complete,
            "row_fingerprints": self.calibration.row_fingerprints[: self.done],
            "calibration_source": self.calibration.source,
            "seed": self.calibration.seed,
            "seconds": self.seconds,
            "runtime": dict(self.runtime),
            "events": list(self.events),
            "device": _device_name(model_device(model)),
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
            event = (
                f"sequence {self.done}: the checkpoint {self.checkpoint} could not be written "
                f"({error}). The build goes on; free some space before stopping it."
            )
            self.events.append(event)
            log.warning(event)
            tqdm.write(event)

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
        self.runtime = content["runtime"]


class _Sequence:
    """One sequence's teacher on its support, and the features of ablations against it."""

    def __init__(
        self, architecture: Architecture, ids: Tensor, positions: Tensor, top_r: int, number: int
    ) -> None:
        device = model_device(architecture.model)
        self.number = number
        self.replay = Replay(architecture, ids.to(device), positions.to(device))
        hidden = self.replay.scored_hidden
        self.head = SupportHead(architecture.head, top_support(architecture.head, hidden, top_r))
        self.logits = self.head(hidden)  # [1, P, r] float32, or float64 like the model
        if not bool(torch.isfinite(self.logits).all()):
            raise NumericalError(
                f"the model gives NaN or infinite logits on sequence {number}. Check the weights; "
                "half precision may overflow: try bfloat16 or float32."
            )
        self.probabilities = torch.softmax(self.logits, dim=-1)
        self.roots = self.probabilities.sqrt()

    def new_features(self, rows: int) -> Tensor:
        """Room for whitened features [rows, P * r], dtype of the logits."""
        return self.logits.new_empty(rows, self.logits[0].numel())

    def try_ablate(self, batch: list[Unit], features: Tensor) -> Tensor | None:
        """`ablate`, or None where memory runs out (outside the exception, so it can be freed)."""
        try:
            return self.ablate(batch, features)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None

    def ablate(self, batch: list[Unit], features: Tensor) -> Tensor:
        """Fill `features` [B, P * r] for units of one layer; return their summed KL [B] float64."""
        shift = self.head(self.replay.ablated_hidden(batch)).sub_(self.logits)  # z_u - z_0
        risk = kl_divergence(self.probabilities, shift).double().sum(dim=-1)
        if not bool(torch.isfinite(risk).all()):
            bad = batch[int((~torch.isfinite(risk)).nonzero()[0])]
            raise NumericalError(
                f"removing {bad} gives NaN or infinite logits on sequence {self.number}. Half "
                "precision may overflow: try bfloat16 or float32."
            )
        # whitened z_0 - z_u; its sign is common to all units, so the Gram does not see it
        torch.mul(center(self.probabilities, shift), self.roots, out=features.view(shift.shape))
        return risk.cpu()


def gram_matrix(features: Tensor) -> np.ndarray:
    """Features times their transpose [M, M] float64: float32 products, float64 between chunks."""
    gram = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for chunk in features.split(_GRAM_COLUMNS, dim=1):
        gram += chunk @ chunk.T
    return gram.cpu().numpy()


def choose_batch(
    architecture: Architecture, units: UnitSet, calibration: CalibrationSet, top_r: int
) -> int:
    """Ablations per batch: as many of a layer's units as half of the free memory holds."""
    largest = max(len(layer_units) for _, layer_units in _by_layer(units))
    fixed = memory_needed(architecture, units, calibration, top_r, 0)
    per_row = memory_needed(architecture, units, calibration, top_r, 1) - fixed
    device = model_device(architecture.model)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # what torch holds back from earlier work is free to us as well
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        import psutil

        free, largest = psutil.virtual_memory().available, min(largest, _LARGEST_CPU_BATCH)
    return int(max(1, min(largest, (free / 2 - fixed) // per_row)))


def memory_needed(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    units_per_batch: int,
) -> float:
    """Bytes a build takes beside the model, roughly: features, activations, group Grams."""
    config, length = architecture.model.config, calibration.seq_len
    size = embedding_weight(architecture.model).element_size()
    vocabulary, hidden = architecture.head.weight.shape
    scored = calibration.positions_per_sequence * top_r * 4
    whole_head = calibration.positions_per_sequence * vocabulary * 4
    features = len(units) * scored
    teacher = length * hidden * size * (len(architecture.layers) + 8) + whole_head
    grams = 8 * len(units) ** 2 * 18
    # residual, normed, queries/keys/values, three FFN activations; then support logits and shifts
    width = max(architecture.width(layer, "ffn") for layer in range(len(architecture.layers)))
    row = (
        length * size * (6 * hidden + 3 * width)
        + 4 * scored
        + calibration.positions_per_sequence * hidden * 8
    )
    if getattr(config, "_attn_implementation", "") == "eager":
        row += config.num_attention_heads * length**2 * (size + 4)
    return features + teacher + grams + units_per_batch * row


def _by_layer(units: UnitSet) -> Iterator[tuple[int, list[Unit]]]:
    """Units of each layer with the index of its first one."""
    first = 0
    while first < len(units):
        layer = units.units[first].layer
        stop = first + int((units.layers == layer).sum())
        yield first, list(units.units[first:stop])
        first = stop


def _require_fit(model: PreTrainedModel, calibration: CalibrationSet, top_r: int) -> None:
    vocabulary = describe(model).head.weight.shape[0]
    if not 1 <= top_r <= vocabulary:
        raise InputError(
            f"top_r is {top_r}; it lies between 1 and the vocabulary size {vocabulary}."
        )
    require_rows_fit(model, calibration)


def require_rows_fit(model: PreTrainedModel, calibration: CalibrationSet) -> None:
    """Raise InputError if token ids or row length lie outside what the model was made for."""
    largest, rows = int(calibration.input_ids.max()), embedding_weight(model).shape[0]
    if largest >= rows:
        raise InputError(
            f"the calibration holds token id {largest}, the model's embedding has {rows} rows. "
            "Use the tokenizer that belongs to the model."
        )
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and calibration.seq_len > context:
        raise InputError(
            f"rows have {calibration.seq_len} tokens, the model's context is {context}. Use "
            f"seq_len={context} or less."
        )


@contextmanager
def measuring(model: PreTrainedModel, threads: int) -> Iterator[None]:
    """Eval mode, no gradients, true float32 products, a fixed number of threads; all put back."""
    modes = [(module, module.training) for module in model.modules()]
    precision = torch.get_float32_matmul_precision()
    before = torch.get_num_threads()
    model.eval()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)
        for module, training in modes:  # not model.train(): submodules may differ from the top
            module.training = training


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C for a few lines (main thread only; elsewhere it cannot arrive)."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[bool] = []
    old = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
    if came:
        raise KeyboardInterrupt


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out; on the CPU torch says so by a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
