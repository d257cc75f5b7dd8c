"""The lambda path against plain solves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.solver.path import LambdaPath
from helpers.problems import STALLING, gram_curvature, make_units, random_curvature

UNITS = make_units(6, 2, 3)  # 30 units


def plan_at(
    curvature: cl.Curvature, ratio: float, strength: float, guards: cl.Guards
) -> frozenset[int] | float:
    """The pruned set of one solve, or the ratio at which it stalls."""
    try:
        return frozenset(cl.solve_greedy(curvature, ratio, strength, guards).pruned)
    except cl.InfeasibleError as error:
        return error.stalled_ratio or 0.0


def check_path(
    path: LambdaPath, curvature: cl.Curvature, ratio: float, guards: cl.Guards, maximum: float
) -> None:
    assert path.segments[0].start == 0
    assert path.segments[-1].stop == path.maximum == maximum
    for left, right in zip(path.segments, path.segments[1:], strict=False):
        assert left.start < left.stop == right.start
        if left.selection is not None and right.selection is not None:
            assert set(left.selection.pruned) != set(right.selection.pruned)
    breaks = np.array([0.0, *path.breakpoints, maximum])
    inside = (breaks[1:] + breaks[:-1]) / 2
    grid = np.concatenate([np.linspace(0, maximum, 51), inside, breaks + 2e-9, breaks - 2e-9])
    for strength in grid[(grid >= 0) & (grid <= maximum)].tolist():
        if np.abs(breaks[1:-1] - strength).min(initial=1.0) < 1e-9:
            continue
        segment = path.at(strength)
        found = segment.stalled_ratio if segment.selection is None else segment.selection.pruned
        expected = plan_at(curvature, ratio, strength, guards)
        assert (found if isinstance(found, float) else frozenset(found or ())) == expected


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ratio=st.floats(0.05, 0.6),
    cap=st.sampled_from([None, 0.75, 0.9]),
    maximum=st.sampled_from([0.1, 1.0, 5.0]),
    shared=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_path_is_every_plan_of_the_solver(
    seed: int, ratio: float, cap: float | None, maximum: float, shared: float
) -> None:
    curvature, guards = random_curvature(UNITS, seed, shared=shared), cl.Guards(layer_cap=cap)
    path = cl.lambda_path(curvature, ratio, guards, maximum)
    check_path(path, curvature, ratio, guards, maximum)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), ratio=st.floats(0.05, 0.6))
def test_the_path_survives_exact_ties(seed: int, ratio: float) -> None:
    """Small integers and equal costs: many scores are equal, at lambda 0 above all."""
    features = np.random.default_rng(seed).integers(-2, 3, size=(16, 3)).astype(float)
    curvature = cl.Curvature(features @ features.T, make_units(4, 0, 4, ffn_cost=4))
    path = cl.lambda_path(curvature, ratio)
    breaks = np.array([0.0, *path.breakpoints, 1.0])
    for strength in ((breaks[1:] + breaks[:-1]) / 2)[np.diff(breaks) > 1e-6].tolist():
        expected = cl.solve_greedy(curvature, ratio, strength).pruned
        assert set(path.at(strength).selection.pruned) == set(expected)


def test_units_tied_for_good_hide_no_crossing() -> None:
    """Units 1 and 2 differ by less than rounding at every lambda; unit 3 passes both at 1/2."""
    matrix = np.diag([0.02, 2.0, 2.0, 2.5])
    matrix[0, 1:] = matrix[1:, 0] = 1.0, np.nextafter(1.0, 0.0), 0.5
    path = cl.lambda_path(cl.Curvature(matrix, make_units(1, 0, 4, ffn_cost=4)), 0.5)
    assert path.breakpoints == pytest.approx([0.5], abs=1e-9)
    assert [segment.selection.pruned for segment in path] == [(0, 1), (0, 3)]


def test_a_segments_plan_is_the_solve_at_its_own_lambda() -> None:
    curvature, guards = random_curvature(UNITS, 4, shared=1.0), cl.Guards(protect_first=1)
    forced: dict[str, Any] = {"include": [12], "exclude": ["L3.ffn[0]"]}
    path = cl.lambda_path(curvature, 0.4, guards, **forced)
    assert len(path) >= 3
    for segment in path:
        plan: Any = segment.selection
        assert segment.start <= plan.interaction_strength <= segment.stop
        fresh = cl.solve_greedy(curvature, 0.4, plan.interaction_strength, guards, **forced)
        assert plan.predicted_risk == pytest.approx(fresh.predicted_risk)
        assert (plan.pruned, plan.guards, plan.forced) == (fresh.pruned, guards, 1)
    assert path.orders >= len(path) >= path.distinct_sets


@pytest.mark.parametrize("seed", [7, 29])
def test_the_order_that_holds_longest_stands_for_the_set(seed: int) -> None:
    """Against solves on a grid: the longest order of a set is neither its first nor its last."""
    curvature = random_curvature(make_units(3, 2, 3), seed, shared=1.0)
    segment = cl.lambda_path(curvature, 0.4).segments[0]
    grid = [float(x) for x in np.linspace(0, 1, 401) if segment.start <= x < segment.stop]
    orders = [cl.solve_greedy(curvature, 0.4, strength).pruned for strength in grid]
    longest = max(set(orders), key=orders.count)
    assert longest not in (orders[0], orders[-1])
    assert segment.selection.pruned == longest


def test_a_stall_on_part_of_the_path_is_a_segment() -> None:
    """Room for 4 per layer of cost 7: cheap attention (3) blocks the FFN pair (2 + 2)."""
    features = np.array([[1.0, 0, 0], [0, 1.2, 0], [0, 0, 1.2], [2.0, 0, 0], [0, 9.0, 9.0]])
    curvature = gram_curvature(STALLING, features)
    guards = cl.Guards(layer_cap=4 / 7)
    first, second = cl.lambda_path(curvature, 0.55, guards, include=[3])
    # attention costs (1/2 + 2 lambda) / 3 (in units of 1/3), an FFN group 0.72 / 2
    assert first.stop == pytest.approx((3 * 0.36 - 0.5) / 2)
    assert (first.selection, first.stalled_ratio) == (None, 7 / 14)
    assert set(second.selection.pruned) == {1, 2, 3}
    with pytest.raises(cl.InfeasibleError):
        cl.solve_greedy(curvature, 0.55, first.start, guards, include=[3])


def test_the_ends_of_the_range() -> None:
    curvature = random_curvature(UNITS)
    (only,) = cl.lambda_path(curvature, 0.0)
    assert (only.start, only.stop, only.selection.pruned) == (0, 1, ())
    (only,) = cl.lambda_path(curvature, 0.3, maximum=0.0)
    assert only.selection.pruned == cl.solve_greedy(curvature, 0.3, 0.0).pruned
    path = cl.lambda_path(curvature, 0.3)
    assert (path.at(0), path.at(1)) == (path.segments[0], path.segments[-1])
    with pytest.raises(cl.InfeasibleError):
        cl.lambda_path(curvature, 0.5, cl.Guards(layer_cap=0.3))
