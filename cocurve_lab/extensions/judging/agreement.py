"""Agreement of predicted with measured risks, the predictions, and pools of plans to test them on.

This file needs numpy and scipy only: it makes plans, and `measure_plans` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import pearsonr, spearmanr

from ...base.errors import InputError
from ...curvature.matrix import Curvature
from ...models.units import UnitSet
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...solver.targets import target_cost

# names of the methods in a same-budget pool
POOL_METHODS = ("edge-aware greedy", "diagonal greedy", "random", "local swap")
EDGE_AWARE, DIAGONAL, RANDOM, SWAP = POOL_METHODS
# the scores that order plans, by their keys in `predictions`, in words
PREDICTIONS = {
    "predicted": "½ sᵀHs",
    "diagonal": "½ Σ H_uu",
    "single_units": "Σ KL of each unit alone",
}
FEW = 3  # fewer points have no correlation: two always lie on a line
_TRIES = 50  # draws per wanted set; after that a small model is assumed to have no more sets


# Agreement --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """The agreement of predicted with measured risks; made by `agreement`.

    Attributes:
        points: number of pairs that count: both values are finite and above 0.
        left_out: number of other pairs, which log axes cannot show either.
        spearman: rank correlation; NaN with fewer than three points or a constant value.
        pearson_log: Pearson correlation of the logarithms; NaN likewise.
        median_ratio: median of measured / predicted; NaN without points.
        worst: index of the pair with the largest |log(measured / predicted)|, the first of equal
            ones; None without points.
        worst_ratio: measured / predicted of that pair.
        note: the reason why a correlation is missing; empty if none is.
    """

    points: int
    left_out: int
    spearman: float
    pearson_log: float
    median_ratio: float
    worst: int | None
    worst_ratio: float
    note: str = ""


def agreement(
    predicted: Sequence[float | None] | np.ndarray, measured: Sequence[float | None] | np.ndarray
) -> Agreement:
    """Compare predicted with measured risks, pair by pair.

    All statistics are over the same pairs: those with both values finite and above 0. A prediction
    of 0 (the empty plan) or below has no logarithm and no ratio.

    Args:
        predicted: 1/2 s^T H s of each plan [n], nats per token; None counts as NaN.
        measured: KL of each plan [n], nats per token; None counts as NaN.

    Raises:
        InputError: the two are not lists of the same length.
    """
    x, y = (np.array(values, dtype=np.float64) for values in (predicted, measured))
    if x.ndim != 1 or x.shape != y.shape:
        raise InputError(
            f"predicted has shape {x.shape} and measured {y.shape}. Give one of each per plan."
        )
    good = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0))
    x, y = np.log(x[good]), np.log(y[good])
    left_out = len(measured) - len(good)
    if not len(good):
        nan = float("nan")
        return Agreement(0, left_out, nan, nan, nan, None, nan, _why_none(x, y))
    gap = y - x
    worst = int(np.abs(gap).argmax())
    note = _why_none(x, y)
    return Agreement(
        points=len(good),
        left_out=left_out,
        spearman=float("nan") if note else float(spearmanr(x, y).statistic),
        pearson_log=float("nan") if note else float(pearsonr(x, y).statistic),
        median_ratio=float(np.median(np.exp(gap))),
        worst=int(good[worst]),
        worst_ratio=float(np.exp(gap[worst])),
        note=note,
    )


def _why_none(x: np.ndarray, y: np.ndarray) -> str:
    """The reason why the correlation of x and y is not defined; empty if it is."""
    if len(x) < FEW:
        return f"needs at least three points, there {'is' if len(x) == 1 else 'are'} {len(x)}"
    for name, values in (("predictions", x), ("measurements", y)):
        # between nearly equal numbers the correlation would be one of rounding
        if np.ptp(values) < 1e-12:
            return f"all {name} are equal"
    return ""


# Predictions ------------------------------------------------------------------------------------


def predictions(curvature: Curvature, pruned: Sequence[int]) -> dict[str, float | None]:
    """Compute the scores that order plans: with edges, without edges, and without H.

    The two without edges are what a ranking by H must beat. The second of them knows no quadratic
    form either: what it lacks of the measured risk is the interaction of the units alone.

    Args:
        curvature: H [M, M].
        pruned: the units of a plan.

    Returns:
        Nats per token: "predicted" 1/2 s^T H s (eq. quadratic); "diagonal" 1/2 sum of H_uu;
        "single_units" the sum of R({u}), the KL of removing each unit alone as the build measured
        it (`Curvature.single_unit_risk`, over the tokens of its `risk_support`), None where it did
        not.
    """
    chosen, alone = list(pruned), curvature.single_unit_risk
    return {
        "predicted": curvature.risk(chosen),
        "diagonal": float(curvature.saliency[chosen].sum() / 2),
        "single_units": None if alone is None else float(alone[chosen].sum()),
    }


# Pools of plans ---------------------------------------------------------------------------------


def same_budget_pool(
    curvature: Curvature,
    ratio: float = 0.2,
    seed: int = 0,
    size: int = 26,
    interaction_strength: float = 1.0,
) -> list[tuple[str, Selection]]:
    """Make different plans of one budget: the paper's test of the surrogate at a fixed ratio.

    The paper (appendix "Surrogate Fidelity", same-budget discrimination) takes 26 sets at 20 %: its
    greedy set, the diagonal greedy set, 14 random sets and 10 local-swap perturbations of the
    greedy set. It does not state how large a swap is, or how random sets meet the budget. Here:

    - a random set takes units in random order until `target_cost` is reached, so like greedy it
      overshoots by less than one unit;
    - a local swap exchanges a tenth of the greedy set (at least one unit) for kept units of the
      same kind and cost, so its cost is exactly that of the greedy set;
    - there are no guards, and all sets differ. If two coincide (the two greedy sets, or swaps of a
      tiny model), a further random set is drawn. If there are too few different sets, the pool is
      smaller.

    Args:
        curvature: H [M, M].
        ratio: share of removable cost, [0, 1); at 0 only the empty plan exists.
        seed: seed of the random sets and the swaps.
        size: number of sets; beyond the two greedy ones 7 in 12 are random, the others swaps.
        interaction_strength: lambda of the greedy set.

    Returns:
        (method, plan) pairs: EDGE_AWARE, DIAGONAL, then the RANDOM plans, then the SWAP plans.
    """
    greedy = solve_greedy(curvature, ratio, interaction_strength)
    diagonal = solve_greedy(curvature, ratio, 0.0)
    pool = {greedy.fingerprint: (EDGE_AWARE, greedy)}
    pool.setdefault(diagonal.fingerprint, (DIAGONAL, diagonal))
    rng = np.random.default_rng(seed)
    random = round((size - 2) * 7 / 12)
    # the last round of random sets makes up for duplicates
    for method, wanted in ((RANDOM, 2 + random), (SWAP, size), (RANDOM, size)):
        for _ in range(_TRIES * size):
            if len(pool) >= wanted:
                break
            units = (
                random_set(curvature.units, ratio, rng) if method == RANDOM else _swap(greedy, rng)
            )
            plan = Selection.from_pruned(
                curvature.units, sorted(units), curvature, requested_ratio=float(ratio)
            )
            pool.setdefault(plan.fingerprint, (method, plan))
    return list(pool.values())


def random_plan(units: UnitSet, ratio: float, seed: int) -> Selection:
    """Remove units in random order until the ratio is reached: the baseline plan."""
    chosen = random_set(units, ratio, np.random.default_rng(seed))
    return Selection.from_pruned(units, chosen, requested_ratio=ratio)


def random_set(units: UnitSet, ratio: float, rng: np.random.Generator) -> list[int]:
    """Draw the indices of units in random order until the budget is reached."""
    order = rng.permutation(len(units))
    before = np.cumsum(units.costs[order]) - units.costs[order]  # cost gone before each removal
    return order[before < target_cost(ratio, units.total_cost)].tolist()


def _swap(plan: Selection, rng: np.random.Generator) -> list[int]:
    """Exchange a tenth of a plan's units for kept units of the same kind and cost."""
    kinds, costs = plan.units.kinds, plan.units.costs
    left = max(1, round(len(plan) / 10))
    free = rng.permutation(plan.kept).astype(int).tolist()
    chosen = set(plan.pruned)
    for unit in rng.permutation(plan.pruned).astype(int).tolist():
        if left == 0:
            break
        rivals = (v for v in free if kinds[v] == kinds[unit] and costs[v] == costs[unit])
        rival = next(rivals, None)
        if rival is not None:
            free.remove(rival)
            chosen ^= {unit, rival}
            left -= 1
    return list(chosen)
