"""Gains, the gate, variants, refinement, bound, stability: against their definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.extensions.analysis.gains import compensated_risk
from cocurve_lab.extensions.analysis.gate import noise_of
from cocurve_lab.extensions.analysis.stability import StopWhenConverged
from cocurve_lab.extensions.analysis.variants import (
    Reach,
    Sign,
    Structure,
    measured_diagonal,
    solve_variant,
)
from helpers import builds, gaussian
from helpers.builds import require_same_bits
from helpers.problems import gram_curvature, make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text

UNITS = make_units()  # 3 layers of 2 attention and 3 FFN units


def plan_of(curvature: cl.Curvature, pruned: list[int]) -> cl.Selection:
    return cl.Selection.from_pruned(curvature.units, pruned, curvature)


def kept_ffn(plan: cl.Selection) -> list[int]:
    return [u for u in range(len(plan.units)) if plan.units[u].kind == "ffn" and u in plan.kept]


# The system ---------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pruned=st.sets(st.integers(0, 14), max_size=10),
    ridge=st.sampled_from([0.0, 0.05, 0.2, 1.0, 7.0]),
    clip=st.sampled_from([0.3, 1.0, 2.0, np.inf]),
    strength=st.sampled_from([0.0, 1.0]),  # of the plan; the system is of the full H all the same
)
def test_equals_least_squares_on_the_features(
    seed: int, pruned: set[int], ridge: float, clip: float, strength: float
) -> None:
    """The paper's minimization on features, never forming H: rows sqrt(gamma) I are the ridge."""
    features = np.random.default_rng(seed).normal(size=(15, 40)) / np.sqrt(40)
    curvature = gram_curvature(UNITS, features)
    plan = plan_of(curvature, sorted(pruned)).with_made(interaction_strength=strength)
    kept = kept_ffn(plan)
    scaled = features / np.sqrt(features.shape[1])
    gamma = ridge * np.mean([scaled[u] @ scaled[u] for u in kept]) if kept else 0.0
    design = np.vstack([scaled[kept].T, np.sqrt(gamma) * np.eye(len(kept))])
    wanted = np.concatenate([scaled[sorted(pruned)].sum(axis=0), np.zeros(len(kept))])
    alpha = np.linalg.lstsq(design, wanted, rcond=None)[0]
    gains = cl.solve_gains(curvature, plan, ridge, clip)
    assert list(gains) == kept
    expected = np.clip(1 + alpha, 1 - clip, 1 + clip)
    np.testing.assert_allclose(list(gains.values()), expected, rtol=1e-9, atol=1e-12)


def test_a_singular_system_without_ridge_takes_the_least_norm() -> None:
    features = np.random.default_rng(0).normal(size=(15, 60))
    features[4] = features[13] = features[8]  # two twins of the pruned unit share its part
    curvature = gram_curvature(UNITS, features)
    gains = cl.solve_gains(curvature, plan_of(curvature, [8]), 0.0)
    assert gains[4] == pytest.approx(1.5)
    assert gains[13] == pytest.approx(1.5)


def test_predicted_risk_with_gains_by_hand() -> None:
    curvature = random_curvature(UNITS, 6)
    plan = plan_of(curvature, [3, 9]).with_gains({2: 1.25, 14: 0.5})
    shares = {3: 1.0, 9: 1.0, 2: -0.25, 14: 0.5}
    by_hand = 0.5 * sum(
        curvature.matrix[u, v] * a * b for u, a in shares.items() for v, b in shares.items()
    )
    assert compensated_risk(curvature, plan) == pytest.approx(by_hand)


def test_an_indefinite_matrix_is_refused_and_rounding_is_not() -> None:
    curvature = random_curvature(UNITS, 0)
    matrix = curvature.matrix.copy()
    plan = plan_of(curvature, [0])
    matrix[2, 3] = matrix[3, 2] = 3 * np.sqrt(matrix[2, 2] * matrix[3, 3])
    with pytest.raises(cl.NumericalError):
        cl.solve_gains(cl.Curvature(matrix, UNITS), plan, 0.0)
    twins = np.random.default_rng(0).normal(size=(15, 4)).astype(np.float32)  # rank 4 of 15
    rounded = cl.Curvature((twins @ twins.T).astype(np.float64), UNITS)
    assert np.linalg.eigvalsh(rounded.matrix).min() < 0
    assert np.isfinite(list(cl.solve_gains(rounded, plan, 0.0, np.inf).values())).all()


