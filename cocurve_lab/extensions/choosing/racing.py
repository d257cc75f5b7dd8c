"""The race of plans over rows, its options, the candidates with their numbers, and the report.

After each stage of the race only those plans go on that are not far behind. Plans are compared in
pairs over the same rows. Most of the spread over rows is common to both and cancels in the
difference, so a few rows are enough to drop a clear loser.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from ...base.errors import InfeasibleError, InputError
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.risk import PlanTable, mean_and_error, measure_plans
from ...solver.guards import Guards
from ...solver.selection import Selection

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

Racer = TypeVar("Racer")
Stage = TypeVar("Stage")
Interval = tuple[float, float]
Judge = Literal["kl", "nll"]
TIE = 1.0  # paired standard errors within which a plan is "not worse" than the winner


# The race -----------------------------------------------------------------------------------------


def race(
    candidates: Iterable[Racer],
    stages: Sequence[Stage],
    measure: Callable[[list[Racer], Stage], object],
    ahead: Callable[[list[Racer], Stage], Iterable[Racer]],
) -> list[Racer]:
    """Measure candidates stage by stage; return those that were measured in all stages.

    Args:
        candidates: what is compared: plans, or their numbers.
        stages: what a candidate goes through, such as the rows of `doubling_stages`.
        measure: measures the candidates that are left in one stage, and stores their values.
        ahead: selects those that go on after a stage; not called after the last one.
    """
    left = list(candidates)
    for number, stage in enumerate(stages, 1):
        if not left:
            break
        measure(left, stage)
        if number < len(stages):
            left = list(ahead(left, stage))
    return left


def doubling_stages(rows: int, first: int) -> list[slice]:
    """Split rows into stages: `first` rows, then as many as are done already."""
    stops = [0, min(first, rows)]
    while stops[-1] < rows:
        stops.append(min(2 * stops[-1], rows))
    return [slice(start, stop) for start, stop in pairwise(stops)]


def survivors(judged: np.ndarray, stop_beyond: float) -> list[int]:
    """Return the places of the plans that are not clearly behind the one of lowest mean.

    Args:
        judged: [plans, rows] values to compare, nats per token.
        stop_beyond: paired standard errors beyond which a plan is clearly behind.
    """
    leader = judged[judged.mean(axis=1).argmin()]
    gaps = [mean_and_error(row - leader) for row in judged]
    # `not >`, so that the leader (0 against 0) stays, and a gap whose error is unknown (NaN) too
    return [place for place, (gap, error) in enumerate(gaps) if not gap > stop_beyond * error]


def require_pairs(text: CalibrationSet, name: str) -> None:
    """Raise InputError unless there are two rows, for a paired standard error."""
    if len(text) < 2:
        raise InputError(
            f"{name} has {len(text)} row, but a paired standard error needs two. Give more."
        )


# Options and results ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChoiceOptions:
    """Options of measuring candidates.

    Attributes:
        max_candidates: the most plans of a lambda path to measure, spread evenly over its plans;
            those at the smallest and the largest lambda are always among them. A grid of candidates
            is measured whole.
        first_rows: rows of the first stage. Every further stage doubles the rows done. Rows are
            taken in their order, so they should not be sorted by source.
        stop_beyond: a plan that is worse than the leader by more than this many paired standard
            errors at the end of a stage is not measured further; inf measures everything.
        judge: the value that plans are compared by: "kl", the divergence from the dense model, or
            "nll", the loss on the text (the logarithm of perplexity); both in nats per token.
        checkpoint: beginning of the names of the files to resume from, one per stage.
        progress: as for `measure_plans`.
    """

    max_candidates: int = 32
    first_rows: int = 8
    stop_beyond: float = 4.0
    judge: Judge = "kl"
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_candidates", 2), ("first_rows", 2), ("stop_beyond", TIE)):
            if not getattr(self, name) >= least:
                raise InputError(f"{name} is {getattr(self, name)}. Give at least {least:g}.")
        if self.judge not in ("kl", "nll"):
            raise InputError(f'judge is {self.judge!r}. Compare plans by "kl" or by "nll".')


@dataclass(frozen=True)
class Fit:
    """The lambda at which R_lambda equals the measured risk of a plan (App. "Trust-Region View").

    From R_lambda(s) - R(s) = (lambda - 1) E - b, the gap is zero at 1 + b/E. Eq. (lambdastar)
    prints 1 - b/E, which is a sign error. This lambda shows how far the surrogate is off, not which
    plan is best. Without edge mass all three properties are NaN.

    Attributes:
        measured_risk: R(s), the held-out KL, nats per token.
        standard_error: of `measured_risk` over rows.
        edge_mass: E = sum over u < v in S of H_uv, nats per token.
        remainder: b = R(s) - 1/2 s^T H s, nats per token, of either sign. It contains higher
            orders, but also the top-r truncation of H and the difference between the texts.
    """

    measured_risk: float
    standard_error: float
    edge_mass: float
    remainder: float

    @property
    def interaction_strength(self) -> float:
        """1 + b/E, where R_lambda(s) = R(s)."""
        return 1 + self.remainder / self.edge_mass if self.edge_mass else math.nan

    @property
    def printed(self) -> float:
        """1 - b/E as eq. (lambdastar) prints it, for comparison."""
        return 1 - self.remainder / self.edge_mass if self.edge_mass else math.nan

    @property
    def strength_error(self) -> float:
        """Standard error of both lambdas, from that of the measured risk; H is taken as exact."""
        return self.standard_error / abs(self.edge_mass) if self.edge_mass else math.nan


@dataclass(frozen=True, eq=False)
class Contender:
    """A distinct pruned set and all settings that make it.

    Attributes:
        selection: the plan, as solved under the loosest guards that make it.
        intervals: all lambdas that make it: [start, stop) of path segments, (x, x) for points.
        guards: all guards that make it, loosest first.
    """

    selection: Selection
    intervals: tuple[Interval, ...]
    guards: tuple[Guards, ...]

    def merged(self, other: Contender) -> Contender:
        """Add the settings of another contender with the same pruned set."""
        *before, (start, stop) = self.intervals
        for new in other.intervals:
            if start <= new[0] <= stop:  # they touch
                stop = max(stop, new[1])
            else:
                before, (start, stop) = [*before, (start, stop)], new
        guards = tuple(dict.fromkeys((*self.guards, *other.guards)))
        return Contender(self.selection, (*before, (start, stop)), guards)


@dataclass(frozen=True, eq=False)
class Infeasible:
    """Settings that give no plan: their interval of lambda, their guards, and the error."""

    interval: Interval
    guards: Guards
    error: InfeasibleError

    @property
    def reason(self) -> str:
        """Why there is no plan."""
        return str(self.error)


Outcome = Contender | Infeasible


@dataclass(frozen=True, eq=False)
class Candidate(Contender):
    """A contender and its result in the race.

    Attributes:
        kl, standard_error: held-out KL over the rows measured, and its error, nats per token.
        nll: loss on the next tokens of the same rows, nats per token.
        rows: number of rows measured.
        judge: "kl" or "nll", the value that the next two compare.
        difference, difference_error: judged value minus that of the winner over the same rows, and
            its paired standard error, nats per token; 0 for the winner. In a report it is minus
            that of the best plan.
        stopped_early: whether it was dropped as a clear loser. Its numbers are then of fewer rows
            than the winner's.
    """

    kl: float
    standard_error: float
    nll: float
    rows: int
    judge: Judge
    difference: float
    difference_error: float
    stopped_early: bool

    @property
    def judged(self) -> float:
        """The value that plans are compared by, nats per token."""
        return self.kl if self.judge == "kl" else self.nll

    @property
    def perplexity(self) -> float:
        """exp(nll) over the rows measured; comparable within one text and tokenizer only."""
        return math.exp(self.nll)

    @property
    def tied(self) -> bool:
        """Whether it ran to the end and is not worse: difference <= TIE x its paired error."""
        return not self.stopped_early and self.difference <= TIE * self.difference_error

    @property
    def fit(self) -> Fit:
        """The lambda at which the surrogate equals this plan's measured risk."""
        edge, predicted = self.selection.edge_risk, self.selection.predicted_risk
        assert edge is not None  # solve_greedy fills both
        assert predicted is not None
        return Fit(self.kl, self.standard_error, edge, self.kl - predicted)


