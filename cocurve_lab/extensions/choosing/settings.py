"""Choice of lambda and of the guards by KL or loss on held-out text.

The paper leaves both open. Each chooser lists distinct plans, measures them in a race that stops
clear losers early (racing.py), and compares them by paired standard errors over the same rows. The
lowest of many means is biased low, so the chosen plan can be reported on further rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...base.errors import InfeasibleError, InputError
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...solver.gate import Gate, redundancy_gate
from ...solver.guards import FREE, Guards, reachable_ratio
from ...solver.path import lambda_path
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...solver.targets import require_strength
from .racing import (
    TIE,
    Candidate,
    ChoiceOptions,
    Contender,
    Fit,
    Found,
    Interval,
    race,
    report_plans,
    require_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerCap = float | str | None

# no cap; the rule of the release; the paper's cap for Llama at 20 %; a looser one
LAYER_CAPS: tuple[LayerCap, ...] = (None, "1.5x", 0.3, 0.5)
PROTECTIONS = ((0, 0), (1, 1), (2, 2))
RELEASE_GUARDS = Guards(layer_cap_factor=1.5, protect_first=2, protect_last=2)


@dataclass(frozen=True)
class Infeasible:
    """Settings that give no plan: their interval of lambda, their guards, and the reason."""

    interval: Interval
    guards: Guards
    reason: str


@dataclass(frozen=True, eq=False)
class _Choice:
    """The result of a chooser.

    "Best" is the first candidate of `curve` that is not worse than the winner (the lowest mean) by
    more than one paired standard error of their difference. The curve is in order of preference:
    smallest lambda, or loosest guards. So ties go to the preferred candidate.

    Attributes:
        curve: the distinct plans measured, in order of preference.
        infeasible: the settings that give no plan.
        report: "best" and the references by name, measured on `report_on`, with differences to the
            best plan; empty without `report_on`.
        left_out: number of distinct plans of the path that `max_candidates` kept from being
            measured.
    """

    curve: tuple[Candidate, ...]
    infeasible: tuple[Infeasible, ...]
    report: Mapping[str, Candidate]
    left_out: int

    @property
    def winner(self) -> Candidate:
        """The candidate of lowest judged value among those measured in full."""
        return min((c for c in self.curve if not c.stopped_early), key=lambda c: c.judged)

    @property
    def chosen(self) -> Candidate:
        """The candidate that the rule chooses, with its numbers."""
        return next(candidate for candidate in self.curve if candidate.tied)

    @property
    def best(self) -> Selection:
        """The plan that the rule chooses."""
        return self.chosen.selection

    @property
    def cells(self) -> int:
        """Number of measurements made, plan x row."""
        return sum(candidate.rows for candidate in self.curve)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per candidate, ready for a DataFrame."""
        return [_row(candidate) for candidate in self.curve]

    def __repr__(self) -> str:
        whole = len(self.curve) * self.winner.rows
        lines = [
            f"{type(self).__name__} at ratio {self.best.requested_ratio:g}: best is {self.best}",
            f"  {len(self.curve)} distinct plans, {self.cells} of {whole} plan x row measurements, "
            f"best = within {TIE:g} paired standard error of the winner",
            *(f"  {candidate}" for candidate in self.curve),
        ]
        if self.left_out:
            lines.append(f"  {self.left_out} further plans of the path were not measured")
        lines += [f"  infeasible: {entry.reason}" for entry in self.infeasible]
        lines += [f"  reported {name}: {entry}" for name, entry in self.report.items()]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class InteractionChoice(_Choice):
    """The lambda whose plan is best on held-out text; made by `choose_interaction_strength`.

    Attributes:
        gate: the recommendation of `redundancy_gate`, from H alone, and whether it is decided.
    """

    gate: Gate

    @property
    def interaction_strength(self) -> float:
        """A lambda at which `solve_greedy` makes the best plan."""
        assert self.best.interaction_strength is not None  # solve_greedy fills it
        return self.best.interaction_strength

    @property
    def fit(self) -> Fit:
        """E, b and the measured risk of the best plan; every candidate of `curve` has its own."""
        return self.chosen.fit

    @property
    def fitting_strength(self) -> float:
        """1 + b/E of the best plan; it answers another question, see `Fit`."""
        return self.fit.interaction_strength

    def summary(self) -> dict[str, Any]:
        """Return one row of a table by ratio: both lambdas, their origin, and the gate's lambda."""
        row = _row(self.chosen)
        row["requested_ratio"] = self.best.requested_ratio
        gate = {"gate": self.gate.recommended, "gate_decided": self.gate.decided}
        return row | gate | {"redundancy": self.gate.redundancy}


