"""Dependence of a plan on the calibration text: a bootstrap over groups, and a stopping rule.

The groups of sequences of a build are its independent draws of text (curvature/uncertainty.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...base.arguments import as_int
from ...base.errors import InfeasibleError, InputError
from ...curvature.matrix import Curvature
from ...curvature.uncertainty import ENOUGH, Sample, relative, trust
from ...solver.guards import FREE, Guards
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...solver.targets import require_ratio, require_strength

if TYPE_CHECKING:
    from ...estimator.build import Build

TOLERANCE = 0.1


# Stability of a plan ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stability:
    """The dependence of a plan on the calibration text; made by `selection_stability`.

    Attributes:
        selection: the plan of the whole H.
        frequency: [M] share of the feasible draws whose plan prunes the unit; NaN without any.
        overlaps: [feasible draws] Jaccard overlap of each draw's plan with `selection`, [0, 1].
        draws, infeasible: bootstrap draws, and those on which greedy stalled.
        groups: G, the number of groups with at least one scored position.
    """

    selection: Selection
    frequency: np.ndarray
    overlaps: np.ndarray
    draws: int
    infeasible: int
    groups: int

    @property
    def mean_overlap(self) -> float:
        """Mean Jaccard overlap with the plan of the whole; NaN if no draw was feasible."""
        return float(self.overlaps.mean()) if self.overlaps.size else float("nan")

    @property
    def trustworthy(self) -> bool:
        """Whether there are enough groups (16) to resample."""
        return self.groups >= ENOUGH

    def contested(self, low: float = 0.1, high: float = 0.9) -> tuple[int, ...]:
        """Return the units pruned in more than `low` and less than `high` of the draws."""
        return tuple(np.flatnonzero((self.frequency > low) & (self.frequency < high)).tolist())

    def __repr__(self) -> str:
        stalled = f"; greedy stalled in {self.infeasible}" if self.infeasible else ""
        return (
            f"Stability of {len(self.selection)} of {len(self.frequency)} units pruned: mean "
            f"overlap {self.mean_overlap:.0%} over {self.draws} draws{stalled}; "
            f"{len(self.contested())} units contested. {trust(self.groups)}"
        )


def selection_stability(
    curvature: Curvature,
    ratio: float,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
    draws: int = 200,
    seed: int = 0,
) -> Stability:
    """Measure how often each unit is pruned when the groups of sequences are drawn again.

    This is a bootstrap over groups (Efron and Tibshirani 1993, An Introduction to the Bootstrap):
    each draw takes G of the G groups with replacement and solves again on the pooled H. With G
    groups the variance over draws is too small by a factor of about (G - 1) / G. A draw without a
    plan is only counted. 200 draws at M = 768 take about 3 s on one core.
    """
    if draws < 1:
        raise InputError(f"draws is {draws}. Give at least 1, better 200.")
    groups = Sample.of(curvature)
    plan = solve_greedy(curvature, ratio, interaction_strength, guards)
    even = np.full(len(groups), 1 / len(groups))
    # drawing G groups with replacement is the same as drawing how often each one is taken
    counts = np.random.default_rng(seed).multinomial(len(groups), even, size=draws)
    chosen = []
    for draw in counts:
        try:
            plan_of_draw = solve_greedy(groups.weighted(draw), ratio, interaction_strength, guards)
        except InfeasibleError:
            continue
        chosen.append(plan_of_draw.indicator)
    pruned = np.array(chosen).reshape(-1, len(curvature.units))
    frequency = pruned.mean(axis=0) if chosen else np.full(len(curvature.units), np.nan)
    overlaps = np.array([_overlap(plan.indicator, other) for other in pruned])
    return Stability(plan, frequency, overlaps, draws, draws - len(chosen), len(groups))


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Jaccard overlap of two plans [M] bool; 1 where both are empty."""
    either = int((one | other).sum())
    return int((one & other).sum()) / either if either else 1.0


# Convergence of H -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convergence:
    """Whether H is known well enough to plan; made by `is_converged`.

    The errors and the overlap are NaN where they are unknown (a single group).

    Attributes:
        converged: there are enough groups, and the three errors are within the tolerance.
        risk: predicted risk of the plan of the whole H, nats per token.
        risk_error: relative standard error of `risk`, with the plan taken as given.
        saliency_error: median over units of the relative standard error of H_uu.
        optimism: the share by which `risk` is likely too low, because the plan was chosen on the
            same H that predicts its risk.
        overlap: Jaccard overlap of the plans of the even and the odd groups. It is no criterion:
            units of equal worth swap places however much text there is.
        groups, tolerance: G, and the largest error allowed.
        reason: one sentence with the numbers.
    """

    converged: bool
    risk: float
    risk_error: float
    saliency_error: float
    optimism: float
    overlap: float
    groups: int
    tolerance: float
    reason: str = field(repr=False)

    def __bool__(self) -> bool:
        return self.converged