def table_of(candidates: Sequence[Candidate]) -> DataFrame:
    """One row per candidate: its lambda, the first interval that gives it, its KL, and the `Fit`.

    Names are those of the attributes, with `<name>_error` for a standard error; nats per token.
    """
    from pandas import DataFrame

    rows = []
    for candidate in candidates:
        fit, plan = candidate.fit, candidate.selection
        start, stop = candidate.intervals[0]
        row = {
            "interaction_strength": plan.interaction_strength,
            "start": start,
            "stop": stop,
            "intervals": len(candidate.intervals),
            "guards": str(candidate.guards[0]),
            "realized_ratio": plan.realized_ratio,
            "predicted_risk": plan.predicted_risk,
            "kl": candidate.kl,
            "kl_error": candidate.standard_error,
            "perplexity": candidate.perplexity,
            "rows": candidate.rows,
            "judge": candidate.judge,
            "difference": candidate.difference,
            "difference_error": candidate.difference_error,
            "stopped_early": candidate.stopped_early,
            "tied": candidate.tied,
            "edge_mass": fit.edge_mass,
            "remainder": fit.remainder,
            "fitting_strength": fit.interaction_strength,
            "fitting_strength_printed": fit.printed,
            "fitting_strength_error": fit.strength_error,
        }
        rows.append(row)
    return DataFrame(rows)


