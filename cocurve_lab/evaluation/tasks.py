"""A suite of tasks on a model object, dense, ablated or pruned, by the lm-evaluation-harness."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.arguments import as_int, as_list
from ..base.errors import InputError
from ..measuring.perplexity import PerplexityOptions, perplexity
from .code_execution import LIMITATION, Limits, Outcome, require_permission, run_programs
from .confinement import require_confinement
from .harness import Scores, collect, require_harness, run_harness
from .report import EvaluationReport
from .suites import DIFFERENCES, PAPER_CODE, PAPER_NAMES, PAPER_TEXTS, demo_tasks, paper_task
from .task_files import LocalTask, TaskFile, local_tasks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SUITES = ("demo", "paper", "local")
_LONGEST = 2048  # tokens of a prompt with its reply, as the paper's context


@dataclass(frozen=True)
class TaskOptions:
    """Options of `evaluate_tasks`.

    Attributes:
        tasks: names of the suite's tasks to run; None runs all.
        files: for suite "local": JSONL files, folders of them, or `LocalTask`s.
        data: for suite "paper": a folder with copies of its datasets, DATA/ORGANIZATION/NAME with
            the files as on the hub; None reads the hub.
        batch_size: prompts per forward.
        max_length: tokens of a prompt with its reply; None takes the model's context, at most 2048.
        limits: time, memory, files and processes of each executed program.
        progress: show the harness's bars.
    """

    tasks: Sequence[str] | None = None
    files: Sequence[LocalTask | str | os.PathLike[str]] = ()
    data: str | os.PathLike[str] | None = None
    batch_size: int = 16
    max_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", as_int(self.batch_size, "batch_size", 1))
        if self.tasks is not None:
            if isinstance(self.tasks, str):
                raise InputError(f"tasks is {self.tasks!r}, one name; give a list: tasks=[...].")
            object.__setattr__(self, "tasks", tuple(as_list(self.tasks, "tasks")))
            if not self.tasks:
                raise InputError("tasks names no task. Name some, or omit it for all of the suite.")
        if isinstance(self.files, (str, os.PathLike)):
            raise InputError(f"files is {str(self.files)!r}, one path; give a list: files=[...].")


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: str = "demo",
    limit: int | None = None,
    allow_code_execution: bool = False,
    options: TaskOptions | None = None,
) -> EvaluationReport:
    """Score a model on a suite of tasks, by the real harness (lm_eval).

    Args:
        model: the object itself; a pruned model too.
        tokenizer: its tokenizer (a copy is used: the harness changes padding).
        suite: "demo", the five families of the embedded model; "paper", the paper's fourteen
            benchmarks and two more of the harness, from the hub or from copies in `options.data`;
            "local", the files in `options.files`.
        limit: only so many samples of each task (documents of each text), from its start; None
            takes all.
        allow_code_execution: True lets generated programs run for pass@1, confined by bubblewrap.
            Where that does not start, no program runs, and the report names the tasks as failed.
        options: a choice of tasks, files, batch size, limits, progress.

    Returns:
        Every metric the harness gives, which of them are averaged, the settings of the run, and
        the tasks that failed, with the reason. They do not end the others.

    Raises:
        InputError: an unknown suite or task; lm_eval is not installed; code tasks without
            `allow_code_execution`; a file that cannot be used; no task could be run, for example
            because the hub cannot be reached.
    """
    options = options or TaskOptions()
    limit = None if limit is None else as_int(limit, "limit", 1)
    require_harness()
    work = suite_tasks(suite, options)
    code = [n for n, made in work.items() if n in PAPER_CODE or (made and made.program)]
    if code:
        require_permission(allow_code_execution)  # before anything is read from the hub
    bench = _Bench(model, tokenizer, options, limit, _max_length(model, options))
    found, failed = bench.found, {}
    for name, made in work.items():
        try:
            if name in code:
                require_confinement()
            bench.run(name, made)
        except Exception as error:  # hours of other tasks must not be lost
            log.warning("%s failed: %s", name, error)
            failed[name] = error
            found.values.pop(name, None)  # replies whose programs could not be run are no score
    if failed and not found.values:
        raise next(iter(failed.values()))
    return EvaluationReport(
        suite=suite,
        values=found.values,
        errors=found.errors,
        samples=found.samples,
        averaged=bench.averaged,
        settings=found.settings
        | {"limit": limit, "batch_size": options.batch_size, "max_length": bench.length}
        | {"notes": found.notes},
        versions=_versions() | found.versions,
        failed={name: f"{type(error).__name__}: {error}" for name, error in failed.items()},
    )


def suite_tasks(suite: str, options: TaskOptions) -> dict[str, TaskFile | None]:
    """Find the tasks of a suite that are to run: name -> task.

    Args:
        suite: "demo", "paper" or "local".
        options: tasks, files and data.

    Returns:
        None for a task of the paper, which is made only when its turn comes.
    """
    if suite not in SUITES:
        raise InputError(f"the suite is {suite!r}. Choose one of {', '.join(SUITES)}.")
    if options.data is not None and (suite != "paper" or not Path(options.data).is_dir()):
        raise InputError(
            f"data is {str(options.data)!r}, for suite {suite!r}. Give an existing folder, and "
            'suite="paper".'
        )
    if suite == "paper":
        work: dict[str, TaskFile | None] = dict.fromkeys(PAPER_NAMES)
    elif suite == "local" and not options.files:
        raise InputError('suite "local" needs files. Give options=TaskOptions(files=[...]).')
    else:
        tasks = demo_tasks() if suite == "demo" else local_tasks(options.files)
        work = {task.name: task for task in tasks}
    if options.tasks is None:
        return work
    unknown = [name for name in options.tasks if name not in work]
    if unknown:
        raise InputError(f"there is no task {unknown[0]!r}. Choose one of {', '.join(work)}.")
    return {name: made for name, made in work.items() if name in options.tasks}


@dataclass
class _Bench:
    """A model under test, and what was found so far."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: TaskOptions
    limit: int | None
    length: int
    found: Scores = field(default_factory=Scores)
    averaged: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, made: TaskFile | None) -> None:
        """Run one task; one of the paper's is made first (`made` is None)."""
        if made is not None:
            self._task(made)
            return
        if name in PAPER_TEXTS:
            self._text(name)
        else:
            self._task(paper_task(name, self.options.data))
        if name in DIFFERENCES:
            self.found.notes.append(
                f"{name}, where the authors' release differs: {DIFFERENCES[name]}"
            )

    def _task(self, task: TaskFile) -> None:
        if task.average is not None:
            self.averaged[task.name] = task.average
        results = run_harness(
            self.model,
            self.tokenizer,
            task,
            length=self.length,
            limit=self.limit,
            batch_size=self.options.batch_size,
            progress=self.options.progress,
            data=self.options.data,
        )
        collect(results, task, self.tokenizer, self.length, self.found)
        if task.program is not None:
            execute_code(results, task, self.options, self.found)

    def _text(self, name: str) -> None:
        """Measure one of the paper's three perplexities: context 2048, stride 512."""
        text = PAPER_TEXTS[name].read(self.options.data, self.limit)
        settings = PerplexityOptions(progress=self.options.progress)
        result = perplexity(self.model, self.tokenizer, text, options=settings)
        error = result.standard_error
        # perplexity is exp(nll), so its error is perplexity x that of the nll, to first order
        spread = None if error is None else error * result.value
        self.found.add(name, {"perplexity": result.value}, {"perplexity": spread})
        self.found.samples[name] = result.tokens
        self.found.notes.append(f"{name}: {len(text)} documents, none blank. {result.protocol}")


