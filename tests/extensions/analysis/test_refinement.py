"""Local search and the bound against every plan there is, and against what they promise."""

from __future__ import annotations

import time
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocurve_lab.base.errors import InfeasibleError, InputError, NumericalError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.bounds import risk_lower_bound
from cocurve_lab.extensions.analysis.refinement import refine
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from helpers.problems import make_units, random_curvature

UNITS = make_units(3, 2, 2)  # 12 units, 4096 plans; a layer costs 32, all 96
PLANS = np.array(list(product([0, 1], repeat=12)))
SETTINGS = settings(max_examples=80, derandomize=True, deadline=None)

guard_sets = st.builds(
    Guards,
    layer_cap=st.sampled_from([None, None, 0.4, 0.7]),
    protect_first=st.integers(0, 1),
    kinds=st.sampled_from([("attention", "ffn"), ("attention", "ffn"), ("ffn",)]),
)


def small_curvature(seed: int, kind: str = "random", units: UnitSet = UNITS) -> Curvature:
    """Well conditioned, of low rank (units that cancel), or with units that do nothing."""
    if kind == "low rank":
        features = np.random.default_rng(seed).normal(size=(len(units), 4))
        return Curvature(features @ features.T / 4, units)
    curvature = random_curvature(units, seed, shared=1.0)
    if kind == "dead units":
        matrix = curvature.matrix.copy()
        matrix[[1, 7]] = matrix[:, [1, 7]] = 0
        return Curvature(matrix, units)
    return curvature


def objectives(curvature: Curvature, strength: float, plans: np.ndarray = PLANS) -> np.ndarray:
    """R_lambda of each row of `plans` by eq. (lambda): nodes plus lambda times pairs."""
    node = plans @ curvature.saliency / 2
    whole = np.einsum("pu,uv,pv->p", plans, curvature.matrix, plans) / 2
    return node + strength * (whole - node)


def feasible(units: UnitSet, ratio: float, guards: Guards, plans: np.ndarray = PLANS) -> np.ndarray:
    """Which rows of `plans` reach the ratio under the guards, from the definitions."""
    ok = plans @ units.costs >= ratio * units.total_cost * (1 - 1e-12)
    for layer in range(units.num_layers):
        mine = units.layers == layer
        cap = guards.cap_at(ratio) * units.costs[mine].sum() * (1 + 1e-12)
        if layer < guards.protect_first or layer >= units.num_layers - guards.protect_last:
            cap = 0
        ok &= plans @ np.where(mine, units.costs, 0) <= cap
    closed = [not guards.allows(unit.kind) for unit in units]
    return ok & ~plans[:, closed].any(axis=1)


def greedy_or_none(
    curvature: Curvature, ratio: float, strength: float, guards: Guards
) -> Selection | None:
    try:
        return solve_greedy(curvature, ratio, strength, guards)
    except InfeasibleError:
        return None


# Against every plan -------------------------------------------------------------------------------


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["random", "low rank", "dead units"]),
    ratio=st.sampled_from([0.1, 0.2, 0.3, 0.45, 0.6]),
    strength=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    guards=guard_sets,
)
def test_bound_below_optimum_below_refined_below_greedy(
    seed: int, kind: str, ratio: float, strength: float, guards: Guards
) -> None:
    curvature = small_curvature(seed, kind)
    values = objectives(curvature, strength)[feasible(UNITS, ratio, guards)]
    if not len(values):
        with pytest.raises(InfeasibleError):
            risk_lower_bound(curvature, ratio, guards, strength)
        return
    optimum = values.min()
    rounding = 1e-13 * curvature.saliency.sum()  # of the enumeration; the bound allows for its own
    assert risk_lower_bound(curvature, ratio, guards, strength) <= optimum + rounding
    greedy = greedy_or_none(curvature, ratio, strength, guards)
    if greedy is not None:
        refined = refine(greedy, curvature)
        assert refined.objective is not None
        assert greedy.objective is not None
        assert optimum - rounding <= refined.objective <= greedy.objective
        assert feasible(UNITS, ratio, guards, refined.indicator[None].astype(int))[0]


