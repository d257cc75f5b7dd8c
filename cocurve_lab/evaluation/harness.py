"""The call of lm_eval on a model object and task files, and the scores read from its results."""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..models.runtime import measuring
from .suites import unreachable
from .task_files import TaskFile, write_task_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SEED = 1234  # of few-shot examples, the harness's own default


@dataclass
class Scores:
    """Scores measured so far, task by task."""

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, task: str, values: dict[str, float], errors: dict[str, float | None]) -> None:
        self.values[task], self.errors[task] = values, errors


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[TaskFile],
    *,
    length: int,
    limit: int | None,
    batch_size: int,
    progress: bool,
) -> Any:
    """Run tasks by lm_eval, greedily and in eval mode; the model comes out as it went in.

    Args:
        model, tokenizer: the model object; a copy of the tokenizer is used.
        tasks: written into a temporary folder for the harness.
        length: tokens of a prompt with its reply.
        limit: only so many samples of each task, from its start; None runs all.
        batch_size: prompts per forward.
        progress: show the harness's bars.

    Returns:
        The harness's own results, samples included.

    Raises:
        InputError: a task of the harness needs the hub and cannot reach it.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = any(not task.config for task in tasks)
    with (
        tempfile.TemporaryDirectory(prefix="cocurve_tasks_") as folder,
        _calm_logging(),
        nullcontext() if progress else redirect_stderr(io.StringIO()),
        measuring(model, torch.get_num_threads()),
        _plain_generation(model),
    ):
        write_task_files([_fitting(task, length) for task in tasks], folder)
        manager = TaskManager(include_path=folder, include_defaults=own)
        try:
            loaded: Any = manager.load([task.name for task in tasks])
        except Exception as error:
            if own:  # each hub client release raises its own network errors
                raise unreachable("a task of the harness", error) from None
            raise
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=_SEED)
        wrapped: Any = HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),
            backend="causal",
            batch_size=batch_size,
            max_length=length,
        )
        # evaluate, not simple_evaluate: that one seeds the caller's generators and asks git and pip
        return evaluate(wrapped, loaded, limit=limit, log_samples=True)


def _fitting(task: TaskFile, length: int) -> TaskFile:
    """Limit a task's replies to half the context, or nothing would be left for prompts."""
    if not _is_shortened(task, length):
        return task
    asked = task.config["generation_kwargs"]
    shorter = task.config | {"generation_kwargs": asked | {"max_gen_toks": length // 2}}
    return replace(task, config=shorter)


def _is_shortened(task: TaskFile, length: int) -> bool:
    asked = task.config.get("generation_kwargs")
    return asked is not None and asked["max_gen_toks"] > length // 2


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Decode greedily, without a checkpoint's own lengths and repetition penalties."""
    from transformers import GenerationConfig

    before = model.generation_config
    ends = {
        name: getattr(before, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = GenerationConfig(**ends)
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _calm_logging() -> Iterator[None]:
    """Log errors only: the harness warns about model objects, and one is given on purpose."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def require_harness() -> None:
    """Raise InputError unless lm_eval is installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise InputError(
            "tasks need the lm-evaluation-harness, which is not installed. Run `pip install -c "
            "constraints.txt 'cocurve-lab[eval]'`."
        ) from None


def collect(
    results: Mapping[str, Any],
    tasks: list[TaskFile],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    found: Scores,
) -> None:
    """Read metrics, errors and counts of the tasks into `found`; of a group (MMLU) the whole."""
    shots, cut = {}, {}
    for task in tasks:
        scores = results["results"][task.name]
        values: dict[str, float] = {}
        errors: dict[str, float | None] = {}
        for key, value in scores.items():
            metric, _, how = key.partition(",")
            if not how or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            label = metric if how == "none" else f"{metric} ({how})"
            error = scores.get(f"{metric}_stderr,{how}")
            values[label] = float(value)
            errors[label] = float(error) if isinstance(error, (int, float)) else None
        found.add(task.name, values, errors)
        parts = _parts(results, task.name)
        found.samples[task.name] = sum(results["n-samples"][part]["effective"] for part in parts)
        found.versions[f"task {task.name}"] = str(results["versions"].get(task.name, "unstated"))
        shots[task.name] = results["n-shot"].get(task.name, results["n-shot"].get(parts[0]))
        rows = [row for part in parts for row in results["samples"].get(part, ())]
        cut[task.name] = sum(_is_cut(row, tokenizer, length) for row in rows)
    found.settings |= {"num_fewshot": shots, "truncated": cut}
    for task in tasks:
        if _is_shortened(task, length):
            asked = task.config["generation_kwargs"]["max_gen_toks"]
            found.notes.append(
                f"{task.name}: replies have at most {length // 2} tokens, half the context, where "
                f"{asked} are usual"
            )
    lost = {name: count for name, count in cut.items() if count}
    if lost:
        each = ", ".join(f"{count} of {name}" for name, count in lost.items())
        found.notes.append(
            f"prompts longer than the context of {length} tokens lost their start: {each}"
        )


def _parts(results: Mapping[str, Any], name: str) -> list[str]:
    """The tasks of a group, to the leaves; of a task itself."""
    children = results.get("group_subtasks", {}).get(name)
    if not children:
        return [name]
    return [leaf for child in children for leaf in _parts(results, child)]


def _is_cut(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, length: int) -> bool:
    """Whether a prompt of this sample, with its reply, is longer than the context."""
    for arguments in row["arguments"]:
        if len(arguments) < 2:  # a whole text, which the harness scores window by window
            continue
        room = length
        text = arguments[0]
        if isinstance(arguments[1], str):
            text += arguments[1]
        else:
            room -= arguments[1].get("max_gen_toks", 256)
        if len(text) > room and len(tokenizer(text, verbose=False)["input_ids"]) > room:
            return True
    return False
