"""Solves on the additive KL: blocks of torch, later stages, paths and prefixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates import additive_torch as additive_solve
from cocurve_lab.extensions.surrogates.additive_torch import TorchAdditiveKL
from cocurve_lab.extensions.surrogates.sketched import with_shifts
from helpers.problems import make_units, with_random_shifts

CURVATURE = with_random_shifts(make_units(8), positions=100, tokens=9)


def test_what_does_not_fit_is_computed_again_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = TorchAdditiveKL(CURVATURE, "cpu").solve(0.3)
    units, _, tokens = CURVATURE.require_shifts().values.shape
    at_once = 7  # does not divide the number of positions
    monkeypatch.setattr(additive_solve, "_BLOCK_BYTES", 8 * units * tokens * at_once)
    for memory in (0, 4 * units * tokens * 3 * at_once, 1 << 30):  # for no, three and all blocks
        made = TorchAdditiveKL(CURVATURE, "cpu", memory=memory)
        assert made.solve(0.3).pruned == whole.pruned
        np.testing.assert_allclose(
            made.marginals([3, 5]), TorchAdditiveKL(CURVATURE, "cpu").marginals([3, 5]), rtol=1e-6
        )


def test_shifts_of_a_later_stage_start_where_units_are_gone() -> None:
    shifts = CURVATURE.require_shifts()
    values, gone = shifts.values.copy(), [2, 11, 20]
    base = values[gone].astype(np.float32).sum(axis=0)
    values[gone] = 0
    staged = with_shifts(CURVATURE, replace(shifts, values=values, base=base))
    made, expected = TorchAdditiveKL(staged, "cpu", "float64"), staged.additive()
    np.testing.assert_allclose(made.marginals([5]), expected.marginals([5]), rtol=1e-4, atol=1e-7)
    assert made.solve(0.4, include=gone).pruned == expected.solve(0.4, include=gone).pruned
    # without the base the same shifts price other sets
    plain = TorchAdditiveKL(with_shifts(CURVATURE, replace(shifts, values=values)), "cpu")
    assert not np.allclose(made.marginals([5]), plain.marginals([5]), rtol=1e-2)


# Path, longest plan and prefixes ------------------------------------------------------------------


@pytest.mark.parametrize("torch_too", [False, True])
def test_the_path_has_the_plan_of_every_lambda(torch_too: bool) -> None:
    made = with_random_shifts(make_units(8), spread=0.1, positions=100, tokens=9)
    surrogate = TorchAdditiveKL(made, "cpu") if torch_too else made.additive()
    guards = cl.Guards(layer_cap=0.7, protect_first=1)
    path = surrogate.lambda_path(0.4, guards, part="fit")
    assert len(path) > 3
    rng = np.random.default_rng(0)
    for strength in rng.uniform(0, 1, 25):
        if np.abs(np.array(path.breakpoints) - strength).min() < 1e-5:
            continue
        plan = path.at(float(strength)).selection
        assert plan is not None
        solved = surrogate.solve(0.4, float(strength), guards, part="fit")
        assert set(plan.pruned) == set(solved.pruned)
        assert plan.surrogate == "additive KL"
        assert plan.predicted_risk == pytest.approx(made.risk(plan.pruned))


def test_prefixes_of_the_longest_plan_are_priced_as_they_are() -> None:
    surrogate, guards = CURVATURE.additive(), cl.Guards(layer_cap=0.5)
    run = surrogate.longest(guards, 0.9, 0.5, part="fit")
    assert run.requested_ratio == run.realized_ratio < 0.51  # the cap ends it
    assert run.prefix(0.3).pruned == surrogate.solve(0.3, 0.5, guards, part="fit").pruned
    prices = surrogate.along(run, "price")
    assert len(prices) == len(run) + 1
    for k in (0, 1, 5, len(run)):
        assert prices[k] == pytest.approx(surrogate.predict(run.pruned[:k], "price"), rel=1e-9)
    singles = [surrogate.predict([u], "price") for u in range(len(CURVATURE.units))]
    np.testing.assert_allclose(surrogate.state("price").singles, singles, rtol=1e-9)


def test_one_surrogate_solves_many_times() -> None:
    # the likelihood ratios are kept between solves; what a solve removes must not be
    surrogate = CURVATURE.additive()
    first = surrogate.solve(0.4)
    assert surrogate.solve(0.2).pruned == CURVATURE.additive().solve(0.2).pruned
    assert surrogate.solve(0.4).pruned == first.pruned


def test_a_solve_ends_where_it_is_told_to() -> None:
    steps = []

    def stop() -> None:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CURVATURE.additive().solve(0.4, each_step=stop)
    assert len(steps) == 4
