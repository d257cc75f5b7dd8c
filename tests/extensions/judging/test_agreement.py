"""Agreement against statistics written out by hand, and the pool of one budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import cocurve_lab as cl
from cocurve_lab.extensions.judging.agreement import (
    DIAGONAL,
    EDGE_AWARE,
    RANDOM,
    SWAP,
    predictions,
    same_budget_pool,
)
from helpers.problems import make_units, random_curvature

CURVATURE = random_curvature(make_units(6, 3, 8), seed=5)


# Agreement --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=3, max_size=20))
@settings(max_examples=60, deadline=None)
def test_agreement_equals_the_definitions(pairs: list[tuple[int, int]]) -> None:
    x, y = ([float(pair[i]) for pair in pairs] for i in (0, 1))
    found = cl.agreement(x, y)
    assert (found.points, found.left_out) == (len(pairs), 0)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(found.spearman)
    else:
        assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
        logs = stats.pearsonr(np.log(x), np.log(y)).statistic
        assert found.pearson_log == pytest.approx(logs, abs=1e-9)
    ratios = np.array(y) / np.array(x)
    assert found.median_ratio == pytest.approx(np.median(ratios))
    assert found.worst_ratio == pytest.approx(ratios[found.worst])
    assert abs(math.log(found.worst_ratio)) == pytest.approx(np.abs(np.log(ratios)).max())


def test_what_has_no_logarithm_is_left_out_and_counted() -> None:
    x = [0.0, 1.0, -1.0, 2.0, None, 4.0, math.nan, 8.0, 3.0]
    y = [1.0, 1.0, 1.0, 2.5, 1.0, 4.0, 1.0, 1.0, math.inf]
    found = cl.agreement(x, y)
    assert (found.points, found.left_out, found.worst) == (4, 5, 7)
    assert (found.worst_ratio, found.median_ratio) == pytest.approx((1 / 8, 1.0))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_of_fewer_than_three_points_there_is_no_correlation(count: int) -> None:
    found = cl.agreement([1.0, 2.0][:count], [2.0, 3.0][:count])
    assert np.isnan([found.spearman, found.pearson_log]).all()
    assert (found.worst is None) == math.isnan(found.median_ratio) == (count == 0)


# Predictions ------------------------------------------------------------------------------------


def test_the_scores_of_h_are_their_sums() -> None:
    built = random_curvature(make_units(), seed=2, groups=4)
    chosen = [7, 1, 4]
    scores = predictions(built, chosen)
    assert scores["predicted"] == pytest.approx(built.matrix[np.ix_(chosen, chosen)].sum() / 2)
    assert scores["diagonal"] == pytest.approx(built.saliency[chosen].sum() / 2)
    alone = built.group_risks[:, chosen].sum() / built.group_positions.sum()
    assert scores["single_units"] == pytest.approx(alone)
    assert predictions(CURVATURE, chosen)["single_units"] is None
    assert set(predictions(built, []).values()) == {0.0}


# Pool -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.5])
def test_the_pool_is_the_papers(ratio: float) -> None:
    pool = same_budget_pool(CURVATURE, ratio)
    methods, units = [method for method, _ in pool], CURVATURE.units
    greedy = cl.solve_greedy(CURVATURE, ratio, 1.0)
    assert len(pool) == len({frozenset(plan.pruned) for _, plan in pool}) == 26
    assert (methods[0], pool[0][1].pruned) == (EDGE_AWARE, greedy.pruned)
    if DIAGONAL in methods:
        assert pool[1][1].pruned == cl.solve_greedy(CURVATURE, ratio, 0.0).pruned
    assert methods.count(RANDOM) == 15 - methods.count(DIAGONAL)
    target = ratio * units.total_cost * (1 - 1e-9)
    for method, plan in pool:
        chosen = set(plan.pruned)
        assert plan.predicted_risk == pytest.approx(CURVATURE.risk(plan.pruned))
        assert plan.pruned_cost >= target
        if method == SWAP:
            gone, came = set(greedy.pruned) - chosen, chosen - set(greedy.pruned)
            assert plan.pruned_cost == greedy.pruned_cost
            assert len(gone) == max(1, round(len(greedy) / 10))
            assert sorted(units.kinds[list(came)]) == sorted(units.kinds[list(gone)])
        elif method == RANDOM:  # the last unit taken was needed
            assert any(plan.pruned_cost - units[u].cost < target for u in chosen)


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


def test_pools_follow_their_seed_and_end_where_there_are_no_more() -> None:
    sets = [
        {frozenset(plan.pruned) for _, plan in same_budget_pool(CURVATURE, 0.2, seed, size=9)}
        for seed in (3, 3, 4)
    ]
    assert sets[0] == sets[1] != sets[2]
    assert 1 <= len(same_budget_pool(random_curvature(make_units(1, 1, 1)), 0.2)) <= 3
    assert [len(plan) for _, plan in same_budget_pool(CURVATURE, 0.0)] == [0]
