"""The redundancy gate against matrices of known correlation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cocurve_lab as cl
from helpers.problems import gram_curvature, make_units, random_curvature

UNITS = make_units(6, 2, 3)  # 30 units


@pytest.mark.parametrize(
    ("rho", "band", "strength"),
    [(0.0999, "low", 1), (0.1001, "gray", 0), (0.1199, "gray", 0), (0.1201, "high", 0)],
)
def test_the_band_and_its_recommendation(rho: float, band: str, strength: float) -> None:
    """Unit saliencies, the same correlation between all pairs."""
    size = len(UNITS)
    curvature = cl.Curvature((1 - rho) * np.eye(size) + rho * np.ones((size, size)), UNITS)
    gate = cl.redundancy_gate(curvature)
    assert gate.redundancy == pytest.approx(rho)
    assert (gate.band, gate.recommended) == (band, strength)


def test_the_balance_variation_and_noise_floor_against_loops() -> None:
    curvature = random_curvature(UNITS, 2, groups=8)
    chosen = cl.solve_greedy(curvature, 0.3, 0.0).pruned
    rho, half = curvature.correlation(), curvature.saliency / 2
    mean = np.mean([rho[u, v] for u in chosen for v in chosen if u != v])
    ratios = [abs(sum(curvature.matrix[u, v] for v in chosen if v != u)) / half[u] for u in chosen]
    gate = cl.redundancy_gate(curvature, 0.3)
    assert gate.edge_to_diagonal == pytest.approx(2 * len(chosen) * abs(mean))
    assert gate.edge_to_diagonal_measured == pytest.approx(np.median(ratios))
    ffn = curvature.saliency[UNITS.kinds == "ffn"]
    assert gate.diagonal_cv["ffn"] == pytest.approx(np.std(ffn) / np.mean(ffn))
    assert gate.noise_floor == curvature.ffn_redundancy_noise_floor
    assert gate.corrected == curvature.ffn_redundancy_corrected


def test_without_ffn_pairs_the_gate_recommends_nothing() -> None:
    gate = cl.redundancy_gate(random_curvature(make_units(3, 2, 0)))
    assert np.isnan([gate.redundancy, gate.diagonal_cv["ffn"]]).all()
    assert (gate.band, gate.recommended, gate.decided) == ("unknown", None, False)


def test_degenerate_matrices_pass_the_gate() -> None:
    gate = cl.redundancy_gate(cl.Curvature(np.zeros((30, 30)), UNITS))
    assert (gate.edge_to_diagonal, gate.edge_to_diagonal_measured, gate.band) == (0, 0, "low")
    assert cl.redundancy_gate(random_curvature(UNITS), ratio=0).edge_to_diagonal == 0


def planted(redundancy: float, positions: int, groups: int = 16) -> cl.Curvature:
    """H of features that share a common part: every rho is near `redundancy`, with errors."""
    rng = np.random.default_rng(0)
    features = np.sqrt(1 - redundancy) * rng.normal(size=(len(UNITS), positions))
    features += np.sqrt(redundancy) * rng.normal(size=positions)
    return gram_curvature(UNITS, features, groups)


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
        dataclasses.replace(curvature, matrix=2 * curvature.matrix)
    for other in (cl.Curvature(curvature.matrix, UNITS), planted(0.05, 20_000, groups=1)):
        gate = cl.redundancy_gate(other)
        assert (gate.decided, gate.verdict) == (True, 1)
        assert gate.redundancy_error is gate.edge_to_diagonal_error is None
