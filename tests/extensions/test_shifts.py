"""The pair KL and the additive KL of a sketch of shifts, against independent naive computations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scipy.special import logsumexp

import cocurve_lab as cl
from cocurve_lab.base.storage import dump_npz, load_npz
from cocurve_lab.extensions.surrogates import additive_torch
from cocurve_lab.extensions.surrogates.additive_torch import TorchAdditiveKL
from cocurve_lab.extensions.surrogates.shifts import Shifts, shifts_path
from cocurve_lab.extensions.surrogates.sketched import with_shifts
from helpers.problems import allowed, make_units, random_curvature, with_random_shifts

UNITS = make_units(3, 2, 3)
SIZE = len(UNITS)
SKETCHED = with_random_shifts(UNITS)
LARGE = with_random_shifts(make_units(8), positions=100, tokens=9)


def naive(shifts: Shifts, chosen: Sequence[int]) -> float:
    """F(S) by its definition: the KL from log-probabilities, in float64."""
    p = shifts.probabilities.astype(np.float64)
    p /= p.sum(axis=-1, keepdims=True)
    total = shifts.values[list(chosen)].astype(np.float64).sum(axis=0)
    z = np.log(p) + total
    log_q = z - logsumexp(z, axis=-1, keepdims=True)
    return float((p * (np.log(p) - log_q)).sum(axis=-1).mean())


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pkl", ".npz"])
def test_the_sketch_lies_beside_h(suffix: str, tmp_path: Path) -> None:
    path = SKETCHED.save(tmp_path / f"H_demo_1f{suffix}")
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "H_demo_1f.shifts.npz"}
    again = cl.Curvature.load(path)
    np.testing.assert_array_equal(again.require_shifts().values, SKETCHED.require_shifts().values)
    random_curvature(UNITS, 1).save(path)  # one without: the old shifts are not its own
    assert not shifts_path(path).exists()
    assert cl.Curvature.load(path).shifts is None


def test_shifts_of_another_h_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = SKETCHED.save(tmp_path / "H.pkl")
    beside = shifts_path(path)
    good, content = beside.read_bytes(), load_npz(beside, format_name="cocurve-shifts", version=1)
    damaged = [
        content | {"values": content["values"].astype(np.float64)},
        content | {"probabilities": -content["probabilities"]},
        content | {"groups": content["groups"][:-1]},
    ]
    for data in (good[:-200], *map(dump_npz, damaged)):
        beside.write_bytes(data)
        with pytest.raises(cl.FileFormatError):
            cl.Curvature.load(path).additive()
    random_curvature(UNITS, 1).save(tmp_path / "other.pkl")
    (tmp_path / "other.shifts.npz").write_bytes(good)
    with pytest.raises(cl.MismatchError):
        cl.Curvature.load(tmp_path / "other.pkl").additive()


# The pair KL --------------------------------------------------------------------------------------


def test_the_pair_kl_is_f_on_one_unit_and_on_two() -> None:
    pair, shifts = SKETCHED.pair_kl(), SKETCHED.require_shifts()
    for u in range(SIZE):
        assert pair.matrix[u, u] == pytest.approx(2 * naive(shifts, [u]), rel=1e-6)
        for v in range(u):
            assert pair.risk([u, v]) == pytest.approx(naive(shifts, [u, v]), rel=1e-6)
    assert pair.group_positions is not None
    assert pair.group_positions.sum() == len(shifts)


def test_to_second_order_the_pair_kl_is_the_gram_of_the_shifts() -> None:
    curvature = with_random_shifts(UNITS, scale=0.01)
    shifts = curvature.require_shifts()
    p = shifts.probabilities.astype(np.float64)
    centred = shifts.values - (p * shifts.values).sum(-1, keepdims=True)
    gram = np.einsum("usk,vsk,sk->uv", centred, centred, p) / len(shifts)
    np.testing.assert_allclose(curvature.pair_kl().matrix, gram, atol=0.05 * np.abs(gram).max())


def test_f_sees_a_turned_sign_and_h_does_not() -> None:
    shifts = SKETCHED.require_shifts()
    turned = with_shifts(random_curvature(UNITS), replace(shifts, values=-shifts.values))
    assert turned.fingerprint == SKETCHED.fingerprint
    found = [c.additive().singles() for c in (SKETCHED, turned)]
    assert np.abs(found[0] / found[1] - 1).max() > 0.1


def test_a_pair_kl_and_its_plans_say_what_they_are(tmp_path: Path) -> None:
    # two units that both take from a token the teacher is sure of: together they turn it over
    p = np.array([[0.999, 0.001]], np.float32)
    values = np.zeros((SIZE, 1, 2), np.float16)
    values[:2, 0, 0], values[2:, 0, 1] = -3.0, 0.1
    ones = np.zeros(1, np.int64)
    pair = with_shifts(random_curvature(UNITS), Shifts(values, p, ones, ones)).pair_kl()
    assert repr(pair).startswith("Pair KL of")
    assert "not the paper's H" in pair.note()
    assert pair.correlation()[0, 1] == pytest.approx(9.5, abs=0.1)
    plan = cl.solve_greedy(pair, 0.2)
    assert cl.Selection.from_json(plan.to_json()).made.matrix == plan.made.matrix == "pair KL"
    assert "surrogate" not in json.loads(cl.solve_greedy(random_curvature(UNITS), 0.2).to_json())
    pair = SKETCHED.pair_kl()
    assert np.isfinite(cl.jackknife(pair, "saliency").standard_error).all()
    again = cl.Curvature.load(pair.save(tmp_path / "Q.pkl"))
    assert again.surrogate == "pair KL"
    np.testing.assert_array_equal(again.matrix, pair.matrix)


# The additive KL ----------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def surrogate(request: pytest.FixtureRequest) -> Callable[[cl.Curvature], Any]:
    """The additive KL of a curvature, on either engine."""
    if request.param == "torch":
        return lambda curvature: TorchAdditiveKL(curvature, "cpu")
    return lambda curvature: curvature.additive()


@pytest.mark.parametrize(("scale", "atol"), [(1.0, 1e-5), (3e-4, 1e-12)])
def test_predictions_and_marginals_follow_the_definition(
    scale: float, atol: float, surrogate: Any
) -> None:
    """Of 1e-7 nats float32 ratios, which are all but 1, would leave two digits."""
    curvature = with_random_shifts(UNITS, scale=scale)
    additive, shifts = surrogate(curvature), curvature.require_shifts()
    for chosen in ([], [4], [0, 3, 7], list(range(SIZE))):
        assert additive.predict(chosen) == pytest.approx(naive(shifts, chosen), rel=1e-6, abs=1e-12)
        found = additive.marginals(chosen)
        for u in set(range(SIZE)) - set(chosen):
            rise = naive(shifts, [*chosen, u]) - naive(shifts, chosen)
            assert found[u] == pytest.approx(rise, rel=1e-3, abs=atol)
        assert not found[chosen].any()
    assert additive.predict([]) == 0  # exactly: log axes would show 1e-18


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("guards", [cl.Guards(), cl.Guards(layer_cap=0.5, protect_first=1)])
def test_the_plan_is_greedy_on_f_lambda(strength: float, guards: cl.Guards, surrogate: Any) -> None:
    shifts, costs = SKETCHED.require_shifts(), UNITS.costs
    single, chosen = [naive(shifts, [u]) for u in range(SIZE)], list[int]()
    while costs[chosen].sum() < 0.3 * UNITS.total_cost:
        now = naive(shifts, chosen)
        scores = {
            u: ((1 - strength) * single[u] + strength * (naive(shifts, [*chosen, u]) - now))
            for u in range(SIZE)
            if allowed(UNITS, chosen, u, 0.3, guards)
        }
        chosen.append(min(scores, key=lambda u: scores[u] / costs[u]))
    plan = surrogate(SKETCHED).solve(0.3, strength, guards)
    assert list(plan.pruned) == chosen
    assert plan.predicted_risk == pytest.approx(SKETCHED.risk(chosen))  # what H predicts
    assert cl.Selection.from_json(plan.to_json()).made.matrix == plan.made.matrix == "additive KL"


def test_targets_and_included_units_are_respected() -> None:
    additive = SKETCHED.additive()
    plan = additive.solve(cl.Target(ratio=0.2), include=["L2.ffn[1]"], exclude=["L0.ffn[0]"])
    assert UNITS[plan.pruned[0]].name == "L2.ffn[1]"
    assert UNITS.index("L0.ffn[0]") not in plan.pruned
    assert plan.realized_ratio >= 0.2


def test_a_price_comes_from_positions_that_the_plan_was_not_solved_on() -> None:
    curvature = with_random_shifts(UNITS, positions=200)
    additive, shifts = curvature.additive(), curvature.require_shifts()
    fit, price = shifts.of("fit"), shifts.of("price")
    assert not set(fit.groups) & set(price.groups)
    assert len(fit) + len(price) == len(shifts)
    plan = additive.solve(0.3, part="fit")
    assert additive.predict(plan, "price") == pytest.approx(naive(price, plan.pruned), rel=1e-6)
    np.testing.assert_allclose(
        curvature.pair_kl("fit").single_unit_risk, [naive(fit, [u]) for u in range(SIZE)], rtol=1e-6
    )
    # the error of a ratio of sums over groups of sequences
    values = [naive(shifts._at(np.arange(len(shifts)) == n), plan.pruned) for n in range(200)]
    off = np.array(values) - np.mean(values)
    sums = np.bincount(shifts.groups, off)
    error = np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / 200
    assert additive.standard_error(plan) == pytest.approx(error, rel=1e-6)


# Blocks of torch, later stages, paths and prefixes ------------------------------------------------


def test_what_does_not_fit_is_computed_again_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = TorchAdditiveKL(LARGE, "cpu")
    plan, marginals = whole.solve(0.3).pruned, whole.marginals([3, 5])
    units, _, tokens = LARGE.require_shifts().values.shape
    at_once = 7  # does not divide the number of positions
    monkeypatch.setattr(additive_torch, "_BLOCK_BYTES", 8 * units * tokens * at_once)
    for memory in (0, 4 * units * tokens * 3 * at_once, 1 << 30):  # for no, three and all blocks
        made = TorchAdditiveKL(LARGE, "cpu", memory=memory)
        assert made.solve(0.3).pruned == plan
        np.testing.assert_allclose(made.marginals([3, 5]), marginals, rtol=1e-6)


def test_shifts_of_a_later_stage_start_where_units_are_gone() -> None:
    shifts = LARGE.require_shifts()
    values, gone = shifts.values.copy(), [2, 11, 20]
    base = values[gone].astype(np.float32).sum(axis=0)
    values[gone] = 0
    staged = with_shifts(LARGE, replace(shifts, values=values, base=base))
    made, expected = TorchAdditiveKL(staged, "cpu", "float64"), staged.additive()
    np.testing.assert_allclose(made.marginals([5]), expected.marginals([5]), rtol=1e-4, atol=1e-7)
    assert made.solve(0.4, include=gone).pruned == expected.solve(0.4, include=gone).pruned
    # without the base the same shifts price other sets
    plain = TorchAdditiveKL(with_shifts(LARGE, replace(shifts, values=values)), "cpu")
    assert not np.allclose(made.marginals([5]), plain.marginals([5]), rtol=1e-2)


def test_the_path_has_the_plan_of_every_lambda(surrogate: Any) -> None:
    made = with_random_shifts(make_units(8), spread=0.1, positions=100, tokens=9)
    additive, guards = surrogate(made), cl.Guards(layer_cap=0.7, protect_first=1)
    path = additive.lambda_path(0.4, guards, part="fit")
    assert len(path) > 3
    for strength in np.random.default_rng(0).uniform(0, 1, 25).tolist():
        if np.abs(np.array(path.breakpoints) - strength).min() < 1e-5:
            continue
        plan = path.at(strength).selection
        assert plan is not None
        assert set(plan.pruned) == set(additive.solve(0.4, strength, guards, part="fit").pruned)
        assert plan.made.matrix == "additive KL"
        assert plan.predicted_risk == pytest.approx(made.risk(plan.pruned))


def test_prefixes_of_the_longest_plan_are_priced_as_they_are() -> None:
    additive, guards = LARGE.additive(), cl.Guards(layer_cap=0.5)
    run = additive.longest(guards, 0.9, 0.5, part="fit")
    assert run.requested_ratio == run.realized_ratio < 0.51  # the cap ends it
    # a solve leaves nothing behind for the next one
    assert run.prefix(0.3).pruned == additive.solve(0.3, 0.5, guards, part="fit").pruned
    prices = additive.along(run, "price")
    assert len(prices) == len(run) + 1
    for k in (0, 1, 5, len(run)):
        assert prices[k] == pytest.approx(additive.predict(run.pruned[:k], "price"), rel=1e-9)
    singles = [additive.predict([u], "price") for u in range(len(LARGE.units))]
    np.testing.assert_allclose(additive.state("price").singles, singles, rtol=1e-9)
    np.testing.assert_allclose(additive.singles("price"), singles, rtol=1e-9)


def test_a_solve_ends_where_it_is_told_to() -> None:
    stop = Mock(side_effect=[None, None, None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        LARGE.additive().solve(0.4, each_step=stop)
    assert stop.call_count == 4
