"""A build where some units are removed already, against full passes of the masked model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.estimator.estimate import load_or_estimate
from helpers.tiny_models import (
    full_logits,
    masked_by_hand,
    relative_error,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
)

TEXT, TOP = tiny_text(5), 40
GONE = (9, 0, 6)  # attention and FFN, in two layers
WHOLE = 10**6  # more positions and tokens than there are


def built(removed: Any = GONE, model: Any = None, **options: Any) -> cl.Curvature:
    model = model or tiny_model()
    rest = {"checkpoint": options.pop("checkpoint", None), "progress": False}
    options = {"sketch_positions": WHOLE, "sketch_top": WHOLE, "groups": 2} | options
    return cl.estimate_curvature(
        model,
        cl.enumerate_units(model, 4),
        TEXT,
        TOP,
        options=cl.BuildOptions(removed=removed, **options),
        **rest,
    )


class Naive(NamedTuple):
    """Logits on the teacher's support [N, P, r] float64: whole, without S, and without S and u."""

    z_0: torch.Tensor
    z_S: torch.Tensor
    z_u: list[torch.Tensor]

    def kl(self, z: torch.Tensor) -> float:
        """E KL(p_0 || softmax z)."""
        p, logs = self.z_0.softmax(-1), self.z_0.log_softmax(-1) - z.log_softmax(-1)
        return float((p * logs).sum(-1).mean())


def naive(model: Any, gone: tuple[int, ...]) -> Naive:
    wide, units, ids = tiny_double(model), units_by_hand(model), TEXT.input_ids
    whole = full_logits(wide, ids)[:, :-1]
    support = whole.topk(TOP).indices
    removed = [units[i] for i in gone]

    def without(*more: Any) -> torch.Tensor:
        with masked_by_hand(wide, [*removed, *more]):
            return full_logits(wide, ids)[:, :-1].gather(-1, support)

    others = [without() if i in gone else without(unit) for i, unit in enumerate(units)]
    return Naive(whole.gather(-1, support), without(), others)


@pytest.mark.parametrize("family", ["llama", "olmo2", "opt", "gpt_neox", "gemma2"])
def test_h_is_the_second_order_of_the_kl_from_the_whole_model(family: str) -> None:
    model = tiny_model(family, "mha")
    found, true = built(model=model), naive(model, GONE)
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
    shifts, true = built(model=model).require_shifts(), naive(model, GONE)
    p = true.z_0.softmax(-1).flatten(0, 1)
    order = p.topk(TOP).indices  # likeliest first, as in the sketch

    def on_the_sketch(z: torch.Tensor) -> np.ndarray:
        """Centred under p_0: constants are nothing to a softmax."""
        d = z.flatten(0, 1)
        return (d - (p * d).sum(-1, keepdim=True)).gather(-1, order).numpy()

    weights = p.gather(-1, order).numpy()
    np.testing.assert_allclose(shifts.probabilities, weights, atol=1e-6)
    assert shifts.base is not None
    for found, z in [
        (shifts.base, true.z_S - true.z_0),
        *zip(shifts.values.astype(float), [z - true.z_S for z in true.z_u], strict=True),
    ]:
        centred = found - (weights * found).sum(-1, keepdims=True)
        np.testing.assert_allclose(centred, on_the_sketch(z), atol=4e-3)
    np.testing.assert_allclose(
        shifts.start, true.z_S.softmax(-1).flatten(0, 1).gather(-1, order).numpy(), atol=1e-6
    )


