"""The preview of H: gradients against autograd written out, its mean against H*, its manners."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.settings import BuildOptions
from cocurve_lab.estimator import replay
from cocurve_lab.estimator.estimate import exact_curvature
from cocurve_lab.extensions.analysis import preview as probing
from cocurve_lab.extensions.analysis.exact import ExactOptions
from cocurve_lab.extensions.analysis.preview import ProbeOptions
from helpers.tiny_models import (
    EVERY,
    GROUPS,
    VOCAB,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)


def preview(model: Any, text: cl.CalibrationSet, top_r: int = 13, **options: int) -> cl.Curvature:
    return cl.estimate_curvature(
        model,
        cl.enumerate_units(model, GROUPS),
        text,
        top_r,
        method="probe",
        options=ProbeOptions(**options),
        progress=False,
    )


def naive_preview(
    model: Any, text: cl.CalibrationSet, top_r: int, probes: int = 1, seed: int = 0
) -> np.ndarray:
    """Autograd through a mask parameter per unit, the whole head, and eq. (gram) over probes."""
    units = units_by_hand(model)
    total = np.zeros((len(units), len(units)))
    for row, (ids, positions) in enumerate(zip(text.input_ids, text.scored, strict=True)):
        masks = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in units]
        logits = masked_logits(model, ids, dict(zip(units, masks, strict=True)))[positions]
        order = logits.detach().topk(top_r, dim=-1).indices
        if top_r == logits.shape[-1]:
            order = order.sort(dim=-1).values
        z = logits.gather(-1, order)
        p = torch.softmax(z.detach(), dim=-1)
        whitened = p.sqrt() * (z - (p * z).sum(dim=-1, keepdim=True))
        for probe in range(probes):
            key = int(fingerprint(text.row_fingerprints[row], seed, probe)[:16], 16)
            signs = torch.tensor(
                [
                    [sign(key, int(position), int(token)) for token in tokens]
                    for position, tokens in zip(positions, order, strict=True)
                ]
            )
            g = torch.autograd.grad((signs * whitened).sum(), masks, retain_graph=True)
            total += np.outer(*2 * (np.array([float(value) for value in g]),))
    return total / (text.scored.numel() * probes)


def sign(key: int, position: int, token: int) -> int:
    """One bit of splitmix64, in Python's integers."""
    bits = (((position << 32) + token) * 0x9E3779B97F4A7C15 + key) % 2**64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % 2**64
    return -1 if bits >> 63 else 1