def _max_length(model: PreTrainedModel, options: TaskOptions) -> int:
    own = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    if options.max_length is None:
        return int(min(own, _LONGEST))
    if not 2 <= options.max_length <= own:
        raise InputError(
            f"max_length is {options.max_length}, and the model's context is {own} tokens. Give "
            f"2 to {own}."
        )
    return options.max_length


def execute_code(
    results: Mapping[str, Any],
    task: TaskFile,
    options: TaskOptions,
    found: Scores,
) -> None:
    """Replace the harness's metric of a code task in `found` by pass@1.

    The caller has checked that code may be executed.

    Args:
        results: of `run_harness`; replies are read from its samples.
        task: one with a `program`.
        options: limits and progress.
        found: gets the score, its error over programs, and a note on what confined them and on
            what passing does not prove.
    """
    assert task.program is not None
    rows = sorted(results["samples"][task.name], key=lambda row: row["doc_id"])
    programs = [task.program(task.records[row["doc_id"]], row["resps"][0][0]) for row in rows]
    outcomes = run_programs(
        programs,
        allow_code_execution=True,
        limits=options.limits,
        progress=options.progress,
    )
    passed = np.array([outcome.status == "passed" for outcome in outcomes], dtype=float)
    error = float(passed.std(ddof=1) / np.sqrt(len(passed))) if len(passed) > 1 else None
    found.add(task.name, {"pass@1": float(passed.mean())}, {"pass@1": error})
    found.notes.append(f"{task.name}: {_isolation(outcomes)}; {LIMITATION}")


def _isolation(outcomes: list[Outcome]) -> str:
    kinds = {", ".join(f"{k}: {v}" for k, v in sorted(o.isolation.items())) for o in outcomes}
    means = " or ".join(sorted(kind for kind in kinds if kind))
    return f"programs ran in bubblewrap ({means})"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("lm_eval", "torch", "transformers", "datasets")}
