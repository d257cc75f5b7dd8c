"""Builds where units are removed already, refitted after an ablation, or sketched, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.estimator.estimate import load_or_estimate
from cocurve_lab.extensions.surrogates.refit_aware import RIDGE
from cocurve_lab.extensions.surrogates.shifts import share_of
from cocurve_lab.extensions.surrogates.sketched import with_shifts
from helpers import tiny_models
from helpers.tiny_models import (
    LLAMA_PLACES,
    PLACES,
    Columns,
    full_logits,
    masked_by_hand,
    naive_build,
    relative_error,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
)

TEXT, TOP = tiny_text(5), 40
GONE = (9, 0, 6)  # attention and FFN, in two layers
WHOLE = 10**6  # more positions and tokens than there are
SKETCH = {"sketch_positions": WHOLE, "sketch_top": WHOLE}


def built(model: Any = None, text: Any = TEXT, top_r: int = TOP, **options: Any) -> Any:
    model, rest = model or tiny_model(), {"checkpoint": options.pop("checkpoint", None)}
    rest["progress"] = options.pop("progress", False)
    chosen = cl.BuildOptions(**{"groups": 2} | options)
    return cl.estimate_curvature(
        model, cl.enumerate_units(model, 4), text, top_r, options=chosen, **rest
    )


# Every kind of build ------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "sketched": {"sketch_positions": 20, "sketch_top": 5},
    "removed": {"removed": GONE, "sketch_positions": 20},
    "refitted": {"refit_ratio": 0.4},
}


def require_same(one: cl.Curvature, other: cl.Curvature) -> None:
    assert one.fingerprint == other.fingerprint
    assert (one.shifts is None) == (other.shifts is None)
    if one.shifts is not None:
        for name, array in one.shifts.arrays().items():
            np.testing.assert_array_equal(getattr(other.require_shifts(), name), array)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_in_shards_or_from_a_file_it_is_the_same(kind: str, tmp_path: Path) -> None:
    def stop(build: Any) -> None:
        if build.done == 2:
            raise KeyboardInterrupt

    path, options = tmp_path / "H.ckpt", KINDS[kind]
    whole, often = built(**options), options | {"checkpoint": path, "checkpoint_seconds": 0.0}
    part = built(on_sequence=stop, **often)
    assert part.provenance["sequences_done"] == 2
    before = path.read_bytes()
    require_same(built(**often), whole)
    path.write_bytes(before)
    if kind == "sketched":  # H goes on, its sketch cannot
        other = built(**often | {"sketch_positions": 10})
        assert other.shifts is None
        assert "[20, 5]" in str(other.provenance["events"])
    else:
        for another in ({}, {"removed": [1]}):
            with pytest.raises(cl.MismatchError):
                built(checkpoint=path, checkpoint_seconds=0.0, **another)
    one, two = (built(shard=(number, 2), **options) for number in (1, 2))
    require_same(merge_shards([two, one]), whole)
    again = cl.Curvature.load(whole.save(tmp_path / "H.pkl"))
    require_same(again, whole)
    assert (again.refit_ratio, again.removed) == (whole.refit_ratio, whole.removed)
    assert again.note() == whole.note()
    if kind == "sketched":
        bare = merge_shards([with_shifts(one, None), two])
        assert bare.shifts is None
        require_same(with_shifts(built(), None), bare)  # H does not depend on the sketch
    else:
        with pytest.raises(cl.MismatchError):
            merge_shards([one, built(shard=(2, 2))])


def test_the_sketch_takes_its_share_of_every_sequence() -> None:
    assert [share_of(i, 3, 10) for i in range(3)] == [3, 3, 4]
    assert sum(share_of(i, 128, 1000) for i in range(128)) == 1000
    assert [share_of(i, 5, 2) for i in range(5)] == [0, 0, 1, 0, 1]
    text = tiny_text(6)
    shifts = built(text=text, groups=3, **KINDS["sketched"]).require_shifts()
    assert shifts.values.shape == (len(units_by_hand(tiny_model())), 20, 5)
    assert np.bincount(shifts.sequences).tolist() == [3, 3, 4, 3, 3, 4]
    assert set(shifts.groups) == {0, 1, 2}
    np.testing.assert_allclose(shifts.probabilities.sum(axis=1), 1, rtol=1e-5)
    assert built(text=text, sketch_positions=2).require_shifts().sequences.tolist() == [2, 5]
    assert built(sketch_positions=0).shifts is None


# Shifts of single units and of pairs --------------------------------------------------------------


class Naive(NamedTuple):
    """Logits on the teacher's support [N, P, r] float64: whole, without S, and without S and u."""

    z_0: Tensor
    z_S: Tensor
    z_u: list[Tensor]

    def kl(self, z: Tensor) -> float:
        """E KL(p_0 || softmax z)."""
        p, logs = self.z_0.softmax(-1), self.z_0.log_softmax(-1) - z.log_softmax(-1)
        return float((p * logs).sum(-1).mean())