def test_the_additive_kl_is_exact_where_it_was_measured() -> None:
    model = tiny_model()
    found, true = built(model=model), naive(model, GONE)
    additive, at = found.additive(), true.kl(true.z_S)
    assert additive.predict([]) == pytest.approx(at, rel=1e-5)
    assert additive.predict(GONE) == pytest.approx(at, rel=1e-5)
    # more so than a sum of the shifts of the whole model
    assert abs(built(()).additive().predict(GONE) / at - 1) > 0.01
    rise = np.array([true.kl(z) - at for z in true.z_u])
    assert rise.min() < 0 < rise.max()  # some units make good what is gone
    np.testing.assert_allclose(additive.marginals(), rise, atol=2e-3 * np.abs(rise).max())
    assert additive.predict([*GONE, 3]) == pytest.approx(true.kl(true.z_u[3]), rel=2e-3)
    # two more: by shifts that add up from S, and so is their edge in the pair KL
    two = true.kl(true.z_u[3] + true.z_u[14] - true.z_S)
    assert additive.predict([*GONE, 3, 14]) == pytest.approx(two, rel=2e-3)
    pair = found.pair_kl()
    assert pair.surrogate == "pair KL"
    assert pair.risk([3, 14]) == pytest.approx(two - at, rel=0.01)
    np.testing.assert_allclose(pair.saliency / 2, rise, atol=2e-3 * np.abs(rise).max())


def test_greedy_goes_on_from_the_removed_units() -> None:
    found = built()
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


def test_none_removed_is_the_plain_build() -> None:
    plain, none = built(()), built([])
    assert plain.fingerprint == none.fingerprint
    assert "removed" not in plain.provenance
    assert plain.require_shifts().base is None
    assert plain.surrogate == "H"


def test_names_and_order_make_no_other_build(tmp_path: Path) -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, 4)

    def kept(removed: Any) -> cl.Curvature:
        options = cl.BuildOptions(removed=removed)
        return load_or_estimate(tmp_path, model, units, TEXT, TOP, progress=False, options=options)

    first = kept(GONE)
    again = kept([units[0], units[6].name, 9])
    assert len(list(tmp_path.glob("H_*.pkl"))) == 1
    assert first.removed == again.removed == (0, 6, 9)
    base = again.require_shifts().base  # it went through the file
    np.testing.assert_array_equal(base, first.require_shifts().base)
    kept(())
    assert len(list(tmp_path.glob("H_*.pkl"))) == 2


def test_an_interrupted_build_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def stop(build: Any) -> None:
        if build.done == 2:
            raise KeyboardInterrupt

    path, rest = tmp_path / "H.ckpt", {"sketch_positions": 20, "checkpoint_seconds": 0.0}
    part = built(on_sequence=stop, checkpoint=path, **rest)
    assert part.provenance["sequences_done"] == 2
    with pytest.raises(cl.MismatchError, match=r"removed is \[0, 6, 9\], not None"):
        built((), checkpoint=path, **rest)
    with pytest.raises(cl.MismatchError, match=r"removed is \[0, 6, 9\], not \[1\]"):
        built([1], checkpoint=path, **rest)
    again, whole = built(checkpoint=path, **rest), built(**rest)
    assert again.fingerprint == whole.fingerprint
    for name, array in whole.require_shifts().arrays().items():
        np.testing.assert_array_equal(getattr(again.require_shifts(), name), array)


def test_builds_without_other_units_are_never_mixed(tmp_path: Path) -> None:
    one, two = built(shard=(1, 2)), built(shard=(2, 2))
    merged = merge_shards([two, one])
    assert merged.fingerprint == built().fingerprint
    assert merged.require_shifts().base is not None
    with pytest.raises(cl.MismatchError, match="removed is"):
        merge_shards([one, built((), shard=(2, 2))])
    # under the file name of the whole model's H
    model = tiny_model()
    arguments = (tmp_path, model, cl.enumerate_units(model, 4), TEXT, TOP)
    load_or_estimate(*arguments, progress=False, options=cl.BuildOptions(groups=2))
    built().save(next(tmp_path.glob("H_*.pkl")))
    with pytest.raises(cl.MismatchError, match="removed is"):
        load_or_estimate(*arguments, progress=False, options=cl.BuildOptions(groups=2))


def test_it_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    options = cl.BuildOptions(removed=GONE)
    found = cl.estimate_curvature(
        model, cl.enumerate_units(model, 4), TEXT, TOP, progress="lines", options=options
    )
    shown = "".join(capsys.readouterr())
    assert f"{len(found.units) - 3} units x 5 sequences" in shown
    assert "3 units" in found.note()
    assert found.surrogate == "staged H"
    assert found.saturation is None
    plan = cl.solve_greedy(found, 0.5, include=GONE)
    assert cl.Selection.from_json(plan.to_json()).surrogate == "staged H"
