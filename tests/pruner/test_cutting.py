"""Physical removal: what is computed, what is gone, what is untouched, what can be read back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.pruner.cutting import cut
from helpers.builds import plan_of
from helpers.tiny_models import (
    GROUPS,
    full_logits,
    masked_by_hand,
    tiny_model,
    tiny_text,
)

PLANS: dict[str, Callable[[cl.UnitSet], list[int]]] = {
    "one attention unit": lambda u: [0],
    "one ffn unit": lambda u: [len(u) - 1],
    "all attention of the first layer": lambda u: where(u, 0, "attention"),
    "all attention of the last layer": lambda u: where(u, 2, "attention"),
    "all ffn of a layer": lambda u: where(u, 1, "ffn"),
    "a whole layer": lambda u: where(u, 1, "attention") + where(u, 1, "ffn"),
    "the whole model": lambda u: list(range(len(u))),
    "random 1": lambda u: np.random.default_rng(1).permutation(len(u))[: len(u) // 3].tolist(),
    "random 2": lambda u: np.random.default_rng(2).permutation(len(u))[: len(u) // 2].tolist(),
}


def where(units: cl.UnitSet, layer: int, kind: str) -> list[int]:
    return np.flatnonzero((units.layers == layer) & (units.kinds == kind)).tolist()


# Mask = physical removal ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "heads", "name"),
    [
        *(
            ("mistral", "mqa", "random 2"),
            ("qwen2", "gqa", "random 2"),
            ("phi3", "mha", "random 1"),
        ),
        *(("llama", "gqa", name) for name in PLANS),
    ],
)
def test_removal_is_masking(family: str, heads: str, name: str) -> None:
    model, ids = tiny_model(family, heads), tiny_text(2, 20).input_ids
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(model, PLANS[name](units))
    pruned = cl.prune(model, plan)
    with masked_by_hand(model, [units[i] for i in plan.pruned]):
        expected = full_logits(model, ids)
    assert (full_logits(pruned, ids) - expected).abs().max() < 2e-5
    assert model.num_parameters() - pruned.num_parameters() == plan.pruned_cost
    found = cl.check_equivalence(model, pruned, plan, tiny_text(3, 20))
    assert found.max_abs_difference < 2e-5
    assert (found.sequences, found.tokens, found.dtype) == (2, 40, "float32")


def test_layers_follow_when_the_attention_implementation_is_switched() -> None:
    """Phi3 layers that lost heads have counts of their own, and nothing else of their own."""
    model, ids = tiny_model("phi3", "gqa"), tiny_text(1).input_ids
    plan = plan_of(model, [0, 7])  # one head group of layer 0, one of layer 1
    for pruned in (cl.prune(model, plan), copy.deepcopy(cl.prune(model, plan))):
        expected = full_logits(pruned, ids)
        pruned.set_attn_implementation("eager")  # whose masks are of another form
        for layer in pruned.model.layers:
            assert layer.self_attn.config._attn_implementation == "eager"
        assert (full_logits(pruned, ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "changes"), [("llama", {"attention_bias": True}), ("phi3", {})])
def test_the_source_model_is_untouched(family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    pruned = cl.prune(model, plan_of(model, [0, 1, 4]))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    theirs = {tensor.data_ptr() for tensor in model.parameters() if tensor.numel()}
    assert not theirs & {tensor.data_ptr() for tensor in pruned.parameters() if tensor.numel()}


def test_in_place() -> None:
    model, ids = tiny_model("phi3", "mqa"), tiny_text(1).input_ids
    plan = plan_of(model, [0, 2, 6])
    expected = cl.prune(model, plan)
    found = cl.prune(model, plan, inplace=True, verify=tiny_text(3))
    assert found is model
    assert torch.equal(full_logits(found, ids), full_logits(expected, ids))


def test_bad_input_is_refused_before_anything_is_cut() -> None:
    model, other = tiny_model("llama", "gqa"), tiny_model("llama", "mha")
    before, plan, foreign = model.num_parameters(), plan_of(model, [0]), plan_of(other, [0])
    for call, error in (
        (lambda: cl.prune(model, foreign, inplace=True), cl.MismatchError),
        (lambda: cut(model, foreign, inplace=True), cl.MismatchError),
        (lambda: cl.prune(model, plan, inplace=True, verify=tiny_text(1, 65)), cl.InputError),
        (lambda: cl.prune(model, [0, 1]), cl.InputError),
    ):
        with pytest.raises(error):
            call()
    assert model.num_parameters() == before


def test_a_cut_is_the_pruned_model_without_a_manifest() -> None:
    model, ids = tiny_model(), tiny_text(1).input_ids
    once = cl.prune(model, plan_of(model, [0, 5]))
    for start in (model, once):  # `once` has a manifest, which is not that of what is cut out of it
        plan = plan_of(start, [1, 7], {2: 1.25})
        bare = cut(start, plan)
        assert torch.equal(full_logits(bare, ids), full_logits(cl.prune(start, plan), ids))
        with pytest.raises(cl.InputError):
            cl.save_pruned(bare, "nowhere")
    assert once.cocurve_manifest["pruned_units"] == ["L0.attention[0]", "L0.ffn[3]"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_are_folded_into_the_kept_columns(dtype: torch.dtype) -> None:
    model, ids = tiny_model(dtype=dtype), tiny_text(1).input_ids
    plan = plan_of(model, [0, 3], {2: 1.25, 10: 0.5})
    pruned, units = cl.prune(model, plan, verify=tiny_text(2)), plan.units
    if dtype == torch.float32:
        with masked_by_hand(model, [units[0], units[3]], {units[2]: 1.25, units[10]: 0.5}):
            assert (full_logits(pruned, ids) - full_logits(model, ids)).abs().max() < 2e-5
    # a layer that loses nothing may still have gains; they are rounded once
    gained = cl.prune(model, plan_of(model, [], {2: 1.1}))
    down, dense = (m.model.layers[0].mlp.down_proj.weight for m in (gained, model))
    assert torch.equal(down[:, :11], (dense[:, :11].double() * 1.1).to(dtype))
    assert torch.equal(down[:, 11:], dense[:, 11:])


# The check itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "spoiled"),
    [
        (torch.float32, "model.layers.0.self_attn.q_proj.weight"),
        (torch.bfloat16, "model.layers.2.input_layernorm.weight"),
        (torch.float32, "model.embed_tokens.weight"),
        (torch.bfloat16, "lm_head.weight"),
    ],
)
def test_one_bit_of_a_weight_is_noticed(dtype: torch.dtype, spoiled: str) -> None:
    model = tiny_model(dtype=dtype)
    plan = plan_of(model, [0, 3, 12])
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    weight = pruned.get_parameter(spoiled).data
    bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits.view(-1)[-1] ^= 1  # of the embedding: the row of a token that the text lacks
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, plan, tiny_text(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_plan_and_nan_are_noticed(dtype: torch.dtype) -> None:
    model, text = tiny_model(dtype=dtype), tiny_text(2)
    ours, theirs = plan_of(model, [0, 3]), plan_of(model, [0, 5])
    pruned, broken = cl.prune(model, theirs), cl.prune(model, theirs)
    broken.lm_head.weight[:] = float("nan")
    wrong = (ours, plan_of(model, [0]), plan_of(model, [0, 5], {2: 1.5}))
    for found, plan in (*((pruned, plan) for plan in wrong), (model, ours), (broken, theirs)):
        with pytest.raises(cl.EquivalenceError):
            cl.check_equivalence(model, found, plan, text)


@pytest.mark.parametrize(
    ("family", "dtype", "name"),
    [
        ("llama", torch.float16, "a whole layer"),
        ("phi3", torch.bfloat16, "random 1"),
        ("llama", torch.bfloat16, "the whole model"),
    ],
)
def test_half_precision_is_judged_layer_by_layer(
    family: str, dtype: torch.dtype, name: str
) -> None:
    model = tiny_model(family, dtype=dtype)
    plan = plan_of(model, PLANS[name](cl.enumerate_units(model, GROUPS)))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pruned = cl.prune(model, plan)
    found = cl.check_equivalence(model, pruned, plan, tiny_text(2))
    assert found.max_abs_difference < 1e-4  # float32 arithmetic on both sides
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert pruned.dtype == dtype
