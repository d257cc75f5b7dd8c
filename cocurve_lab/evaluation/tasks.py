"""Tasks, run by the lm-evaluation-harness on a model object: dense, ablated or pruned."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..measuring.perplexity import PerplexityOptions, perplexity
from .code_execution import Limits, Outcome, require_permission, run_programs
from .harness import Scores, collect, require_harness, run_harness
from .report import EvaluationReport
from .suites import PAPER_CODE, PAPER_NAMES, PAPER_TEXTS, demo_tasks, paper_tasks
from .task_files import LocalTask, TaskFile, local_tasks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SUITES = ("demo", "paper", "local")


_LONGEST = 2048  # tokens of a prompt with its reply, as the paper's context


@dataclass(frozen=True)
class TaskOptions:
    """What is run and how.

    Attributes:
        tasks: names of the suite's tasks to run; None runs all.
        files: of suite "local": JSONL files, folders of them, or `LocalTask`s.
        batch_size: prompts per forward.
        max_length: tokens of a prompt with its reply; None takes the model's context, at most 2048.
        limits: of each executed program.
        progress: show the harness's bars.
    """

    tasks: Sequence[str] | None = None
    files: Sequence[LocalTask | str | os.PathLike[str]] = ()
    batch_size: int = 16
    max_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    progress: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; give 1 or more prompts.")
        if isinstance(self.files, (str, os.PathLike)):
            raise InputError(f"files is {str(self.files)!r}; give a list: files=[...].")


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: str = "demo",
    limit: int | None = None,
    allow_code_execution: bool = False,
    options: TaskOptions | None = None,
) -> EvaluationReport:
    """Scores of a model on a suite of tasks, by the real harness (lm_eval).

    Args:
        model: the object itself; a pruned model too.
        tokenizer: its tokenizer (a copy is used: the harness changes padding).
        suite: "demo", the five families of the embedded model; "paper", the paper's fourteen
            benchmarks, from the hub; "local", the files in `options.files`.
        limit: only so many samples of each task (documents of each text), from its start.
        allow_code_execution: True lets generated programs run, confined, for pass@1.
        options: a choice of tasks, files, batch size, limits, progress.

    Returns:
        Every metric the harness gives, which of them is averaged, and how all was run.

    Raises:
        InputError: an unknown suite or task; lm_eval is not installed; code tasks without
            `allow_code_execution`; the hub cannot be reached; a file that cannot be used.
    """
    options = options or TaskOptions()
    if suite not in SUITES:
        raise InputError(f"the suite is {suite!r}; there are {', '.join(SUITES)}.")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; evaluate at least one sample of each task.")
    require_harness()
    names = _names(suite, options)
    if suite == "paper" and set(names) & set(PAPER_CODE):
        require_permission(allow_code_execution)  # before anything is read
    tasks = _tasks(suite, names, options)
    if any(task.program for task in tasks):
        require_permission(allow_code_execution)
    found = Scores()
    length = _max_length(model, options)
    if suite == "paper":  # first: a hub that cannot be reached is known before hours of tasks
        _measure_texts(model, tokenizer, names, limit, options, found)
    if tasks:
        with tempfile.TemporaryDirectory(prefix="cocurve_tasks_") as folder:
            results = run_harness(model, tokenizer, tasks, folder, length, limit, options)
        collect(results, tasks, tokenizer, length, found)
        _execute_code(results, tasks, allow_code_execution, options, found)
    return EvaluationReport(
        suite=suite,
        values=found.values,
        errors=found.errors,
        samples=found.samples,
        averaged={task.name: task.average for task in tasks if task.average is not None},
        settings=found.settings
        | {"limit": limit, "batch_size": options.batch_size, "max_length": length}
        | {"notes": found.notes},
        versions=_versions() | found.versions,
    )


def _names(suite: str, options: TaskOptions) -> tuple[str, ...]:
    """The paper's names asked for; of the other suites names are known once the tasks are read."""
    return PAPER_NAMES if suite == "paper" and options.tasks is None else tuple(options.tasks or ())


def _tasks(suite: str, names: tuple[str, ...], options: TaskOptions) -> list[TaskFile]:
    if suite == "paper":
        _require_known(names, PAPER_NAMES)
        return paper_tasks(names)
    if suite == "local" and not options.files:
        raise InputError('suite "local" needs files: options=TaskOptions(files=[...]).')
    tasks = demo_tasks() if suite == "demo" else local_tasks(options.files)
    _require_known(names, [task.name for task in tasks])
    return [task for task in tasks if options.tasks is None or task.name in names]


def _require_known(names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"there is no task {unknown[0]!r}; there are {', '.join(known)}.")


def _max_length(model: PreTrainedModel, options: TaskOptions) -> int:
    own = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    if options.max_length is None:
        return int(min(own, _LONGEST))
    if not 2 <= options.max_length <= own:
        raise InputError(
            f"max_length is {options.max_length}; the model's context is {own} tokens."
        )
    return options.max_length


def _execute_code(
    results: Mapping[str, Any],
    tasks: list[TaskFile],
    allow_code_execution: bool,
    options: TaskOptions,
    found: Scores,
) -> None:
    """pass@1 of the code tasks in place of the harness's metric."""
    for task in tasks:
        if task.program is None:
            continue
        rows = sorted(results["samples"][task.name], key=lambda row: row["doc_id"])
        programs = [task.program(task.records[row["doc_id"]], row["resps"][0][0]) for row in rows]
        outcomes = run_programs(
            programs,
            allow_code_execution=allow_code_execution,
            limits=options.limits,
            progress=options.progress,
        )
        passed = np.array([outcome.status == "passed" for outcome in outcomes], dtype=float)
        error = float(passed.std(ddof=1) / np.sqrt(len(passed))) if len(passed) > 1 else None
        found.add(task.name, {"pass@1": float(passed.mean())}, {"pass@1": error})
        found.notes.append(f"{task.name}: {_isolation(outcomes)}")


def _isolation(outcomes: list[Outcome]) -> str:
    kinds = {", ".join(f"{k}: {v}" for k, v in sorted(o.isolation.items())) for o in outcomes}
    return "programs ran confined by " + " or ".join(sorted(kind for kind in kinds if kind))


def _measure_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: tuple[str, ...],
    limit: int | None,
    options: TaskOptions,
    found: Scores,
) -> None:
    """The paper's three perplexities: context 2048, stride 512."""
    for source in PAPER_TEXTS:
        if source.name not in names:
            continue
        text = source.read()[:limit]
        result = perplexity(
            model, tokenizer, text, options=PerplexityOptions(progress=options.progress)
        )
        error = result.standard_error
        spread = None if error is None else error * result.value  # of exp, to first order
        found.add(source.name, {"perplexity": result.value}, {"perplexity": spread})
        found.samples[source.name] = result.tokens
        found.notes.append(f"{source.name}: {result.protocol}")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("lm_eval", "torch", "transformers", "datasets")}