def exchanges(plan: Selection, free: list[int]) -> list[set[int]]:
    """Every set one exchange away: drop, add, swap, two for one, one for two."""
    inside = [u for u in plan.pruned if u in free]
    outside = [u for u in free if u not in plan.pruned]
    found = []
    for leave, enter in [(1, 0), (0, 1), (1, 1), (2, 1), (1, 2)]:
        for out in combinations(inside, leave):
            found += [
                (set(plan.pruned) - set(out)) | set(new) for new in combinations(outside, enter)
            ]
    return found


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    ratio=st.sampled_from([0.15, 0.3, 0.5]),
    strength=st.sampled_from([0.3, 1.0, 2.0]),
    guards=guard_sets,
    forced=st.lists(st.integers(4, 11), max_size=2, unique=True),
)
def test_no_exchange_improves_a_refined_plan(
    seed: int, ratio: float, strength: float, guards: Guards, forced: list[int]
) -> None:
    """The promise of `refine`, checked exchange by exchange with the objective summed afresh."""
    curvature = small_curvature(seed)
    try:
        greedy = solve_greedy(curvature, ratio, strength, guards, include=forced)
    except (InfeasibleError, InputError):  # no such plan, or a forced unit breaks a guard
        return
    refined = refine(greedy, curvature)
    assert refined.objective is not None
    assert set(forced) <= set(refined.pruned)
    limit = ratio * 96 + max(
        c for c, k in zip(UNITS.costs, UNITS.kinds, strict=True) if guards.allows(k)
    )
    assert refined.pruned_cost < max(limit, UNITS.costs[forced].sum() + 1)
    rows = np.zeros((0, 12), dtype=int)
    for near in exchanges(refined, [u for u in range(12) if u not in forced]):
        rows = np.vstack([rows, [u in near for u in range(12)]])
    ok = feasible(UNITS, ratio, guards, rows) & (rows @ UNITS.costs < limit)
    values = objectives(curvature, strength, rows)[ok]
    tolerance = 1e-9 * abs(refined.objective) + 1e-15
    assert (values > refined.objective - tolerance).all()


# Local search -------------------------------------------------------------------------------------


def test_what_the_refined_plan_keeps() -> None:
    curvature = random_curvature(make_units(4, 3, 6), 5, shared=1.0)
    guards = Guards(layer_cap_factor=1.6, protect_last=1)
    greedy = solve_greedy(curvature, 0.35, 0.7, guards, include=[9, 2])
    refined = refine(greedy.with_gains({8: 1.2} if 8 in greedy.kept else {}), curvature)
    assert refined.pruned != greedy.pruned
    assert refined.pruned[:2] == (9, 2)
    assert list(refined.pruned[2:]) == sorted(refined.pruned[2:])
    assert (refined.guards, refined.interaction_strength) == (guards, 0.7)
    assert (refined.requested_ratio, refined.forced) == (0.35, 2)
    assert not refined.ordered
    assert refined.gains == {}
    assert refined.predicted_risk == pytest.approx(curvature.risk(refined.pruned))
    assert refined.objective is not None
    plan = refined.indicator[None].astype(float)
    assert refined.objective == pytest.approx(objectives(curvature, 0.7, plan)[0])
    again = refine(refined, curvature)
    assert again.pruned == refined.pruned
    assert refine(greedy, curvature).pruned == refined.pruned


def test_excluded_units_stay_out() -> None:
    curvature = random_curvature(make_units(4, 3, 6), 5, shared=1.0)
    greedy = solve_greedy(curvature, 0.3)
    entered = set(refine(greedy, curvature).pruned) - set(greedy.pruned)
    assert entered
    refined = refine(greedy, curvature, exclude=entered)
    assert not entered & set(refined.pruned)


def test_hundreds_of_units_take_seconds() -> None:
    curvature = random_curvature(make_units(16, 8, 16), 0, shared=1.0, positions=450)
    greedy = solve_greedy(curvature, 0.2, guards=Guards(layer_cap=0.3, protect_first=2))
    start = time.process_time()
    refined = refine(greedy, curvature)
    assert time.process_time() - start < 10  # of this process, well below 1
    assert refined.objective is not None
    assert greedy.objective is not None
    assert refined.objective < greedy.objective


@pytest.mark.parametrize(
    ("pruned", "fields", "match"),
    [
        ([0, 2], {"interaction_strength": None}, "interaction_strength"),
        ([0], {"requested_ratio": 0.3}, "29"),
        ([0, 2, 3, 6], {"requested_ratio": 0.1}, "38"),
        ([0, 2], {"guards": Guards(protect_first=1)}, r"may not go: .*L0.attention\[0\]"),
        ([0, 2], {"guards": Guards(layer_cap=0.4)}, r"layers above their cap: \[0\]"),
    ],
)
def test_plans_that_break_their_own_rules_are_refused(
    pruned: list[int], fields: dict[str, Any], match: str
) -> None:
    plan = Selection.from_pruned(UNITS, pruned, **({"interaction_strength": 1.0} | fields))
    with pytest.raises(InputError, match=match):
        refine(plan, small_curvature(0))


# The bound ----------------------------------------------------------------------------------------


