"""Choice of lambda and of the guards by KL or loss on held-out text.

The paper leaves both open. Each chooser lists distinct plans, measures them in a race that stops
clear losers early (racing.py), and compares them by paired standard errors over the same rows. The
lowest of many means is biased low, so the chosen plan can be reported on further rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from ...base.errors import InfeasibleError, InputError
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.results import Tabular
from ...models.identity import require_source
from ...models.units import UnitSet
from ...solver.guards import FREE, Guards, reachable_ratio
from ...solver.path import lambda_path
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...solver.targets import Target, require_ratio, require_strength
from ..analysis.gate import Gate, redundancy_gate
from .racing import (
    Candidate,
    ChoiceOptions,
    Contender,
    Fit,
    Infeasible,
    Interval,
    Outcome,
    race_plans,
    report_plans,
    require_text,
    table_of,
)

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

LayerCap = float | str | None

# the one grid of guards, for notebooks 06 and 09, `cocurve paper` and the benchmarks: no cap, the
# paper's for Llama at 20 %, and the release's rule; layers kept at the first and the last end
LAYER_CAPS: tuple[LayerCap, ...] = (None, 0.3, "1.5x")
PROTECTIONS = ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2))
RELEASE_GUARDS = Guards(layer_cap_factor=1.5, protect_first=2, protect_last=2)


@dataclass(frozen=True, eq=False, repr=False)
class _Choice(Tabular):
    """The result of a chooser.

    "Best" is the first of the `candidates` that is not worse than the winner (the lowest mean) by
    more than one paired standard error of their difference. They are in order of preference:
    smallest lambda, or loosest guards. So ties go to the preferred candidate.

    Attributes:
        candidates: the distinct plans measured, in order of preference.
        infeasible: the settings that give no plan.
        report: "best" and the references by name, measured on `report_on`, with differences to the
            best plan; empty without `report_on`.
        left_out: number of distinct plans of the path that `max_candidates` kept from being
            measured.
    """

    candidates: tuple[Candidate, ...]
    infeasible: tuple[Infeasible, ...]
    report: Mapping[str, Candidate]
    left_out: int

    @property
    def winner(self) -> Candidate:
        """The candidate of lowest judged value among those measured in full."""
        return min((c for c in self.candidates if not c.stopped_early), key=lambda c: c.judged)

    @property
    def chosen(self) -> Candidate:
        """The candidate that the rule chooses, with its numbers."""
        return _chosen(self.candidates)

    @property
    def best(self) -> Selection:
        """The plan that the rule chooses."""
        return self.chosen.selection

    @property
    def curve(self) -> DataFrame:
        """One row per candidate: lambda, KL, its paired difference to the winner; `table_of`."""
        return table_of(self.candidates)

    table = curve


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
        """E, b and the measured risk of the best plan; every candidate has its own."""
        return self.chosen.fit


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
    ratio: float | Target,
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
        ratio: share of removable cost, [0, 1); with lambdas of your own also a `Target`.
        held_out: rows to choose on, at least two, none of them calibrated on.
        guards: where units may be pruned.
        candidates: "path" for every distinct plan of lambda in [0, 1] (at most
            `options.max_candidates` of them), or the lambdas to try, each finite and >= 0.
        report_on: rows for `report`, which has the best plan and those of lambda 0 and 1.
        options: how to measure.

    Returns:
        An InteractionChoice: `.best` is the plan, `.curve` a DataFrame of all candidates (lambda,
        KL, paired standard error).

    Raises:
        InfeasibleError: no candidate reaches the ratio under the guards.
        MismatchError: rows are shared between calibration (as far as the curvature knows its rows),
            `held_out` and `report_on`.
    """
    held_out, report_on = require_text(curvature, held_out, report_on)
    require_source(model, curvature, what="H")
    ends = {f"lambda {end}": _solve(curvature, ratio, float(end), guards) for end in (0, 1)}
    if isinstance(candidates, str):
        if candidates != "path":
            raise InputError(f'candidates is {candidates!r}. Give "path" or a list of lambdas.')
        plans, infeasible = _distinct(
            _path(curvature, require_ratio(ratio), guards, *ends.values())
        )
        kept = _spread(plans, options.max_candidates)
    else:
        # ascending, so that ties go to the smallest
        strengths = sorted({require_strength(strength) for strength in candidates})
        if not strengths:
            raise InputError('candidates is empty. Give at least one lambda, or "path".')
        plans, infeasible = _distinct(_solve(curvature, ratio, s, guards) for s in strengths)
        kept = plans
    curve = race_plans(model, kept, held_out, options)
    report = report_plans(model, _chosen(curve), ends, report_on, options)
    share = ratio.budget(curvature.units).share if isinstance(ratio, Target) else ratio
    gate = redundancy_gate(curvature, share)
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
    make: Callable[[Guards], Selection] | None = None,
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
        make: makes a plan under guards, such as another method's; None solves on the curvature.
        report_on: rows for `report`, which has the best plan, that of no guards, and that of the
            release's guards (1.5x, two layers at either end) if they give plans.

    Returns:
        A GuardsChoice: `.best` is the plan, `.guards` its guards. Combinations that give no plan
        are listed in `.infeasible` with the reason.
    """
    held_out, report_on = require_text(curvature, held_out, report_on)
    require_source(model, curvature, what="H")
    make = make or partial(solve_greedy, curvature, ratio, float(interaction_strength))
    grid = guards_grid(layer_caps, protections)
    if not grid:
        raise InputError("the grid of guards is empty. Give at least one cap and one protection.")
    found = loosest_first(curvature.units, ratio, grid)
    plans, infeasible = _distinct(_made(make, g) for g in found)
    curve = race_plans(model, plans, held_out, options)
    named = {"no guards": FREE, "release's guards": RELEASE_GUARDS}
    wanted = {} if report_on is None else named
    references = {name: _made(make, g) for name, g in wanted.items()}
    report = report_plans(model, _chosen(curve), references, report_on, options)
    return GuardsChoice(curve, infeasible, report, left_out=0)


def guards_grid(
    layer_caps: Sequence[LayerCap] = LAYER_CAPS,
    protections: Sequence[tuple[int, int]] = PROTECTIONS,
) -> tuple[Guards, ...]:
    """Combine every cap with every protection, see `choose_guards`."""
    return tuple(_guards(*each) for each in product(layer_caps, protections))


def loosest_first(units: UnitSet, ratio: float, grid: Iterable[Guards]) -> list[Guards]:
    """Sort guards by the ratio they reach, then by their cap, then by the layers they leave."""

    def room(guards: Guards) -> tuple[float, float, int]:
        kept = guards.protect_first + guards.protect_last
        return reachable_ratio(units, guards, ratio), guards.cap_at(ratio), -kept

    return sorted(grid, key=room, reverse=True)


# Candidates ---------------------------------------------------------------------------------------


def _chosen(curve: Sequence[Candidate]) -> Candidate:
    """The first, and so the preferred, of those that tie with the winner."""
    return next(candidate for candidate in curve if candidate.tied)


def _solve(
    curvature: Curvature,
    ratio: float | Target,
    strength: float,
    guards: Guards,
    interval: Interval | None = None,
) -> Outcome:
    """The plan of one lambda, for an interval of lambda, or the error that there is none."""
    make = partial(solve_greedy, curvature, ratio, strength)
    return _made(make, guards, interval or (strength, strength))


def _made(
    make: Callable[[Guards], Selection], guards: Guards, interval: Interval | None = None
) -> Outcome:
    """The plan under guards, or the error that there is none."""
    try:
        plan = make(guards)
    except InfeasibleError as error:
        return Infeasible(interval or (0, 0), guards, error)
    strength = plan.interaction_strength or 0.0
    return Contender(plan, (interval or (strength, strength),), (guards,))


def _path(
    curvature: Curvature, ratio: float, guards: Guards, zero: Outcome, one: Outcome
) -> list[Outcome]:
    """All plans of the path with their intervals of lambda."""
    # the plans solved at exactly 0 and 1 represent the first and the last segment, so that choosing
    # the diagonal selector gives lambda = 0 and not the middle of its segment
    found: list[Outcome] = []
    for segment in lambda_path(curvature, ratio, guards):
        span, plan = (segment.start, segment.stop), segment.selection
        if plan is None:
            found.append(_solve(curvature, ratio, sum(span) / 2, guards, span))
            continue
        if segment.stop == 1 and isinstance(one, Contender):
            plan = one.selection if one.selection.fingerprint == plan.fingerprint else plan
        found.append(Contender(plan, (span,), (guards,)))
    first, last = ([end] if isinstance(end, Contender) else [] for end in (zero, one))
    return [*first, *found, *last]


def _distinct(found: Iterable[Outcome]) -> tuple[list[Contender], tuple[Infeasible, ...]]:
    """Each pruned set once, in the order found, and the settings without a plan."""
    plans: dict[str, Contender] = {}
    infeasible = []
    for entry in found:
        if isinstance(entry, Infeasible):
            infeasible.append(entry)
            continue
        mark = entry.selection.fingerprint
        plans[mark] = plans[mark].merged(entry) if mark in plans else entry
    if not plans:
        raise infeasible[0].error
    return list(plans.values()), tuple(infeasible)


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


def _guards(cap: LayerCap, protection: tuple[int, int]) -> Guards:
    """The guards of one cap ("1.5x": a multiple of the ratio) and one pair of protected ends."""
    first, last = protection
    if isinstance(cap, str):
        factor = float(cap.removesuffix("x"))
        return Guards(layer_cap_factor=factor, protect_first=first, protect_last=last)
    return Guards(layer_cap=cap, protect_first=first, protect_last=last)