# Measurement --------------------------------------------------------------------------------------


def require_text(
    curvature: Curvature, held_out: CalibrationSet, report_on: CalibrationSet | None
) -> tuple[CalibrationSet, CalibrationSet | None]:
    """Raise unless there are two rows to choose on and no text serves two purposes.

    Returns both sets; their sources name the share that H has seen.
    """
    require_pairs(held_out, "held_out")
    held_out = held_out.require_disjoint(curvature)
    if report_on is not None:
        report_on = report_on.require_disjoint(curvature)
        report_on.require_disjoint(held_out)
    return held_out, report_on


def race_plans(
    model: PreTrainedModel,
    plans: Sequence[Contender],
    held_out: CalibrationSet,
    options: ChoiceOptions,
) -> tuple[Candidate, ...]:
    """Race plans over growing parts of the rows; return them in the same order, with their numbers.

    The leader of a stage always goes on, so at least one plan is measured on every row.
    """
    values = np.full((len(plans), len(held_out), 2), np.nan)  # KL and nll
    judged = values[..., 0 if options.judge == "kl" else 1]

    def measure(numbers: list[int], stage: slice) -> None:
        running, part = [plans[number].selection for number in numbers], f"rows{stage.start}-"
        text = held_out.rows(stage.start, stage.stop)
        table = measure_stage(model, running, text, options, f"{part}{stage.stop}")
        values[numbers, stage] = _kl_and_nll(table)

    def ahead(numbers: list[int], stage: slice) -> list[int]:
        # judged on all rows so far. A plan that is dropped by chance cannot come back, and each
        # stage is such a chance: hence the wide margin of `stop_beyond`
        places = survivors(judged[numbers, : stage.stop], options.stop_beyond)
        return [numbers[place] for place in places]

    stages = doubling_stages(len(held_out), options.first_rows)
    whole = race(range(len(plans)), stages, measure, ahead)
    # only plans measured on all rows can win: means over other rows do not compare
    winner = values[whole[int(judged[whole].mean(axis=1).argmin())]]
    return _compared(plans, values, winner, options.judge)


def report_plans(
    model: PreTrainedModel,
    best: Contender,
    references: Mapping[str, Outcome],
    report_on: CalibrationSet | None,
    options: ChoiceOptions,
) -> dict[str, Candidate]:
    """Measure the best plan and the feasible references on rows that were used for nothing else.

    Returns:
        "best" and the references by name, with differences to the best plan; empty without
        `report_on`.
    """
    if report_on is None:
        return {}
    plans = {"best": best}
    plans |= {name: plan for name, plan in references.items() if isinstance(plan, Contender)}
    selections = [plan.selection for plan in plans.values()]
    values = _kl_and_nll(measure_stage(model, selections, report_on, options, "report"))
    found = _compared(plans.values(), values, values[0], options.judge)
    return dict(zip(plans, found, strict=True))


def measure_stage(
    model: PreTrainedModel,
    plans: Sequence[Selection],
    text: CalibrationSet,
    options: ChoiceOptions,
    part: str,
) -> PlanTable:
    """Measure plans with a checkpoint of their own, because a file belongs to one text."""
    return measure_plans(
        model,
        plans,
        text,
        checkpoint=None if options.checkpoint is None else f"{options.checkpoint}.{part}",
        progress=options.progress,
    )


def _kl_and_nll(table: PlanTable) -> np.ndarray:
    """KL and nll [plans, rows, 2], nats per token."""
    assert table.nll is not None  # measure_plans fills it
    return np.stack([table.kl, table.nll], axis=-1)


def _compared(
    plans: Iterable[Contender], values: np.ndarray, reference: np.ndarray, judge: Judge
) -> tuple[Candidate, ...]:
    """Compare plans with a reference [rows, 2] that was measured on all rows.

    `values` is KL and nll [plans, rows, 2], NaN in the rows after a plan was stopped.
    """
    found = []
    for plan, measured in zip(plans, values, strict=True):
        rows = int((~np.isnan(measured[:, 0])).sum())
        kl, error = mean_and_error(measured[:rows, 0])
        gaps = (measured - reference)[:rows, 0 if judge == "kl" else 1]
        difference, difference_error = mean_and_error(gaps)
        found.append(
            Candidate(
                selection=plan.selection,
                intervals=plan.intervals,
                guards=plan.guards,
                kl=kl,
                standard_error=error,
                nll=float(measured[:rows, 1].mean()),
                rows=rows,
                judge=judge,
                difference=difference,
                difference_error=difference_error,
                stopped_early=rows < len(measured),
            )
        )
    return tuple(found)