def fractional_knapsack(curvature: Curvature, ratio: float) -> float:
    """Cheapest way to reach the ratio if units could be cut in parts: by risk per parameter."""
    risk, costs = curvature.saliency / 2, curvature.units.costs
    need, value = ratio * costs.sum(), 0.0
    for u in np.argsort(risk / costs):
        part = min(1.0, need / costs[u])
        value += part * risk[u]
        need -= part * costs[u]
        if need <= 0:
            break
    return value


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5, 0.9])
def test_without_edges_the_bound_is_the_fractional_knapsack(ratio: float) -> None:
    units = make_units(8, 3, 9)
    curvature = random_curvature(units, 3)
    expected = fractional_knapsack(curvature, ratio)
    diagonal = Curvature(np.diag(curvature.saliency), units)
    for bound in (
        risk_lower_bound(diagonal, ratio),
        risk_lower_bound(curvature, ratio, interaction_strength=0.0),
    ):
        assert expected * (1 - 2e-3) < bound < expected * 1.05  # costs are whole, so above is fine
        assert bound <= solve_greedy(diagonal, ratio).objective  # type: ignore[operator]


def test_the_bound_rounds_the_budget_to_whole_units() -> None:
    """Five of twelve equal units are needed for 0.4: no plan of 4.8 units exists."""
    units = make_units(3, 0, 4, ffn_cost=7)
    bound = risk_lower_bound(Curvature(2 * np.eye(12), units), 0.4)
    assert bound == pytest.approx(5, rel=2e-3)
    assert bound <= 5


def test_caps_and_protection_raise_the_bound() -> None:
    curvature = random_curvature(make_units(6, 4, 8), 2, shared=0.6, positions=2000)
    bounds = [
        risk_lower_bound(curvature, 0.3, guards)
        for guards in (
            Guards(),
            Guards(protect_first=1, protect_last=1),
            Guards(protect_first=1, protect_last=1, layer_cap=0.5),
        )
    ]
    assert 0 < bounds[0] < 0.999 * bounds[1] < bounds[1] < 0.999 * bounds[2]


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_weak_edges_leave_a_tight_bound(strength: float) -> None:
    curvature = random_curvature(make_units(6, 4, 8), 4, positions=3000)
    refined = refine(solve_greedy(curvature, 0.3, strength), curvature)
    assert refined.objective is not None
    bound = risk_lower_bound(curvature, 0.3, interaction_strength=strength)
    assert 0.9 * refined.objective < bound <= refined.objective


@pytest.mark.parametrize("seed", range(4))
def test_semidefinite_only_up_to_float32_is_accounted_for(seed: int) -> None:
    """Rank 4 of 12 in float32: eigenvalues of -1e-8 exist, and R can be below 0 by as much."""
    features = np.random.default_rng(seed).normal(size=(12, 4)).astype(np.float32)
    curvature = Curvature((features @ features.T).astype(float), UNITS)
    assert curvature.spectrum()[-1] < 0
    for ratio in (0.0, 0.2, 0.4):
        optimum = objectives(curvature, 1.0)[feasible(UNITS, ratio, Guards())].min()
        assert risk_lower_bound(curvature, ratio) <= optimum


def test_ratio_zero_and_nothing_to_prune() -> None:
    curvature = random_curvature(UNITS, 0, positions=2000)
    assert risk_lower_bound(curvature, 0) == pytest.approx(0, abs=1e-12 * curvature.saliency.sum())
    assert risk_lower_bound(curvature, 0, Guards(protect_first=3)) == 0
    nothing = Curvature(np.zeros((12, 12)), UNITS)
    assert risk_lower_bound(nothing, 0.3) == pytest.approx(0, abs=1e-9)
    assert risk_lower_bound(nothing, 0.3) <= 0


def test_an_indefinite_matrix_is_refused_at_every_lambda() -> None:
    matrix = small_curvature(0).matrix.copy()
    matrix[2, 3] = matrix[3, 2] = -2 * np.sqrt(matrix[2, 2] * matrix[3, 3])
    dead = small_curvature(0, "dead units").matrix.copy()
    dead[1, 2] = dead[2, 1] = -0.1 * dead.diagonal().mean()
    for wrong, strength in product((matrix, dead), (0.0, 1.0)):
        with pytest.raises(NumericalError):
            risk_lower_bound(Curvature(wrong, UNITS), 0.2, interaction_strength=strength)


def test_out_of_reach_is_said_with_what_is_reachable() -> None:
    with pytest.raises(InfeasibleError) as caught:
        risk_lower_bound(small_curvature(0), 0.5, Guards(layer_cap=0.4))
    assert caught.value.stalled_ratio is None
    assert caught.value.reachable_ratio == pytest.approx(33 / 96)
