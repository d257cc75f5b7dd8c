"""Agreement against statistics written out by hand, and the pool of one budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.judging.agreement import (
    DIAGONAL,
    EDGE_AWARE,
    PREDICTIONS,
    RANDOM,
    SWAP,
    predictions,
    same_budget_pool,
)
from helpers.problems import llama_8b_units, make_units, random_curvature

CURVATURE = random_curvature(make_units(6, 3, 8), seed=5)


def ranks(values: list[float]) -> list[float]:
    """1-based ranks, ties averaged."""
    return [
        1 + sum(other < value for other in values) + (sum(o == value for o in values) - 1) / 2
        for value in values
    ]


def pearson(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


# Agreement --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=3, max_size=20))
@settings(max_examples=60, deadline=None)
def test_agreement_equals_the_definitions(pairs: list[tuple[int, int]]) -> None:
    x, y = ([float(pair[i]) for pair in pairs] for i in (0, 1))
    found = cl.agreement(x, y)
    assert (found.points, found.left_out) == (len(pairs), 0)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(found.spearman)
        assert "equal" in found.note
    else:
        assert found.note == ""
        assert found.spearman == pytest.approx(pearson(ranks(x), ranks(y)), abs=1e-9)
        logs = [[math.log(value) for value in values] for values in (x, y)]
        assert found.pearson_log == pytest.approx(pearson(*logs), abs=1e-9)
    ratios = sorted(b / a for a, b in pairs)
    middle = len(ratios) // 2
    median = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    assert found.median_ratio == pytest.approx(median)
    farthest = max(abs(math.log(ratio)) for ratio in ratios)
    assert found.worst is not None
    assert found.worst_ratio == pytest.approx(y[found.worst] / x[found.worst])
    assert abs(math.log(found.worst_ratio)) == pytest.approx(farthest)


def test_what_has_no_logarithm_is_left_out_and_counted() -> None:
    x = [0.0, 1.0, -1.0, 2.0, None, 4.0, math.nan, 8.0, 3.0]
    y = [1.0, 1.0, 1.0, 2.5, 1.0, 4.0, 1.0, 1.0, math.inf]
    found = cl.agreement(x, y)
    assert (found.points, found.left_out) == (4, 5)
    assert found.worst == 7
    assert found.worst_ratio == pytest.approx(1 / 8)
    assert found.median_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_points_say_so(count: int) -> None:
    found = cl.agreement([1.0, 2.0][:count], [2.0, 3.0][:count])
    assert math.isnan(found.spearman)
    assert math.isnan(found.pearson_log)
    assert str(count) in found.note
    assert (found.worst is None) == (count == 0)
    assert math.isnan(found.median_ratio) == (count == 0)


# Predictions ------------------------------------------------------------------------------------


def test_the_scores_of_h_are_their_sums() -> None:
    built = random_curvature(make_units(), seed=2, groups=4)
    assert built.group_risks is not None
    assert built.group_positions is not None
    chosen = [7, 1, 4]
    scores = predictions(built, chosen)
    assert tuple(scores) == tuple(PREDICTIONS)
    pairs = [built.matrix[u, v] for u in chosen for v in chosen]
    assert scores["predicted"] == pytest.approx(sum(pairs) / 2)
    assert scores["diagonal"] == pytest.approx(sum(built.matrix[u, u] for u in chosen) / 2)
    alone = [built.group_risks[:, u].sum() / built.group_positions.sum() for u in chosen]
    assert scores["single_units"] == pytest.approx(sum(alone))
    assert predictions(CURVATURE, chosen)["single_units"] is None
    assert set(predictions(built, []).values()) == {0.0}


# Pool -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5])
def test_the_pool_is_the_papers(ratio: float) -> None:
    pool = same_budget_pool(CURVATURE, ratio)
    methods = [method for method, _ in pool]
    greedy = cl.solve_greedy(CURVATURE, ratio, 1.0)
    assert len(pool) == 26
    assert len({frozenset(plan.pruned) for _, plan in pool}) == 26
    assert pool[0][0] == EDGE_AWARE
    assert pool[0][1].pruned == greedy.pruned
    if methods.count(DIAGONAL):
        assert pool[1][1].pruned == cl.solve_greedy(CURVATURE, ratio, 0.0).pruned
    assert methods.count(RANDOM) == 15 - methods.count(DIAGONAL)
    assert methods.count(SWAP) == 10
    target = ratio * CURVATURE.units.total_cost * (1 - 1e-9)
    for method, plan in pool:
        assert plan.requested_ratio == ratio
        indices = list(plan.pruned)
        s = np.isin(np.arange(len(CURVATURE.units)), indices).astype(float)
        assert plan.predicted_risk == pytest.approx(0.5 * s @ CURVATURE.matrix @ s)
        assert plan.pruned_cost >= target
        if method == SWAP:
            assert plan.pruned_cost == greedy.pruned_cost
            gone = set(greedy.pruned) - set(indices)
            assert len(gone) == max(1, round(len(greedy) / 10))
            kinds = CURVATURE.units.kinds
            came = sorted(kinds[list(set(indices) - set(greedy.pruned))])
            assert came == sorted(kinds[list(gone)])
        elif method == RANDOM:  # the last unit taken was needed
            assert any(plan.pruned_cost - CURVATURE.units[u].cost < target for u in indices)


def test_the_pool_follows_its_seed() -> None:
    def sets(seed: int) -> list[frozenset[int]]:
        return [frozenset(plan.pruned) for _, plan in same_budget_pool(CURVATURE, 0.2, seed)]

    assert sets(3) == sets(3)
    assert len(set(sets(3)) & set(sets(4))) < 10


def test_pools_of_other_sizes() -> None:
    assert len(same_budget_pool(CURVATURE, 0.2, size=2)) == 2
    assert len(same_budget_pool(random_curvature(llama_8b_units()), 0.2, size=40)) == 40
    assert 1 <= len(same_budget_pool(random_curvature(make_units(1, 1, 1)), 0.2)) <= 3
    assert [len(plan) for _, plan in same_budget_pool(CURVATURE, 0.0)] == [0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: cl.agreement([1.0, 2.0], [1.0, 2.0, 3.0]),
        lambda: cl.agreement(np.ones((2, 2)), np.ones((2, 2))),
        lambda: same_budget_pool(CURVATURE, 1.0),
        lambda: same_budget_pool(CURVATURE, 0.2, interaction_strength=-1),
    ],
)
def test_bad_input_is_refused(call: Any) -> None:
    with pytest.raises(cl.InputError):
        call()