@dataclass(frozen=True, eq=False, repr=False)
class GuardsChoice(_Choice):
    """The guards whose plan is best on held-out text; made by `choose_guards`."""

    @property
    def guards(self) -> Guards:
        """The loosest guards that make the best plan."""
        return self.chosen.guards[0]


def choose_interaction_strength(
    model: PreTrainedModel,
    curvature: Curvature,
    ratio: float,
    held_out: CalibrationSet,
    guards: Guards = FREE,
    *,
    candidates: str | Sequence[float] = "path",
    report_on: CalibrationSet | None = None,
    options: ChoiceOptions = ChoiceOptions(),
) -> InteractionChoice:
    """Choose the lambda whose plan costs least on held-out text; ties go to the smallest lambda.

    Args:
        model: the dense model.
        curvature: its H [M, M].
        ratio: share of removable cost, [0, 1).
        held_out: rows to choose on, at least two, none of them calibrated on.
        guards: where units may be pruned.
        candidates: "path" for every distinct plan of lambda in [0, 1] (at most
            `options.max_candidates` of them), or the lambdas to try, each finite and >= 0.
        report_on: rows for `report`, which has the best plan and those of lambda 0 and 1.
        options: how to measure.

    Returns:
        An InteractionChoice: `.best` is the plan, `.curve` all candidates (lambda, KL, paired
        standard error).

    Raises:
        InputError: no or bad candidates, a ratio out of range, or fewer than two held-out rows.
        InfeasibleError: no candidate reaches the ratio under the guards.
        MismatchError: rows are shared between calibration, `held_out` and `report_on` (as far as
            the curvature knows its rows), or the curvature is of other units.
    """
    require_text(curvature, held_out, report_on)
    ends = [_solve(curvature, ratio, strength, guards) for strength in (0.0, 1.0)]
    if isinstance(candidates, str):
        if candidates != "path":
            raise InputError(f'candidates is {candidates!r}. Give "path" or a list of lambdas.')
        found = _path(curvature, ratio, guards, ends)
        limit = options.max_candidates
    else:
        found = [_solve(curvature, ratio, value, guards) for value in _strengths(candidates)]
        limit = len(found)
    plans, infeasible = _distinct(found)
    kept = _spread(plans, limit)
    curve = race(model, kept, held_out, options)
    references = zip(("lambda 0", "lambda 1"), ends, strict=True)
    report = report_plans(model, curve, references, report_on, options)
    gate = redundancy_gate(curvature, ratio)
    return InteractionChoice(curve, infeasible, report, len(plans) - len(kept), gate)


