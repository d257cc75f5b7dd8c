"""Products of shifts in bfloat16: H as near as rounding a share of each shift allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.estimator import replay
from cocurve_lab.models.architectures import describe
from cocurve_lab.pruner.cutting import cut
from helpers.builds import build, require_same_bits, stop_after
from helpers.tiny_models import GROUPS, full_logits, tiny_model, tiny_text, word_tokenizer

TEXT, LAYERS = tiny_text(4, 20, 6), 3
# each product rounds three numbers (weight, shift, result) by at most 2^-8, and two products follow
# each other in each of the two blocks of a layer. Their errors add up as squares, and H has squares
BOUND = 2 * np.sqrt(3 * 2 * 2 * LAYERS) / 2**8


def with_weak_units(family: str) -> PreTrainedModel:
    """A model in which two units shift a thousandth of what the others do."""
    model = tiny_model(family, "gqa" if family in ("llama", "phi3", "gemma2") else "mha")
    units, architecture = cl.enumerate_units(model, GROUPS), describe(model)
    with torch.no_grad():
        for unit in (units[0], units[-1]):
            weight = architecture.output_weight(unit.layer, unit.kind)
            weight[:, unit.start : unit.stop] *= 1e-3
    return model


def error(found: cl.Curvature, exact: cl.Curvature) -> float:
    """The largest error of an entry, as a share of the two units' own."""
    own = np.sqrt(np.diag(exact.matrix))
    return float((np.abs(found.matrix - exact.matrix) / np.outer(own, own)).max())


# fused and transposed weights, biases, norms after the write, flat states, parallel blocks
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("scored", ["all", 5])
def test_the_error_is_a_share_of_h_however_weak_the_unit(family: str, scored: Any) -> None:
    model, text = with_weak_units(family), tiny_text(4, 20, scored)
    exact = build(model, text)
    assert np.diag(exact.matrix).min() < 1e-5 * np.median(np.diag(exact.matrix))
    before = full_logits(model, text.input_ids)
    found = build(model, text, bfloat16_products=True)
    assert 0 < error(found, exact) < BOUND
    np.testing.assert_allclose(found.single_unit_risk, exact.single_unit_risk, rtol=2 * BOUND)
    assert torch.equal(full_logits(model, text.input_ids), before)  # nothing is left behind
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("options", [{"full_vocabulary": True}, {"refit_ratio": 0.4}], ids=str)
def test_other_options_keep_to_it(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    monkeypatch.setattr(replay, "TRACE_BYTES", 0)  # layers run again for their traces
    found, exact = (build(bfloat16_products=each, **options) for each in (True, False))
    assert 0 < error(found, exact) < BOUND
    np.testing.assert_allclose(found.single_unit_risk, exact.single_unit_risk, rtol=2 * BOUND)


def test_the_shifts_are_those_from_the_model_without_removed_units() -> None:
    gone = list(range(0, 18, 5))
    model = tiny_model()
    found, exact = (build(model, removed=gone, bfloat16_products=each) for each in (True, False))
    # the first-order term is signed, so an entry may be smaller than what it is a sum of
    size = np.abs(exact.matrix).max()
    assert 0 < np.abs(found.matrix - exact.matrix).max() < BOUND * size


def test_a_layer_that_lost_its_attention_has_no_columns() -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    gone = [at for at, unit in enumerate(units) if unit.layer == 1 and unit.kind == "attention"]
    pruned = cut(model, cl.Selection.from_pruned(units, gone))
    found, exact = (build(pruned, bfloat16_products=each) for each in (True, False))
    assert 0 < error(found, exact) < BOUND


def test_builds_in_two_precisions_are_never_mixed(tmp_path: Path) -> None:
    model, rounded = tiny_model(), {"bfloat16_products": True}
    inputs = (tmp_path, model, cl.enumerate_units(model, GROUPS), TEXT, 32)
    exact, found, again = (
        cl.load_or_estimate(*inputs, progress=False, options=cl.BuildOptions(**options))
        for options in ({}, rounded, rounded)
    )
    assert len(list(tmp_path.glob("H_*.pkl"))) == 2
    assert "products" not in exact.provenance
    assert again.provenance["products"] == "bfloat16"
    require_same_bits(again, found)
    require_same_bits(exact, build(model))
    path = tmp_path / "build.ckpt"
    build(model, checkpoint=path, on_sequence=stop_after(2), **rounded)
    with pytest.raises(cl.MismatchError, match="products is 'bfloat16'"):
        build(model, checkpoint=path)
    require_same_bits(build(model, checkpoint=path, **rounded), found)
    parts = [build(model, shard=(at, 2), **rounded) for at in (1, 2)]
    require_same_bits(cl.Curvature.merge(parts), found)
    for other in ({"shard": (2, 2)}, {"text": tiny_text(4, 20, 6, seed=1)}):
        with pytest.raises(cl.MismatchError, match="products"):
            cl.Curvature.merge([parts[0] if "shard" in other else found, build(model, **other)])


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64", "packed", "streamed"])
def test_only_float32_weights_in_memory_are_rounded(tmp_path: Path, kind: str) -> None:
    model = tiny_model(dtype=getattr(torch, kind, torch.float32))
    if kind == "packed":
        model.model.layers[1].mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    if kind == "streamed":
        pytest.importorskip("accelerate")
        model.save_pretrained(tmp_path)
        word_tokenizer().save_pretrained(tmp_path)
        model = cl.load_model(tmp_path, device="cpu", dtype="float32", stream=True)[0]
    with pytest.raises(cl.InputError, match=f"bfloat16_products .* are {kind}"):
        build(model, bfloat16_products=True)


@pytest.mark.parametrize("fast", [{"avx512_bf16": True}, {"amx_bf16": True}, {"bf16": True}, {}])
def test_a_processor_that_is_slow_at_it_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fast: dict[str, bool]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: fast | {"avx512_f": True})
    slow = []
    for rounded in (True, False):
        build(bfloat16_products=rounded)
        slow.append("no fast bfloat16" in caplog.text)
        caplog.clear()
    assert slow == [not fast, False]