def naive(model: Any, gone: tuple[int, ...]) -> Naive:
    wide, units, ids = tiny_double(model), units_by_hand(model), TEXT.input_ids
    whole = full_logits(wide, ids)[:, :-1]
    support = whole.topk(TOP).indices
    removed = [units[i] for i in gone]

    def without(*more: Any) -> Tensor:
        with masked_by_hand(wide, [*removed, *more]):
            return full_logits(wide, ids)[:, :-1].gather(-1, support)

    others = [without() if i in gone else without(unit) for i, unit in enumerate(units)]
    return Naive(whole.gather(-1, support), without(), others)


@pytest.mark.parametrize("gone", [(), GONE], ids=["whole", "removed"])
def test_units_and_pairs_cost_what_full_passes_say(gone: tuple[int, ...]) -> None:
    model = tiny_model()
    found, true = built(model, removed=gone, **SKETCH), naive(model, gone)
    additive, pair, at = found.additive(), found.pair_kl(), true.kl(true.z_S)
    assert pair.surrogate == "pair KL"
    assert additive.predict([]) == pytest.approx(at, rel=1e-5)
    assert additive.predict(gone) == pytest.approx(at, rel=1e-5)
    rise = np.array([true.kl(z) - at for z in true.z_u])  # float16 keeps three digits of it
    close = {"rtol": 4e-3, "atol": 2e-3 * np.abs(rise).max()}
    np.testing.assert_allclose(found.single_unit_risk, rise, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(additive.marginals(), rise, **close)
    np.testing.assert_allclose(pair.saliency / 2, rise, **close)
    for u, v in ((1, 2), (3, 14), (5, 10)):  # by shifts that add up from S
        two = true.kl(true.z_u[u] + true.z_u[v] - true.z_S)
        assert additive.predict([*gone, u]) == pytest.approx(true.kl(true.z_u[u]), rel=2e-3)
        assert additive.predict([*gone, u, v]) == pytest.approx(two, rel=2e-3)
        assert pair.risk([u, v]) == pytest.approx(two - at, rel=0.01)
    if gone:
        assert rise.min() < 0 < rise.max()  # some units make good what is gone
        # a sum of the shifts of the whole model says something else
        assert abs(built(model, **SKETCH).additive().predict(gone) / at - 1) > 0.01


@pytest.mark.parametrize("family", ["llama", "olmo2", "opt", "gpt_neox", "gemma2"])
def test_h_is_the_second_order_of_the_kl_from_the_whole_model(family: str) -> None:
    model = tiny_model(family, "mha")
    found, true = built(model, removed=GONE), naive(model, GONE)
    p_0, p = true.z_0.softmax(-1), true.z_S.softmax(-1)
    shifts = [z - true.z_S for z in true.z_u]
    features = torch.stack([(p.sqrt() * (d - (p * d).sum(-1, keepdim=True))) for d in shifts])
    gram = torch.einsum("unpr,vnpr->uv", features, features) / p[..., 0].numel()
    slope = torch.tensor([float(((p - p_0) * d).sum(-1).mean()) for d in shifts])
    expected = gram.numpy() + 2 * np.diag(slope.numpy())
    assert relative_error(found.matrix, expected) < 1e-4
    assert relative_error(found.matrix, gram.numpy()) > 1e-2  # so the first order is seen
    # what each unit adds to the KL, of all orders
    rise = np.array([true.kl(z) - true.kl(true.z_S) for z in true.z_u])
    assert relative_error(found.single_unit_risk, rise) < 1e-4
    assert not found.matrix[list(GONE)].any()
    assert not found.single_unit_risk[list(GONE)].any()


def test_the_sketch_has_the_shifts_on_the_masked_model() -> None:
    model = tiny_model()
    shifts, true = built(model, removed=GONE, **SKETCH).require_shifts(), naive(model, GONE)
    p = true.z_0.softmax(-1).flatten(0, 1)
    order = p.topk(TOP).indices  # likeliest first, as in the sketch

    def on_the_sketch(z: Tensor) -> np.ndarray:
        """Centred under p_0: constants are nothing to a softmax."""
        d = z.flatten(0, 1)
        return (d - (p * d).sum(-1, keepdim=True)).gather(-1, order).numpy()

    weights = p.gather(-1, order).numpy()
    np.testing.assert_allclose(shifts.probabilities, weights, atol=1e-6)
    for found, z in [
        (shifts.base, true.z_S - true.z_0),
        *zip(shifts.values.astype(float), [z - true.z_S for z in true.z_u], strict=True),
    ]:
        centred = found - (weights * found).sum(-1, keepdims=True)
        np.testing.assert_allclose(centred, on_the_sketch(z), atol=4e-3)
    start = true.z_S.softmax(-1).flatten(0, 1).gather(-1, order)
    np.testing.assert_allclose(shifts.start, start.numpy(), atol=1e-6)


def test_greedy_goes_on_from_the_removed_units() -> None:
    found = built(removed=GONE, **SKETCH)
    additive, costs = found.additive(), found.units.costs
    # by hand: from F at S on, the cheapest rise per parameter
    chosen = list(GONE)
    while costs[chosen].sum() < 0.5 * found.units.total_cost:
        left = [u for u in range(len(costs)) if u not in chosen]
        now = additive.predict(chosen)
        chosen.append(min(left, key=lambda u: (additive.predict([*chosen, u]) - now) / costs[u]))
    assert list(additive.solve(0.5, include=GONE).pruned) == chosen
    at_zero = additive.solve(0.5, 0.0, include=GONE).pruned
    by_rise = np.argsort(additive.marginals() / costs, kind="stable")
    assert list(at_zero[3:]) == [u for u in by_rise if u not in GONE][: len(at_zero) - 3]


def test_names_and_order_make_no_other_build(tmp_path: Path) -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, 4)

    def kept(removed: Any) -> cl.Curvature:
        options = cl.BuildOptions(removed=removed)
        return load_or_estimate(tmp_path, model, units, TEXT, TOP, progress=False, options=options)

    first = kept(GONE)
    require_same(kept([units[0], units[6].name, 9]), first)
    assert len(list(tmp_path.glob("H_*.pkl"))) == 1
    assert first.removed == (0, 6, 9)
    plain = kept(())
    assert plain.fingerprint == kept([]).fingerprint == built(groups=16).fingerprint
    assert (plain.surrogate, plain.require_shifts().base) == ("H", None)
    assert "removed" not in plain.provenance
    assert len(list(tmp_path.glob("H_*.pkl"))) == 2
    for path in tmp_path.glob("H_*.pkl"):  # under the file name of the other's H
        first.save(path)
    with pytest.raises(cl.MismatchError):
        kept(())


