"""The sketch of shifts, the pair KL and the additive KL, against independent naive computations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

import cocurve_lab as cl
from cocurve_lab.base.storage import dump_npz, load_npz
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.extensions.surrogates.additive import AdditiveKL
from cocurve_lab.extensions.surrogates.additive_torch import TorchAdditiveKL
from cocurve_lab.extensions.surrogates.shifts import Shifts, share_of, shifts_path
from cocurve_lab.extensions.surrogates.sketched import with_shifts as _with_shifts
from helpers.problems import make_units, random_curvature, with_random_shifts
from helpers.tiny_models import tiny_model

UNITS = make_units(3, 2, 3)
SIZE = len(UNITS)
ROWS, LENGTH = 6, 12
WHOLE = 10**6  # more positions and tokens than there are


def text(rows: int = ROWS) -> cl.CalibrationSet:
    ids = torch.randint(0, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return cl.CalibrationSet(ids)


def built(rows: int = ROWS, top_r: int = 32, **options: Any) -> cl.Curvature:
    options = {"sketch_positions": WHOLE, "sketch_top": WHOLE, "groups": 3} | options
    return cl.estimate_curvature(
        tiny_model(), None, text(rows), top_r, progress=False, options=cl.BuildOptions(**options)
    )


def with_shifts(**settings: Any) -> cl.Curvature:
    return with_random_shifts(UNITS, **settings)


def naive(shifts: Shifts, chosen: Sequence[int]) -> float:
    """F(S) by its definition: the KL from log-probabilities, in float64."""
    p = shifts.probabilities.astype(np.float64)
    p /= p.sum(axis=-1, keepdims=True)
    total = shifts.values[list(chosen)].astype(np.float64).sum(axis=0)
    z = np.log(p) + total
    log_q = z - logsumexp(z, axis=-1, keepdims=True)
    return float((p * (np.log(p) - log_q)).sum(axis=-1).mean())


# What a build keeps -------------------------------------------------------------------------------


def test_one_unit_costs_what_the_build_measured() -> None:
    """F({u}) = R({u}) on the same positions and support; float16 keeps three digits."""
    curvature = built()
    risks, additive = curvature.single_unit_risk, curvature.additive()
    assert risks is not None
    found = np.array([additive.predict([u]) for u in range(len(risks))])
    np.testing.assert_allclose(found, risks, rtol=4e-3)
    np.testing.assert_allclose(curvature.pair_kl().saliency / 2, risks, rtol=4e-3)
    np.testing.assert_allclose(additive.marginals(), risks, rtol=4e-3)


def test_a_pair_costs_what_its_summed_shifts_say() -> None:
    """Against full passes of the masked model, on the teacher's support."""
    curvature, model, ids = built(top_r=20), tiny_model(), text().input_ids
    with torch.no_grad():
        z_0 = model(input_ids=ids).logits[:, :-1].double()
        support = z_0.topk(20).indices
        z_0 = z_0.gather(-1, support)
        shift = []
        for unit in curvature.units:
            with cl.ablate(model, [unit]):
                z = model(input_ids=ids).logits[:, :-1].double().gather(-1, support)
            shift.append(z - z_0)
    p = z_0.softmax(-1)

    def kl(d: torch.Tensor) -> float:
        return float((p * (z_0.log_softmax(-1) - (z_0 + d).log_softmax(-1))).sum(-1).mean())

    pair = curvature.pair_kl().matrix
    for u, v in ((0, 1), (2, 9), (5, 14)):
        edge = kl(shift[u] + shift[v]) - kl(shift[u]) - kl(shift[v])
        assert pair[u, v] == pytest.approx(edge, rel=0.02, abs=1e-6)
        assert 0.5 * pair[np.ix_([u, v], [u, v])].sum() == pytest.approx(
            kl(shift[u] + shift[v]), rel=0.01
        )


