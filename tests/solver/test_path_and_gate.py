"""The lambda path against plain solves, and the gate against matrices of known correlation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.models.units import Unit, UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.path import LambdaPath, lambda_path
from cocurve_lab.solver.solve import solve_greedy
from helpers.problems import gram_curvature, llama_8b_units, make_units, random_curvature

UNITS = make_units(6, 2, 3)  # 30 units


def plan_at(
    curvature: Curvature, ratio: float, strength: float, guards: Guards
) -> frozenset[int] | float:
    """The pruned set of one solve, or the ratio at which it stalls."""
    try:
        return frozenset(solve_greedy(curvature, ratio, strength, guards).pruned)
    except InfeasibleError as error:
        return error.stalled_ratio or 0.0


def check_path(
    path: LambdaPath, curvature: Curvature, ratio: float, guards: Guards, maximum: float
) -> None:
    assert path.segments[0].start == 0
    assert path.segments[-1].stop == path.maximum == maximum
    for left, right in zip(path.segments, path.segments[1:], strict=False):
        assert left.stop == right.start
        assert left.start < left.stop
        if left.selection is not None and right.selection is not None:
            assert set(left.selection.pruned) != set(right.selection.pruned)
    breaks = np.array([0.0, *path.breakpoints, maximum])
    inside = (breaks[1:] + breaks[:-1]) / 2
    grid = np.concatenate([np.linspace(0, maximum, 101), inside, breaks + 2e-9, breaks - 2e-9])
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
    curvature, guards = random_curvature(UNITS, seed, shared=shared), Guards(layer_cap=cap)
    path = lambda_path(curvature, ratio, guards, maximum)
    check_path(path, curvature, ratio, guards, maximum)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), ratio=st.floats(0.05, 0.6))
def test_the_path_survives_exact_ties(seed: int, ratio: float) -> None:
    """Small integers and equal costs: many scores are equal, at lambda 0 above all."""
    units = make_units(4, 0, 4, ffn_cost=4)
    features = np.random.default_rng(seed).integers(-2, 3, size=(16, 3)).astype(float)
    curvature = Curvature(features @ features.T, units)
    path = lambda_path(curvature, ratio)
    breaks = np.array([0.0, *path.breakpoints, 1.0])
    for strength in ((breaks[1:] + breaks[:-1]) / 2)[np.diff(breaks) > 1e-6].tolist():
        plan = path.at(strength).selection
        assert plan is not None
        assert set(plan.pruned) == set(solve_greedy(curvature, ratio, strength).pruned)


def test_units_tied_for_good_hide_no_crossing() -> None:
    """Units 1 and 2 differ by less than rounding at every lambda; unit 3 passes both at 1/2."""
    units = make_units(1, 0, 4, ffn_cost=4)
    matrix = np.diag([0.02, 2.0, 2.0, 2.5])
    matrix[0, 1:] = matrix[1:, 0] = 1.0, np.nextafter(1.0, 0.0), 0.5
    path = lambda_path(Curvature(matrix, units), 0.5)
    assert path.breakpoints == pytest.approx([0.5], abs=1e-9)
    assert [segment.selection.pruned for segment in path if segment.selection] == [(0, 1), (0, 3)]


def test_a_segments_plan_is_the_solve_at_its_own_lambda() -> None:
    curvature, guards = random_curvature(UNITS, 4, shared=1.0), Guards(protect_first=1)
    forced: dict[str, Any] = {"include": [12], "exclude": ["L3.ffn[0]"]}
    path = lambda_path(curvature, 0.4, guards, **forced)
    assert len(path) >= 3
    for segment in path:
        plan = segment.selection
        assert plan is not None
        assert plan.interaction_strength is not None
        assert segment.start <= plan.interaction_strength <= segment.stop
        fresh = solve_greedy(curvature, 0.4, plan.interaction_strength, guards, **forced)
        assert plan.predicted_risk == pytest.approx(fresh.predicted_risk)
        assert (plan.pruned, plan.guards, plan.forced) == (fresh.pruned, guards, 1)
    assert path.orders >= len(path) >= path.distinct_sets
    assert f"{path.distinct_sets} distinct plans" in repr(path)


@pytest.mark.parametrize("seed", [7, 29])
def test_the_order_that_holds_longest_stands_for_the_set(seed: int) -> None:
    """Against solves on a grid: the longest order of a set is neither its first nor its last."""
    curvature = random_curvature(make_units(3, 2, 3), seed, shared=1.0)
    segment = lambda_path(curvature, 0.4).segments[0]
    grid = [float(x) for x in np.linspace(0, 1, 401) if segment.start <= x < segment.stop]
    orders = [solve_greedy(curvature, 0.4, strength).pruned for strength in grid]
    longest = max(set(orders), key=orders.count)
    assert longest not in (orders[0], orders[-1])
    assert segment.selection is not None
    assert segment.selection.pruned == longest


def test_orders_of_one_set_are_one_segment() -> None:
    """Two units that swap places in the order but are both pruned throughout."""
    units = make_units(1, 0, 4)
    features = np.array([[1.0, 0, 0], [1.0, 1.0, 0], [-1.0, 0, 1.1], [9.0, 9.0, 9.0]])
    curvature = gram_curvature(units, features)
    assert solve_greedy(curvature, 0.7, 0.0).pruned == (0, 1, 2)
    assert solve_greedy(curvature, 0.7, 1.0).pruned == (0, 2, 1)
    path = lambda_path(curvature, 0.7)
    assert (path.orders, len(path), path.distinct_sets) == (2, 1, 1)


def test_a_stall_on_part_of_the_path_is_a_segment() -> None:
    """Room for 4 per layer of cost 7: cheap attention (3) blocks the FFN pair (2 + 2)."""
    units = UnitSet(
        (
            Unit("attention", 0, 0, 0, 3, 3),
            Unit("ffn", 0, 0, 0, 2, 2),
            Unit("ffn", 0, 1, 2, 4, 2),
            Unit("ffn", 1, 0, 0, 4, 4),
            Unit("ffn", 1, 1, 4, 7, 3),
        )
    )
    features = np.array([[1.0, 0, 0], [0, 1.2, 0], [0, 0, 1.2], [2.0, 0, 0], [0, 9.0, 9.0]])
    curvature = gram_curvature(units, features)
    guards = Guards(layer_cap=4 / 7)
    path = lambda_path(curvature, 0.55, guards, include=[3])
    first, second = path
    # attention costs (1/2 + 2 lambda) / 3 (in units of 1/3), an FFN group 0.72 / 2
    assert first.stop == pytest.approx((3 * 0.36 - 0.5) / 2)
    assert first.selection is None
    assert first.stalled_ratio == 7 / 14
    assert second.selection is not None
    assert set(second.selection.pruned) == {1, 2, 3}
    assert "greedy stalls" in repr(path)
    with pytest.raises(InfeasibleError):
        solve_greedy(curvature, 0.55, first.start, guards, include=[3])


def test_an_impossible_ratio_raises_as_the_solver_does() -> None:
    curvature, guards = random_curvature(UNITS), Guards(layer_cap=0.3)
    with pytest.raises(InfeasibleError) as of_path:
        lambda_path(curvature, 0.5, guards)
    with pytest.raises(InfeasibleError) as of_solve:
        solve_greedy(curvature, 0.5, 0.0, guards)
    assert str(of_path.value) == str(of_solve.value)
    assert of_path.value.stalled_ratio is None


def test_the_ends_of_the_range() -> None:
    curvature = random_curvature(UNITS)
    (only,) = lambda_path(curvature, 0.0)
    assert (only.start, only.stop) == (0, 1)
    assert only.selection is not None
    assert only.selection.pruned == ()
    (only,) = lambda_path(curvature, 0.3, maximum=0.0)
    assert only.selection is not None
    assert only.selection.pruned == solve_greedy(curvature, 0.3, 0.0).pruned
    path = lambda_path(curvature, 0.3)
    assert path.at(0) is path.segments[0]
    assert path.at(1) is path.segments[-1]


def test_the_path_of_the_papers_size() -> None:
    curvature = random_curvature(llama_8b_units(), positions=1000)
    path = lambda_path(curvature, 0.2, Guards(protect_first=2, protect_last=2))
    assert path.distinct_sets > 5
    for strength in np.random.default_rng(0).random(100).tolist():
        plan = path.at(strength).selection
        assert plan is not None
        fresh = solve_greedy(curvature, 0.2, strength, plan.guards)
        assert set(plan.pruned) == set(fresh.pruned)


# The gate -----------------------------------------------------------------------------------------


def equicorrelated(units: UnitSet, rho: float) -> Curvature:
    """Unit saliencies, the same signed correlation between all pairs."""
    size = len(units)
    return Curvature((1 - rho) * np.eye(size) + rho * np.ones((size, size)), units)


@pytest.mark.parametrize(
    ("rho", "band", "strength"),
    [(0.0999, "low", 1), (0.1001, "gray", 0), (0.1199, "gray", 0), (0.1201, "high", 0)],
)
def test_the_band_and_its_recommendation(rho: float, band: str, strength: float) -> None:
    gate = redundancy_gate(equicorrelated(UNITS, rho))
    assert gate.redundancy == pytest.approx(rho)
    assert (gate.band, gate.recommended) == (band, strength)
    assert f"{rho:.3f}" in gate.reason
    assert band in gate.reason


def test_the_balance_against_loops() -> None:
    curvature = random_curvature(UNITS, 2)
    chosen = solve_greedy(curvature, 0.3, 0.0).pruned
    rho = curvature.correlation()
    mean = np.mean([rho[u, v] for u in chosen for v in chosen if u != v])
    ratios = [
        abs(sum(curvature.matrix[u, v] for v in chosen if v != u)) / (curvature.matrix[u, u] / 2)
        for u in chosen
    ]
    gate = redundancy_gate(curvature, 0.3)
    assert gate.edge_to_diagonal == pytest.approx(2 * len(chosen) * abs(mean))
    assert gate.edge_to_diagonal_measured == pytest.approx(np.median(ratios))


def test_variation_and_noise_floor() -> None:
    curvature = random_curvature(UNITS, 3, groups=8)
    gate = redundancy_gate(curvature)
    ffn = curvature.saliency[UNITS.kinds == "ffn"]
    assert gate.diagonal_cv["ffn"] == pytest.approx(np.std(ffn) / np.mean(ffn))
    assert gate.noise_floor == curvature.ffn_redundancy_noise_floor
    assert gate.corrected == curvature.ffn_redundancy_corrected
    assert f"{gate.noise_floor:.3f}" in gate.reason


def test_without_ffn_pairs_the_gate_recommends_nothing() -> None:
    gate = redundancy_gate(random_curvature(make_units(3, 2, 0)))
    assert math.isnan(gate.redundancy)
    assert math.isnan(gate.diagonal_cv["ffn"])
    assert (gate.band, gate.recommended, gate.decided) == ("unknown", None, False)
    assert "NaN" in gate.reason


def test_degenerate_matrices_pass_the_gate() -> None:
    gate = redundancy_gate(Curvature(np.zeros((30, 30)), UNITS))
    assert (gate.edge_to_diagonal, gate.edge_to_diagonal_measured, gate.band) == (0, 0, "low")
    assert redundancy_gate(random_curvature(UNITS), ratio=0).edge_to_diagonal == 0


def planted(redundancy: float, positions: int, groups: int = 16) -> Curvature:
    """H of features that share a common part: every rho is near `redundancy`, with errors."""
    rng = np.random.default_rng(0)
    features = np.sqrt(1 - redundancy) * rng.normal(size=(len(UNITS), positions))
    features += np.sqrt(redundancy) * rng.normal(size=positions)
    return gram_curvature(UNITS, features, groups)


def test_the_error_of_the_balance_is_the_spread_over_new_text() -> None:
    """The bootstrap over groups against the same plan's balance on other draws of features."""
    gate = redundancy_gate(planted(0.3, 2000), 0.4)
    assert redundancy_gate(planted(0.3, 2000), 0.4) == gate  # the draws are seeded
    for number in (gate.edge_to_diagonal_measured, gate.edge_to_diagonal_error):
        assert f"{number:.2f}" in gate.reason
    chosen = list(solve_greedy(planted(0.3, 2000), 0.4, 0.0).pruned)
    found = []
    for seed in range(60):
        rng = np.random.default_rng(100 + seed)
        features = np.sqrt(0.7) * rng.normal(size=(len(chosen), 2000))
        features += np.sqrt(0.3) * rng.normal(size=2000)
        gram = features @ features.T
        half = np.diag(gram) / 2
        found.append(np.median(np.abs(gram.sum(axis=1) - 2 * half) / half))
    assert gate.edge_to_diagonal_error is not None
    assert 0.5 < gate.edge_to_diagonal_error / np.std(found) < 2


