"""A race of plans on held-out text, in stages: clear losers stop early, all others run to the end.

Plans are compared in pairs over the same rows. Most of the spread over rows is common to both plans
and cancels in the difference, so a few rows are enough to drop a clear loser. The leader of a stage
always runs on, so at least one plan is measured on every row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...base.arguments import as_float
from ...base.errors import InfeasibleError, InputError
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.risk import PlanTable, measure_plans, standard_error
from ...solver.guards import Guards
from ...solver.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Interval = tuple[float, float]
# settings, and the plan or error that they give
Found = tuple[Interval, Guards, Selection | InfeasibleError]

Judge = Literal["kl", "nll"]
TIE = 1.0  # paired standard errors within which a plan is "not worse" than the winner


# Options and results ----------------------------------------------------------------------------


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
        progress, plans_per_batch: as for `measure_plans`.

    Raises:
        InputError: a value out of range.
    """

    max_candidates: int = 32
    first_rows: int = 8
    stop_beyond: float = 4.0
    judge: Judge = "kl"
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool = True
    plans_per_batch: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_candidates", 2), ("first_rows", 2), ("stop_beyond", TIE)):
            if not as_float(getattr(self, name), name) >= least:
                raise InputError(f"{name} is {getattr(self, name)}. Give at least {least:g}.")
        if self.judge not in ("kl", "nll"):
            raise InputError(f'judge is {self.judge!r}. Compare plans by "kl" or by "nll".')


@dataclass(frozen=True)
class Fit:
    """The lambda at which R_lambda equals the measured risk of a plan (App. "Trust-Region View").

    From R_lambda(s) - R(s) = (lambda - 1) E - b, the gap is zero at 1 + b/E. Eq. (lambdastar)
    prints 1 - b/E, which is a sign error. This lambda tells how far the surrogate is off; it does
    not tell which plan is best.

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
        """1 + b/E, where R_lambda(s) = R(s); NaN without edge mass."""
        return 1 + self.remainder / self.edge_mass if self.edge_mass else math.nan

    @property
    def printed(self) -> float:
        """1 - b/E as eq. (lambdastar) prints it, for comparison; NaN without edge mass."""
        return 1 - self.remainder / self.edge_mass if self.edge_mass else math.nan

    @property
    def strength_error(self) -> float:
        """Standard error of both lambdas, from that of the measured risk; H is taken as exact."""
        return self.standard_error / abs(self.edge_mass) if self.edge_mass else math.nan


@dataclass(frozen=True, eq=False)
class Candidate:
    """One distinct pruned set and its result in the race.

    Attributes:
        selection: the plan, as solved under the loosest guards that make it.
        intervals: all lambdas that make it: [start, stop) of path segments, (x, x) for points.
        guards: all guards that make it, loosest first.
        kl: held-out KL over the rows measured, nats per token.
        standard_error: standard error of `kl` over rows, nats per token.
        nll: loss on the next tokens of the same rows, nats per token.
        rows: number of rows measured.
        judge: "kl" or "nll", the value that the next two compare.
        difference: judged value minus that of the winner over the same rows, nats per token; 0 for
            the winner. In a report it is minus that of the best plan.
        difference_error: paired standard error of `difference`, nats per token.
        stopped_early: whether it was dropped as a clear loser. Its numbers are then of fewer rows
            than the winner's.
    """

    selection: Selection
    intervals: tuple[Interval, ...]
    guards: tuple[Guards, ...]
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
        """Whether it is not worse than the winner: difference <= TIE x its paired error.

        A plan that was stopped early is not tied.
        """
        return not self.stopped_early and self.difference <= TIE * self.difference_error

    @property
    def fit(self) -> Fit:
        """The lambda at which the surrogate equals this plan's measured risk."""
        edge, predicted = self.selection.edge_risk, self.selection.predicted_risk
        assert edge is not None  # solve_greedy fills both
        assert predicted is not None
        return Fit(self.kl, self.standard_error, edge, self.kl - predicted)

    def __repr__(self) -> str:
        spans = ", ".join(f"{a:.4g}" if a == b else f"{a:.4g}..{b:.4g}" for a, b in self.intervals)
        state = f"stopped after {self.rows} rows" if self.stopped_early else "tied" * self.tied
        return (
            f"lambda {spans}  {self.guards[0]}  KL {self.kl:.5f} ± "
            f"{self.standard_error:.5f}  perplexity {self.perplexity:.4g}  behind in "
            f"{self.judge} {self.difference:.5f} ± "
            f"{self.difference_error:.5f}  {state}".rstrip()
        )


# The race ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A distinct plan and all settings that make it: lambdas and guards."""

    selection: Selection
    intervals: tuple[Interval, ...]
    guards: tuple[Guards, ...]


