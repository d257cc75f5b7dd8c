"""Local search and the bound against every plan there is, and against what they promise."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from helpers.problems import make_units, random_curvature

UNITS = make_units(3, 2, 2)  # 12 units, 4096 plans; a layer costs 32, all 96
PLANS = np.array(list(product([0, 1], repeat=12)))
SETTINGS = settings(max_examples=50, derandomize=True, deadline=None)

guard_sets = st.builds(
    cl.Guards,
    layer_cap=st.sampled_from([None, None, 0.4, 0.7]),
    protect_first=st.integers(0, 1),
    kinds=st.sampled_from([("attention", "ffn"), ("attention", "ffn"), ("ffn",)]),
)


def small_curvature(seed: int, kind: str = "random", units: cl.UnitSet = UNITS) -> cl.Curvature:
    """Well conditioned, of low rank (units that cancel), or with units that do nothing."""
    if kind == "low rank":
        features = np.random.default_rng(seed).normal(size=(len(units), 4))
        return cl.Curvature(features @ features.T / 4, units)
    curvature = random_curvature(units, seed, shared=1.0)
    if kind == "dead units":
        matrix = curvature.matrix.copy()
        matrix[[1, 7]] = matrix[:, [1, 7]] = 0
        return cl.Curvature(matrix, units)
    return curvature


def objectives(curvature: cl.Curvature, strength: float, plans: np.ndarray = PLANS) -> np.ndarray:
    """R_lambda of each row of `plans` by eq. (lambda): nodes plus lambda times pairs."""
    node = plans @ curvature.saliency / 2
    whole = np.einsum("pu,uv,pv->p", plans, curvature.matrix, plans) / 2
    return node + strength * (whole - node)


def feasible(
    units: cl.UnitSet, ratio: float, guards: cl.Guards, plans: np.ndarray = PLANS
) -> np.ndarray:
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
    seed: int, kind: str, ratio: float, strength: float, guards: cl.Guards
) -> None:
    curvature = small_curvature(seed, kind)
    values = objectives(curvature, strength)[feasible(UNITS, ratio, guards)]
    if not len(values):
        with pytest.raises(cl.InfeasibleError):
            cl.risk_lower_bound(curvature, ratio, guards, strength)
        return
    optimum = values.min()
    rounding = 1e-13 * curvature.saliency.sum()  # of the enumeration; the bound allows for its own
    assert cl.risk_lower_bound(curvature, ratio, guards, strength) <= optimum + rounding
    try:
        greedy = cl.solve_greedy(curvature, ratio, strength, guards)
    except cl.InfeasibleError:  # it stalls
        return
    refined = cl.refine(greedy, curvature)
    assert optimum - rounding <= refined.objective <= greedy.objective
    assert feasible(UNITS, ratio, guards, refined.indicator[None].astype(int))[0]


def exchanges(plan: cl.Selection, free: list[int]) -> list[set[int]]:
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
    seed: int, ratio: float, strength: float, guards: cl.Guards, forced: list[int]
) -> None:
    """The promise of `refine`, checked exchange by exchange with the objective summed afresh."""
    curvature = small_curvature(seed)
    try:
        greedy = cl.solve_greedy(curvature, ratio, strength, guards, include=forced)
    except (cl.InfeasibleError, cl.InputError):  # no such plan, or a forced unit breaks a guard
        return
    refined = cl.refine(greedy, curvature)
    assert set(forced) <= set(refined.pruned)
    limit = ratio * 96 + max(
        c for c, k in zip(UNITS.costs, UNITS.kinds, strict=True) if guards.allows(k)
    )
    assert refined.pruned_cost < max(limit, UNITS.costs[forced].sum() + 1)
    near = exchanges(refined, [u for u in range(12) if u not in forced])
    rows = np.array([[u in one for u in range(12)] for one in near], dtype=int).reshape(-1, 12)
    ok = feasible(UNITS, ratio, guards, rows) & (rows @ UNITS.costs < limit)
    values = objectives(curvature, strength, rows)[ok]
    tolerance = 1e-9 * abs(refined.objective) + 1e-15
    assert (values > refined.objective - tolerance).all()


# Local search -------------------------------------------------------------------------------------


def test_what_the_refined_plan_keeps_and_leaves_out() -> None:
    curvature = random_curvature(make_units(4, 3, 6), 1, shared=1.0)
    guards = cl.Guards(layer_cap_factor=1.6, protect_last=1)
    greedy = cl.solve_greedy(curvature, 0.3, 0.7, guards, include=[9, 2])
    refined = cl.refine(greedy.with_gains({8: 1.2}), curvature)
    assert refined.pruned[:2] == (9, 2)
    assert list(refined.pruned[2:]) == sorted(refined.pruned[2:])
    for field in ("guards", "interaction_strength", "requested_ratio", "forced"):
        assert getattr(refined, field) == getattr(greedy, field)
    assert (refined.ordered, refined.gains) == (False, {})
    assert refined.predicted_risk == pytest.approx(curvature.risk(refined.pruned))
    plan = refined.indicator[None].astype(float)
    assert refined.objective == pytest.approx(objectives(curvature, 0.7, plan)[0])
    entered = set(refined.pruned) - set(greedy.pruned)
    assert entered
    assert not entered & set(cl.refine(greedy, curvature, exclude=entered).pruned)


H = random_curvature(UNITS)


PLAN = cl.solve_greedy(H, 0.3)


@pytest.mark.parametrize(
    ("pruned", "fields"),
    [
        ([0, 2], {"interaction_strength": None}),
        ([0], {"requested_ratio": 0.3}),
        ([0, 2, 3, 6], {"requested_ratio": 0.1}),
        ([0, 2], {"guards": cl.Guards(protect_first=1)}),
        ([0, 2], {"guards": cl.Guards(layer_cap=0.4)}),
    ],
)
def test_plans_that_break_their_own_rules_are_refused(
    pruned: list[int], fields: dict[str, Any]
) -> None:
    plan = cl.Selection.from_pruned(UNITS, pruned, **({"interaction_strength": 1.0} | fields))
    with pytest.raises(cl.InputError):
        cl.refine(plan, H)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: cl.refine(PLAN, H, exclude=[PLAN.pruned[0]]), cl.InputError),
        (lambda: cl.refine(cl.solve_greedy(H, 0.4, uniform=True), H), cl.InputError),
        (lambda: cl.refine(PLAN, random_curvature(make_units(2))), cl.MismatchError),
        *(
            (lambda x=x: cl.risk_lower_bound(H, 0.2, interaction_strength=x), cl.InputError)
            for x in (-0.1, 1.1, np.nan)
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


# The bound ----------------------------------------------------------------------------------------


def test_the_bound_rounds_the_budget_to_whole_units() -> None:
    """Five of twelve equal units are needed for 0.4: no plan of 4.8 units exists."""
    units = make_units(3, 0, 4, ffn_cost=7)
    bound = cl.risk_lower_bound(cl.Curvature(2 * np.eye(12), units), 0.4)
    assert 5 * (1 - 2e-3) < bound <= 5


def test_caps_and_protection_raise_the_bound() -> None:
    curvature = random_curvature(make_units(6, 4, 8), 2, shared=0.6, positions=2000)
    ends = {"protect_first": 1, "protect_last": 1}
    guards = (cl.Guards(), cl.Guards(**ends), cl.Guards(**ends, layer_cap=0.5))
    bounds = [cl.risk_lower_bound(curvature, 0.3, each) for each in guards]
    assert 0 < bounds[0] < 0.999 * bounds[1] < bounds[1] < 0.999 * bounds[2]


@pytest.mark.parametrize(("strength", "share"), [(0.0, 0.97), (0.5, 0.9), (1.0, 0.9)])
def test_weak_edges_leave_a_tight_bound(strength: float, share: float) -> None:
    curvature = random_curvature(make_units(6, 4, 8), 4, positions=3000)
    refined = cl.refine(cl.solve_greedy(curvature, 0.3, strength), curvature)
    bound = cl.risk_lower_bound(curvature, 0.3, interaction_strength=strength)
    assert share * refined.objective < bound <= refined.objective, bound / refined.objective


@pytest.mark.parametrize("seed", range(4))
def test_semidefinite_only_up_to_float32_is_accounted_for(seed: int) -> None:
    """Rank 4 of 12 in float32: eigenvalues of -1e-8 exist, and R can be below 0 by as much."""
    features = np.random.default_rng(seed).normal(size=(12, 4)).astype(np.float32)
    curvature = cl.Curvature((features @ features.T).astype(float), UNITS)
    assert curvature.spectrum()[-1] < 0
    for ratio in (0.0, 0.2, 0.4):
        optimum = objectives(curvature, 1.0)[feasible(UNITS, ratio, cl.Guards())].min()
        assert cl.risk_lower_bound(curvature, ratio) <= optimum


def test_ratio_zero_and_nothing_to_prune() -> None:
    curvature = random_curvature(UNITS, 0, positions=2000)
    zero = 1e-12 * curvature.saliency.sum()
    assert cl.risk_lower_bound(curvature, 0) == pytest.approx(0, abs=zero)
    assert cl.risk_lower_bound(curvature, 0, cl.Guards(protect_first=3)) == 0
    assert -1e-9 < cl.risk_lower_bound(cl.Curvature(np.zeros((12, 12)), UNITS), 0.3) <= 0


def test_an_indefinite_matrix_is_refused_at_every_lambda() -> None:
    matrix = small_curvature(0).matrix.copy()
    matrix[2, 3] = matrix[3, 2] = -2 * np.sqrt(matrix[2, 2] * matrix[3, 3])
    dead = small_curvature(0, "dead units").matrix.copy()
    dead[1, 2] = dead[2, 1] = -0.1 * dead.diagonal().mean()
    for wrong, strength in product((matrix, dead), (0.0, 1.0)):
        with pytest.raises(cl.NumericalError):
            cl.risk_lower_bound(cl.Curvature(wrong, UNITS), 0.2, interaction_strength=strength)


def test_out_of_reach_is_said_with_what_is_reachable() -> None:
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.risk_lower_bound(small_curvature(0), 0.5, cl.Guards(layer_cap=0.4))
    reached = (caught.value.stalled_ratio, caught.value.reachable_ratio)
    assert reached == (None, pytest.approx(33 / 96))
