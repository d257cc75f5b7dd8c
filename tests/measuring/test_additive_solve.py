"""The additive KL with torch, against the numpy one, which is tested against its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.measuring import additive_solve
from cocurve_lab.measuring.additive_solve import TorchAdditiveKL
from helpers.problems import make_units, with_random_shifts

CURVATURE = with_random_shifts(make_units(8), positions=100, tokens=9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_plan_is_that_of_numpy(dtype: Any, strength: float) -> None:
    made = TorchAdditiveKL(CURVATURE, "cpu", dtype)
    guards = cl.Guards(layer_cap=0.6, protect_first=1)
    found = made.solve(0.4, strength, guards, part="fit")
    expected = CURVATURE.additive().solve(0.4, strength, guards, part="fit")
    assert found.pruned == expected.pruned
    np.testing.assert_allclose(found.edge_terms, expected.edge_terms)
    assert found.surrogate == "additive KL"
    assert len(found) > 10
    np.testing.assert_allclose(
        made.marginals(found.pruned), CURVATURE.additive().marginals(found.pruned), rtol=1e-4
    )
    assert made.predict(found) == CURVATURE.additive().predict(found)


def test_small_units_keep_their_digits_in_float32() -> None:
    small = with_random_shifts(make_units(8), scale=3e-4, positions=100, tokens=9)
    found, expected = (
        TorchAdditiveKL(small, "cpu", dtype).marginals([0, 3]) for dtype in ("float32", "float64")
    )
    assert 0 < np.median(expected) < 1e-6
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-12)
    np.testing.assert_allclose(small.additive().marginals([0, 3]), expected, rtol=1e-3, atol=1e-12)


def test_what_does_not_fit_is_computed_again_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = TorchAdditiveKL(CURVATURE, "cpu").solve(0.3)
    units, _, tokens = CURVATURE.require_shifts().values.shape
    at_once = 7  # does not divide the number of positions
    monkeypatch.setattr(additive_solve, "_BLOCK_BYTES", 8 * units * tokens * at_once)
    for memory, kept in ((0, 0), (4 * units * tokens * 3 * at_once, 3), (1 << 30, 15)):
        made = TorchAdditiveKL(CURVATURE, "cpu", memory=memory)
        blocks: Any = made.state().blocks  # type: ignore[attr-defined]
        assert [len(block.weights) for block in blocks] == [at_once] * 14 + [2]
        assert sum(block.kept is not None for block in blocks) == kept
        assert made.solve(0.3).pruned == whole.pruned
        np.testing.assert_allclose(
            made.marginals([3, 5]), TorchAdditiveKL(CURVATURE, "cpu").marginals([3, 5]), rtol=1e-6
        )


def test_shifts_of_a_later_stage_start_where_units_are_gone() -> None:
    shifts = CURVATURE.require_shifts()
    values, gone = shifts.values.copy(), [2, 11, 20]
    base = values[gone].astype(np.float32).sum(axis=0)
    values[gone] = 0
    staged = CURVATURE.with_shifts(replace(shifts, values=values, base=base))
    made, expected = TorchAdditiveKL(staged, "cpu", "float64"), staged.additive()
    np.testing.assert_allclose(made.marginals([5]), expected.marginals([5]), rtol=1e-4, atol=1e-7)
    assert made.solve(0.4, include=gone).pruned == expected.solve(0.4, include=gone).pruned
    # without the base the same shifts price other sets
    plain = TorchAdditiveKL(CURVATURE.with_shifts(replace(shifts, values=values)), "cpu")
    assert not np.allclose(made.marginals([5]), plain.marginals([5]), rtol=1e-2)


def test_what_cannot_be_used_is_said() -> None:
    with pytest.raises(cl.InputError, match=r"dtype is 'float16'. Choose float32 or float64"):
        TorchAdditiveKL(CURVATURE, "cpu", "float16")  # type: ignore[arg-type]
    with pytest.raises(cl.InputError, match="cannot be used"):
        TorchAdditiveKL(CURVATURE, "nowhere")
    with pytest.raises(cl.InputError, match="no sketch of shifts"):
        TorchAdditiveKL(cl.Curvature(np.eye(len(CURVATURE.units)), CURVATURE.units))