def test_the_sketch_takes_its_share_of_every_sequence() -> None:
    assert [share_of(i, 3, 10) for i in range(3)] == [3, 3, 4]
    assert sum(share_of(i, 128, 1000) for i in range(128)) == 1000
    assert [share_of(i, 5, 2) for i in range(5)] == [0, 0, 1, 0, 1]
    shifts = built(sketch_positions=20, sketch_top=5).require_shifts()
    assert shifts.values.shape == (SIZE_OF_MODEL, 20, 5)
    assert np.bincount(shifts.sequences).tolist() == [3, 3, 4, 3, 3, 4]
    assert set(shifts.groups) == {0, 1, 2}
    np.testing.assert_allclose(shifts.probabilities.sum(axis=1), 1, rtol=1e-5)
    few = built(sketch_positions=2).require_shifts()
    assert few.sequences.tolist() == [2, 5]
    assert built(sketch_positions=0).shifts is None


SIZE_OF_MODEL = len(cl.enumerate_units(tiny_model()))


def test_h_does_not_depend_on_the_sketch() -> None:
    np.testing.assert_array_equal(built().matrix, built(sketch_positions=0).matrix)


def test_an_interrupted_build_goes_on_with_its_sketch(tmp_path: Path) -> None:
    def stop(build: Any) -> None:
        if build.done == 2:
            raise KeyboardInterrupt

    path, model = tmp_path / "H.ckpt", tiny_model()

    def run(**options: Any) -> cl.Curvature:
        chosen = {"sketch_positions": 20, "sketch_top": 5, "groups": 3, "checkpoint_seconds": 0.0}
        return cl.estimate_curvature(
            *(model, None, text(), 32),
            checkpoint=path,
            progress=False,
            options=cl.BuildOptions(**chosen | options),
        )

    part = run(on_sequence=stop)
    assert len(part.require_shifts()) == 6
    before = path.read_bytes()
    again, whole = run().require_shifts(), built(sketch_positions=20, sketch_top=5).require_shifts()
    for name in ("values", "probabilities", "sequences", "groups"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
    path.write_bytes(before)
    other = run(sketch_positions=10)
    assert other.shifts is None
    assert "no sketch of shifts: the checkpoint has [20, 5]" in str(other.provenance["events"])


def test_shards_and_merges_put_sketches_together() -> None:
    whole = built(sketch_positions=20)
    parts = [built(sketch_positions=20, shard=(i, 2)) for i in (2, 1)]
    merged = merge_shards(parts).require_shifts()
    for name in ("values", "probabilities", "sequences", "groups"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(whole.require_shifts(), name))
    bare = parts[0].with_provenance()
    assert merge_shards([replace(bare, shift_source=None), parts[1]]).shifts is None


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pkl", ".npz"])
def test_the_sketch_lies_beside_h(suffix: str, tmp_path: Path) -> None:
    curvature = with_shifts()
    path = curvature.save(tmp_path / f"H_demo_1f{suffix}")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [path.name, "H_demo_1f.shifts.npz"]
    )
    again = cl.Curvature.load(path)
    np.testing.assert_array_equal(again.require_shifts().values, curvature.require_shifts().values)
    random_curvature(UNITS, 1).save(path)  # one without: the old shifts are not its own
    assert not shifts_path(path).exists()
    assert cl.Curvature.load(path).shifts is None


def test_shifts_of_another_h_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = with_shifts().save(tmp_path / "H.pkl")
    beside = shifts_path(path)
    good = beside.read_bytes()
    beside.write_bytes(good[:-200])
    with pytest.raises(cl.FileFormatError):
        cl.Curvature.load(path).pair_kl()
    beside.write_bytes(good)
    content = load_npz(path=beside, format_name="cocurve-shifts", version=1)
    for change in (
        {"values": content["values"].astype(np.float64)},
        {"probabilities": -content["probabilities"]},
        {"groups": content["groups"][:-1]},
    ):
        beside.write_bytes(dump_npz(content | change))
        with pytest.raises(cl.FileFormatError):
            cl.Curvature.load(path).additive()
    random_curvature(UNITS, 1).save(tmp_path / "other.pkl")
    (tmp_path / "other.shifts.npz").write_bytes(good)
    with pytest.raises(cl.MismatchError):
        cl.Curvature.load(tmp_path / "other.pkl").additive()