# The redundancy gate ----------------------------------------------------------------------------

GATED = make_units(6, 2, 3)  # 30 units


@pytest.mark.parametrize(
    ("rho", "band", "strength"),
    [(0.0999, "low", 1), (0.1001, "gray", 0), (0.1199, "gray", 0), (0.1201, "high", 0)],
)
def test_the_band_and_its_recommendation(rho: float, band: str, strength: float) -> None:
    """Unit saliencies, the same correlation between all pairs."""
    size = len(GATED)
    curvature = cl.Curvature((1 - rho) * np.eye(size) + rho * np.ones((size, size)), GATED)
    gate = cl.redundancy_gate(curvature)
    assert gate.redundancy == pytest.approx(rho)
    assert (gate.band, gate.recommended) == (band, strength)


def test_the_balance_variation_and_noise_floor_against_loops() -> None:
    curvature = random_curvature(GATED, 2, groups=8)
    chosen = cl.solve_greedy(curvature, 0.3, 0.0).pruned
    rho, half = curvature.correlation(), curvature.saliency / 2
    mean = np.mean([rho[u, v] for u in chosen for v in chosen if u != v])
    ratios = [abs(sum(curvature.matrix[u, v] for v in chosen if v != u)) / half[u] for u in chosen]
    gate = cl.redundancy_gate(curvature, 0.3)
    assert gate.edge_to_diagonal == pytest.approx(2 * len(chosen) * abs(mean))
    assert gate.edge_to_diagonal_measured == pytest.approx(np.median(ratios))
    ffn = curvature.saliency[GATED.kinds == "ffn"]
    assert gate.diagonal_cv["ffn"] == pytest.approx(np.std(ffn) / np.mean(ffn))
    assert (gate.noise_floor, gate.corrected) == noise_of(curvature, curvature.pair_mask("ffn"))


def test_without_ffn_pairs_the_gate_recommends_nothing() -> None:
    gate = cl.redundancy_gate(random_curvature(make_units(3, 2, 0)))
    assert np.isnan([gate.redundancy, gate.diagonal_cv["ffn"]]).all()
    assert (gate.band, gate.recommended, gate.decided) == ("unknown", None, False)


def test_degenerate_matrices_pass_the_gate() -> None:
    gate = cl.redundancy_gate(cl.Curvature(np.zeros((30, 30)), GATED))
    assert (gate.edge_to_diagonal, gate.edge_to_diagonal_measured, gate.band) == (0, 0, "low")
    assert cl.redundancy_gate(random_curvature(GATED), ratio=0).edge_to_diagonal == 0


def planted(redundancy: float, positions: int, groups: int = 16) -> cl.Curvature:
    """H of features that share a common part: every rho is near `redundancy`, with errors."""
    rng = np.random.default_rng(0)
    features = np.sqrt(1 - redundancy) * rng.normal(size=(len(GATED), positions))
    features += np.sqrt(redundancy) * rng.normal(size=positions)
    return gram_curvature(GATED, features, groups)


def test_the_error_of_the_balance_is_the_spread_over_new_text() -> None:
    """The bootstrap over groups against the same plan's balance on other draws of features."""
    gate = cl.redundancy_gate(planted(0.3, 2000), 0.4)
    assert cl.redundancy_gate(planted(0.3, 2000), 0.4) == gate  # the draws are seeded
    chosen = list(cl.solve_greedy(planted(0.3, 2000), 0.4, 0.0).pruned)
    found = []
    for seed in range(60):
        rng = np.random.default_rng(100 + seed)
        features = np.sqrt(0.7) * rng.normal(size=(len(chosen), 2000))
        features += np.sqrt(0.3) * rng.normal(size=2000)
        gram = features @ features.T
        half = np.diag(gram) / 2
        found.append(np.median(np.abs(gram.sum(axis=1) - 2 * half) / half))
    assert 0.5 < gate.edge_to_diagonal_error / np.std(found) < 2


