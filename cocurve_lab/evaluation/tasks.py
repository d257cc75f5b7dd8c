"""A suite of tasks on a model object, dense, ablated or pruned, by the lm-evaluation-harness."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..measuring.perplexity import PerplexityOptions, perplexity
from .code_execution import LIMITATION, Limits, Outcome, require_permission, run_programs
from .confinement import Confinement, require_confinement
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
    """Options of `evaluate_tasks`.

    Attributes:
        tasks: names of the suite's tasks to run; None runs all.
        files: for suite "local": JSONL files, folders of them, or `LocalTask`s.
        batch_size: prompts per forward.
        max_length: tokens of a prompt with its reply; None takes the model's context, at most 2048.
        limits: time, memory, files and processes of each executed program.
        confinement: what confines executed programs: "bwrap" (bubblewrap, which must be installed)
            or "weak" (what the system offers without it). The report says which it was.
        progress: show the harness's bars.

    Raises:
        InputError: batch_size is below 1, or files is one path instead of a list.
    """

    tasks: Sequence[str] | None = None
    files: Sequence[LocalTask | str | os.PathLike[str]] = ()
    batch_size: int = 16
    max_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    confinement: Confinement = "bwrap"
    progress: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}. Give at least one prompt.")
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
            benchmarks, from the hub; "local", the files in `options.files`.
        limit: only so many samples of each task (documents of each text), from its start; None
            takes all.
        allow_code_execution: True lets generated programs run, confined, for pass@1.
        options: a choice of tasks, files, batch size, limits, progress.

    Returns:
        Every metric the harness gives, which of them are averaged, and the settings of the run.

    Raises:
        InputError: an unknown suite or task; lm_eval is not installed; code tasks without
            `allow_code_execution`, or where bwrap does not start; the hub cannot be reached; a
            file that cannot be used.
    """
    options = options or TaskOptions()
    if suite not in SUITES:
        raise InputError(f"the suite is {suite!r}. Choose one of {', '.join(SUITES)}.")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}. Evaluate at least one sample of each task.")
    require_harness()
    names = _names(suite, options)
    if suite == "paper" and set(names) & set(PAPER_CODE):
        require_permission(allow_code_execution)  # before anything is read
        require_confinement(options.confinement)
    tasks = _tasks(suite, names, options)
    if any(task.program for task in tasks):
        require_permission(allow_code_execution)
        require_confinement(options.confinement)
    found = Scores()
    length = _max_length(model, options)
    if suite == "paper":  # first, so that an unreachable hub is known before hours of tasks
        _measure_texts(model, tokenizer, names, limit, options, found)
    if tasks:
        results = run_harness(
            model,
            tokenizer,
            tasks,
            length=length,
            limit=limit,
            batch_size=options.batch_size,
            progress=options.progress,
        )
        collect(results, tasks, tokenizer, length, found)
        execute_code(results, tasks, allow_code_execution, options, found)
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
    """Names asked for: the paper's are known at once, those of other suites once tasks are read."""
    return PAPER_NAMES if suite == "paper" and options.tasks is None else tuple(options.tasks or ())


def _tasks(suite: str, names: tuple[str, ...], options: TaskOptions) -> list[TaskFile]:
    if suite == "paper":
        _require_known(names, PAPER_NAMES)
        return paper_tasks(names)
    if suite == "local" and not options.files:
        raise InputError('suite "local" needs files. Give options=TaskOptions(files=[...]).')
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
            f"max_length is {options.max_length}, and the model's context is {own} tokens. Give "
            f"2 to {own}."
        )
    return options.max_length


def execute_code(
    results: Mapping[str, Any],
    tasks: list[TaskFile],
    allow_code_execution: bool,
    options: TaskOptions,
    found: Scores,
) -> None:
    """Replace the harness's metric of the code tasks in `found` by pass@1.

    Args:
        results: of `run_harness`; replies are read from its samples.
        tasks: those without `program` are passed over.
        allow_code_execution: must be True where there is a code task.
        options: limits and progress.
        found: gets the scores, their errors over programs, and a note on the confinement and on
            what passing does not prove.

    Raises:
        InputError, CocurveError: as for `run_programs`.
    """
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
            confinement=options.confinement,
        )
        passed = np.array([outcome.status == "passed" for outcome in outcomes], dtype=float)
        error = float(passed.std(ddof=1) / np.sqrt(len(passed))) if len(passed) > 1 else None
        found.add(task.name, {"pass@1": float(passed.mean())}, {"pass@1": error})
        found.notes.append(f"{task.name}: {_isolation(outcomes)}; {LIMITATION}")


def _isolation(outcomes: list[Outcome]) -> str:
    kinds = {", ".join(f"{k}: {v}" for k, v in sorted(o.isolation.items())) for o in outcomes}
    means = " or ".join(sorted(kind for kind in kinds if kind))
    return f'programs ran with confinement "{outcomes[0].confinement}" ({means})'


def _measure_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: tuple[str, ...],
    limit: int | None,
    options: TaskOptions,
    found: Scores,
) -> None:
    """Measure the paper's three perplexities: context 2048, stride 512."""
    for source in PAPER_TEXTS:
        if source.name not in names:
            continue
        text = source.read()[:limit]
        result = perplexity(
            model, tokenizer, text, options=PerplexityOptions(progress=options.progress)
        )
        error = result.standard_error
        # perplexity is exp(nll), so its error is perplexity x that of the nll, to first order
        spread = None if error is None else error * result.value
        found.add(source.name, {"perplexity": result.value}, {"perplexity": spread})
        found.samples[source.name] = result.tokens
        found.notes.append(f"{source.name}: {result.protocol}")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("lm_eval", "torch", "transformers", "datasets")}
