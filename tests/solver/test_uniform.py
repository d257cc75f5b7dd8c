"""Uniform plans: the same counts in every layer, against brute force, and in a stock class."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from helpers.problems import make_units, random_curvature

SMALL = make_units(2, 3, 4)  # 2 layers of 3 heads (cost 5) and 4 FFN groups (cost 11): 118
SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)
Widths = dict[int, Counter]


def widths(units: cl.UnitSet, chosen: Any) -> Widths:
    """Per layer, how many of the chosen units there are of each kind and number of columns."""
    found: Widths = {layer: Counter() for layer in range(units.num_layers)}
    for u in chosen:
        unit = units[u]
        found[unit.layer][unit.kind, unit.stop - unit.start] += 1
    return found


def is_uniform(units: cl.UnitSet, pruned: Any) -> bool:
    """All layers lose alike, and none loses a whole kind."""
    gone, whole = widths(units, pruned), widths(units, range(len(units)))
    left = {layer: Counter(k for k, _ in (whole[layer] - gone[layer]).elements()) for layer in gone}
    alike = all(gone[layer] == gone[0] for layer in gone)
    return alike and all(left[layer][kind] > 0 for layer in left for kind in set(units.kinds))


def every_uniform(units: cl.UnitSet) -> list[tuple[int, ...]]:
    """All uniform sets, by going through all subsets of every layer."""
    per_layer = [
        [s for size in range(len(mine) + 1) for s in combinations(mine, size)]
        for mine in (np.flatnonzero(units.layers == n).tolist() for n in range(units.num_layers))
    ]
    sets = [sum(parts, ()) for parts in product(*per_layer)]
    return [s for s in sets if is_uniform(units, s)]


EVERY = every_uniform(SMALL)


# The plan -----------------------------------------------------------------------------------------


@SETTINGS
@given(seed=st.integers(0, 10_000), ratio=st.floats(0, 0.8), cap=st.sampled_from([None, 0.6]))
def test_the_diagonal_plan_is_the_best_of_all_uniform_ones(
    seed: int, ratio: float, cap: float | None
) -> None:
    """At lambda 0 greedy within quotas is a sort, so the search over counts must be exact."""
    curvature, guards = random_curvature(SMALL, seed), cl.Guards(layer_cap=cap)
    fits = [
        s for s in EVERY
        if ratio * 118 * (1 - 1e-12) <= SMALL.costs[list(s)].sum() <= 118 * (cap or 1)
    ]  # fmt: skip
    if not fits:
        with pytest.raises(cl.InfeasibleError):
            cl.solve_greedy(curvature, ratio, 0.0, guards, uniform=True)
        return
    plan = cl.solve_greedy(curvature, ratio, 0.0, guards, uniform=True)
    assert is_uniform(SMALL, plan.pruned)
    assert plan.objective == pytest.approx(min(curvature.saliency[list(s)].sum() / 2 for s in fits))


@SETTINGS
@given(seed=st.integers(0, 10_000), ratio=st.floats(0.01, 0.72), strength=st.floats(0.1, 2))
def test_plans_with_edges_are_uniform_reach_the_ratio_and_state_their_risk(
    seed: int, ratio: float, strength: float
) -> None:
    curvature = random_curvature(SMALL, seed)
    plan = cl.solve_greedy(curvature, ratio, strength, uniform=True)
    assert is_uniform(SMALL, plan.pruned)
    assert plan.requested_ratio == ratio <= plan.realized_ratio + 1e-12
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))
    # one unit per layer less would miss the ratio
    least = min(11 if kind == "ffn" else 5 for kind, _ in widths(SMALL, plan.pruned)[0])
    assert plan.pruned_cost - 2 * least < ratio * 118
    # and no better by any one choice of counts than by the other: greedy of each by hand
    assert plan.objective == pytest.approx(min(by_hand(curvature, ratio, strength)))


def by_hand(curvature: Any, ratio: float, strength: float) -> list[float]:
    """R_lambda of greedy within quotas for each minimal pair of counts, marginals summed afresh."""
    units, matrix, objectives = curvature.units, curvature.matrix, []
    for heads, groups in product(range(3), range(4)):
        cost = 2 * (5 * heads + 11 * groups)
        fewer = [cost - 2 * c for n, c in ((heads, 5), (groups, 11)) if n]
        if cost < ratio * 118 or max(fewer, default=-1) >= ratio * 118:
            continue
        pruned: list[int] = []
        quota = {"attention": heads, "ffn": groups}
        while len(pruned) < 2 * (heads + groups):
            scores = {}
            for u in set(range(len(units))) - set(pruned):
                place = units[u].layer, units[u].kind
                alike = [v for v in pruned if (units[v].layer, units[v].kind) == place]
                if len(alike) < quota[units[u].kind]:
                    edges = sum(matrix[u, v] for v in pruned)
                    scores[u] = (matrix[u, u] / 2 + strength * edges) / units[u].cost
            pruned.append(min(scores, key=lambda u: (scores[u], u)))
        block = matrix[np.ix_(pruned, pruned)]
        node = np.trace(block) / 2
        objectives.append(node + strength * (block.sum() / 2 - node))
    return objectives


def test_include_exclude_and_kinds_bind() -> None:
    curvature = random_curvature(SMALL, 1)
    plan = cl.solve_greedy(
        curvature, 0.3, include=["L1.attention[2]", "L0.ffn[3]"], exclude=["L0.ffn[0]"],
        uniform=True,
    )  # fmt: skip
    assert plan.pruned[:2] == (SMALL.index("L1.attention[2]"), SMALL.index("L0.ffn[3]"))
    assert SMALL.index("L0.ffn[0]") not in plan.pruned
    assert is_uniform(SMALL, plan.pruned)
    heads = cl.solve_greedy(curvature, 0.1, guards=cl.Guards(kinds=("attention",)), uniform=True)
    assert {SMALL[u].kind for u in heads.pruned} == {"attention"}
    assert len(cl.solve_greedy(curvature, 0, uniform=True)) == 0


# What cannot be uniform ---------------------------------------------------------------------------


def test_the_most_that_uniform_plans_reach_is_named() -> None:
    curvature = random_curvature(SMALL)
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.solve_greedy(curvature, 0.8, uniform=True)
    assert caught.value.reachable_ratio == 86 / 118  # 2 of 3 heads and 3 of 4 groups
    plan = cl.solve_greedy(curvature, 0.7288, uniform=True)
    assert plan.pruned_cost == 86
    assert cl.Selection.from_json(plan.to_json()).made.uniform


# The model ----------------------------------------------------------------------------------------