def test_the_gate_is_undecided_where_the_errors_reach_the_border() -> None:
    rough, fine = planted(0.12, 300), planted(0.3, 20_000)
    gate = redundancy_gate(rough, 0.4)
    assert gate.redundancy_error is not None
    assert min(gate.redundancy, gate.corrected or 0) - 2 * gate.redundancy_error < 0.10
    assert (gate.decided, gate.verdict, gate.recommended) == (False, None, 0)  # the paper's λ stays
    assert gate.doubts == ("border",)
    assert gate.reason.startswith("Undecided")
    gate = redundancy_gate(fine, 0.4)
    assert (gate.decided, gate.verdict, gate.recommended) == (True, 0, 0)
    assert not gate.reason.startswith("Undecided")


def test_the_gate_is_undecided_where_the_edges_are_no_larger_than_the_diagonal() -> None:
    curvature = planted(0.05, 20_000)
    few = redundancy_gate(curvature, 0.2)
    assert few.edge_to_diagonal_measured < 1
    assert (few.band, few.recommended, few.doubts) == ("low", 1, ("balance",))
    many = redundancy_gate(curvature, 0.9)  # the balance grows with |S|
    assert many.edge_to_diagonal_error is not None
    assert many.edge_to_diagonal_measured - 2 * many.edge_to_diagonal_error > 1
    assert (many.recommended, many.decided, many.verdict) == (1, True, 1)


def test_without_errors_the_rule_of_the_paper_stands() -> None:
    curvature = planted(0.05, 20_000)
    assert not redundancy_gate(curvature).decided
    with pytest.raises(InputError, match="its group Grams come to another value"):
        replace(curvature, matrix=2 * curvature.matrix)
    for other in (Curvature(curvature.matrix, UNITS), planted(0.05, 20_000, groups=1)):
        gate = redundancy_gate(other)
        assert (gate.decided, gate.verdict) == (True, 1)
        assert gate.redundancy_error is gate.edge_to_diagonal_error is None