def choose_guards(
    model: PreTrainedModel,
    curvature: Curvature,
    ratio: float,
    held_out: CalibrationSet,
    *,
    layer_caps: Sequence[LayerCap] = LAYER_CAPS,
    protections: Sequence[tuple[int, int]] = PROTECTIONS,
    interaction_strength: float = 1.0,
    report_on: CalibrationSet | None = None,
    options: ChoiceOptions = ChoiceOptions(),
) -> GuardsChoice:
    """Choose the cap and protection whose plan costs least on held-out text; ties to the loosest.

    The paper chooses by perplexity (appendix "The Greedy Co-Pruning Solver");
    `ChoiceOptions(judge="nll")` does the same. Every cap is combined with every protection. Looser
    means a larger `reachable_ratio`, then a larger cap, then fewer protected layers. So guards that
    allow everything that others do never come later.

    Args:
        model, curvature, ratio, held_out, options: as for `choose_interaction_strength`.
        layer_caps: shares of a layer's cost in (0, 1], None for no cap, or "1.5x" for 1.5 x ratio
            (`Guards.layer_cap_factor`, the release's rule).
        protections: (protect_first, protect_last) pairs, layers kept whole at either end.
        interaction_strength: lambda of all plans.
        report_on: rows for `report`, which has the best plan, that of no guards, and that of the
            release's guards (1.5x, two layers at either end) if they give plans.

    Returns:
        A GuardsChoice: `.best` is the plan, `.guards` its guards. Combinations that give no plan
        are listed in `.infeasible` with the reason.
    """
    require_text(curvature, held_out, report_on)
    strength = float(interaction_strength)
    grid = [_guards(cap, pair) for cap in layer_caps for pair in protections]
    if not grid:
        raise InputError("the grid of guards is empty. Give at least one cap and one protection.")
    grid.sort(key=lambda guards: _looseness(curvature, ratio, guards), reverse=True)
    plans, infeasible = _distinct(_solve(curvature, ratio, strength, g) for g in grid)
    curve = race(model, plans, held_out, options)
    named = (("no guards", Guards()), ("release's guards", RELEASE_GUARDS))
    references = ((name, _solve(curvature, ratio, strength, g)) for name, g in named)
    report = report_plans(model, curve, references, report_on, options)
    return GuardsChoice(curve, infeasible, report, left_out=0)


# Candidates ---------------------------------------------------------------------------------------


def _solve(curvature: Curvature, ratio: float, strength: float, guards: Guards) -> Found:
    """The plan of one lambda and guards, or the error that there is none."""
    outcome: Selection | InfeasibleError
    try:
        outcome = solve_greedy(curvature, ratio, strength, guards)
    except InfeasibleError as error:
        outcome = error
    return (strength, strength), guards, outcome


def _path(curvature: Curvature, ratio: float, guards: Guards, ends: Sequence[Found]) -> list[Found]:
    """All plans of the path with their intervals of lambda."""
    # the plans solved at exactly 0 and 1 stand for the first and the last segment, so that choosing
    # the diagonal selector gives lambda = 0 and not the middle of its segment
    zero, one = ([end] if isinstance(end[2], Selection) else [] for end in ends)
    found: list[Found] = []
    for segment in lambda_path(curvature, ratio, guards):
        span, plan = (segment.start, segment.stop), segment.selection
        if plan is None:
            found.append((span, *_solve(curvature, ratio, sum(span) / 2, guards)[1:]))
        elif span[1] == 1 and _same_set(plan, ends[1][2]):
            found.append((span, *ends[1][1:]))
        else:
            found.append((span, guards, plan))
    return [*zero, *found, *one]


def _same_set(plan: Selection, other: Selection | InfeasibleError) -> bool:
    return isinstance(other, Selection) and other.fingerprint == plan.fingerprint


def _distinct(found: Iterable[Found]) -> tuple[list[Contender], tuple[Infeasible, ...]]:
    """Each pruned set once, in the order found, and the settings without a plan."""
    plans: dict[str, Contender] = {}
    errors: list[tuple[Infeasible, InfeasibleError]] = []
    for interval, guards, outcome in found:
        if isinstance(outcome, InfeasibleError):
            errors.append((Infeasible(interval, guards, str(outcome)), outcome))
            continue
        plan = plans.get(outcome.fingerprint, Contender(outcome, (), ()))
        plans[outcome.fingerprint] = replace(
            plan,
            intervals=_joined(plan.intervals, interval),
            guards=plan.guards if guards in plan.guards else (*plan.guards, guards),
        )
    if not plans:
        raise errors[0][1]
    return list(plans.values()), tuple(entry for entry, _ in errors)


