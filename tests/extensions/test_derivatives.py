"""H by derivatives: the exact H* against finite differences, previews against H*."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.settings import BuildOptions
from cocurve_lab.estimator import support
from cocurve_lab.extensions.analysis import exact as infinitesimal
from cocurve_lab.extensions.analysis import preview as probing
from cocurve_lab.extensions.analysis.exact import ExactOptions, derivatives
from cocurve_lab.extensions.analysis.preview import ProbeOptions
from cocurve_lab.models.architectures import describe
from helpers.tiny_models import (
    EVERY,
    FAMILIES,
    GROUPS,
    VOCAB,
    full_logits,
    masked_by_hand,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)

METHODS = ("exact", "probe")


def derived(
    method: str, model: Any, text: cl.CalibrationSet, top_r: int = 13, **options: int
) -> Any:
    kind: Any = ExactOptions if method == "exact" else ProbeOptions
    units, chosen = cl.enumerate_units(model, GROUPS), kind(**options)
    return cl.estimate_curvature(model, units, text, top_r, options=chosen, progress=False)


def exact(*args: Any, **options: int) -> Any:
    return derived("exact", *args, **options)


def preview(*args: Any, **options: int) -> Any:
    return derived("probe", *args, **options)


# The exact H* -------------------------------------------------------------------------------------


def wide(model: Any) -> Any:
    """The same model with its norms in float64: transformers runs them in float32 always."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def norm(x: torch.Tensor, m: Any = module) -> torch.Tensor:
                square = x.pow(2).mean(-1, keepdim=True)
                return m.weight * (x * torch.rsqrt(square + m.variance_epsilon))

            module.forward = norm
    return model


def differences(
    model: Any, text: cl.CalibrationSet, top_r: int, step: float, central: bool = True
) -> np.ndarray:
    """Gram [M, M] of (z(1 + step) - z(1 - step)) / (2 step), or of (z(1) - z(1 - step)) / step."""
    features: list[list[torch.Tensor]] = [[] for _ in units_by_hand(model)]
    for ids, positions in zip(text.input_ids, text.scored, strict=True):
        teacher = full_logits(model, ids[None])[0, positions]
        support = teacher.topk(top_r, dim=-1).indices
        p = torch.softmax(teacher.gather(-1, support), dim=-1)
        for index, unit in enumerate(units_by_hand(model)):
            ends = []
            for gain in (1 + step if central else 1.0, 1 - step):
                with masked_by_hand(model, [], {unit: gain}):
                    ends.append(full_logits(model, ids[None])[0, positions].gather(-1, support))
            slope = (ends[0] - ends[1]) / (2 * step if central else step)
            mean = (p * slope).sum(dim=-1, keepdim=True)
            features[index].append((p.sqrt() * (slope - mean)).flatten())
    stacked = torch.stack([torch.cat(parts) for parts in features])
    return (stacked @ stacked.T / text.scored.numel()).numpy()


@pytest.mark.parametrize(
    ("family", "heads"),
    [(family, "gqa") for family in FAMILIES] + [("llama", "mha"), ("llama", "mqa")],
)
def test_it_is_the_limit_of_central_differences(family: str, heads: str) -> None:
    model = wide(tiny_model(family, heads, layers=2, dtype=torch.float64))
    text = tiny_text(2, 10, scored=4)
    expected = differences(model, text, 13, step=1e-4)
    found = exact(model, text)
    assert relative_error(found.matrix, expected) < 1e-6
    assert np.allclose(np.diagonal(found.matrix), np.diagonal(expected), rtol=1e-6, atol=0)


def test_removing_less_and_less_leads_there() -> None:
    """Features of a removal by a share, over that share: the distance falls with the share."""
    model, text = wide(tiny_model(layers=2, dtype=torch.float64)), tiny_text(1, 12)
    found = exact(model, text).matrix
    apart = [
        relative_error(differences(model, text, 13, step, central=False), found)
        for step in (1.0, 0.1, 0.01)
    ]
    assert apart[0] > 0.05  # whole removals are something else
    assert apart[1] / apart[2] == pytest.approx(10, rel=0.2)  # first order in the share


def test_attention_and_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    text = tiny_text(1, 12)
    fused, plain = (
        tiny_model(layers=2, dtype=torch.float64, attention=kind) for kind in ("sdpa", "eager")
    )
    whole = exact(fused, text).matrix
    assert relative_error(exact(plain, text).matrix, whole) < 1e-5  # its softmax is float32
    monkeypatch.setattr(infinitesimal, "_BATCH_TOKENS", 1)
    assert relative_error(exact(fused, text).matrix, whole) < 1e-12
    monkeypatch.setattr(infinitesimal, "sdpa_kernel", lambda _: nullcontext())  # left to be fused
    with pytest.raises(cl.InputError):
        exact(tiny_model(), text)


