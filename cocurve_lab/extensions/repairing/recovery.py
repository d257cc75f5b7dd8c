"""Recovery: a little training, until the pruned model answers as the dense one does.

Each linear layer of the decoder with weight W [out, in] gets a low-rank update (LoRA; Hu et al.,
2021), by PEFT:

    W + (alpha / r) B A,    A [r, in] random, B [out, r] zero at the start, alpha = 2 r.

A and B learn by AdamW, with the rate rising over the first steps and then falling as a cosine. No
label is used. The loss is the one that the lab measures, KL(dense || pruned) in nats per token,
here over every position; its gradient with respect to the pruned model's logits is q - p, with p
and q the two distributions. At the end the updates are added to W, so that the result has the
shapes and the parameters of the pruned model.

Memory: both models, four copies of A and B in float32 with a fifth for held-out rows, and the
activations of `TOKENS_PER_BATCH` tokens of the pruned model. Logits come a few positions at a time.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...base.arguments import as_float, as_int, require_type
from ...base.atomic import write_atomically
from ...base.errors import InputError, NumericalError
from ...base.progress import Progress, open_bar
from ...base.schema import (
    COUNT,
    OBJECT,
    TEXT,
    Field,
    dict_of,
    is_number,
    list_of,
    reading,
    require_fields,
)
from ...base.storage import dump_plain, fingerprint, load_plain, require_settings
from ...base.tables import fold
from ...calibration import CalibrationSet
from ...estimator.batches import LOGIT_BYTES
from ...estimator.fisher import kl_divergence
from ...estimator.replay import widen
from ...measuring.risk import pair_risk, require_one_vocabulary
from ...models.architectures import Architecture, describe, is_transposed
from ...models.identity import fingerprint_model, model_device, model_dtype, weight_marks
from ...models.runtime import measuring, require_measurable, require_one_device, uninterrupted
from ...models.weights import loaded_copy
from .projection_inputs import TOKENS_PER_BATCH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
FORMAT, VERSION = "cocurve-recovery", 1
_WARM_UP = 0.05  # of the steps
_CLIP = 1.0  # the largest norm of a step's gradient
_SECONDS = 120.0  # between two writes of the checkpoint
_STATES = ("exp_avg", "exp_avg_sq")  # AdamW's two means of each weight


@dataclass(frozen=True)
class RecoverOptions:
    """Options of `recover`.

    Attributes:
        rank: r, the rank of the updates.
        learning_rate: the largest rate of AdamW.
        epochs: how often each row is read.
        rows_per_step: rows per step of AdamW.
        seed: of the random start of A, and of the order of the rows.
        progress: say what memory is needed, and show a bar; "lines" writes lines for a log file
            instead.

    Raises:
        InputError: a value is out of range.
    """

    rank: int = 16
    learning_rate: float = 1e-3
    epochs: int = 4
    rows_per_step: int = 4
    seed: int = 0
    progress: Progress = True

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "rows_per_step"):
            as_int(getattr(self, name), name, 1)
        as_int(self.seed, "seed", 0)
        if not 0 < as_float(self.learning_rate, "learning_rate") < math.inf:
            raise InputError(
                f"learning_rate is {self.learning_rate}. Give a finite number above 0."
            )

    def to_plain(self) -> dict[str, Any]:
        """All that decides the result, as JSON values."""
        names = ("rank", "epochs", "rows_per_step", "seed")
        whole = {name: int(getattr(self, name)) for name in names}
        return whole | {"learning_rate": float(self.learning_rate)}


def recover(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    calibration: CalibrationSet,
    held_out: CalibrationSet | None = None,
    *,
    options: RecoverOptions = RecoverOptions(),
    checkpoint: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """Train a pruned model on text until it answers as the dense one does; needs the package peft.

    Start from a refit (`repair`) where there is one: it costs less, and training goes on from it.

    Args:
        model: the dense model, the teacher; on one device or spread over several.
        pruned: what `prune` or `repair` made of it. It is left as it was.
        calibration: rows; every token counts, whichever positions are scored.
        held_out: other rows. Their KL is measured before the first epoch and after each, and the
            weights of the lowest are taken, which may be those of the start. None takes the last.
        options: rank, learning rate, epochs and progress.
        checkpoint: a file that keeps the state, every two minutes and when the run is stopped. The
            same call goes on from there, to the same bits on the same machine.

    Returns:
        A copy of `pruned` with the updates added to its weights, each rounded once to its dtype.
        The manifest records it under "recovery".

    Raises:
        InputError: peft is missing, no CalibrationSet, text that does not fit a model, or weights
            of `pruned` that are not all on one device.
        MismatchError: other vocabularies, held-out rows among the calibration, or a checkpoint of
            another run.
        ArchitectureError: `pruned` is quantized or of an unknown family.
        FileFormatError: the checkpoint is damaged.
        NumericalError: the loss is not finite.
        KeyboardInterrupt: Ctrl-C; with a checkpoint nothing is lost.
    """
    require_type(options, RecoverOptions, "options")
    require_one_device(pruned)
    texts = [calibration] if held_out is None else [calibration, held_out]
    for text in texts:
        require_type(text, CalibrationSet, "the text of a recovery")
        for one in (model, pruned):
            require_measurable(one, text.input_ids)
    if held_out is not None:
        held_out.require_disjoint(calibration)
    describe(pruned).require_unpacked()
    teacher = describe(model)
    require_one_vocabulary(teacher, describe(pruned))
    settings = _settings(model, pruned, texts, options) if checkpoint is not None else {}
    student = loaded_copy(pruned)
    run = _Run(teacher, describe(student), calibration, held_out, options)
    run.start(None if checkpoint is None else Path(checkpoint), settings)
    if options.progress and run.step < run.steps:
        print(run.announcement(pruned), flush=True)
    run.train()
    run.merge()
    for before, after in zip(pruned.parameters(), student.parameters(), strict=True):
        after.requires_grad_(before.requires_grad)
    manifest: Any = getattr(student, "cocurve_manifest", None)
    if manifest is not None and run.taken:
        manifest |= {
            "recovery": _record(calibration, options, run.taken),
            "weights_fingerprint": fingerprint(weight_marks(student)),
            "weights_since_pruning": "trained",
        }
    return student


def _settings(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    texts: list[CalibrationSet],
    options: RecoverOptions,
) -> dict[str, Any]:
    """All that decides the result, as JSON values."""
    return {
        "dense_fingerprint": fingerprint_model(model),
        "pruned_fingerprint": fingerprint_model(pruned),
        "dtype": model_dtype(pruned),
        "texts": [text.fingerprint for text in texts],
        "options": options.to_plain(),
    }


def _record(calibration: CalibrationSet, options: RecoverOptions, epoch: int) -> dict[str, Any]:
    """The manifest's record, as JSON values; `epoch` is the one whose weights were taken."""
    return {
        "method": "LoRA",
        **options.to_plain(),
        "epoch": epoch,
        "calibration": calibration.source,
        "calibration_fingerprint": calibration.fingerprint,
        "sequences": len(calibration),
        "positions": calibration.input_ids.numel(),
    }


