"""Methods on families whose weights lie, or are called, otherwise than in Llama."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import cocurve_lab as cl
from cocurve_lab.methods.inputs import collect_statistics
from helpers.contract import logit_difference
from helpers.tiny_models import GROUPS, full_logits, tiny_model, tiny_text

METHODS = ("magnitude", "wanda-sp", "flap", "amp", "llm-pruner", "slimgpt", "slimllm", "2ssp")


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "gpt2", "opt"])
def test_every_method_makes_a_plan(family: str) -> None:
    model = tiny_model(family, "gqa" if family == "gemma2" else "mha")
    units, text = cl.enumerate_units(model, GROUPS), tiny_text(8, 24)
    for name in METHODS:
        method = cl.get_method(name)
        evidence = method.measure(model, units, text, progress=False)
        scores = evidence.arrays["scores"]
        assert np.isfinite(scores).all(), name
        assert len(set(scores.tolist())) > 3, name
        plan = method.select(evidence, units, 0.25)
        assert 0.25 <= plan.realized_ratio < 0.7, name
        assert logit_difference(model, cl.prune(model, plan), plan) < 1e-5
        if (name, family) == ("magnitude", "gpt2"):  # whose weights are transposed
            for unit, score in zip(units, scores, strict=True):
                layer = model.transformer.h[unit.layer]
                stored = (layer.attn if unit.kind == "attention" else layer.mlp).c_proj.weight
                expected = stored[unit.start : unit.stop].double().norm(dim=1).sum()
                assert score == pytest.approx(float(expected), rel=1e-6)


@torch.enable_grad()
def test_llm_pruner_reads_transposed_weights() -> None:
    """First-order Taylor of GPT-2 by hand: |w g| over a unit's rows and columns."""
    model = tiny_model("gpt2", "mha")
    units, text = cl.enumerate_units(model, GROUPS), tiny_text(1, 24)
    method = cl.get_method("llm-pruner", taylor="param_first")
    scores = method.measure(model, units, text, progress=False).arrays["scores"]
    model.requires_grad_(True)
    logits = model(text.input_ids).logits[0, :-1]
    nn.functional.cross_entropy(logits, text.input_ids[0, 1:]).backward()
    for unit, score in zip(units, scores, strict=True):
        layer, own = model.transformer.h[unit.layer], slice(unit.start, unit.stop)
        inside, outside = (
            (layer.attn.c_attn, layer.attn.c_proj)
            if unit.kind == "attention"
            else (layer.mlp.c_fc, layer.mlp.c_proj)
        )
        parts = [(outside.weight * outside.weight.grad)[own]]
        for third in inside.weight.mul(inside.weight.grad).split(
            32 if unit.kind == "attention" else 42, 1
        ):
            parts.append(third[:, own])
        assert score == pytest.approx(
            float(sum(p.detach().abs().double().sum() for p in parts)), rel=1e-4
        )


def test_column_statistics_see_rows_also_where_the_layer_flattens_them() -> None:
    model, text = tiny_model("opt", "mha"), tiny_text(3, 12)
    found = collect_statistics(model, text, progress=False)
    seen: list[torch.Tensor] = []
    fc2 = model.model.decoder.layers[1].fc2
    handle = fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    full_logits(model, text.input_ids)
    handle.remove()
    rows = seen[0].view(3, 12, -1)
    np.testing.assert_allclose(
        found.row_norms[1, "ffn"], rows.norm(dim=1).sum(dim=0).numpy(), rtol=1e-6
    )
