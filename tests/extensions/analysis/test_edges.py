"""Gains, the redundancy gate and edge variants against their definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.gains import compensated_risk
from cocurve_lab.extensions.analysis.variants import (
    Reach,
    Sign,
    Structure,
    measured_diagonal,
    solve_variant,
)
from helpers.problems import gram_curvature, make_units, random_curvature

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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"ridge": ridge}, cl.InputError) for ridge in (-0.1, np.nan, np.inf)),
        *(({"clip": clip}, cl.InputError) for clip in (0.0, -1.0, np.nan)),
        ({"curvature": random_curvature(make_units(2))}, cl.MismatchError),
    ],
    ids=str,
)
def test_bad_input_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    curvature = random_curvature(UNITS)
    plan = plan_of(curvature, [3])
    with pytest.raises(error):
        cl.solve_gains(**{"curvature": curvature, "selection": plan} | options)


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
    assert gate.noise_floor == curvature.ffn_redundancy_noise_floor
    assert gate.corrected == curvature.ffn_redundancy_corrected


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: cl.edge_variant(CURVATURE, "diagnal"),
        lambda: cl.edge_variant(CURVATURE, reach="near"),
        lambda: cl.edge_variant(CURVATURE, sign="positive"),
        lambda: measured_diagonal(CURVATURE),  # without measured risks
    ],
)
def test_a_variant_that_is_none_is_refused(call: Any) -> None:
    with pytest.raises(cl.InputError):
        call()


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