def _joined(intervals: tuple[Interval, ...], new: Interval) -> tuple[Interval, ...]:
    """Append an interval, or extend the last one if they touch."""
    if intervals and intervals[-1][0] <= new[0] <= intervals[-1][1]:
        return (*intervals[:-1], (intervals[-1][0], max(intervals[-1][1], new[1])))
    return (*intervals, new)


def _spread(plans: list[Contender], limit: int) -> list[Contender]:
    """At most `limit` plans, evenly spaced by their rank in the path."""
    # by rank and not by lambda: more plans are taken where they change often
    if len(plans) <= limit:
        return plans
    tops = [plan.intervals[-1][1] for plan in plans]
    # the plan at the largest lambda need not be the last: it may have occurred earlier in the path
    ends = {0, tops.index(max(tops))}
    rest = [number for number in range(len(plans)) if number not in ends]
    room = limit - len(ends)
    picks = {rest[(2 * k + 1) * len(rest) // (2 * room)] for k in range(room)}
    return [plans[number] for number in sorted(ends | picks)]


def _strengths(candidates: Sequence[float]) -> list[float]:
    """The grid, ascending, so that ties go to the smallest."""
    try:
        strengths = sorted({float(value) for value in candidates})
    except (TypeError, ValueError):
        raise InputError(f"candidates is {candidates!r}. Give a list of numbers.") from None
    if not strengths:
        raise InputError('candidates is empty. Give at least one lambda, or "path".')
    for strength in strengths:
        require_strength(strength)
    return strengths


def _guards(cap: LayerCap, protection: tuple[int, int]) -> Guards:
    """The guards of one cap ("1.5x": a multiple of the ratio) and one pair of protected ends."""
    try:
        first, last = (int(layers) for layers in protection)
        if isinstance(cap, str):
            factor = float(cap.removesuffix("x")) if cap.endswith("x") else math.nan
            return Guards(layer_cap_factor=factor, protect_first=first, protect_last=last)
        return Guards(layer_cap=cap, protect_first=first, protect_last=last)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"cap {cap!r} with protection {protection!r} makes no guards ({error}). Give caps as "
            'shares in (0, 1], None, or multiples of the ratio such as "1.5x", and protections as '
            "pairs."
        ) from None


def _looseness(curvature: Curvature, ratio: float, guards: Guards) -> tuple[float, float, int]:
    reachable = reachable_ratio(curvature.units, guards, ratio)
    return reachable, guards.cap_at(ratio), -(guards.protect_first + guards.protect_last)


# Tables -------------------------------------------------------------------------------------------


def _row(candidate: Candidate) -> dict[str, Any]:
    """A candidate as a flat dict, with its lambda and the first interval that gives it."""
    fit, selection = candidate.fit, candidate.selection
    numbers = ("perplexity", "rows")
    compared = ("judge", "difference", "difference_error")
    return {
        "interaction_strength": selection.interaction_strength,
        "start": candidate.intervals[0][0],
        "stop": candidate.intervals[0][1],
        "intervals": len(candidate.intervals),
        "guards": str(candidate.guards[0]),
        "realized_ratio": selection.realized_ratio,
        "predicted_risk": selection.predicted_risk,
        "kl": candidate.kl,
        "kl_error": candidate.standard_error,
        **{name: getattr(candidate, name) for name in (*numbers, *compared)},
        "stopped_early": candidate.stopped_early,
        "tied": candidate.tied,
        "edge_mass": fit.edge_mass,
        "remainder": fit.remainder,
        "fitting_strength": fit.interaction_strength,
        "fitting_strength_printed": fit.printed,
        "fitting_strength_error": fit.strength_error,
    }
