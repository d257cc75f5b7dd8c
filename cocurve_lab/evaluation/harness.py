"""The call of lm_eval on a model object and a task, and the scores read from its results."""

from __future__ import annotations

import copy
import io
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import InputError
from ..models.runtime import measuring
from .sources import local_copy, unreadable
from .task_files import TaskFile, write_task_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SEED = 1234  # of few-shot examples, the harness's own default
_REPLY = 256  # tokens of a reply where a task does not say, the harness's own default


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
    task: TaskFile,
    *,
    length: int,
    limit: int | None,
    batch_size: int,
    progress: bool,
    data: str | os.PathLike[str] | None = None,
) -> Any:
    """Run a task by lm_eval, greedily and in eval mode; the model comes out as it went in.

    Args:
        model, tokenizer: the model object; a copy of the tokenizer is used.
        task: written into a temporary folder for the harness, unless it is the harness's own.
        length: tokens of a prompt with its reply.
        limit: only so many samples, from the start; None runs all.
        batch_size: prompts per forward.
        progress: show the harness's bars.
        data: folder of local copies of datasets, as for `Source.rows`; None reads the hub.

    Returns:
        The harness's own results, samples included, and shortened_from: the tokens of a reply that
        the task asks for, where half the context is less.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    with (
        tempfile.TemporaryDirectory(prefix="cocurve_tasks_") as folder,
        _calm_logging(),
        nullcontext() if progress else redirect_stderr(io.StringIO()),
        measuring(model, torch.get_num_threads()),
        _plain_generation(model),
    ):
        loaded = _loaded(task, folder, data)
        (known,) = loaded["tasks"].values()
        if known.get_config("num_fewshot") is None:
            known.set_config(key="num_fewshot", value=0)
        known.set_fewshot_seed(seed=_SEED)
        shortened_from = _shorten(known, length)
        wrapped: Any = HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),
            backend="causal",
            batch_size=batch_size,
            max_length=length,
        )
        # evaluate, not simple_evaluate: that one seeds the caller's generators and asks git and pip
        found: Any = evaluate(wrapped, loaded, limit=limit, log_samples=True)
    return found | {"shortened_from": shortened_from}


def _loaded(task: TaskFile, folder: str, data: str | os.PathLike[str] | None) -> Any:
    """The task as the harness's manager loads it."""
    import lm_eval.tasks

    if task.own is None:
        write_task_files([task], folder)
        return lm_eval.tasks.TaskManager(None, folder, False).load(task.name)
    changes: dict[str, Any] = {}
    if data is not None:
        place = str(local_copy(data, task.own.dataset))
        # the cache lies in the temporary folder: another would only copy what is there already
        changes = {"dataset_path": place, "dataset_kwargs": {"cache_dir": f"{folder}/cache"}}
    # its own folder alone: to read all tasks of the harness takes half a minute
    home = Path(lm_eval.tasks.__file__).parent / task.own.folder
    member = {"task": task.own.task} | changes
    try:
        # a task is changed as a member of a group; the group itself is not wanted
        found: Any = lm_eval.tasks.TaskManager(None, str(home), False).load(
            {"group": "changed", "task": [member]}
        )
    except Exception as error:  # each hub client release raises its own network errors
        raise unreadable(task.own.dataset, data, error) from None
    return {"tasks": found["tasks"]}


def _shorten(known: Any, length: int) -> int | None:
    """Limit replies to half the context, or nothing would be left for prompts."""
    settings = known.get_config("generation_kwargs")
    if known.OUTPUT_TYPE != "generate_until" or settings is None:
        return None
    asked = int(settings.get("max_gen_toks", _REPLY))
    if asked <= length // 2:
        return None
    known.set_config(key="generation_kwargs", value=settings | {"max_gen_toks": length // 2})
    return asked


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
    task: TaskFile,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    found: Scores,
) -> None:
    """Read a task's metrics, errors and counts into `found`."""
    name = task.name if task.own is None else task.own.task
    scores = results["results"][name]
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
    found.samples[task.name] = results["n-samples"][name]["effective"]
    found.versions[f"task {task.name}"] = str(results["versions"].get(name, "unstated"))
    found.settings.setdefault("num_fewshot", {})[task.name] = results["n-shot"].get(name)
    cut = sum(_is_cut(row, tokenizer, length) for row in results["samples"].get(name, ()))
    found.settings.setdefault("truncated", {})[task.name] = cut
    if results["shortened_from"]:
        found.notes.append(
            f"{task.name}: replies have at most {length // 2} tokens, half the context, where "
            f"{results['shortened_from']} are usual"
        )
    if cut:
        found.notes.append(
            f"prompts longer than the context of {length} tokens lost their start: {cut} of "
            f"{task.name}"
        )


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
            room -= arguments[1].get("max_gen_toks", _REPLY)
        if len(text) > room and len(tokenizer(text, verbose=False)["input_ids"]) > room:
            return True
    return False
