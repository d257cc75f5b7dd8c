"""What every supported family must satisfy, as measured numbers.

tests/models/test_families.py asserts them; tests/benchmarks/families_table.py prints them. Masks, H
and the inventory come from tiny_models.py or from parameter names, never from the library's own
description.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cocurve_lab as cl
from helpers.tiny_models import (
    EXPERTS,
    GROUPS,
    LLAMA_PLACES,
    MULTIMODAL,
    PLACES,
    TOP_K,
    Columns,
    attention_is_whole,
    full_logits,
    masked_by_hand,
    naive_build,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)

HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
TEXT, SCORED = tiny_text(2, 24), tiny_text(2, 24, 6)
# parts of a layer that hold its attention and FFN
_BLOCKS = {
    "gpt_neox": ("attention.", "mlp."),
    "gpt2": ("attn.", "mlp."),
    "opt": ("self_attn.", "fc1.", "fc2."),
    "granitemoe": ("self_attn.", "block_sparse_moe."),
    "granitemoehybrid": ("self_attn.", "block_sparse_moe.", "shared_mlp."),
    "falcon_h1": ("self_attn.", "feed_forward."),
    "lfm2": ("self_attn.", "feed_forward."),
}


def removable_parameters(model: PreTrainedModel) -> int:
    """Parameters of attention and FFN, without output biases and norms that heads share."""
    kind = model.config.model_type
    layers, *outputs = PLACES.get(kind, LLAMA_PLACES)
    if kind in MULTIMODAL:
        layers = "model.language_model.layers"
    blocks = _BLOCKS.get(kind, ("self_attn.", "mlp."))
    total = 0
    for name, weight in model.named_parameters():
        if not name.startswith(f"{layers}."):
            continue
        part = name.removeprefix(f"{layers}.").partition(".")[2]
        whole = attention_is_whole(model.config) and kind != "doge"  # whose norms are of one head
        shared = any(name in part for name in HEAD_NORMS) and not whole
        shared |= "act_fn" in part or "shared_expert_gate" in part or "_a_" in part
        if part.startswith(blocks) and part not in [f"{o}.bias" for o in outputs] and not shared:
            total += weight.numel()
    return total


def plans(units: cl.UnitSet) -> dict[str, cl.Selection]:
    """A third of the units; a layer without heads beside one without FFN; and kept gains."""
    rng = np.random.default_rng(0)
    third = rng.choice(len(units), len(units) // 3, replace=False).tolist()
    # a router needs its two experts: the last ones stay
    third = [i for i in third if units[i].kind != "expert" or units[i].index < EXPERTS - TOP_K]
    whole = [
        index
        for index, unit in enumerate(units)
        if (unit.layer, unit.kind) in ((0, "attention"), (1, "ffn"))
    ]
    scattered = cl.Selection.from_pruned(units, third)
    kept = [i for i in range(len(units)) if i not in third and units[i].kind == "ffn"]
    gains = dict(zip(kept, rng.uniform(0.5, 1.5, len(kept)).tolist(), strict=True))
    return {
        "scattered": scattered,
        "whole blocks": cl.Selection.from_pruned(units, whole),
        "gains": scattered.with_gains(gains),
    }


def by_hand(selection: cl.Selection) -> tuple[list[Columns], dict[Columns, float]]:
    """A plan's removed units and its gains, as masked_by_hand takes them."""
    every = [Columns(unit.layer, unit.kind, unit.start, unit.stop) for unit in selection.units]
    gains = {every[index]: gain for index, gain in selection.gains.items()}
    return [every[index] for index in selection.pruned], gains


@torch.no_grad()
def greedy_by_hand(model: PreTrainedModel, units: Iterable[Columns], prompt: Tensor, new: int):
    """Greedy text of the masked model, every token from a whole pass without a cache."""
    ids = prompt
    with masked_by_hand(model, units):
        for _ in range(new):
            ids = torch.cat([ids, full_logits(model, ids)[:, -1:].argmax(dim=-1)], dim=1)
    return ids


