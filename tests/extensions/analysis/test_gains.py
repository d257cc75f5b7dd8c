"""Gains against least squares written out, and planted rescales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.gains import compensated_risk
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
    gains = cl.solve_gains(curvature, plan, ridge, clip)
    assert list(gains) == kept
    expected = np.clip(1 + alpha, 1 - clip, 1 + clip)
    np.testing.assert_allclose(list(gains.values()), expected, rtol=1e-9, atol=1e-12)


def test_the_full_signed_matrix_is_used_whatever_lambda_made_the_plan() -> None:
    curvature = random_curvature(UNITS, 2)
    plan = cl.solve_greedy(curvature, 0.3, 0.0)
    again = plan.with_made(interaction_strength=1.0)
    assert cl.solve_gains(curvature, plan) == cl.solve_gains(curvature, again)


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
