"""A race of plans on held-out text: measured in stages, clear losers stopped, compared in pairs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..errors import InfeasibleError, InputError
from ..solver.guards import Guards
from ..solver.selection import Selection
from .risk import measure_plans, standard_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Interval = tuple[float, float]
Found = tuple[Interval, Guards, Selection | InfeasibleError]  # settings and what they give

Judge = Literal["kl", "nll"]
TIE = 1.0  # paired standard errors within which a plan is "not worse" than the winner


@dataclass(frozen=True)
class ChoiceOptions:
    """How candidates are measured.

    Attributes:
        max_candidates: plans of a lambda path that are measured, spread evenly over its plans; the
            ones at the smallest and the largest lambda are always among them. Grids are not cut.
        first_rows: rows of the first stage; every further stage doubles the rows done. Rows are
            taken in their order, so they should not be sorted by source.
        stop_beyond: a plan that is worse than the leader by more than this many paired standard
            errors at the end of a stage is not measured further; inf measures everything.
        judge: what plans are compared by: "kl", the divergence from the dense model, or "nll", the
            loss on the text itself, which is the logarithm of perplexity; both in nats per token.
        checkpoint: start of the names of the files to resume from, one per stage.
        progress, plans_per_batch: as for `measure_plans`.
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
            if not getattr(self, name) >= least:
                raise InputError(f"{name} is {getattr(self, name)}; it is at least {least:g}.")
        if self.judge not in ("kl", "nll"):
            raise InputError(f'judge is {self.judge!r}; plans are compared by "kl" or by "nll".')


@dataclass(frozen=True)
class Fit:
    """The lambda that makes R_lambda fit the measured risk of one plan (App. "Trust-Region View").

    From R_lambda(s) - R(s) = (lambda - 1) E - b the gap is zero at 1 + b/E; eq. (lambdastar) prints
    1 - b/E, a sign error. It says how far the surrogate is off, not which plan is best.

    Attributes:
        measured_risk: R(s), the held-out KL, nats per token.
        standard_error: of `measured_risk` over rows.
        edge_mass: E = sum over u < v in S of H_uv, nats per token.
        remainder: b = R(s) - 1/2 s^T H s, nats per token, of either sign: higher orders, but also
            the top-r truncation of H and its other text.
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
        """Standard error of both lambdas from that of the measured risk, H taken as exact."""
        return self.standard_error / abs(self.edge_mass) if self.edge_mass else math.nan


@dataclass(frozen=True, eq=False)
class Candidate:
    """One distinct pruned set and how it fared.

    Attributes:
        selection: the plan, as the path of the loosest guards that make it has it (`Segment`).
        intervals: all lambda that make it: [start, stop) of path segments, (x, x) for points.
        guards: all guards that make it, loosest first.
        kl: held-out KL over the rows measured, nats per token.
        standard_error: of `kl` over rows.
        nll: loss on the next tokens of the same rows, nats per token.
        rows: how many rows were measured.
        judge: "kl" or "nll", what the next two are about.
        difference: judged value minus the winner's over the same rows, nats per token; 0 for the
            winner. In a report: minus that of the best plan.
        difference_error: paired standard error of `difference`.
        stopped_early: dropped as a clear loser: its numbers are of fewer rows than the winner's.
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
        """The value plans were compared by, nats per token."""
        return self.kl if self.judge == "kl" else self.nll

    @property
    def perplexity(self) -> float:
        """exp(nll) over the rows measured; comparable within one text and tokenizer only."""
        return math.exp(self.nll)

    @property
    def tied(self) -> bool:
        """Not worse than the winner: measured in full, difference <= TIE x its paired error."""
        return not self.stopped_early and self.difference <= TIE * self.difference_error

    @property
    def fit(self) -> Fit:
        """The lambda that would fit this plan's measured risk."""
        edge, predicted = self.selection.edge_risk, self.selection.predicted_risk
        assert edge is not None  # solve_greedy fills both
        assert predicted is not None
        return Fit(self.kl, self.standard_error, edge, self.kl - predicted)

    def __repr__(self) -> str:
        spans = ", ".join(f"{a:.4g}" if a == b else f"{a:.4g}..{b:.4g}" for a, b in self.intervals)
        state = f"stopped after {self.rows} rows" if self.stopped_early else "tied" * self.tied
        return (
            f"lambda {spans}  {guards_text(self.guards[0])}  KL {self.kl:.5f} +- "
            f"{self.standard_error:.5f}  perplexity {self.perplexity:.4g}  behind in "
            f"{self.judge} {self.difference:.5f} +- "
            f"{self.difference_error:.5f}  {state}".rstrip()
        )


@dataclass(frozen=True)
class Contender:
    """A distinct plan and all settings that make it."""

    selection: Selection
    intervals: tuple[Interval, ...]
    guards: tuple[Guards, ...]


def require_text(
    curvature: Curvature, held_out: CalibrationSet, report_on: CalibrationSet | None
) -> None:
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
    """Measure plans over growing subsets of the rows, dropping clear losers after each stage."""
    values = np.full((len(plans), len(held_out), 2), np.nan)  # KL and nll
    column = 0 if options.judge == "kl" else 1
    judged = values[..., column]
    alive = list(range(len(plans)))
    start, stop = 0, min(options.first_rows, len(held_out))
    while start < len(held_out):
        part, running = held_out.rows(start, stop), [plans[number] for number in alive]
        values[alive, start:stop] = _measure(model, running, part, options, f"rows{start}-{stop}")
        if stop < len(held_out):
            places = _survivors(judged[alive, :stop], options.stop_beyond)
            alive = [alive[place] for place in places]
        start, stop = stop, min(2 * stop, len(held_out))
    winner = values[alive[int(judged[alive].mean(axis=1).argmin())]]
    return tuple(
        standing(plan, rows, winner, options.judge)
        for plan, rows in zip(plans, values, strict=True)
    )


def _survivors(judged: np.ndarray, stop_beyond: float) -> list[int]:
    """Plans of values [plans, rows] not clearly behind the lowest mean, see `ChoiceOptions`."""
    leader = judged[judged.mean(axis=1).argmin()]
    gaps = [_mean_and_error(row - leader) for row in judged]
    return [place for place, (gap, error) in enumerate(gaps) if not gap > stop_beyond * error]


def standing(
    plan: Contender, values: np.ndarray, reference: np.ndarray, judge: Judge = "kl"
) -> Candidate:
    """A plan's KL and nll [rows, 2], NaN from where it was stopped on, beside a whole one's."""
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


def _measure(
    model: PreTrainedModel,
    plans: Sequence[Contender],
    text: CalibrationSet,
    options: ChoiceOptions,
    part: str,
) -> np.ndarray:
    """KL and nll [plans, rows, 2], with a checkpoint of its own: a file has one text."""
    table = measure_plans(
        model,
        [plan.selection for plan in plans],
        text,
        checkpoint=None if options.checkpoint is None else f"{options.checkpoint}.{part}",
        progress=options.progress,
        plans_per_batch=options.plans_per_batch,
    )
    assert table.nll is not None  # measure_plans fills it
    return np.stack([table.kl, table.nll], axis=-1)


def report_plans(
    model: PreTrainedModel,
    curve: tuple[Candidate, ...],
    references: Iterable[tuple[str, Found]],
    report_on: CalibrationSet | None,
    options: ChoiceOptions,
) -> dict[str, Candidate]:
    """The best plan and the references that exist, against the best on rows of their own."""
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


def guards_text(guards: Guards) -> str:
    return str(guards)