def test_it_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = built(removed=GONE, progress="lines")
    assert f"{len(found.units) - 3} units x 5 sequences" in "".join(capsys.readouterr())
    assert "3 units" in found.note()
    assert (found.surrogate, found.saturation) == ("staged H", None)
    plan = cl.solve_greedy(found, 0.5, include=GONE)
    assert cl.Selection.from_json(plan.to_json()).surrogate == "staged H"


# Ablations that the rest of their block makes up for ----------------------------------------------


def projection_of(model: Any, unit: Columns) -> Any:
    """The output projection of a unit's block."""
    layers, *outputs = PLACES.get(model.config.model_type, LLAMA_PLACES)
    return model.get_submodule(f"{layers}.{unit.layer}.{outputs[unit.kind == 'ffn']}")


def inputs_by_hand(model: Any, projection: Any) -> Tensor:
    """The columns x [tokens, W] float64 of a block on the text."""
    seen: list[Tensor] = []
    hook = projection.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    full_logits(model, TEXT.input_ids)
    hook.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).double()


def prediction_by_hand(x: Tensor, unit: Columns, units: list[Columns], ratio: float) -> Tensor:
    """The expected prediction [W, w] of a unit's columns from all columns, by normal equations.

    The moments under masks are sums over all masks, each with its probability.
    """
    width, others = x.shape[1], [other for other in units if other != unit]
    moments, cross = torch.zeros(width, width).double(), torch.zeros(width, width).double()
    for size in range(len(others) + 1):
        for staying in combinations(others, size):
            mask = torch.zeros(width).double()
            for other in staying:
                mask[other.start : other.stop] = 1
            weight = (1 - ratio) ** size * ratio ** (len(others) - size)
            moments += weight * (x * mask).T @ (x * mask)
            cross += weight * x.T @ (x * mask)
    keep = 1 - ratio
    moments.diagonal().add_(keep * RIDGE * float((x * x).sum(dim=0).mean()))
    own = slice(unit.start, unit.stop)
    rest = torch.ones(width, dtype=torch.bool)
    rest[own] = False
    found = torch.zeros(width, unit.stop - unit.start).double()
    solved = torch.linalg.solve(moments[rest][:, rest], cross[own][:, rest].T)
    found[rest] = keep * solved  # a column that stays with probability `keep`
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_h_is_that_of_refitted_ablations(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against full passes with hooks, and predictions summed over all masks of a block."""
    model = tiny_model(family) if family != "gpt2" else tiny_model(family, "mha")
    ratio = 0.3
    predictions, every = {}, units_by_hand(model)
    for unit in every:
        block = [other for other in every if other[:2] == unit[:2]]
        x = inputs_by_hand(model, projection_of(model, unit))
        predictions[unit] = prediction_by_hand(x, unit, block, ratio).float()

    @contextmanager
    def made_up(_: Any, units: list[Columns]) -> Iterator[None]:
        (unit,) = units

        def cut(_: Any, args: Any) -> Any:
            x = args[0].clone()
            x[..., unit.start : unit.stop] = args[0] @ predictions[unit]
            return (x,)

        hook = projection_of(model, unit).register_forward_pre_hook(cut)
        try:
            yield
        finally:
            hook.remove()

    monkeypatch.setattr(tiny_models, "masked_by_hand", made_up)
    expected, risks = naive_build(model, TEXT, 32)
    found = built(model, top_r=32, refit_ratio=ratio, **SKETCH)
    assert relative_error(found.matrix, expected) <= 1e-4
    assert relative_error(found.single_unit_risk, risks) <= 1e-4  # type: ignore[arg-type]
    alone = [found.additive().predict([unit]) for unit in range(len(found.units))]
    np.testing.assert_allclose(alone, risks, rtol=0.02, atol=1e-6)  # so are its shifts


def test_where_nothing_stays_nothing_is_made_up_for() -> None:
    assert relative_error(built(refit_ratio=1).matrix, built().matrix) <= 1e-5
    assert "40%" in built(refit_ratio=0.4).note()


def test_a_unit_with_a_twin_costs_next_to_nothing() -> None:
    """Its twin has the same columns, so a refit loses nothing: H of masks cannot know that."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    size = 11  # of the first two of four groups of 42 channels
    with torch.no_grad():
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[size : 2 * size - 1] = projection.weight[: size - 1]
            projection.weight[[size - 1, 2 * size - 1]] = 0
    twin = [unit.name for unit in cl.enumerate_units(model, ffn_groups=4)].index("L1.ffn[0]")
    masked, refitted = built(model), built(model, refit_ratio=0.1)
    assert refitted.saliency[twin] < 0.05 * masked.saliency[twin]
