"""The paper's tables measured on one model: plans, suite and speed, beside the paper's numbers.

Every task of every plan is kept in the folder as soon as it is done, so a killed run resumes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.base.files import read_regular
from cocurve_lab.base.schema import parse_json
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from cocurve_lab.evaluation.suites import PAPER_CODE, PAPER_HARNESS, PAPER_METRICS
from cocurve_lab.evaluation.task_files import TaskFile
from cocurve_lab.evaluation.tasks import (
    APART,
    BOS_WINDOWS,
    TaskOptions,
    evaluate_tasks,
    suite_tasks,
)
from cocurve_lab.models.identity import model_device
from cocurve_lab.models.layers import weights_of
from cocurve_lab.pruner.cutting import cut, prune
from cocurve_lab.pruner.manifest import require_dense
from cocurve_lab.pruner.saving import load_pruned
from cocurve_lab.solver.selection import Selection

from ..bake_off.speeds import timing_marks
from ..lazy import PreTrainedModel, PreTrainedTokenizerBase
from ..shared import marks
from ..tables import Row, Rows, is_kept, kept_rows, pick, plus_minus
from .published import Published, reference_metrics
from .side_by_side import DENSE, HOURS, SIZES, best_of

log = logging.getLogger(__name__)

RELEASED = "the release's plan"
PAPER_LABELS = ("Dense", "CoCurve", "CoCurve+", "best baseline")


class Candidate(NamedTuple):
    """A plan to measure: its label, its ratio, what makes it, and whether CoCurve must beat it."""

    label: str
    ratio: float
    make: Callable[[], Selection]
    baseline: bool = False


class Subject(NamedTuple):
    """What a number is of: the dense model, or a plan if there is one of this label and ratio."""

    label: str = DENSE
    ratio: float = 0.0
    plan: Selection | None = None

    def __str__(self) -> str:
        return self.label if self.label == DENSE else f"{self.label} at {self.ratio:.0%}"

    def row(
        self, source: str, task: str, metric: str, value: float | None, shown: bool = True
    ) -> Row:
        """Make a row of the table; see `Reproduction.run` for its columns."""
        return {
            "source": source,
            "plan": self.label,
            "requested_ratio": self.ratio,
            "realized_ratio": None if self.plan is None else self.plan.realized_ratio,
            "guards": "" if self.plan is None else str(self.plan.guards),
            "task": task,
            "metric": metric,
            "value": value,
            "value_error": None,
            "shown": shown,
            "table": "",
            "failed": "",
        }

    def failure(self, error: Exception, task: str = "") -> Row:
        """Make the row of a number that is missing, with the reason."""
        kind = "" if isinstance(error, InfeasibleError) else f"{type(error).__name__}: "
        log.warning("%s %s: %s%s", self, task, kind, error)
        return self.row("measured", task, "", None, shown=False) | {"failed": f"{kind}{error}"}


@dataclass(frozen=True)
class ReproductionOptions:
    """Options of `Reproduction`.

    Attributes:
        folder: keeps plans and results.
        suite: "demo", "paper" or "local", with its `tasks`.
        limit: only so many samples of each task; None takes all.
        allow_code_execution: without it, code tasks are omitted.
        tasks: options of `evaluate_tasks`.
        chat: as for `evaluate_tasks`.
        efficiency: options of `measure_efficiency`.
        release: the release's folder of this model, whose reference metrics are added.
    """

    folder: Path
    suite: str = "paper"
    limit: int | None = None
    allow_code_execution: bool = False
    tasks: TaskOptions = field(default_factory=TaskOptions)
    chat: bool | None = None
    efficiency: EfficiencyOptions = field(
        default_factory=lambda: EfficiencyOptions(batch_sizes=(1,))
    )
    release: str | os.PathLike[str] | None = None


@dataclass
class Reproduction:
    """A model, plans for it and the paper's numbers, measured by `run`.

    Attributes:
        model, tokenizer: the dense model.
        candidates: the plans. At each ratio the last one that can be made is timed: speed depends
            on the ratio alone.
        paper: the paper's numbers of this model.
        options: what is measured, and where it is kept.
        build_seconds: seconds that H took to build; None if unknown.
        say: gets a line for every finished step.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    candidates: Sequence[Candidate]
    paper: Published
    options: ReproductionOptions
    build_seconds: float | None = None
    say: Callable[[str], None] = print

    @cached_property
    def _mark(self) -> dict[str, Any]:
        return marks(self.model)

    @cached_property
    def _data(self) -> str | None:
        """The mark of the copies of datasets: of their content, wherever they are."""
        folder = self.options.tasks.data
        if folder is None:
            return None
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return fingerprint(
            [[str(p.relative_to(folder)), fingerprint(read_regular(p))] for p in files]
        )

    @property
    def _kept(self) -> Path:
        """The folder of what is measured."""
        return self.options.folder / "measured"

    @property
    def _streamed(self) -> bool:
        """Whether layers are read when they run, so that nothing can be timed."""
        return bool(weights_of(self.model).devices)

    @cached_property
    def _tasks(self) -> dict[str, TaskFile | None]:
        """The tasks to run; None for one of the paper's."""
        tasks = suite_tasks(self.options.suite, self.options.tasks)
        code = [name for name, made in tasks.items() if _is_code(name, made)]
        if code and not self.options.allow_code_execution:
            self.say(f"{', '.join(code)} left out: they need --allow-code-execution")
            return {name: made for name, made in tasks.items() if name not in code}
        return tasks

    def run(self) -> Rows:
        """Measure everything that is not kept yet.

        Returns:
            One row per number. Columns: source ("measured", "paper" or "release"), plan,
            requested_ratio, realized_ratio, guards, task, metric, value, value_error (its standard
            error), shown (whether the page shows it) and failed (the reason, if there is no value).
        """
        if self._streamed:
            self.say("size and speed left out: they need all weights in memory")
        ratios = list(dict.fromkeys(candidate.ratio for candidate in self.candidates))
        # the release's files are read before hours of tasks
        published = [row for ratio in (0.0, *ratios) for row in self._published(ratio)]
        rows = self._scored(Subject())
        for ratio in ratios:
            timed = None
            for label, _, make, _ in (c for c in self.candidates if c.ratio == ratio):
                try:
                    subject = Subject(label, ratio, make())
                    self._keep_plan(subject)
                    rows += self._scored(subject)
                    timed = subject
                except Exception as error:  # one plan must not cost the others
                    rows.append(Subject(label, ratio).failure(error))
            others = {c.label for c in self.candidates if c.baseline and c.ratio == ratio}
            here = pick(rows, requested_ratio=ratio, shown=True)
            rows += best_of([row for row in here if row["plan"] in others])
            if timed is not None and not self._streamed:
                rows += self._timed(timed)
        return rows + published

    def _keep_plan(self, subject: Subject) -> None:
        assert subject.plan is not None
        name = f"{subject.label.replace(' ', '_')}_{100 * subject.ratio:g}.json"
        write_atomically(self.options.folder / "plans" / name, subject.plan.to_json().encode())

    # Scores ---------------------------------------------------------------------------------------
    def _scored(self, subject: Subject) -> Rows:
        """Score the dense model, or a plan's pruned one, on every task."""
        todo = {
            name: self._settings(name, made, subject.plan) for name, made in self._tasks.items()
        }
        kept = [name for name, s in todo.items() if is_kept(self._kept, "suite", s)]
        rows: Rows = []
        with self._pruned(subject.plan if len(kept) < len(todo) else None) as model:
            for name, settings in todo.items():
                try:
                    compute = partial(self._evaluate, model, name)
                    found = kept_rows(self._kept, "suite", settings, compute)
                except Exception as error:  # one task must not cost the others
                    rows.append(subject.failure(error, name))
                    continue
                shown = (_shown_metric(name, found), BOS_WINDOWS, APART)
                for r in found:
                    metric, value = r["metric"], plus_minus(r["value"], r["value_error"])
                    task = f"{name}, {metric}" if metric in (BOS_WINDOWS, APART) else name
                    row = subject.row("measured", task, metric, r["value"], metric in shown)
                    rows.append(row | {"value_error": r["value_error"]})
                    if metric in shown:
                        again = " (kept)" if name in kept else ""
                        self.say(f"{subject}: {name} {metric} {value}{again}")
        return rows + self._means(subject, rows)

    def _evaluate(self, model: PreTrainedModel, name: str) -> Rows:
        """Run one task."""
        options = self.options
        report = evaluate_tasks(
            model,
            self.tokenizer,
            options.suite,
            options.limit,
            options.allow_code_execution,
            options=replace(options.tasks, tasks=(name,)),
            chat=options.chat,
        )
        notes = " ".join(report.settings["notes"])
        return [row | {"notes": notes} for row in report.rows()]

    @contextmanager
    def _pruned(self, plan: Selection | None) -> Iterator[PreTrainedModel]:
        """Yield the pruned model, or the dense one without a plan.

        If the dense model is streamed, the pruned one is too, from a folder that is then removed.
        """
        if plan is None or not self._streamed:
            yield self.model if plan is None else cut(self.model, plan)
            return
        # named by the model and the plan, so that a run that was killed finds it again
        name = fingerprint(self._mark | {"plan": plan.fingerprint})[:10]
        folder = self.options.folder / "pruned" / name
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            prune(self.model, plan, out=folder)
        pruned = load_pruned(folder, device=model_device(self.model), stream=True)
        require_dense(self.model, pruned)
        yield pruned
        shutil.rmtree(folder)

    def _means(self, subject: Subject, rows: Rows) -> Rows:
        """Return the mean over the averaged tasks, and that of the two code benchmarks."""
        averaged = {name: _average_of(name, made) for name, made in self._tasks.items()}
        code = {name: PAPER_METRICS[name] for name in PAPER_CODE if name in self._tasks}
        means = []
        for title, metrics in (("average", averaged), ("code", code)):
            wanted = {name: metric for name, metric in metrics.items() if metric}
            found = [pick(rows, task=name, metric=metric) for name, metric in wanted.items()]
            if found and all(found):
                mean = sum(row["value"] for (row,) in found) / len(found)
                means.append(subject.row("measured", title, f"mean of {len(found)}", mean))
        return means

    def _settings(self, name: str, made: TaskFile | None, plan: Selection | None) -> dict[str, Any]:
        options = self.options
        chat = {} if options.chat is None else {"chat": options.chat}
        return (
            self._mark
            | chat
            | {
                "plan": "" if plan is None else plan.fingerprint,
                "suite": options.suite,
                "task": name,
                "content": "" if made is None else fingerprint([made.config, list(made.records)]),
                "data": self._data,
                "tokenizer": tokenizer_mark(self.tokenizer),
                "limit": options.limit,
                "lm_eval": version("lm_eval"),
            }
        )

    # Speed ----------------------------------------------------------------------------------------
    def _timed(self, subject: Subject) -> Rows:
        """Return size and speed relative to the dense model, and the hours of the build."""
        plan, asked = subject.plan, self.options.efficiency
        assert plan is not None

        def compute() -> Rows:
            return list(measure_efficiency(self.model, cut(self.model, plan), asked).rows)

        settings = self._mark | timing_marks(self.model, asked) | {"plan": plan.fingerprint}
        try:
            table = kept_rows(self._kept, "efficiency", settings, compute)
        except Exception as error:  # a GPU without room for two models must not cost the scores
            return [subject.failure(error, "prefill")]
        rows = [
            subject.row("measured", row["quantity"], "pruned / dense", row["ratio"])
            for row in table
            if row["quantity"] in SIZES and row["batch_size"] in (None, asked.batch_sizes[0])
        ]
        if self.build_seconds is not None:
            rows.append(subject.row("measured", HOURS, "hours", self.build_seconds / 3600))
        self.say(f"{subject}: size and speed measured")
        return rows

    # Published numbers ----------------------------------------------------------------------------
    def shows(self, known: Row, table: Rows) -> bool:
        """Whether all numbers of one of the paper's rows stand in a table of `run`."""
        here = pick(table, source="paper", requested_ratio=known["ratio"])
        found = {(row["plan"].split(",")[0], row["task"], row["value"]) for row in here}
        name = DENSE if known["method"] == "Dense" else known["method"]
        mine = {(name, task, value) for task, value in known["values"].items()}
        return not known["variant"] and mine <= found

    def _published(self, ratio: float) -> Rows:
        """Return the numbers of the paper and the release at a ratio, 0 for the dense model."""
        wanted = {*PAPER_LABELS, *(candidate.label for candidate in self.candidates)}
        rows: Rows = []
        for known in pick(self.paper.rows, ratio=ratio, variant=""):
            if known["method"] not in wanted:
                continue
            label = DENSE if known["method"] == "Dense" else known["method"]
            strength = known["interaction_strength"]
            label += "" if strength is None else f", lambda {strength:g}"
            for task, value in known["values"].items():
                subject = Subject(label, ratio)
                before = [row["value"] for row in pick(rows, plan=label, task=task)]
                if value in before:
                    continue
                if before:  # the paper's tables differ, so both stand there
                    subject = Subject(f"{label} ({known['table']})", ratio)
                row = subject.row("paper", task, PAPER_METRICS.get(task, ""), value)
                rows.append(row | {"table": known["table"]})
        if self.options.release is not None and ratio:
            rows += [
                Subject(RELEASED, ratio).row("release", task, PAPER_METRICS[task], value)
                for task, value in reference_metrics(self.options.release, ratio).items()
            ]
        return rows


def _is_code(name: str, made: TaskFile | None) -> bool:
    return name in PAPER_CODE if made is None else made.program is not None


def _average_of(name: str, made: TaskFile | None) -> str | None:
    known = PAPER_HARNESS.get(name) if made is None else made
    return None if known is None else known.average


def _shown_metric(name: str, rows: Rows) -> str:
    """Return the metric of the paper's tables, else the one averaged, else the first."""
    metrics: list[str] = [row["metric"] for row in rows]
    averaged = [row["metric"] for row in rows if row["averaged"]]
    known = [metric for metric in metrics if metric == PAPER_METRICS.get(name)]
    return (known or averaged or metrics)[0]


def tokenizer_mark(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer: its rules, or its words, and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else parse_json(backend.to_str())
    for passing in ("truncation", "padding"):  # set by whoever used it last
        rules.pop(passing, None)
    return fingerprint(rules, getattr(tokenizer, "chat_template", None))
