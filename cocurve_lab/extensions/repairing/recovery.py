"""Recovery: low-rank updates of a pruned model, trained until it answers as the dense one does.

Each linear layer of the decoder gets W + 2 B A in place of W [out, in], with A [r, in] random and
B [out, r] zero at the start (LoRA; Hu et al., 2021). `transformers.Trainer` trains A and B on
KL(dense || pruned) over every position, which needs no labels; PEFT then adds the updates to W.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.arguments import as_float, as_int
from ...base.atomic import room_for, scratch
from ...base.errors import InputError, NumericalError
from ...base.progress import Progress
from ...base.storage import fingerprint
from ...calibration import CalibrationSet
from ...estimator.support import widen
from ...models.architectures import describe, is_transposed
from ...models.identity import fingerprint_model, model_device, weight_marks
from ...models.runtime import measuring, require_measurable, require_one_device
from ...pruner.manifest import require_dense
from .projection_inputs import TOKENS_PER_BATCH, text_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RecoverOptions:
    """Options of `recover`.

    Attributes:
        rank, learning_rate: the rank of the updates, and the largest rate of AdamW.
        epochs: times each row is read; with `minutes`, times held-out rows are measured.
        rows_per_step, seed: of the training.
        progress: show a bar.
        minutes: train for as many steps as fit in place of whole epochs, by the time that one step
            takes; measuring held-out rows counts. It ends at the first step after the time.
    """

    rank: int = 16
    learning_rate: float = 1e-3
    epochs: int = 4
    rows_per_step: int = 4
    seed: int = 0
    progress: Progress = True
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < as_float(self.minutes, "minutes") < math.inf:
            raise InputError(f"minutes is {self.minutes}. Give the time to train, such as 15.")
        for name, least in (("rank", 1), ("epochs", 1), ("rows_per_step", 1), ("seed", 0)):
            as_int(getattr(self, name), name, least)
        if not 0 < as_float(self.learning_rate, "learning_rate") < math.inf:
            raise InputError(f"learning_rate is {self.learning_rate}. Give a number above 0.")


def recover(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    calibration: CalibrationSet,
    held_out: CalibrationSet | None = None,
    *,
    options: RecoverOptions = RecoverOptions(),
    checkpoint: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """Train a copy of a pruned (and refitted) model on the dense one's answers, at the same size.

    Args:
        model, pruned: the dense model, and what `prune` or `repair` made of it.
        calibration: rows; every token counts, whichever positions are scored.
        held_out: other rows, whose KL chooses the epoch; 0 is the start. None takes the last epoch.
            With a bar, the KL after each epoch is printed.
        options: rank, learning rate, epochs or minutes, and progress.
        checkpoint: a folder for the state after each epoch, from which the same call goes on.
    """
    require_one_device(pruned)
    texts = [calibration]
    if held_out is not None:
        texts.append(held_out.require_disjoint(calibration))
    for text in texts:
        require_measurable(model, text)
        require_measurable(pruned, text)
    require_dense(model, pruned)
    student = copy.deepcopy(pruned)
    settings = {k: v for k, v in asdict(options).items() if k != "progress"}
    marks = [fingerprint_model(model), fingerprint_model(pruned)]
    run = fingerprint([settings, marks, [text.fingerprint for text in texts]])
    with (
        scratch() if checkpoint is None else nullcontext(Path(checkpoint)) as place,
        room_for(0, place),
        measuring(model, torch.get_num_threads()),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # peft uses old names of transformers
        state = place / run[:16]  # each run has a folder of its own in the checkpoint
        for part in state.glob("checkpoint-*"):
            try:
                json.loads((part / "trainer_state.json").read_bytes())
            except (OSError, ValueError):  # written last: the run was killed before
                shutil.rmtree(part)
        epoch = _train(model, student, texts, options, state)
    for before, after in zip(pruned.parameters(), student.parameters(), strict=True):
        after.requires_grad_(before.requires_grad)
    manifest: Any = getattr(student, "cocurve_manifest", None)
    if manifest is not None and epoch:
        record = {"method": "LoRA", **settings, "epoch": epoch, **text_record(calibration)}
        manifest |= {"recovery": record, "weights_since_pruning": "trained"}
        manifest["weights_fingerprint"] = fingerprint(weight_marks(student))
    return student.eval()


def _train(teacher: Any, student: Any, texts: Any, options: RecoverOptions, folder: Path) -> int:
    """Train the student in place; return the epoch whose weights it has, 0 for the start."""
    judged = len(texts) > 1
    ends = math.inf
    most = max(1, TOKENS_PER_BATCH // texts[0].seq_len)
    step = options.rows_per_step
    rows = max(n for n in range(1, step + 1) if step % n == 0 and n <= most)  # of one forward
    unit = "epoch" if options.minutes is None else "steps"
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
        from transformers.trainer_utils import get_last_checkpoint

        settings = TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=rows,
            gradient_accumulation_steps=step // rows,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,  # a share of all steps
            seed=options.seed,
            save_strategy=unit,
            logging_strategy=unit,
            eval_strategy=unit if judged else "no",
            load_best_model_at_end=judged,
            save_total_limit=1,
            label_names=["input_ids"],
            prediction_loss_only=True,
            remove_unused_columns=False,
            use_cpu=model_device(student).type == "cpu",
            dataloader_pin_memory=False,
            disable_tqdm=options.progress is not True,
            report_to="none",
        )
    except ImportError as error:
        raise InputError(f"{error}. Run `pip install 'cocurve-lab[recover]'`.") from None

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if time.monotonic() > ends:
                control.should_training_stop = control.should_save = True
                control.should_evaluate = judged

    class Distillation(Trainer):
        def compute_loss(  # type: ignore[override]
            self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any
        ) -> Any:
            own = widen(model.eval()(**inputs, use_cache=False).logits)  # eval: without dropout
            with torch.no_grad():
                ids: Tensor = inputs["input_ids"].to(model_device(teacher))
                dense = widen(teacher(ids, use_cache=False).logits.to(own.device))
            q, p = (logits.log_softmax(-1).flatten(0, 1) for logits in (own, dense))
            loss = F.kl_div(q, p, log_target=True, reduction="batchmean")
            if not torch.isfinite(loss):
                raise NumericalError(f"the loss is {loss}. Lower learning_rate, or use bfloat16.")
            return (loss, {}) if return_outputs else loss

    inside = f"{describe(student).stack}."
    names = [
        name
        for name, module in student.named_modules()
        if (isinstance(module, nn.Linear) or is_transposed(module))
        and name.startswith(inside)
        and module.weight.numel()
    ]
    torch.manual_seed(options.seed)
    updates = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=names)
    updates.fan_in_fan_out = any(is_transposed(module) for module in student.modules())
    adapted = get_peft_model(student, updates)
    data, *others = ([{"input_ids": row} for row in text.input_ids] for text in texts)
    trainer = Distillation(
        adapted,
        settings,
        train_dataset=data,
        eval_dataset=others[0] if others else None,
        callbacks=[Clock()],
    )
    if options.progress is False:
        trainer.remove_callback(PrinterCallback)
    begun = time.monotonic()
    start = trainer.evaluate()["eval_loss"] if judged else math.inf
    if options.minutes is not None:
        ends = begun + 60 * options.minutes
        left = 60 * options.minutes - (options.epochs + 1) * (time.monotonic() - begun)
        begun = time.monotonic()
        ids = texts[0].input_ids[:rows].to(model_device(student))
        trainer.compute_loss(adapted, {"input_ids": ids}).backward()  # to see how long it takes
        adapted.zero_grad()
        a_step = (time.monotonic() - begun) * step / rows
        settings.max_steps = max(options.epochs, int(left / a_step))
        every = math.ceil(settings.max_steps / options.epochs)
        settings.eval_steps = settings.save_steps = settings.logging_steps = every
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    state = trainer.state
    improved = not judged or (state.best_metric is not None and state.best_metric < start)
    adapted.merge_and_unload() if improved else adapted.unload()
    vars(student).pop("peft_config", None)
    share = (state.best_global_step or 0) / state.max_steps if judged else 1
    # a step may take longer than was foreseen, and the time then end in the first epoch
    return max(1, round(share * options.epochs)) if improved else 0