# The pair KL --------------------------------------------------------------------------------------


def test_the_pair_kl_is_f_on_one_unit_and_on_two() -> None:
    curvature = with_shifts()
    pair, shifts = curvature.pair_kl(), curvature.require_shifts()
    for u in range(SIZE):
        assert pair.matrix[u, u] == pytest.approx(2 * naive(shifts, [u]), rel=1e-6)
        for v in range(u):
            assert pair.risk([u, v]) == pytest.approx(naive(shifts, [u, v]), rel=1e-6)
    assert pair.group_positions is not None
    assert pair.group_positions.sum() == len(shifts)


def test_to_second_order_the_pair_kl_is_the_gram_of_the_shifts() -> None:
    curvature = with_shifts(scale=0.01)
    shifts = curvature.require_shifts()
    p = shifts.probabilities.astype(np.float64)
    centred = shifts.values - (p * shifts.values).sum(-1, keepdims=True)
    gram = np.einsum("usk,vsk,sk->uv", centred, centred, p) / len(shifts)
    np.testing.assert_allclose(curvature.pair_kl().matrix, gram, atol=0.05 * np.abs(gram).max())


def test_f_sees_a_turned_sign_and_h_does_not() -> None:
    shifts = with_shifts().require_shifts()
    turned = replace(shifts, values=-shifts.values)
    one, two = (_with_shifts(random_curvature(UNITS), s) for s in (shifts, turned))
    assert one.fingerprint == two.fingerprint
    found = np.array([[c.additive().predict([u]) for u in range(SIZE)] for c in (one, two)])
    assert np.abs(found[0] / found[1] - 1).max() > 0.1


def test_a_pair_kl_and_its_plans_say_what_they_are() -> None:
    # two units that both take from a token the teacher is sure of: together they turn it over
    p = np.array([[0.999, 0.001]], np.float32)
    values = np.zeros((SIZE, 1, 2), np.float16)
    values[:2, 0, 0], values[2:, 0, 1] = -3.0, 0.1
    ones = np.zeros(1, np.int64)
    pair = _with_shifts(random_curvature(UNITS), Shifts(values, p, ones, ones)).pair_kl()
    assert repr(pair).startswith("Pair KL of")
    assert "not the paper's H" in pair.note()
    assert pair.correlation()[0, 1] == pytest.approx(9.5, abs=0.1)
    plan = cl.solve_greedy(pair, 0.2)
    assert plan.surrogate == "pair KL"
    assert cl.Selection.from_json(plan.to_json()).surrogate == "pair KL"
    assert "surrogate" not in json.loads(cl.solve_greedy(random_curvature(UNITS), 0.2).to_json())


def test_a_pair_kl_has_error_bars_and_can_be_stored(tmp_path: Path) -> None:
    pair = with_shifts().pair_kl()
    assert np.isfinite(cl.jackknife(pair, "saliency").standard_error).all()
    again = cl.Curvature.load(pair.save(tmp_path / "Q.pkl"))
    assert again.surrogate == "pair KL"
    np.testing.assert_array_equal(again.matrix, pair.matrix)


# The additive KL ----------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def surrogate(request: pytest.FixtureRequest) -> Callable[[cl.Curvature], AdditiveKL]:
    """The additive KL of a curvature, on either engine."""
    if request.param == "torch":
        return lambda curvature: TorchAdditiveKL(curvature, "cpu")
    return lambda curvature: curvature.additive()


