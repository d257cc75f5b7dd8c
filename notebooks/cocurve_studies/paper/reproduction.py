"""The paper's tables measured on one model: plans, suite and speed, beside the paper's numbers.

Every task of every plan is kept in the folder as soon as it is done, so a killed run resumes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.base.tables import Row, Table, cached_table, is_kept, pick, plus_minus
from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from cocurve_lab.evaluation.harness import require_harness
from cocurve_lab.evaluation.suites import PAPER_CODE, PAPER_HARNESS, PAPER_METRICS
from cocurve_lab.evaluation.task_files import TaskFile
from cocurve_lab.evaluation.tasks import TaskOptions, evaluate_tasks, suite_tasks
from cocurve_lab.models.identity import fingerprint_model, model_device, model_dtype
from cocurve_lab.models.layers import source_of
from cocurve_lab.models.runtime import device_name
from cocurve_lab.pruner.cutting import cut, prune
from cocurve_lab.pruner.saving import load_pruned
from cocurve_lab.solver.selection import Selection

from .published import Published, reference_metrics
from .side_by_side import DENSE, HOURS, SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

RELEASED = "the release's plan"


class Candidate(NamedTuple):
    """A plan to measure: its label, its ratio, and the function that makes it."""

    label: str
    ratio: float
    make: Callable[[], Selection]


@dataclass(frozen=True)
class ReproductionOptions:
    """Options of `Reproduction`.

    Attributes:
        folder: keeps plans and results.
        suite: "demo", "paper" or "local", with its `tasks`.
        limit: only so many samples of each task; None takes all.
        allow_code_execution: without it, code tasks are left out.
        tasks: options of `evaluate_tasks`.
        efficiency: options of `measure_efficiency`.
        release: the release's folder of this model, whose reference metrics are added.
    """

    folder: Path
    suite: str = "paper"
    limit: int | None = None
    allow_code_execution: bool = False
    tasks: TaskOptions = field(default_factory=TaskOptions)
    efficiency: EfficiencyOptions = field(
        default_factory=lambda: EfficiencyOptions(batch_sizes=(1,))
    )
    release: str | os.PathLike[str] | None = None


@dataclass
class Reproduction:
    """A model, plans for it and the paper's numbers, measured by `run`.

    Attributes:
        model, tokenizer: the dense model.
        candidates: the plans. At each ratio the last one that can be made is timed: speed is a
            matter of the ratio.
        paper: the paper's numbers of this model.
        options: what is measured, and where it is kept.
        build_seconds: what H took to build; None where that is not known.
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
    def _mark(self) -> dict[str, str]:
        return {"model": fingerprint_model(self.model), "dtype": model_dtype(self.model)}

    @property
    def _kept(self) -> Path:
        """The folder of what is measured."""
        return self.options.folder / "measured"

    @property
    def _streamed(self) -> bool:
        """Whether layers are read when they run, so that nothing can be timed."""
        return source_of(self.model) is not None

    @cached_property
    def _tasks(self) -> dict[str, TaskFile | None]:
        """The tasks to run; None for one of the paper's."""
        tasks = suite_tasks(self.options.suite, self.options.tasks)
        code = [name for name, made in tasks.items() if _is_code(name, made)]
        if code and not self.options.allow_code_execution:
            self.say(f"{', '.join(code)} left out: they need --allow-code-execution")
            return {name: made for name, made in tasks.items() if name not in code}
        return tasks

    def run(self) -> Table:
        """Measure everything that is not kept yet.

        Returns:
            One row per number. Columns: source ("measured", "paper" or "release"), plan,
            requested_ratio, realized_ratio, guards, task, metric, value, value_error (its standard
            error), shown (whether the page shows it) and failed (the reason, where there is no
            value).
        """
        require_harness()
        if self._streamed:
            self.say("size and speed left out: they need all weights in memory")
        ratios = list(dict.fromkeys(candidate.ratio for candidate in self.candidates))
        # the release's files are read before hours of tasks
        told = [row for ratio in (0.0, *ratios) for row in self._told(ratio)]
        rows = self._scored(DENSE, 0.0, None)
        for ratio in ratios:
            rows += self._at(ratio)
        return rows + told

    def _at(self, ratio: float) -> Table:
        """Everything measured at one ratio."""
        rows: Table = []
        timed = None
        for label, wanted, make in self.candidates:
            if wanted != ratio:
                continue
            try:
                plan = make()
                self._keep_plan(label, ratio, plan)
                rows += self._scored(label, ratio, plan)
            except Exception as error:  # one plan must not cost the others
                rows.append(self._failure(label, ratio, error))
            else:
                timed = label, plan
        if timed is None or self._streamed:
            return rows
        return rows + self._speed(*timed, ratio)

    def _keep_plan(self, label: str, ratio: float, plan: Selection) -> None:
        name = f"{label.replace(' ', '_')}_{100 * ratio:g}.json"
        write_atomically(self.options.folder / "plans" / name, plan.to_json().encode())

    # Scores ---------------------------------------------------------------------------------------
    def _scored(self, label: str, ratio: float, plan: Selection | None) -> Table:
        """Score the dense model, or a plan's pruned one, on every task."""
        options = self.options
        todo = {name: self._settings(name, made, plan) for name, made in self._tasks.items()}
        kept = [name for name, s in todo.items() if is_kept(self._kept, "suite", s)]
        pruned = plan is not None and len(kept) < len(todo)
        rows: Table = []
        with self._pruned(plan) if plan and pruned else nullcontext(self.model) as model:
            for name, settings in todo.items():

                def compute(name: str = name) -> Table:
                    report = evaluate_tasks(
                        model,
                        self.tokenizer,
                        options.suite,
                        options.limit,
                        options.allow_code_execution,
                        options=replace(options.tasks, tasks=(name,)),
                    )
                    notes = " ".join(report.settings["notes"])
                    return [row | {"notes": notes} for row in report.rows()]

                try:
                    found = cached_table(self._kept, "suite", settings, compute)
                except Exception as error:  # one task must not cost the others
                    rows.append(self._failure(label, ratio, error, name))
                    continue
                shown = _shown_metric(name, found)
                rows += [
                    self._row("measured", label, ratio, name, row["metric"], row["value"], plan)
                    | {"value_error": row["value_error"], "shown": row["metric"] == shown}
                    for row in found
                ]
                (head,) = pick(found, metric=shown)
                how = " (kept)" if name in kept else ""
                value = plus_minus(head["value"], head["value_error"])
                self.say(f"{_title(label, ratio)}: {name} {shown} {value}{how}")
        return rows + self._average(label, ratio, plan, rows)

    @contextmanager
    def _pruned(self, plan: Selection) -> Iterator[PreTrainedModel]:
        """The pruned model; where the dense one is streamed, it is too, from a folder that goes."""
        if not self._streamed:
            yield cut(self.model, plan)
            return
        # by the plan, so that a run that was killed finds it again
        folder = self.options.folder / "pruned" / plan.fingerprint[:10]
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            prune(self.model, plan, out=folder)
        yield load_pruned(folder, device=model_device(self.model), stream=True)
        shutil.rmtree(folder)

    def _average(self, label: str, ratio: float, plan: Selection | None, rows: Table) -> Table:
        metrics = {name: _average_of(name, made) for name, made in self._tasks.items()}
        metrics = {name: metric for name, metric in metrics.items() if metric is not None}
        found = [pick(rows, task=name, metric=metric) for name, metric in metrics.items()]
        if not found or not all(found):
            return []
        mean = sum(row["value"] for (row,) in found) / len(found)
        row = self._row("measured", label, ratio, "average", f"mean of {len(found)}", mean, plan)
        return [row | {"shown": True}]

    def _settings(self, name: str, made: TaskFile | None, plan: Selection | None) -> dict[str, Any]:
        from importlib.metadata import version

        options = self.options
        return self._mark | {
            "plan": "" if plan is None else plan.fingerprint,
            "suite": options.suite,
            "task": name,
            "content": "" if made is None else fingerprint([made.config, list(made.records)]),
            "data": None if options.tasks.data is None else str(options.tasks.data),
            "limit": options.limit,
            "max_length": options.tasks.max_length,
            "lm_eval": version("lm_eval"),
        }

    # Speed ----------------------------------------------------------------------------------------
    def _speed(self, label: str, plan: Selection, ratio: float) -> Table:
        """Size and speed relative to the dense model, and the hours of the build."""
        asked = self.options.efficiency

        def compute() -> Table:
            return list(measure_efficiency(self.model, cut(self.model, plan), asked).rows)

        settings = self._mark | {
            "plan": plan.fingerprint,
            "device": device_name(model_device(self.model)),
            "options": asdict(asked) | {"progress": None, "batch_sizes": list(asked.batch_sizes)},
        }
        try:
            table = cached_table(self._kept, "efficiency", settings, compute)
        except Exception as error:  # a GPU without room for two models must not cost the scores
            return [self._failure(label, ratio, error, "prefill")]
        found = {
            row["quantity"]: ("pruned / dense", row["ratio"])
            for row in table
            if row["quantity"] in SIZES and row["batch_size"] in (None, asked.batch_sizes[0])
        }
        if self.build_seconds is not None:
            found[HOURS] = "hours", self.build_seconds / 3600
        self.say(f"{_title(label, ratio)}: size and speed measured")
        return [
            self._row("measured", label, ratio, task, metric, value, plan) | {"shown": True}
            for task, (metric, value) in found.items()
        ]

    # Rows -----------------------------------------------------------------------------------------
    def _told(self, ratio: float) -> Table:
        """What the paper and the release say at a ratio, 0 for the dense model."""
        wanted = {"CoCurve", "Dense", *(candidate.label for candidate in self.candidates)}
        rows: Table = []
        for known in pick(self.paper.rows, ratio=ratio):
            if known["method"] not in wanted:
                continue
            label = DENSE if known["method"] == "Dense" else known["method"]
            strength = known["interaction_strength"]
            label += "" if strength is None else f", lambda {strength:g}"
            rows += [
                self._row("paper", label, ratio, task, PAPER_METRICS.get(task, ""), value)
                | {"shown": True, "table": known["table"]}
                for task, value in known["values"].items()
            ]
        if self.options.release is not None and ratio:
            rows += [
                self._row("release", RELEASED, ratio, task, PAPER_METRICS[task], value)
                | {"shown": True}
                for task, value in reference_metrics(self.options.release, ratio).items()
            ]
        return rows

    def _row(
        self,
        source: str,
        label: str,
        ratio: float,
        task: str,
        metric: str,
        value: float | None,
        plan: Selection | None = None,
    ) -> Row:
        return {
            "source": source,
            "plan": label,
            "requested_ratio": ratio,
            "realized_ratio": None if plan is None else plan.realized_ratio,
            "guards": "" if plan is None else str(plan.guards),
            "task": task,
            "metric": metric,
            "value": value,
            "value_error": None,
            "shown": False,
            "table": "",
            "failed": "",
        }

    def _failure(self, label: str, ratio: float, error: Exception, task: str = "") -> Row:
        why = (
            str(error) if isinstance(error, InfeasibleError) else f"{type(error).__name__}: {error}"
        )
        log.warning("%s %s: %s", _title(label, ratio), task, why)
        return self._row("measured", label, ratio, task, "", None) | {"failed": why}


def _is_code(name: str, made: TaskFile | None) -> bool:
    return name in PAPER_CODE if made is None else made.program is not None


def _average_of(name: str, made: TaskFile | None) -> str | None:
    known = PAPER_HARNESS.get(name) if made is None else made
    return None if known is None else known.average


def _shown_metric(name: str, rows: Table) -> str:
    """The metric of the paper's tables, else the one averaged, else the first."""
    metrics: list[str] = [row["metric"] for row in rows]
    averaged = [row["metric"] for row in rows if row["averaged"]]
    known = [metric for metric in metrics if metric == PAPER_METRICS.get(name)]
    return (known or averaged or metrics)[0]


def _title(label: str, ratio: float) -> str:
    return label if label == DENSE else f"{label} at {ratio:.0%}"