def test_a_bias_of_the_head_moves_the_teacher_not_the_derivative() -> None:
    model, text = wide(tiny_model(layers=2, dtype=torch.float64)), tiny_text(1, 12)
    without = exact(model, text).matrix
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(model.lm_head.out_features, generator=generator, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    found = exact(model, text).matrix
    assert relative_error(found, differences(model, text, 13, step=1e-4)) < 1e-6
    assert relative_error(found, without) > 0.01


# Previews -----------------------------------------------------------------------------------------


def naive_preview(
    model: Any, text: cl.CalibrationSet, top_r: int, probes: int = 1, seed: int = 0
) -> np.ndarray:
    """Random signs of the derivatives of exact.py, and eq. (gram) over probes."""
    units, total = cl.enumerate_units(model, GROUPS), np.zeros(())
    for row, (ids, positions) in enumerate(zip(text.input_ids, text.scored, strict=True)):
        with torch.no_grad():
            features = derivatives(describe(model), units, text, row, top_r).numpy()
        order = full_logits(model, ids[None])[0, positions].topk(top_r).indices
        if top_r == VOCAB:
            order = order.sort(dim=-1).values
        for probe in range(probes):
            key = int(fingerprint(text.row_fingerprints[row], seed, probe)[:16], 16)
            places = zip(positions.tolist(), order.tolist(), strict=True)
            signs = [sign(key, position, token) for position, some in places for token in some]
            g = features @ np.array(signs)
            total = total + np.outer(g, g)
    return total / (text.scored.numel() * probes)


def sign(key: int, position: int, token: int) -> int:
    """One bit of splitmix64, in Python's integers."""
    bits = (((position << 32) + token) * 0x9E3779B97F4A7C15 + key) % 2**64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
    return -1 if bits >> 63 else 1


@pytest.mark.parametrize(("family", "heads"), [*EVERY, ("granite", "gqa")])
def test_probes_are_random_signs_of_derivatives(family: str, heads: str) -> None:
    model, text = wide(tiny_model(family, heads, dtype=torch.float64)), tiny_text(2, 12, scored=5)
    found = preview(model, text, probes=2, seed=3)
    expected = naive_preview(model, text, 13, probes=2, seed=3)
    assert relative_error(found.matrix, expected) < 1e-10


@pytest.mark.parametrize(("top_r", "limit"), [(VOCAB, None), (13, 1), (5, 1), (5, 2000)])
def test_every_way_through_the_head(
    top_r: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens; the whole head; rows gathered one position at a time; several at a time."""
    if limit is not None:
        monkeypatch.setattr(support, "GATHER_BYTES", limit)
        monkeypatch.setattr(probing, "GATHER_BYTES", limit)
    model, text = wide(tiny_model(dtype=torch.float64)), tiny_text(1, 12)
    found = preview(model, text, top_r)
    assert relative_error(found.matrix, naive_preview(model, text, top_r)) < 1e-10


def test_the_mean_over_probes_is_the_exact_matrix() -> None:
    """Entry by entry within 4.5 standard errors, which for signs are at most the Gaussian ones."""
    model, text = tiny_model(layers=2, dtype=torch.float64), tiny_text(2, 12)
    limit, found = exact(model, text, 32), preview(model, text, 32, probes=200)
    grams = limit.group_grams  # one sequence in each group
    diagonals = np.diagonal(grams, axis1=1, axis2=2)
    variance = diagonals[:, :, None] * diagonals[:, None, :] + grams**2
    error = np.sqrt(variance.sum(axis=0) / 200) / text.scored.numel()
    z = (found.matrix - limit.matrix) / error
    assert np.abs(z).max() < 4.5
    assert z.std() > 0.3  # the bound is a bound on real noise, not a wide net
    # twice the matrix, or half of it, would be far outside
    assert np.diagonal(limit.matrix / error).min() > 5


def test_half_precision_stays_near() -> None:
    """On all tokens, so that rounding does not move tokens into and out of the support."""
    text = tiny_text(2, 16)
    whole = preview(tiny_model(layers=2), text, VOCAB).matrix
    for dtype, limit in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        found = preview(tiny_model(layers=2, dtype=dtype), text, VOCAB)
        assert relative_error(found.matrix, whole) < limit
        assert found.provenance["model_dtype"] == str(dtype).removeprefix("torch.")


def test_signs_depend_on_seed_and_row_alone() -> None:
    model, text = tiny_model(dtype=torch.float64), tiny_text(4)
    whole = preview(model, text, seed=5).matrix
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert np.array_equal(preview(model, text, seed=5).matrix, whole)
    assert relative_error(preview(model, text, seed=6).matrix, whole) > 0.01
    parts = [preview(model, text.rows(a, a + 2), seed=5).matrix for a in (2, 0)]
    assert relative_error(sum(parts) / 2, whole) < 1e-12


# Both methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "weight"), [("exact", 1), ("probe", 3)])
def test_what_comes_back(method: str, weight: int, tmp_path: Path) -> None:
    model, text = tiny_model(), tiny_text(5)
    found = derived(method, model, text, groups=2, **{"probes": 3} if method == "probe" else {})
    facts = found.provenance
    assert found.is_preview == (method == "probe")
    assert (facts["complete"], facts["groups"]) == (True, 2)
    assert found.group_positions.tolist() == [3 * weight * 23, 2 * weight * 23]
    assert found.single_unit_risk is None
    assert cl.jackknife(found, "saliency").standard_error.min() > 0
    assert np.linalg.eigvalsh(found.matrix).min() > -1e-6 * found.saliency.max()
    again = cl.Curvature.load(found.save(tmp_path / "H.pkl"))
    assert (again.is_preview, again.group_risks) == (found.is_preview, None)
    assert np.array_equal(again.matrix, found.matrix)
    with pytest.raises(cl.MismatchError):
        text.require_disjoint(found)
    if method == "probe":
        assert (facts["probes"], facts["rank"]) == (15, 15)
        assert np.linalg.matrix_rank(found.matrix) == 15
        assert facts["noise_floor"] == pytest.approx(np.sqrt(2 / (np.pi * 15)))
        assert cl.redundancy_gate(found).recommended is None


def state(model: Any) -> tuple[Any, ...]:
    return (
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad for parameter in model.parameters()],
        [module.training for module in model.modules()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was(method: str) -> None:
    model, text = tiny_model(), tiny_text(2)
    expected = derived(method, model, text).matrix
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert np.array_equal(derived(method, model, text).matrix, expected)
    model.requires_grad_(True)
    model.lm_head.requires_grad_(False)
    model.train()
    model.model.layers[0].eval()
    before = state(model)
    assert np.array_equal(derived(method, model, text).matrix, expected)
    assert state(model) == before
    for raised, error in (
        (ZeroDivisionError(), ZeroDivisionError),
        (torch.OutOfMemoryError("no room"), cl.InputError),
    ):

        def fail(*_: Any, raised: Exception = raised) -> None:
            raise raised

        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(error):
            derived(method, model, text)
        handle.remove()
        assert state(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_interrupted_it_keeps_what_is_done(method: str) -> None:
    model, text = tiny_model(), tiny_text(4)
    whole = derived(method, model, text)
    passes = iter([None, None, KeyboardInterrupt(), KeyboardInterrupt()])  # of the decoder

    def stop(*_: Any) -> None:
        if (error := next(passes)) is not None:
            raise error

    model.model.register_forward_pre_hook(stop)
    found = derived(method, model, text)
    assert (found.provenance["sequences_done"], found.provenance["complete"]) == (2, False)
    assert relative_error(found.matrix, whole.group_grams[:2].sum(axis=0) / 46) < 1e-12
    if method == "probe":
        assert found.provenance["probes"] == 2
    with pytest.raises(KeyboardInterrupt):  # nothing is done
        derived(method, model, text)


def test_gradients_that_overflow_are_an_error() -> None:
    """Finite logits, infinite derivatives."""
    model = tiny_model(dtype=torch.float64)
    model.model.layers[0].mlp.down_proj.register_full_backward_pre_hook(
        lambda _, gradients: (gradients[0] * float("inf"),)
    )
    with pytest.raises(cl.NumericalError, match="sequence 0"):
        preview(model, tiny_text(1))


def test_the_options_alone_choose_the_method() -> None:
    model, text = tiny_model(), tiny_text(3)

    def estimate(**how: Any) -> cl.Curvature:
        return cl.estimate_curvature(model, None, text, 13, progress=False, **how)

    for options, stored in (
        (BuildOptions(groups=2), "ablation"),
        (ProbeOptions(groups=2), "probe"),
        (ExactOptions(groups=2), "infinitesimal"),
    ):
        assert estimate(options=options).provenance["method"] == stored
    assert estimate(method="exact").fingerprint == estimate(options=ExactOptions()).fingerprint
    assert estimate(method="probe").provenance["probes"] == 3  # one per sequence
