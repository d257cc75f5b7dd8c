"""Gains against least squares written out, and planted rescales."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocurve_lab.base.errors import NumericalError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gains import compensated_risk, solve_gains
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from helpers.problems import gram_curvature, make_units, random_curvature

UNITS = make_units()  # 3 layers of 2 attention and 3 FFN units


def plan_of(curvature: Curvature, pruned: list[int]) -> Selection:
    return Selection.from_pruned(curvature.units, pruned, curvature)


def kept_ffn(plan: Selection) -> list[int]:
    return [u for u in range(len(plan.units)) if plan.units[u].kind == "ffn" and u in plan.kept]


# The system ---------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pruned=st.sets(st.integers(0, 14), max_size=10),
    ridge=st.sampled_from([0.0, 0.05, 0.2, 1.0, 7.0]),
    clip=st.sampled_from([0.3, 1.0, 2.0, np.inf]),
)
def test_equals_least_squares_on_the_features(
    seed: int, pruned: set[int], ridge: float, clip: float
) -> None:
    """The paper's minimization on features, never forming H: rows sqrt(gamma) I are the ridge."""
    features = np.random.default_rng(seed).normal(size=(15, 40)) / np.sqrt(40)
    curvature = gram_curvature(UNITS, features)
    plan = plan_of(curvature, sorted(pruned))
    kept = kept_ffn(plan)
    scaled = features / np.sqrt(features.shape[1])
    gamma = ridge * np.mean([scaled[u] @ scaled[u] for u in kept]) if kept else 0.0
    design = np.vstack([scaled[kept].T, np.sqrt(gamma) * np.eye(len(kept))])
    wanted = np.concatenate([scaled[sorted(pruned)].sum(axis=0), np.zeros(len(kept))])
    alpha = np.linalg.lstsq(design, wanted, rcond=None)[0]
    gains = solve_gains(curvature, plan, ridge, clip)
    assert list(gains) == kept
    expected = np.clip(1 + alpha, 1 - clip, 1 + clip)
    np.testing.assert_allclose(list(gains.values()), expected, rtol=1e-9, atol=1e-12)


def test_the_full_signed_matrix_is_used_whatever_lambda_made_the_plan() -> None:
    curvature = random_curvature(UNITS, 2)
    plan = solve_greedy(curvature, 0.3, 0.0)
    same = plan.with_made(interaction_strength=1.0)
    assert solve_gains(curvature, plan) == solve_gains(curvature, same)
    diagonal = Curvature(np.diag(curvature.saliency), UNITS)
    assert set(solve_gains(diagonal, plan).values()) == {1.0}


def test_a_singular_system_without_ridge_takes_the_least_norm() -> None:
    features = np.random.default_rng(0).normal(size=(15, 60))
    features[4] = features[13] = features[8]  # two twins of the pruned unit share its part
    curvature = gram_curvature(UNITS, features)
    gains = solve_gains(curvature, plan_of(curvature, [8]), 0.0)
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
    plain = plan.with_gains({})
    assert compensated_risk(curvature, plain) == pytest.approx(plain.predicted_risk)


def test_an_indefinite_matrix_is_refused_and_rounding_is_not() -> None:
    curvature = random_curvature(UNITS, 0)
    matrix = curvature.matrix.copy()
    plan = plan_of(curvature, [0])
    matrix[2, 3] = matrix[3, 2] = 3 * np.sqrt(matrix[2, 2] * matrix[3, 3])
    with pytest.raises(NumericalError):
        solve_gains(Curvature(matrix, UNITS), plan, 0.0)
    twins = np.random.default_rng(0).normal(size=(15, 4)).astype(np.float32)  # rank 4 of 15
    rounded = Curvature((twins @ twins.T).astype(np.float64), UNITS)
    assert np.linalg.eigvalsh(rounded.matrix).min() < 0
    assert np.isfinite(list(solve_gains(rounded, plan, 0.0, np.inf).values())).all()