def is_converged(
    curvature: Curvature,
    ratio: float = 0.2,
    interaction_strength: float = 1.0,
    tolerance: float = TOLERANCE,
) -> Convergence:
    """Decide whether H is known well enough to plan at this ratio and lambda.

    H counts as converged if there are at least 16 groups and each of these is at most `tolerance`:

    - the relative standard error of the plan's predicted risk (delete-a-group jackknife of
      1/2 s^T H s with the plan fixed);
    - the median relative standard error of the saliency, over units with H_uu > 0;
    - the optimism. The even and the odd groups each give a plan, whose risk is predicted by its own
      half and by the other half. Then optimism = (risk by the other / risk by its own - 1) / 2.

    The first two alone would pass too early, because a plan chosen among millions looks good on its
    own H. On a trained model of 120 units (64 sequences x 255 positions, ratio 0.3, lambda 1) that
    risk was known to 8 %, while the plans of the halves cost 34 % more on the other half. It takes
    milliseconds. The plan is without guards.
    """
    groups = Sample.of(curvature)
    plan = solve_greedy(curvature, ratio, interaction_strength).indicator
    risk = _risk(curvature.matrix, plan)
    live = curvature.saliency > 0
    saliency = relative(groups.linear_error(np.diagonal)[live], curvature.saliency[live])
    risk_error = _share(float(groups.linear_error(lambda h: _risk(h, plan))), risk)
    saliency_error = float(np.median(saliency)) if live.any() else 0.0
    optimism, overlap = _split(groups, ratio, interaction_strength)
    errors = {
        "predicted risk": risk_error,
        "median saliency": saliency_error,
        "optimism of the plan": optimism,
    }
    failing = [name for name, error in errors.items() if not error <= tolerance]  # NaN fails too
    converged = len(groups) >= ENOUGH and not failing
    numbers = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    if len(groups) < ENOUGH:
        reason = (
            f"Too early to say: {len(groups)} {'group' if len(groups) == 1 else 'groups'} of "
            f"sequences, and below {ENOUGH} no interval is trustworthy ({numbers})."
        )
    elif failing:
        reason = f"Not converged: {', '.join(failing)} above {tolerance:.1%} ({numbers})."
    else:
        reason = f"Converged: relative errors at most {tolerance:.1%} ({numbers})."
    return Convergence(
        converged=converged,
        risk=risk,
        risk_error=risk_error,
        saliency_error=saliency_error,
        optimism=optimism,
        overlap=overlap,
        groups=len(groups),
        tolerance=tolerance,
        reason=reason,
    )


def _risk(matrix: np.ndarray, plan: np.ndarray) -> float:
    """1/2 s^T H s of a plan [M] bool (eq. quadratic)."""
    return 0.5 * float(matrix[np.ix_(plan, plan)].sum())


def _share(part: float, whole: float) -> float:
    """part / whole; 0 / 0 is 0 (an empty plan is known exactly)."""
    if whole > 0:
        return part / whole
    return part if part == 0 or np.isnan(part) else float("inf")


def _split(groups: Sample, ratio: float, strength: float) -> tuple[float, float]:
    """Optimism and overlap of the plans of two halves; NaN with a single group."""
    if len(groups) < 2:
        return float("nan"), float("nan")
    halves = groups.halves()
    plans = [solve_greedy(half, ratio, strength).indicator for half in halves]
    home = sum(_risk(half.matrix, plan) for half, plan in zip(halves, plans, strict=True))
    away = sum(_risk(half.matrix, plan) for half, plan in zip(halves, plans[::-1], strict=True))
    # halved: the whole has twice the text of a half, and such errors fall about as 1 / n
    return _share(away - home, home) / 2, _overlap(*plans)


# Stopping a build -------------------------------------------------------------------------------


class StopWhenConverged:
    """Stop a build once H is good enough: `cl.BuildOptions(on_sequence=StopWhenConverged())`.

    It asks `is_converged` after each sequence. After `patience` positive answers in a row it adds
    the reason to the build's events and stops the build, which returns the H over the sequences
    done and keeps its checkpoint; running it again continues, with fresh patience. It needs
    groups >= 16, the default.

    Attributes:
        history: (sequences done, Convergence) after each sequence.
    """

    def __init__(
        self,
        ratio: float = 0.2,
        interaction_strength: float = 1.0,
        tolerance: float = TOLERANCE,
        patience: int = 4,
    ) -> None:
        self.criterion = (require_ratio(ratio), require_strength(interaction_strength), tolerance)
        self.patience = as_int(patience, "patience", 1)
        self.history: list[tuple[int, Convergence]] = []

    def __call__(self, build: Build) -> str | None:
        """Return why to stop, if H is good enough; the build calls this after each sequence."""
        if build.stopped:
            return None
        # a build of fewer than 16 sequences cannot have 16 groups: no error, it just never stops
        if len(build.groups) < ENOUGH <= len(build.calibration):
            raise InputError(
                f"the build keeps {len(build.groups)} groups, and convergence cannot be judged "
                f"below {ENOUGH}. Give BuildOptions(groups={ENOUGH}) or more."
            )
        readout = is_converged(build.so_far(), *self.criterion)
        self.history.append((build.done, readout))
        # a criterion checked after every sequence is met too early by luck, hence the patience
        recent = [look.converged for _, look in self.history[-self.patience :]]
        enough = len(recent) == self.patience and all(recent)
        if not enough or build.done == build.total:  # after the last there is nothing to stop
            return None
        reason = f"sequence {build.done}: stopped early. {readout.reason}"
        build.events.append(reason)
        return reason

    def __repr__(self) -> str:
        last = self.history[-1][1].reason if self.history else "Not checked yet."
        return f"StopWhenConverged after {self.patience} positive checks in a row. {last}"