# Training -----------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The state of a training.

    Attributes:
        teacher, student: the dense model, and the copy that is trained.
        text, held_out: rows.
        options: of `recover`.
        layers: the linear layers that learn, with PEFT's adapters around them, by name.
        step: steps done.
        risks: held-out KL before the first epoch and after each, nats per token.
        best: A and B of the lowest of `risks`; empty for the start.
    """

    teacher: Architecture
    student: Architecture
    text: CalibrationSet
    held_out: CalibrationSet | None
    options: RecoverOptions
    layers: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    risks: list[float] = field(default_factory=list)
    best: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = _with_adapters(self.student, self.options)
        model = self.student.model
        self.weights = {k: w for k, w in model.named_parameters() if w.requires_grad}
        # without weight decay: the updates start small, and only few rows are read
        self.adam = torch.optim.AdamW(self.weights.values(), weight_decay=0.0)
        self.threads = torch.get_num_threads()
        self.path: Path | None = None
        self.settings: dict[str, Any] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the last may have fewer rows."""
        return math.ceil(len(self.text) / self.options.rows_per_step)

    @property
    def steps(self) -> int:
        """All steps."""
        return self.options.epochs * self.steps_per_epoch

    @property
    def taken(self) -> int:
        """The epoch whose weights are the result; 0 for the start."""
        return int(np.argmin(self.risks)) if self.held_out is not None else self.options.epochs

    def announcement(self, pruned: PreTrainedModel) -> str:
        """Steps, and the memory that is known beforehand, in words."""
        models = (self.teacher.model, pruned, self.student.model)
        whole = sum(model.get_memory_footprint() for model in models)
        # the gradient and AdamW's two means of each trained weight; the weights are in the student
        trained = sum(weight.numel() for weight in self.weights.values())
        return fold(
            f"{self.steps - self.step} steps of {self.options.rows_per_step} rows of "
            f"{self.text.seq_len} tokens, {trained:,} trained weights: "
            f"{(whole + 3 * 4 * trained) / 1e9:.2g} GB for the dense model, the pruned one and the "
            f"copy of it that is trained, beside the activations of "
            f"{min(TOKENS_PER_BATCH, self.options.rows_per_step * self.text.seq_len):,} tokens."
        )

    def train(self) -> None:
        """Take the remaining steps, and measure after each epoch."""
        saved = time.monotonic()
        bar = open_bar(
            self.options.progress,
            total=self.steps,
            initial=self.step,
            desc="Recover",
            unit="step",
        )
        # normal tensors inside, because a backward pass cannot keep those of inference mode
        with measuring(self.teacher.model, self.threads), torch.inference_mode(False), bar:
            self.student.model.eval()
            try:
                self._measure()
                while self.step < self.steps:
                    loss = self._take_step()
                    bar.update()
                    bar.set_description(f"Recover, loss {loss:.4f}")
                    self._measure()
                    if time.monotonic() - saved >= _SECONDS:
                        self._save()
                        saved = time.monotonic()
            except KeyboardInterrupt:
                self._save()
                raise
            self._save()

    def _take_step(self) -> float:
        """Take a step of AdamW on the next rows; return their loss, nats per token."""
        ids = self.text.input_ids[self._rows()]
        self.adam.zero_grad()
        loss = sum(
            _backward(self.teacher, self.student, piece, ids.numel())
            for piece in ids.split(max(1, TOKENS_PER_BATCH // ids.shape[1]))
        )
        if not math.isfinite(loss):
            raise _diverged(f"the loss of step {self.step} is {loss}.", self.options)
        nn.utils.clip_grad_norm_(self.weights.values(), _CLIP)
        for group in self.adam.param_groups:
            group["lr"] = self.options.learning_rate * _share(self.step, self.steps)
        with uninterrupted():  # a checkpoint must not hold half a step
            self.adam.step()
            self.step += 1
        return float(loss)

    def _rows(self) -> np.ndarray:
        """The rows of the next step; each epoch has an order of its own."""
        epoch, place = divmod(self.step, self.steps_per_epoch)
        order = np.random.default_rng([self.options.seed, epoch]).permutation(len(self.text))
        size = self.options.rows_per_step
        return order[place * size : (place + 1) * size]

    def _measure(self) -> None:
        """Between epochs, measure the KL of the held-out rows, and keep the weights if lowest."""
        epoch, rest = divmod(self.step, self.steps_per_epoch)
        if self.held_out is None or rest or len(self.risks) > epoch:
            return
        try:
            with torch.inference_mode():
                risk = float(pair_risk((self.teacher, self.student), self.held_out).mean())
        except NumericalError as error:
            raise _diverged(str(error), self.options) from error
        if self.risks and risk < min(self.risks):
            self.best = self._arrays()
        self.risks.append(risk)

    # The checkpoint

    def start(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Go on from a checkpoint, if there is one.

        Args:
            path: the file; None keeps nothing on disk.
            settings: of this run.
        """
        self.path, self.settings = path, settings
        if path is None or not path.exists():
            return
        content = load_plain(path, format_name=FORMAT, version=VERSION)
        remedy = "Delete it and train again, or use a copy."
        with reading(path, remedy):
            require_fields(content, {"settings": OBJECT}, others=True)
        require_settings(content["settings"], settings, str(path))
        with reading(path, remedy):
            arrays = Field("the float32 arrays of A and B", self._fits)
            some = Field("those arrays, or none", lambda value: value == {} or self._fits(value))
            numbers = Field("a list of numbers", list_of(is_number))
            fields = {"format": TEXT, "version": COUNT, "settings": OBJECT, "step": COUNT}
            fields |= {"risks": numbers, "best": some, "adapters": arrays}
            require_fields(content, fields | dict.fromkeys(_STATES, some))
        self.step, self.risks, self.best = content["step"], content["risks"], content["best"]
        self._set(content["adapters"])
        for name, weight in self.weights.items():
            if self.step:
                self.adam.state[weight] = {"step": torch.tensor(float(self.step))} | {
                    state: torch.from_numpy(content[state][name].copy()).to(weight.device)
                    for state in _STATES
                }

    def _fits(self, value: Any) -> bool:
        """Whether these are float32 arrays of the shapes of A and B, by name."""
        shapes = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        return dict_of(_is_float32)(value) and {k: a.shape for k, a in value.items()} == shapes

    def _save(self) -> None:
        if self.path is None:
            return
        states = {
            state: {
                name: self.adam.state[weight][state].cpu().numpy()
                for name, weight in self.weights.items()
                if weight in self.adam.state
            }
            for state in _STATES
        }
        content = {"format": FORMAT, "version": VERSION, "settings": self.settings, **states}
        content |= {"step": self.step, "risks": self.risks, "best": self.best}
        try:
            write_atomically(self.path, dump_plain(content | {"adapters": self._arrays()}))
        except OSError as error:  # a full disk must not end the training
            log.warning("%s could not be written (%s). The training goes on.", self.path, error)

    def _arrays(self) -> dict[str, np.ndarray]:
        """Copies of A and B of all layers."""
        return {name: weight.detach().cpu().numpy().copy() for name, weight in self.weights.items()}

    def _set(self, arrays: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, array in arrays.items():
                self.weights[name].copy_(torch.from_numpy(array))

    # The result

    def merge(self) -> None:
        """Add the updates of the epoch taken to the weights, and take the adapters away."""
        if self.best:
            self._set(self.best)
        for name, layer in self.layers.items():
            base = layer.get_base_layer()
            if self.taken:
                with torch.no_grad():  # the sum is rounded, not the update
                    base.weight.copy_(widen(base.weight) + layer.get_delta_weight("default"))
            self.student.model.set_submodule(name, base)


def _diverged(fact: str, options: RecoverOptions) -> NumericalError:
    return NumericalError(
        f"{fact} Give a lower learning_rate than {options.learning_rate:g}; in float16, load the "
        "models in bfloat16."
    )


def _is_float32(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32


def _with_adapters(student: Architecture, options: RecoverOptions) -> dict[str, Any]:
    """Put adapters around the linear layers of the decoder; return them by name."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise InputError(
            "recovery needs the package peft, which is not installed. Run "
            "`pip install cocurve-lab[recover]`."
        ) from None
    model = student.model.requires_grad_(False)
    inside = f"{student.stack}."
    names = [
        name
        for name, module in model.named_modules()
        if name.startswith(inside)
        and (isinstance(module, nn.Linear) or is_transposed(module))
        and module.weight.numel()
    ]
    if not names:
        raise InputError("the pruned model has no linear layer left to train.")
    settings = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.0,
        target_modules=names,
        fan_in_fan_out=is_transposed(model.get_submodule(names[0])),
    )
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU, wherever the weights are
        torch.default_generator.manual_seed(options.seed)
        inject_adapter_in_model(settings, model)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()  # also beside weights in half precision
    return {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}


def _backward(teacher: Architecture, student: Architecture, ids: Tensor, positions: int) -> float:
    """Add the gradients of a few rows [B, T], and return their share of the loss.

    Args:
        positions: of the whole step, over which the loss is a mean.
    """
    with torch.no_grad():
        wanted = teacher.last_hidden(ids.to(model_device(teacher.model)))
    with torch.enable_grad():
        hidden = student.last_hidden(ids.to(model_device(student.model)))
    # the graph of the logits is freed piece by piece, and that of the decoder runs once
    leaf, loss = hidden.detach().requires_grad_(), 0.0
    for part in _pieces(ids.shape, student.vocabulary):
        with torch.enable_grad():
            logits = student.logits(leaf[:, part])
        with torch.no_grad():
            dense, own = widen(teacher.logits(wanted[:, part]).to(logits.device)), widen(logits)
            p, q = torch.softmax(dense, dim=-1), torch.softmax(own, dim=-1)
            loss += float(kl_divergence(p, own - dense).sum()) / positions
            gradient = (q - p).div_(positions).to(logits.dtype)
        logits.backward(gradient)
    hidden.backward(leaf.grad)
    return loss


def _pieces(shape: torch.Size, vocabulary: int) -> Iterator[slice]:
    """Positions of rows [B, T], so few at a time that their logits fit in `LOGIT_BYTES`."""
    rows, length = shape
    step = max(1, LOGIT_BYTES // (4 * 6 * rows * vocabulary))  # six such arrays in float32
    for start in range(0, length, step):
        yield slice(start, start + step)


def _share(step: int, steps: int) -> float:
    """The share of the largest rate at a step: a rise, then half a cosine down to 0."""
    rise = max(1, round(_WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
