"""Structure of H: constructed matrices with known blocks, spectra, budgets and balances."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_studies.shared import DRAWS
from cocurve_studies.structure import geometry, propositions
from cocurve_studies.tables import Table, column, pick
from helpers.problems import gram_curvature, make_units, random_curvature

UNITS = make_units(4, 2, 3)
BUILT = random_curvature(UNITS, seed=2, groups=8, positions=400)


def constant_correlation(rho: float, saliency: float = 0.01) -> cl.Curvature:
    """Every pair correlates rho, every unit has the same saliency."""
    size = len(UNITS)
    matrix = saliency * ((1 - rho) * np.eye(size) + rho)
    return cl.Curvature(matrix, UNITS)


# Blocks -------------------------------------------------------------------------------------------


def test_planted_blocks_are_read_back_by_distance() -> None:
    kinds, layers = UNITS.kinds, UNITS.layers
    rho = np.zeros((len(UNITS), len(UNITS)))
    for u in range(len(UNITS)):
        for v in range(len(UNITS)):
            same = kinds[u] == kinds[v]
            near = 0.02 if layers[u] == layers[v] else 0.01
            rho[u, v] = near if same else -2 * near
    np.fill_diagonal(rho, 1)
    scale = np.exp(np.random.default_rng(0).normal(size=len(UNITS)))
    table = geometry.block_table(cl.Curvature(rho * np.outer(scale, scale), UNITS))
    for block, sign in (("attention", 1), ("ffn", 1), ("cross", -2)):
        for reach, size in (("same layer", 0.02), ("adjacent layers", 0.01), ("further", 0.01)):
            (row,) = pick(table, block=block, reach=reach)
            assert row["mean_absolute"] == pytest.approx(abs(sign) * size)
            assert row["mean_signed"] == pytest.approx(sign * size)
            assert row["positive_share"] == (sign > 0)
            assert row["mean_absolute_error"] is None
    for block in ("attention", "cross", "ffn"):
        whole, *parts = pick(table, block=block)
        assert whole["pairs"] == sum(part["pairs"] for part in parts)
    assert {row["paper"] for row in pick(table, reach="all")} == {0.1, 0.086, 0.07}


def test_blocks_agree_with_what_the_curvature_says_of_itself() -> None:
    table = pick(geometry.block_table(BUILT), reach="all")
    assert dict(zip(column(table, "block"), column(table, "mean_absolute"), strict=True)) == (
        pytest.approx(BUILT.block_means())
    )
    (ffn,) = pick(table, block="ffn")
    assert ffn["noise_floor"] == pytest.approx(BUILT.ffn_redundancy_noise_floor)
    assert ffn["corrected"] == pytest.approx(BUILT.ffn_redundancy_corrected)
    expected = cl.jackknife(BUILT, "block_means").standard_error
    assert column(table, "mean_absolute_error") == pytest.approx(expected)


def test_noise_reads_as_its_floor_and_nothing_more() -> None:
    rng = np.random.default_rng(1)
    units = make_units(6, 4, 8)
    noise = gram_curvature(units, rng.normal(size=(len(units), 640)), groups=16)
    for row in pick(geometry.block_table(noise), reach="all"):
        assert row["mean_absolute"] == pytest.approx(np.sqrt(2 / (np.pi * 640)), rel=0.1)
        assert row["noise_floor"] == pytest.approx(row["mean_absolute"], rel=0.15)
        assert abs(row["corrected"]) < 0.2 * row["mean_absolute"]


# Budgets ------------------------------------------------------------------------------------------


def test_budgets_add_up_to_the_plan() -> None:
    table = geometry.budget_table(BUILT, 0.4)
    for strength in (0.0, 1.0):
        rows = pick(table, interaction_strength=strength)
        plan = cl.solve_greedy(BUILT, 0.4, strength)
        assert sum(column(rows, "units")) == len(plan)
        cost = {"attention": 2 * 5, "ffn": 3 * 11}
        gone = sum(row["share"] * cost[row["kind"]] for row in rows)
        assert gone == pytest.approx(plan.pruned_cost)
        assert {row["draws"] for row in rows} == {DRAWS}
    assert max(column(table, "share_error")) > 0


def test_a_plan_no_text_can_change_has_no_spread() -> None:
    saliency = np.arange(1, len(UNITS) + 1) ** 4.0  # far apart: the order is beyond doubt
    features = np.sqrt(saliency)[:, None] * np.tile(np.eye(len(UNITS)), 16)
    table = geometry.budget_table(gram_curvature(UNITS, features, groups=16), 0.3)
    assert column(table, "share_error") == pytest.approx(0, abs=1e-12)
    released = cl.Curvature(np.diag(saliency), UNITS)
    assert geometry.budget_table(released, 0.3)["share_error"].isna().all()


def test_a_budget_out_of_reach_says_so() -> None:
    table = geometry.budget_table(BUILT, 0.8, (1.0,), cl.Guards(layer_cap=0.5))
    assert len(table) == 1
    assert pick(table)[0]["note"]
    assert pick(table)[0]["share"] is None
    geometry.plot_budgets(table)


# Spectrum -----------------------------------------------------------------------------------------


def test_an_identity_has_every_direction_and_a_rank_one_h_a_single_one() -> None:
    size = len(UNITS)
    flat = pick(geometry.spectrum_table(cl.Curvature(0.3 * np.eye(size), UNITS)))
    assert flat[0]["effective_rank"] == pytest.approx(size)
    assert flat[0]["participation"] == pytest.approx(size)
    assert column(flat, "eigenvalue") == pytest.approx(0.3)
    assert column(flat, "cumulative") == pytest.approx(np.arange(1, size + 1) / size)
    one = pick(geometry.spectrum_table(cl.Curvature(np.ones((size, size)), UNITS)))
    assert one[0]["effective_rank"] == pytest.approx(1, abs=1e-6)
    assert one[0]["share"] == pytest.approx(1)


def test_spectrum_errors_are_jackknife_errors() -> None:
    table = geometry.spectrum_table(BUILT)
    error = cl.jackknife(BUILT, lambda c: c.spectrum()).standard_error
    assert column(table, "eigenvalue_error") == pytest.approx(error)
    assert 0 < pick(table)[0]["effective_rank_error"] < pick(table)[0]["effective_rank"]


# Propositions -------------------------------------------------------------------------------------


def said(table: Table, quantity: str, **more: Any) -> dict[str, Any]:
    return pick(table, quantity=quantity, **more)[0]


@pytest.mark.parametrize("rho", [0.02, 0.3])
def test_equal_saliencies_and_correlations_meet_the_balance_exactly(rho: float) -> None:
    table = propositions.proposition_table(constant_correlation(rho), ratios=(0.2, 0.5))
    for ratio in (0.2, 0.5):
        size = len(cl.solve_greedy(constant_correlation(rho), ratio, 0.0))
        for name, count in (("its own", size - 1), ("the mean", size)):
            row = said(table, f"edge over diagonal, by {name} correlation", requested_ratio=ratio)
            assert row["value"] == pytest.approx(2 * (size - 1) * rho)
            assert row["reference"] == pytest.approx(2 * count * rho)
            assert row["holds"]
        plan = said(table, "edge over node risk", requested_ratio=ratio, interaction_strength=0.0)
        assert plan["value"] == pytest.approx((size - 1) * rho)
        positive = said(
            table, "share of positive edges", requested_ratio=ratio, interaction_strength=0.0
        )
        assert positive["value"] == 1
    size = len(UNITS)
    off = said(table, "share of |H| off the diagonal")["value"]
    assert off == pytest.approx((size - 1) * rho / (1 + (size - 1) * rho))
    assert said(table, "diagonal CV, FFN")["value"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_weighted_correlation_gives_the_edge_risk(strength: float) -> None:
    """Prop. offdiag: its two sides, pair by pair."""
    row = said(
        propositions.proposition_table(BUILT, ratios=(0.4,)),
        "weighted mean correlation",
        interaction_strength=strength,
    )
    plan = cl.solve_greedy(BUILT, 0.4, strength)
    h, edges = BUILT.matrix, 0.0
    numerator = denominator = 0.0
    for u in plan.pruned:
        for v in plan.pruned:
            if u != v:
                weight = np.sqrt(h[u, u] * h[v, v])
                numerator += h[u, v] / weight * weight
                denominator += weight
                edges += h[u, v] / 2
    assert row["value"] == pytest.approx(numerator / denominator)
    trace = sum(h[u, u] for u in plan.pruned)
    root = sum(np.sqrt(h[u, u]) for u in plan.pruned)
    assert row["value"] * (root**2 - trace) / 2 == pytest.approx(edges)
    assert plan.edge_risk == pytest.approx(edges)
    assert row["value_error"] > 0
    assert row["reference"] == BUILT.ffn_redundancy_corrected


def test_the_balance_is_the_one_of_the_gate() -> None:
    table = propositions.proposition_table(BUILT, ratios=(0.4,))
    gate = cl.redundancy_gate(BUILT, 0.4)
    row = said(table, "edge over diagonal, by the mean correlation")
    assert row["value"] == pytest.approx(gate.edge_to_diagonal_measured)
    assert row["reference"] == pytest.approx(gate.edge_to_diagonal)
    for kind, label in (("attention", "attention"), ("ffn", "FFN")):
        cv = said(table, f"diagonal CV, {label}")
        assert cv["value"] == pytest.approx(gate.diagonal_cv[kind])
        # single-unit risks of this H are 1/2 H_uu, so the two readings and errors coincide
        single = said(table, f"single-unit KL CV, {label}")
        assert single["value"] == pytest.approx(cv["value"])
        assert single["value_error"] == pytest.approx(cv["value_error"], rel=0.05)


def test_saliencies_far_apart_break_the_balance() -> None:
    saliency = np.exp(np.linspace(0, 40, len(UNITS)))
    scale = np.sqrt(saliency)
    rho = np.full((len(UNITS),) * 2, 0.3) + 0.7 * np.eye(len(UNITS))
    table = propositions.proposition_table(
        cl.Curvature(rho * np.outer(scale, scale), UNITS), ratios=(0.5,)
    )
    assert not said(table, "edge over diagonal, by its own correlation")["holds"]


def test_a_matrix_that_is_no_gram_matrix_is_told() -> None:
    matrix = np.eye(len(UNITS))
    matrix[0, 1] = matrix[1, 0] = 2.0  # eigenvalue -1
    table = propositions.proposition_table(cl.Curvature(matrix, UNITS), ratios=(0.2,))
    row = said(table, "smallest eigenvalue over the largest")
    assert row["value"] == pytest.approx(-1 / 3)
    assert not row["holds"]
    assert said(propositions.proposition_table(BUILT, (0.2,)), row["quantity"])["holds"]


def test_overshoot_is_below_the_largest_unit() -> None:
    table = propositions.proposition_table(BUILT, ratios=(0.0, 0.13, 0.37))
    rows = pick(table, proposition="overshoot")
    assert len(rows) == 6
    assert all(row["holds"] and row["reference"] == pytest.approx(11 / 172) for row in rows)
    plan = cl.solve_greedy(BUILT, 0.37)
    row = pick(rows, requested_ratio=0.37, interaction_strength=1.0)[0]
    assert row["value"] == pytest.approx(plan.realized_ratio - 0.37)
    assert row["value"] > 0


def test_decoupled_saliency_is_seen() -> None:
    correlated = said(
        propositions.proposition_table(BUILT, (0.2,)), "saliency-connectivity correlation"
    )
    bridges = cl.bridge_units(BUILT)
    assert correlated["value"] == pytest.approx(bridges.saliency_connectivity_correlation)
    assert correlated["value_error"] > 0
    assert correlated["paper"] == 0.63


# Keeping and drawing ------------------------------------------------------------------------------


def test_structure_needs_no_model_and_no_plotly_until_it_draws() -> None:
    code = (
        "import sys; from cocurve_studies.structure import geometry, propositions; "
        "print([m for m in ('torch', 'plotly', 'pandas', 'ipywidgets') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