def greedy(model: PreTrainedModel, prompt: Tensor, new: int) -> Tensor:
    """Greedy text by `generate`, with its cache."""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )


@dataclass(frozen=True)
class Contract:
    """What one family measures; differences are float32.

    Attributes:
        inventory: cost of all units minus the parameters counted by name.
        logits: largest |logit| difference of masked and pruned, over all plans.
        size: largest |logit| of the model.
        parameters: largest difference of removed parameters and the plans' cost.
        h_error: relative Frobenius difference of H and naive full passes.
        texts_equal: greedy text with a cache is that of the masked model without one.
        reloaded: largest |logit| difference after saving and loading.
    """

    inventory: int
    logits: float
    size: float
    parameters: int
    h_error: float
    texts_equal: bool
    reloaded: float


def measure_contract(family: str, heads: str, *, layers: int = 3, save: bool = True) -> Contract:
    """All checks on one tiny random model; saving takes most of the time."""
    model = tiny_model(family, heads, layers=layers)
    units = cl.enumerate_units(model, GROUPS)
    assert [tuple(u) for u in units_by_hand(model)] == [
        (u.layer, u.kind, u.start, u.stop) for u in units
    ]
    logits, parameters, texts, reloaded = [], [], [], [0.0]
    for selection in plans(units).values():
        pruned = cl.prune(model, selection)
        logits.append(logit_difference(model, pruned, selection))
        gone = model.num_parameters() - pruned.num_parameters()
        parameters.append(abs(gone - selection.pruned_cost))
        if not selection.gains:
            texts.append(text_is_equal(model, pruned, selection))
            reloaded += [reload_difference(pruned)] if save else []
    return Contract(
        units.total_cost - removable_parameters(model),
        max(logits),
        float(full_logits(model, TEXT.input_ids).abs().max()),
        max(parameters),
        max(h_error(model, text.rows(0, 1)) for text in (TEXT, SCORED)),
        all(texts),
        max(reloaded),
    )


def logit_difference(
    model: PreTrainedModel, pruned: PreTrainedModel, selection: cl.Selection
) -> float:
    """Largest |logit| difference of a model masked by hand and a pruned one."""
    with masked_by_hand(model, *by_hand(selection)):
        expected = full_logits(model, TEXT.input_ids)
    return float((full_logits(pruned, TEXT.input_ids) - expected).abs().max())


def text_is_equal(
    model: PreTrainedModel, pruned: PreTrainedModel, selection: cl.Selection, new: int = 6
) -> bool:
    """Whether the pruned and the masked model write the same with a cache as without one."""
    prompt = TEXT.input_ids[:, :5]
    expected = greedy_by_hand(model, by_hand(selection)[0], prompt, new)
    with cl.ablate(model, selection):
        masked = greedy(model, prompt, new)
    return torch.equal(masked, expected) and torch.equal(greedy(pruned, prompt, new), expected)


def reload_difference(pruned: PreTrainedModel) -> float:
    """Largest |logit| difference of a pruned model and what is read back from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        again = cl.load_pruned(cl.save_pruned(pruned, Path(folder) / "model"), device="cpu")
        # a folder does not say how attention is computed; 5.17 runs Gemma 2 without its cap
        if again.config._attn_implementation != pruned.config._attn_implementation:
            again.set_attn_implementation(pruned.config._attn_implementation)
        same = full_logits(again, TEXT.input_ids) - full_logits(pruned, TEXT.input_ids)
    prompt = TEXT.input_ids[:, :5]
    assert torch.equal(greedy(again, prompt, 4), greedy(pruned, prompt, 4))
    return float(same.abs().max())


def h_error(model: PreTrainedModel, text: cl.CalibrationSet, top_r: int = 32) -> float:
    """Relative Frobenius difference of H by replay and by naive full passes."""
    units = cl.enumerate_units(model, GROUPS)
    found = cl.estimate_curvature(model, units, text, top_r, progress=False)
    expected, risks = naive_build(model, text, top_r)
    np.testing.assert_allclose(found.single_unit_risk, risks, rtol=1e-3, atol=1e-7)
    return relative_error(found.matrix, expected)
