"""Does the prediction hold? Plans of one budget to test the surrogate on, and how to score it.

Numpy and scipy only: plans are made here and measured elsewhere (`measure_plans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import pearsonr, spearmanr

from ..curvature.matrix import Curvature
from ..errors import InputError
from ..models.units import UnitSet
from ..solver.selection import Selection
from ..solver.solve import solve_greedy
from ..solver.targets import target_cost

# names of the methods in a same-budget pool
POOL_METHODS = ("edge-aware greedy", "diagonal greedy", "random", "local swap")
EDGE_AWARE, DIAGONAL, RANDOM, SWAP = POOL_METHODS
FEW = 3  # two points always lie on a line
_TRIES = 50  # draws per wanted set before a small model is taken to have no more sets


@dataclass(frozen=True)
class Agreement:
    """How well predicted risks agree with measured ones; made by `agreement`.

    Attributes:
        points: pairs that count: both values finite and above 0.
        left_out: pairs that do not, which log axes cannot show either.
        spearman: rank correlation; NaN with fewer than three points or a constant value.
        pearson_log: Pearson correlation of the logarithms; NaN likewise.
        median_ratio: median of measured / predicted; NaN without points.
        worst: position (in what was given) of the largest |log(measured / predicted)|; None without
            points. Ties go to the first.
        worst_ratio: measured / predicted there.
        note: why a correlation is missing; empty where none is.
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

    All statistics are taken over the same pairs: those with both values finite and above 0. A
    prediction of exactly 0 (the empty plan) or below it has no logarithm and no ratio.

    Args:
        predicted: 1/2 s^T H s of each plan [n], nats per token; None counts as NaN.
        measured: KL of each plan [n], nats per token; None counts as NaN.

    Raises:
        InputError: the two are not equally long lists of numbers.
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
    """Why the correlation of x and y is not defined; empty where it is."""
    if len(x) < FEW:
        return f"needs at least three points, there {'is' if len(x) == 1 else 'are'} {len(x)}"
    for name, values in (("predictions", x), ("measurements", y)):
        # logarithms of equal numbers are equal, but for nearly equal ones only rounding is left
        if np.ptp(values) < 1e-12:
            return f"all {name} are equal"
    return ""


def same_budget_pool(
    curvature: Curvature,
    ratio: float = 0.2,
    seed: int = 0,
    size: int = 26,
    interaction_strength: float = 1.0,
) -> list[tuple[str, Selection]]:
    """Different plans of one budget: the paper's test of the surrogate at a fixed ratio.

    The paper (appendix, "Same-budget discrimination") takes 26 sets at 20 %: its greedy set, the
    diagonal greedy set, 14 random sets and 10 local-swap perturbations of the greedy set. It does
    not say how large a swap is, nor how random sets meet the budget. Here:

    - a random set takes units in random order until `target_cost` is reached, so like greedy it
      overshoots by less than one unit;
    - a local swap exchanges a tenth of the greedy set (at least one unit) for kept units of the
      same kind and cost, so its cost is exactly the greedy one's;
    - no guards; all sets differ. Where two coincide (the two greedy sets, or swaps of a tiny
      model), further random sets take the place, and where there are too few different sets at all
      the pool is smaller.

    Args:
        curvature: H [M, M].
        ratio: share of removable cost, [0, 1); at 0 only the empty plan exists.
        seed: for the random sets and the swaps.
        size: number of sets; beyond the two greedy ones 7 in 12 are random, the others swaps.
        interaction_strength: lambda of the greedy set.

    Returns:
        (method, plan) pairs: EDGE_AWARE, DIAGONAL, then RANDOM ones, SWAP ones.

    Raises:
        InputError: size below 2, ratio or lambda out of range.
    """
    if size < 2:
        raise InputError(f"size is {size}; the pool has at least the two greedy sets.")
    greedy = solve_greedy(curvature, ratio, interaction_strength)
    diagonal = solve_greedy(curvature, ratio, 0.0)
    pool = {greedy.fingerprint: (EDGE_AWARE, greedy)}
    pool.setdefault(diagonal.fingerprint, (DIAGONAL, diagonal))
    rng = np.random.default_rng(seed)
    random = round((size - 2) * 7 / 12)
    # the last line fills up what the others could not
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


def random_set(units: UnitSet, ratio: float, rng: np.random.Generator) -> list[int]:
    """Indices of units in random order until the budget is reached."""
    order = rng.permutation(len(units))
    before = np.cumsum(units.costs[order]) - units.costs[order]  # cost gone before each removal
    return order[before < target_cost(units, ratio)].tolist()


def _swap(plan: Selection, rng: np.random.Generator) -> list[int]:
    """The plan with a tenth of its units exchanged for kept ones of the same kind and cost."""
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