def test_the_gate_is_undecided_where_the_errors_reach_the_border() -> None:
    gate = cl.redundancy_gate(planted(0.12, 300), 0.4)
    assert min(gate.redundancy, gate.corrected or 0) - 2 * gate.redundancy_error < 0.10
    assert (gate.decided, gate.verdict, gate.recommended) == (False, None, 0)  # the paper's λ stays
    assert gate.doubts == ("border",)
    gate = cl.redundancy_gate(planted(0.3, 20_000), 0.4)
    assert (gate.decided, gate.verdict, gate.recommended) == (True, 0, 0)


def test_the_gate_is_undecided_where_the_edges_are_no_larger_than_the_diagonal() -> None:
    curvature = planted(0.05, 20_000)
    few, many = (cl.redundancy_gate(curvature, ratio) for ratio in (0.2, 0.9))
    assert few.edge_to_diagonal_measured < 1
    assert (few.band, few.recommended, few.doubts) == ("low", 1, ("balance",))
    # the balance grows with |S|
    assert many.edge_to_diagonal_measured - 2 * many.edge_to_diagonal_error > 1
    assert (many.recommended, many.decided, many.verdict) == (1, True, 1)


def test_without_errors_the_rule_of_the_paper_stands() -> None:
    curvature = planted(0.05, 20_000)
    assert not cl.redundancy_gate(curvature).decided
    with pytest.raises(cl.InputError):  # its groups come to another matrix
        replace(curvature, matrix=2 * curvature.matrix)
    for other in (cl.Curvature(curvature.matrix, GATED), planted(0.05, 20_000, groups=1)):
        gate = cl.redundancy_gate(other)
        assert (gate.decided, gate.verdict) == (True, 1)
        assert gate.redundancy_error is gate.edge_to_diagonal_error is None


# Edge variants ----------------------------------------------------------------------------------

VARIED = make_units(4, 2, 3)  # 20 units in 4 layers


CURVATURE = random_curvature(VARIED)
VARIANTS = list(product(get_args(Structure), get_args(Reach), get_args(Sign), (True, False)))