def test_predictions_and_marginals_follow_the_definition(surrogate: Any) -> None:
    curvature = with_shifts()
    additive, shifts = surrogate(curvature), curvature.require_shifts()
    for chosen in ([], [4], [0, 3, 7], list(range(SIZE))):
        assert additive.predict(chosen) == pytest.approx(naive(shifts, chosen), rel=1e-6, abs=1e-12)
        found = additive.marginals(chosen)
        for u in set(range(SIZE)) - set(chosen):
            rise = naive(shifts, [*chosen, u]) - naive(shifts, chosen)
            assert found[u] == pytest.approx(rise, rel=1e-3, abs=1e-5)
        assert not found[chosen].any()
    assert additive.predict([]) == 0  # exactly: log axes would show 1e-18


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("guards", [cl.Guards(), cl.Guards(layer_cap=0.5, protect_first=1)])
def test_the_plan_is_greedy_on_f_lambda(strength: float, guards: cl.Guards, surrogate: Any) -> None:
    curvature = with_shifts()
    shifts, costs, total = curvature.require_shifts(), UNITS.costs, UNITS.total_cost
    single = [naive(shifts, [u]) for u in range(SIZE)]
    by_layer = {layer: costs[UNITS.layers == layer].sum() for layer in range(3)}
    chosen: list[int] = []
    while costs[chosen].sum() < 0.3 * total:
        now, best = naive(shifts, chosen), (np.inf, -1)
        for u in set(range(SIZE)) - set(chosen):
            layer = int(UNITS.layers[u])
            same = costs[[v for v in chosen if UNITS.layers[v] == layer]].sum() + costs[u]
            if layer < guards.protect_first or (
                guards.layer_cap and same > guards.layer_cap * by_layer[layer]
            ):
                continue
            rise = naive(shifts, [*chosen, u]) - now
            score = ((1 - strength) * single[u] + strength * rise) / costs[u]
            best = min(best, (score, u))
        chosen.append(best[1])
    plan = surrogate(curvature).solve(0.3, strength, guards)
    assert list(plan.pruned) == chosen
    assert plan.surrogate == "additive KL"
    assert plan.predicted_risk == pytest.approx(curvature.risk(chosen))  # what H predicts
    assert cl.Selection.from_json(plan.to_json()).surrogate == "additive KL"


def test_marginals_of_small_units_keep_their_digits(surrogate: Any) -> None:
    """Of 1e-7 nats float32 ratios, which are all but 1, would leave two digits."""
    curvature = with_shifts(scale=3e-4)
    shifts, chosen = curvature.require_shifts(), [0, 3]
    found, before = surrogate(curvature).marginals(chosen), naive(shifts, chosen)
    for u in set(range(SIZE)) - set(chosen):
        rise = naive(shifts, [*chosen, u]) - before
        assert found[u] == pytest.approx(rise, rel=1e-3, abs=1e-12)
    assert 0 < np.median(found) < 1e-6


def test_targets_and_included_units_are_respected() -> None:
    additive = with_shifts().additive()
    plan = additive.solve(cl.Target(ratio=0.2), include=["L2.ffn[1]"], exclude=["L0.ffn[0]"])
    assert UNITS[plan.pruned[0]].name == "L2.ffn[1]"
    assert UNITS.index("L0.ffn[0]") not in plan.pruned
    assert plan.realized_ratio >= 0.2


def test_a_price_comes_from_positions_that_the_plan_was_not_solved_on() -> None:
    curvature = with_shifts(positions=200)
    additive, shifts = curvature.additive(), curvature.require_shifts()
    fit, price = shifts.of("fit"), shifts.of("price")
    assert not set(fit.groups) & set(price.groups)
    assert len(fit) + len(price) == len(shifts)
    plan = additive.solve(0.3, part="fit")
    assert additive.predict(plan, "price") == pytest.approx(naive(price, plan.pruned), rel=1e-6)
    np.testing.assert_allclose(
        curvature.pair_kl("fit").single_unit_risk, [naive(fit, [u]) for u in range(SIZE)], rtol=1e-6
    )
    assert additive.standard_error(plan) > 0