def require_text(
    curvature: Curvature, held_out: CalibrationSet, report_on: CalibrationSet | None
) -> None:
    """Raise unless there are two rows to choose on and no row serves two purposes."""
    if len(held_out) < 2:
        raise InputError(
            f"held_out has {len(held_out)} row, but a paired standard error needs two. Give more."
        )
    held_out.require_disjoint(curvature)
    if report_on is not None:
        report_on.require_disjoint(curvature)
        report_on.require_disjoint(held_out)


def race(
    model: PreTrainedModel, plans: list[Contender], held_out: CalibrationSet, options: ChoiceOptions
) -> tuple[Candidate, ...]:
    """Measure plans over growing subsets of the rows, dropping clear losers after each stage.

    Returns:
        The candidates in the order of `plans`, with differences to the winner.
    """
    values = np.full((len(plans), len(held_out), 2), np.nan)  # KL and nll
    column = 0 if options.judge == "kl" else 1
    judged = values[..., column]
    alive = list(range(len(plans)))
    start, stop = 0, min(options.first_rows, len(held_out))
    while start < len(held_out):
        part, running = held_out.rows(start, stop), [plans[number] for number in alive]
        values[alive, start:stop] = _measure(model, running, part, options, f"rows{start}-{stop}")
        if stop < len(held_out):
            # judged on all rows so far. A plan that is dropped by chance cannot come back, and each
            # stage is such a chance: hence the wide margin of `stop_beyond`
            places = survivors(judged[alive, :stop], options.stop_beyond)
            alive = [alive[place] for place in places]
        start, stop = stop, min(2 * stop, len(held_out))
    # only plans measured on all rows can win: means over other rows do not compare
    winner = values[alive[int(judged[alive].mean(axis=1).argmin())]]
    return tuple(
        standing(plan, rows, winner, options.judge)
        for plan, rows in zip(plans, values, strict=True)
    )


def survivors(judged: np.ndarray, stop_beyond: float) -> list[int]:
    """Return the places of the plans that are not clearly behind the one of lowest mean.

    Args:
        judged: [plans, rows] values to compare, nats per token.
        stop_beyond: paired standard errors beyond which a plan is clearly behind.
    """
    leader = judged[judged.mean(axis=1).argmin()]
    gaps = [_mean_and_error(row - leader) for row in judged]
    # `not >`, so that the leader (0 against 0) stays, and a gap whose error is unknown (NaN) too
    return [place for place, (gap, error) in enumerate(gaps) if not gap > stop_beyond * error]


def standing(
    plan: Contender, values: np.ndarray, reference: np.ndarray, judge: Judge = "kl"
) -> Candidate:
    """Compare the values of a plan with those of a reference that was measured in full.

    Args:
        plan: the plan.
        values: its KL and nll [rows, 2], nats per token; NaN in the rows after it was stopped.
        reference: the same of the reference, without NaN.
        judge: the value to compare.
    """
    rows = int((~np.isnan(values[:, 0])).sum())
    kl, nll = values[:rows].T
    gap = (values - reference)[:rows, 0 if judge == "kl" else 1]
    return Candidate(
        plan.selection,
        plan.intervals,
        plan.guards,
        *_mean_and_error(kl),
        float(nll.mean()),
        rows,
        judge,
        *_mean_and_error(gap),
        stopped_early=rows < len(values),
    )


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over rows and its standard error; NaN with a single row."""
    return float(values.mean()), float(standard_error(values[None])[0])


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
        plans_per_batch=options.plans_per_batch,
    )


def _measure(
    model: PreTrainedModel,
    plans: Sequence[Contender],
    text: CalibrationSet,
    options: ChoiceOptions,
    part: str,
) -> np.ndarray:
    """KL and nll [plans, rows, 2] of one stage, nats per token."""
    table = measure_stage(model, [plan.selection for plan in plans], text, options, part)
    assert table.nll is not None  # measure_plans fills it
    return np.stack([table.kl, table.nll], axis=-1)


def report_plans(
    model: PreTrainedModel,
    curve: tuple[Candidate, ...],
    references: Iterable[tuple[str, Found]],
    report_on: CalibrationSet | None,
    options: ChoiceOptions,
) -> dict[str, Candidate]:
    """Measure the best plan and the references on `report_on`; empty if that is None.

    Args:
        model: the dense model.
        curve: the candidates, in order of preference.
        references: (name, outcome) pairs; those without a plan are skipped.
        report_on: rows that were used for nothing else.
        options: how to measure.

    Returns:
        "best" and the references by name, with differences to the best plan.
    """
    if report_on is None:
        return {}
    best = next(candidate for candidate in curve if candidate.tied)
    plans = {"best": Contender(best.selection, best.intervals, best.guards)}
    for name, (interval, guards, outcome) in references:
        if isinstance(outcome, Selection):
            plans[name] = Contender(outcome, (interval,), (guards,))
    values = _measure(model, list(plans.values()), report_on, options, "report")
    return {
        name: standing(plan, rows, values[0], options.judge)
        for (name, plan), rows in zip(plans.items(), values, strict=True)
    }