def wild_curvature(units: cl.UnitSet, seed: int) -> cl.Curvature:
    """A symmetric matrix that is no Gram matrix: some correlations lie beyond 1."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(len(units), len(units)))
    matrix += matrix.T
    np.fill_diagonal(matrix, rng.uniform(0.1, 3.0, len(units)))
    return cl.Curvature(matrix, units)


def naive_entry(curvature: cl.Curvature, u: int, v: int, settings: tuple[Any, ...]) -> float:
    """Entry u, v of a variant, from the words of the paper alone."""
    structure, reach, sign, keep_diagonal = settings
    h, a, b = curvature.matrix, curvature.units[u], curvature.units[v]
    if u == v:
        return h[u, u] if keep_diagonal else 0.0
    kinds = {a.kind, b.kind}
    in_structure = {
        "full": True,
        "diagonal": False,
        "within_module": len(kinds) == 1,
        "attention": kinds == {"attention"},
        "cross": kinds == {"attention", "ffn"},
        "ffn": kinds == {"ffn"},
    }[structure]
    in_reach = abs(a.layer - b.layer) <= {"all": 99, "adjacent": 1, "within_layer": 0}[reach]
    if not (in_structure and in_reach):
        return 0.0
    limit = (h[u, u] * h[v, v]) ** 0.5
    return {
        "signed": h[u, v],
        "clipped": max(h[u, v], 0.0),
        "absolute": abs(h[u, v]),
        "correlation_clipped": min(max(h[u, v] / limit, -1.0), 1.0) * limit,
    }[sign]


@pytest.mark.parametrize("make", [random_curvature, wild_curvature])
def test_every_variant_is_what_loops_over_pairs_give(make: Any) -> None:
    curvature = make(VARIED, 3)
    size = len(VARIED)
    for choice in VARIANTS:
        variant = cl.edge_variant(curvature, *choice)
        expected = [
            [naive_entry(curvature, u, v, choice) for v in range(size)] for u in range(size)
        ]
        np.testing.assert_allclose(variant.matrix, expected, rtol=1e-13, atol=0)
        assert variant.units is curvature.units


def test_provenance_tells_every_step_and_group_grams_are_gone() -> None:
    curvature = random_curvature(VARIED, groups=4)
    once = cl.edge_variant(curvature, "ffn")
    twice = cl.edge_variant(once, reach="adjacent", keep_diagonal=False)
    assert once.group_grams is once.group_positions is once.group_risks is None
    assert twice.provenance["variant_of"] == curvature.fingerprint
    first = {"structure": "ffn", "reach": "all", "sign": "signed", "keep_diagonal": True}
    second = {"structure": "full", "reach": "adjacent", "sign": "signed", "keep_diagonal": False}
    assert twice.provenance["edge_variants"] == [first, second]
    assert twice.provenance["row_fingerprints"] == curvature.provenance["row_fingerprints"]
    with pytest.raises(cl.InputError):
        cl.Curvature.merge([once])


# Plans --------------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    choice=st.sampled_from(VARIANTS),
    ratio=st.floats(0.0, 0.6),
    strength=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_variant_changes_the_plan_never_its_predicted_risk(
    seed: int, choice: tuple[Any, ...], ratio: float, strength: float
) -> None:
    curvature, guards = random_curvature(VARIED, seed, shared=1.0), cl.Guards(protect_last=1)
    variant = cl.edge_variant(curvature, *choice)
    plan = solve_variant(curvature, variant, ratio, strength, guards)
    assert plan.pruned == cl.solve_greedy(variant, ratio, strength, guards).pruned
    assert (plan.guards, plan.interaction_strength) == (guards, strength)
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned), abs=1e-15)
    assert plan.curvature_fingerprint == curvature.fingerprint
    node = [curvature.matrix[u, u] / 2 for u in plan.pruned]
    edge = [sum(curvature.matrix[u, v] for v in plan.pruned[:k]) for k, u in enumerate(plan.pruned)]
    assert plan.terms.node == pytest.approx(node)
    assert plan.terms.edge == pytest.approx(edge, abs=1e-15)


# The measured diagonal ---------------------------------------------------------------------------


def test_the_measured_diagonal_prices_single_units_as_measured() -> None:
    curvature = random_curvature(make_units(), 3, groups=4)
    rng = np.random.default_rng(0)
    risks = curvature.group_risks * rng.uniform(1, 30, size=curvature.group_risks.shape[1])
    curvature = replace(curvature, groups=replace(curvature.groups, risks=risks))
    variant = measured_diagonal(curvature)
    assert variant.saliency / 2 == pytest.approx(curvature.single_unit_risk)
    np.testing.assert_allclose(variant.correlation(), curvature.correlation(), atol=1e-12)
    assert np.linalg.eigvalsh(variant.matrix).min() > -1e-12 * variant.saliency.max()
    assert variant.provenance["variant_of"] == curvature.fingerprint
    plan = solve_variant(curvature, variant, 0.3, 0.0)
    cheapest = np.argsort(curvature.single_unit_risk / curvature.units.costs, kind="stable")
    assert set(plan.pruned) == set(cheapest[: len(plan)].tolist())
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))


# Local search and the bound, against every plan there is ------------------------------------------

SMALL = make_units(3, 2, 2)  # 12 units, 4096 plans; a layer costs 32, all 96
PLANS = np.array(list(product([0, 1], repeat=12)))
SETTINGS = settings(max_examples=50, derandomize=True, deadline=None)

guard_sets = st.builds(
    cl.Guards,
    layer_cap=st.sampled_from([None, None, 0.4, 0.7]),
    protect_first=st.integers(0, 1),
    kinds=st.sampled_from([("attention", "ffn"), ("attention", "ffn"), ("ffn",)]),
)


def small_curvature(seed: int, kind: str = "random", units: cl.UnitSet = SMALL) -> cl.Curvature:
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
    values = objectives(curvature, strength)[feasible(SMALL, ratio, guards)]
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
    assert feasible(SMALL, ratio, guards, refined.indicator[None].astype(int))[0]


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
        c for c, k in zip(SMALL.costs, SMALL.kinds, strict=True) if guards.allows(k)
    )
    assert refined.pruned_cost < max(limit, SMALL.costs[forced].sum() + 1)
    near = exchanges(refined, [u for u in range(12) if u not in forced])
    rows = np.array([[u in one for u in range(12)] for one in near], dtype=int).reshape(-1, 12)
    ok = feasible(SMALL, ratio, guards, rows) & (rows @ SMALL.costs < limit)
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


H = random_curvature(SMALL)


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
    plan = cl.Selection.from_pruned(SMALL, pruned, **({"interaction_strength": 1.0} | fields))
    with pytest.raises(cl.InputError):
        cl.refine(plan, H)


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
    curvature = cl.Curvature((features @ features.T).astype(float), SMALL)
    assert curvature.spectrum()[-1] < 0
    for ratio in (0.0, 0.2, 0.4):
        optimum = objectives(curvature, 1.0)[feasible(SMALL, ratio, cl.Guards())].min()
        assert cl.risk_lower_bound(curvature, ratio) <= optimum


def test_ratio_zero_and_nothing_to_prune() -> None:
    curvature = random_curvature(SMALL, 0, positions=2000)
    zero = 1e-12 * curvature.saliency.sum()
    assert cl.risk_lower_bound(curvature, 0) == pytest.approx(0, abs=zero)
    assert cl.risk_lower_bound(curvature, 0, cl.Guards(protect_first=3)) == 0
    assert -1e-9 < cl.risk_lower_bound(cl.Curvature(np.zeros((12, 12)), SMALL), 0.3) <= 0


def test_an_indefinite_matrix_is_refused_at_every_lambda() -> None:
    matrix = small_curvature(0).matrix.copy()
    matrix[2, 3] = matrix[3, 2] = -2 * np.sqrt(matrix[2, 2] * matrix[3, 3])
    dead = small_curvature(0, "dead units").matrix.copy()
    dead[1, 2] = dead[2, 1] = -0.1 * dead.diagonal().mean()
    for wrong, strength in product((matrix, dead), (0.0, 1.0)):
        with pytest.raises(cl.NumericalError):
            cl.risk_lower_bound(cl.Curvature(wrong, SMALL), 0.2, interaction_strength=strength)


def test_out_of_reach_is_said_with_what_is_reachable() -> None:
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.risk_lower_bound(small_curvature(0), 0.5, cl.Guards(layer_cap=0.4))
    reached = (caught.value.stalled_ratio, caught.value.reachable_ratio)
    assert reached == (None, pytest.approx(33 / 96))


# Stability of plans, and convergence of a build ---------------------------------------------------

# Draws --------------------------------------------------------------------------------------


def diagonal_groups(per_group: np.ndarray, units: cl.UnitSet) -> cl.Curvature:
    """H without edges from the saliencies [G, M] of groups of one position each."""
    grams = np.stack([np.diag(row) for row in per_group])
    return cl.Curvature(grams.mean(axis=0), units, {}, Groups(grams, np.ones(len(grams), np.int64)))


def test_stability_solves_on_the_resampled_groups() -> None:
    curvature = random_curvature(make_units(3, 2, 3), groups=5, positions=30)
    guards = cl.Guards(layer_cap=0.7, protect_first=1)
    found = cl.selection_stability(curvature, 0.3, 0.5, guards, draws=40, seed=9)
    counts = np.random.default_rng(9).multinomial(5, [0.2] * 5, size=40)
    times, overlaps = np.zeros(15), []
    for row in counts:
        groups = np.repeat(np.arange(5), row)
        total = curvature.group_grams[groups].sum(axis=0)
        matrix = total / curvature.group_positions[groups].sum()
        plan = cl.solve_greedy(cl.Curvature(matrix, curvature.units), 0.3, 0.5, guards)
        times[list(plan.pruned)] += 1
        shared = set(plan.pruned) & set(found.selection.pruned)
        overlaps.append(len(shared) / len({*plan.pruned, *found.selection.pruned}))
    np.testing.assert_allclose(found.frequency, times / 40)
    assert found.mean_overlap == pytest.approx(np.mean(overlaps))
    contested = tuple(np.flatnonzero((times > 4) & (times < 36)).tolist())
    assert found.contested() == contested != ()
    assert not found.trustworthy


def test_draws_on_which_greedy_stalls_are_counted_apart() -> None:
    """Costs 10, 5, 6 and room for 15: unit 1, then 0, is a plan; 1, then 2, leaves no room."""
    costs = enumerate((10, 5, 6))
    units = cl.UnitSet(
        tuple(cl.Unit("ffn", 0, i, 10 * i, 10 * i + cost, cost) for i, cost in costs)
    )
    saliency = np.tile([10.0, 1.0, 0.0], (16, 1))
    saliency[8:, 2] = 12.1
    curvature, guards = diagonal_groups(saliency, units), cl.Guards(layer_cap=15.5 / 21)
    found = cl.selection_stability(curvature, 15 / 21, 0.0, guards, draws=300)
    counts = np.random.default_rng(0).multinomial(16, [1 / 16] * 16, size=300)
    # H_uu / c_u is 1, 0.2 and H_22 / 6: unit 2 goes before unit 0 where H_22 is below 6
    stalls = int((12.1 * counts[:, 8:].sum(axis=1) / 16 < 6).sum())
    assert 60 < stalls < 180
    assert (found.infeasible, len(found.overlaps)) == (stalls, 300 - stalls)
    assert found.trustworthy
    assert found.frequency.tolist() == [1, 1, 0]


# Convergence ------------------------------------------------------------------------------------


def test_readout_is_what_its_words_say() -> None:
    curvature = random_curvature(make_units(3, 2, 3), groups=17, positions=400)
    found = cl.is_converged(curvature, 0.4, 0.5)
    plan = cl.solve_greedy(curvature, 0.4, 0.5)
    assert found.risk == pytest.approx(plan.predicted_risk)
    risk = cl.jackknife(curvature, lambda c: c.risk(plan.pruned))
    assert found.risk_error == pytest.approx(float(risk.standard_error) / plan.predicted_risk)
    relative = cl.jackknife(curvature, "saliency").standard_error / curvature.saliency
    assert found.saliency_error == pytest.approx(np.median(relative))
    halves = [
        cl.Curvature(
            curvature.group_grams[s::2].sum(axis=0) / curvature.group_positions[s::2].sum(),
            curvature.units,
        )
        for s in (0, 1)
    ]
    plans = [cl.solve_greedy(half, 0.4, 0.5).pruned for half in halves]
    home = sum(half.risk(pruned) for half, pruned in zip(halves, plans, strict=True))
    away = sum(half.risk(pruned) for half, pruned in zip(halves, plans[::-1], strict=True))
    assert found.optimism == pytest.approx((away / home - 1) / 2)
    one, two = map(set, plans)
    assert found.overlap == pytest.approx(len(one & two) / len(one | two))


def test_convergence_comes_with_text_and_needs_groups() -> None:
    much = random_curvature(gaussian.UNITS, groups=16, positions=20_000)
    assert cl.is_converged(much)
    assert not cl.is_converged(much, tolerance=1e-4)
    for positions, groups in ((48, 16), (20_000, 15), (60, 1)):
        found = cl.is_converged(
            random_curvature(gaussian.UNITS, groups=groups, positions=positions)
        )
        assert not found.converged
    # of one group nothing can be said
    assert np.isnan([found.risk_error, found.saliency_error, found.optimism, found.overlap]).all()


def test_nothing_to_remove_and_nothing_to_lose_are_known_exactly() -> None:
    curvature = random_curvature(gaussian.UNITS, groups=16, positions=20_000)
    empty = cl.is_converged(curvature, 0.0)
    assert (empty.risk, empty.risk_error, empty.optimism, empty.overlap) == (0, 0, 0, 1)
    silent = cl.is_converged(diagonal_groups(np.zeros((16, 6)), gaussian.UNITS))
    assert (silent.risk, silent.risk_error, silent.saliency_error) == (0, 0, 0)


def test_a_build_stops_early_and_keeps_the_h_of_its_sequences() -> None:
    text = tiny_text(40, 16)
    stop = StopWhenConverged(0.3, tolerance=0.5, patience=3)
    stopped = build(text, on_sequence=stop)
    done = stopped.provenance["sequences_done"]
    assert 18 <= done < 40  # three looks with all 16 groups filled at the earliest
    assert [look.converged for _, look in stop.history[-3:]] == [True] * 3
    assert not all(look.converged for _, look in stop.history[-4:-1])
    assert stopped.provenance["complete"] is False
    require_same_bits(stopped, build(text.rows(0, done)))


def test_a_build_that_settles_at_its_last_sequence_is_complete() -> None:
    last = StopWhenConverged(tolerance=10.0, patience=3)
    whole = build(tiny_text(18, 12), on_sequence=last)
    assert last.history[-1][1].converged
    assert [done for done, _ in last.history] == list(range(1, 19))
    assert (whole.provenance["complete"], whole.provenance["events"]) == (True, [])


GROUPED = random_curvature(make_units(), groups=4)


def gains(h: Any = H, **options: float) -> Any:
    return cl.solve_gains(h, plan_of(H, [3]), **options)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((lambda r=ridge: gains(ridge=r), cl.InputError) for ridge in (-0.1, np.nan, np.inf)),
        *((lambda c=clip: gains(clip=c), cl.InputError) for clip in (0.0, -1.0, np.nan)),
        (lambda: gains(random_curvature(make_units(2))), cl.MismatchError),
        (lambda: cl.edge_variant(CURVATURE, "diagnal"), cl.InputError),
        (lambda: cl.edge_variant(CURVATURE, reach="near"), cl.InputError),
        (lambda: cl.edge_variant(CURVATURE, sign="positive"), cl.InputError),
        (lambda: measured_diagonal(CURVATURE), cl.InputError),  # without measured risks
        (lambda: cl.refine(PLAN, H, exclude=[PLAN.pruned[0]]), cl.InputError),
        (lambda: cl.refine(cl.solve_greedy(H, 0.4, uniform=True), H), cl.InputError),
        (lambda: cl.refine(PLAN, random_curvature(make_units(2))), cl.MismatchError),
        *(
            (lambda x=x: cl.risk_lower_bound(H, 0.2, interaction_strength=x), cl.InputError)
            for x in (-0.1, 1.1, np.nan)
        ),
        (lambda: cl.selection_stability(GROUPED, 0.3, draws=0), cl.InputError),
        (lambda: cl.selection_stability(GROUPED, 1.0), cl.InputError),
        (
            lambda: cl.selection_stability(GROUPED, 0.9, guards=cl.Guards(layer_cap=0.5)),
            cl.InfeasibleError,
        ),
        (lambda: StopWhenConverged(ratio=1.0), cl.InputError),
        (lambda: StopWhenConverged(interaction_strength=-1), cl.InputError),
        (lambda: StopWhenConverged(patience=0), cl.InputError),
        (
            lambda: build(tiny_text(16, 12), groups=4, on_sequence=StopWhenConverged()),
            cl.InputError,
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def build(text: cl.CalibrationSet, checkpoint: Any = None, **options: Any) -> cl.Curvature:
    """H of a model of one layer, which takes milliseconds per row."""
    return builds.build(tiny_model(layers=1), text, 16, checkpoint=checkpoint, **options)