def masked_logits(model: Any, ids: torch.Tensor, masks: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Logits [T, V] of a whole pass with units scaled by mask variables."""
    with ExitStack() as stack:
        for unit, mask in masks.items():
            layer = model.model.layers[unit.layer]
            attention = unit.kind == "attention"
            module = layer.self_attn.o_proj if attention else layer.mlp.down_proj

            def scale(_: Any, args: Any, unit: Any = unit, mask: Any = mask) -> Any:
                inside = torch.zeros(args[0].shape[-1], dtype=args[0].dtype)
                inside[unit.start : unit.stop] = 1
                return (args[0] * (1 - inside) + args[0] * inside * mask,)

            stack.callback(module.register_forward_pre_hook(scale).remove)
        return model(input_ids=ids[None], use_cache=False).logits[0]


# The numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "heads"), EVERY)
def test_gradients_are_those_of_explicit_mask_parameters(family: str, heads: str) -> None:
    model = tiny_model(family, heads, dtype=torch.float64)
    text = tiny_text(2, 12, scored=5)
    found = preview(model, text, probes=2, seed=3)
    expected = naive_preview(model, text, 13, probes=2, seed=3)
    assert relative_error(found.matrix, expected) < 1e-10


@pytest.mark.parametrize(("top_r", "limit"), [(VOCAB, None), (13, 1), (5, 1), (5, 2000)])
def test_every_way_through_the_head(
    top_r: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens; the whole head; rows gathered one position at a time; several at a time."""
    if limit is not None:
        monkeypatch.setattr(replay, "GATHER_BYTES", limit)
        monkeypatch.setattr(probing, "GATHER_BYTES", limit)
    model, text = tiny_model(dtype=torch.float64), tiny_text(1, 12)
    found = preview(model, text, top_r)
    assert relative_error(found.matrix, naive_preview(model, text, top_r)) < 1e-10


def test_the_mean_over_probes_is_the_exact_matrix() -> None:
    """Entry by entry within 4.5 standard errors, which for signs are at most the Gaussian ones."""
    model, text = tiny_model(layers=2, dtype=torch.float64), tiny_text(2, 12)
    units = cl.enumerate_units(model, GROUPS)
    exact = exact_curvature(model, units, text, 32, progress=False)
    found = preview(model, text, 32, probes=200)
    assert exact.group_grams is not None
    grams = exact.group_grams  # one sequence in each group
    diagonals = np.diagonal(grams, axis1=1, axis2=2)
    variance = diagonals[:, :, None] * diagonals[:, None, :] + grams**2
    error = np.sqrt(variance.sum(axis=0) / 200) / text.scored.numel()
    z = (found.matrix - exact.matrix) / error
    assert np.abs(z).max() < 4.5
    assert z.std() > 0.3  # the bound is a bound on real noise, not a wide net
    # twice the matrix, or half of it, would be far outside
    assert np.diagonal(exact.matrix / error).min() > 5


def test_half_precision_stays_near() -> None:
    """On all tokens, so that rounding does not move tokens into and out of the support."""
    text = tiny_text(2, 16)
    wide = preview(tiny_model(layers=2), text, VOCAB).matrix
    for dtype, limit in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        found = preview(tiny_model(layers=2, dtype=dtype), text, VOCAB)
        assert relative_error(found.matrix, wide) < limit
        assert found.provenance["model_dtype"] == str(dtype).removeprefix("torch.")


# Determinism ------------------------------------------------------------------------------------


def test_same_seed_same_bits_whatever_else_is_random() -> None:
    model, text = tiny_model(), tiny_text(3)
    first = preview(model, text, seed=5)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert np.array_equal(preview(model, text, seed=5).matrix, first.matrix)
    assert relative_error(preview(model, text, seed=6).matrix, first.matrix) > 0.01


def test_shards_and_order_draw_the_same_signs() -> None:
    model, text = tiny_model(dtype=torch.float64), tiny_text(4)
    whole = preview(model, text)
    parts = [preview(model, text.rows(a, a + 2)).matrix for a in (2, 0)]
    assert relative_error(sum(parts) / 2, whole.matrix) < 1e-12


# What comes back --------------------------------------------------------------------------------


def test_it_is_a_preview_with_groups(tmp_path: Path) -> None:
    model, text = tiny_model(), tiny_text(5)
    found = preview(model, text, probes=3, groups=2)
    assert found.is_preview
    facts = found.provenance
    assert (facts["probes"], facts["rank"], facts["complete"]) == (15, 15, True)
    assert facts["noise_floor"] == pytest.approx(np.sqrt(2 / (np.pi * 15)))
    assert found.group_positions is not None
    assert found.group_positions.tolist() == [3 * 3 * 23, 2 * 3 * 23]
    assert found.single_unit_risk is None
    assert np.linalg.matrix_rank(found.matrix) == 15
    assert cl.redundancy_gate(found).recommended is None
    assert cl.jackknife(found, "saliency").standard_error.min() > 0
    again = cl.Curvature.load(found.save(tmp_path / "H.pkl"))
    assert again.is_preview
    assert again.group_risks is None
    assert np.array_equal(again.matrix, found.matrix)
    text.require_disjoint(tiny_text(2, seed=9))
    with pytest.raises(cl.MismatchError):
        text.require_disjoint(found)


def test_interrupted_it_keeps_what_is_done() -> None:
    model, text = tiny_model(), tiny_text(4)
    whole = preview(model, text)
    assert whole.group_grams is not None
    passes = iter([None, None, KeyboardInterrupt(), KeyboardInterrupt()])  # of the decoder

    def stop(*_: Any) -> None:
        if (error := next(passes)) is not None:
            raise error

    model.model.register_forward_pre_hook(stop)
    found = preview(model, text)
    facts = found.provenance
    assert (facts["sequences_done"], facts["probes"], facts["complete"]) == (2, 2, False)
    assert relative_error(found.matrix, whole.group_grams[:2].sum(axis=0) / 46) < 1e-12
    with pytest.raises(KeyboardInterrupt):  # nothing is done
        preview(model, text)


# Manners ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_left_as_it_was(broken: bool) -> None:
    model, text = tiny_model(), tiny_text(2)
    expected = preview(model, text).matrix
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert np.array_equal(preview(model, text).matrix, expected)
    model.requires_grad_(True)
    model.lm_head.requires_grad_(False)
    model.train()
    model.model.layers[0].eval()
    before = state(model)
    if broken:
        handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            preview(model, text)
        handle.remove()
    else:
        assert np.array_equal(preview(model, text).matrix, expected)
    assert state(model) == before


def test_gradients_that_overflow_are_an_error() -> None:
    """Finite logits, infinite derivatives."""
    model = tiny_model(dtype=torch.float64)
    text = tiny_text(1)
    handle = model.model.layers[0].mlp.down_proj.register_full_backward_pre_hook(
        lambda _, gradients: (gradients[0] * float("inf"),)
    )
    with pytest.raises(cl.NumericalError, match=r"a gradient .*sequence 0"):
        preview(model, text)
    handle.remove()


def test_the_options_alone_choose_the_method() -> None:
    model, text = tiny_model(), tiny_text(3)
    for options, stored in (
        (BuildOptions(groups=2), "ablation"),
        (ProbeOptions(groups=2), "probe"),
        (ExactOptions(groups=2), "infinitesimal"),
    ):
        found = cl.estimate_curvature(model, None, text, 13, progress=False, options=options)
        assert (found.provenance["method"], found.provenance["groups"]) == (stored, 2)
    named = cl.estimate_curvature(model, None, text, 13, progress=False, method="exact")
    assert named.fingerprint == exact_curvature(model, None, text, 13, progress=False).fingerprint
    plain = cl.estimate_curvature(model, None, text, 13, method="probe", progress=False)
    assert plain.provenance["probes"] == 3  # one per sequence


def test_memory_that_runs_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(probing, "probe_gradients", full)
    with pytest.raises(cl.InputError, match="sequence 0"):
        preview(tiny_model(), tiny_text(1))
