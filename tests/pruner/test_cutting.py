"""Physical removal: what is computed, what is gone, what is untouched, what can be read back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.pruner.cutting import cut
from helpers.tiny_models import (
    EVERY,
    FAMILIES,
    GROUPS,
    VOCAB,
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


def plan_of(model: PreTrainedModel, indices: Any, **gains: float) -> cl.Selection:
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, indices)
    return plan.with_gains({int(name[1:]): gain for name, gain in gains.items()})


def masked_greedy(
    model: PreTrainedModel, plan: cl.Selection, ids: Tensor, mask: Tensor, steps: int
) -> Tensor:
    """Greedy text of the masked model, every step from scratch, without any cache."""
    units = [plan.units.units[i] for i in plan.pruned]
    with masked_by_hand(model, units), torch.no_grad():
        for _ in range(steps):
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False
            ).logits
            ids = torch.cat([ids, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


# Mask = physical removal ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "heads", "name"),
    [*((*each, "random 2") for each in EVERY), *(("llama", "gqa", name) for name in PLANS)],
)
def test_removal_is_masking(family: str, heads: str, name: str) -> None:
    model = tiny_model(family, heads)
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(model, PLANS[name](units))
    pruned = cl.prune(model, plan)
    ids = tiny_text(2, 20).input_ids
    with masked_by_hand(model, [units[i] for i in plan.pruned]):
        expected = full_logits(model, ids)
    assert (full_logits(pruned, ids) - expected).abs().max() < 2e-5
    assert model.num_parameters() - pruned.num_parameters() == plan.pruned_cost
    found = cl.check_equivalence(model, pruned, plan, tiny_text(3, 20))
    assert found.max_abs_difference < 2e-5
    assert (found.sequences, found.tokens, found.dtype) == (2, 40, "float32")
    assert "masked = pruned to" in str(found)


def test_head_dim_and_widths_per_layer() -> None:
    model = tiny_model("mistral", "mha")  # head_dim 12 on a width of 32
    units = cl.enumerate_units(model, GROUPS)
    pruned = cl.prune(model, plan_of(model, ["L0.attention[1]", "L0.attention[2]", "L2.ffn[0]"]))
    assert pruned.config.head_dim == 12
    attention = pruned.model.layers[0].self_attn
    assert attention.head_dim == 12
    assert attention.q_proj.weight.shape == attention.k_proj.weight.shape == (24, 32)
    assert attention.o_proj.weight.shape == (32, 24)
    assert pruned.model.layers[1].self_attn.q_proj.weight.shape == (48, 32)
    assert pruned.model.layers[2].mlp.down_proj.weight.shape == (32, 31)
    left = cl.enumerate_units(pruned, GROUPS)
    assert left.total_cost == units.total_cost - plan_of(model, [1, 2, 20]).pruned_cost
    assert len(left) == len(units) - 2


def test_a_model_can_be_pruned_twice() -> None:
    model = tiny_model("phi3", "gqa")
    first = plan_of(model, [0, 3, 15])
    once = cl.prune(model, first)
    second = plan_of(once, ["L1.attention[0]", "L2.ffn[3]"])
    twice = cl.prune(once, second)
    assert model.num_parameters() - twice.num_parameters() == first.pruned_cost + second.pruned_cost
    assert cl.check_equivalence(once, twice, second, tiny_text(1)).max_abs_difference < 2e-5


def test_layers_follow_when_the_attention_implementation_is_switched() -> None:
    """Phi3 layers that lost heads have counts of their own, and nothing else of their own."""
    model = tiny_model("phi3", "gqa")
    plan = plan_of(model, [0, 7])  # one head group of layer 0, one of layer 1
    ids = tiny_text(1).input_ids
    for pruned in (cl.prune(model, plan), copy.deepcopy(cl.prune(model, plan))):
        expected = full_logits(pruned, ids)
        pruned.set_attn_implementation("eager")  # whose masks are of another form
        implementations = {
            layer.self_attn.config._attn_implementation for layer in pruned.model.layers
        }
        assert implementations == {"eager"}
        assert (full_logits(pruned, ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_source_model_is_untouched(family: str) -> None:
    model = tiny_model(family, attention_bias=True) if family == "llama" else tiny_model(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    pruned = cl.prune(model, plan_of(model, [0, 1, 4]))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    theirs = {tensor.data_ptr() for tensor in model.parameters() if tensor.numel()}
    assert not theirs & {tensor.data_ptr() for tensor in pruned.parameters() if tensor.numel()}
    assert not hasattr(model, "cocurve_manifest")


def test_in_place() -> None:
    model = tiny_model("phi3", "mqa")
    plan = plan_of(model, [0, 2, 6])
    expected = cl.prune(model, plan)
    before = model.num_parameters()
    found = cl.prune(model, plan, inplace=True, verify=tiny_text(3))
    assert found is model
    assert before - model.num_parameters() == plan.pruned_cost
    ids = tiny_text(1).input_ids
    assert torch.equal(full_logits(found, ids), full_logits(expected, ids))


def test_bad_input_is_refused_before_anything_is_cut() -> None:
    model, other = tiny_model("llama", "gqa"), tiny_model("llama", "mha")
    before, plan = model.num_parameters(), plan_of(model, [0])
    for call in (cl.prune, cut):
        with pytest.raises(cl.MismatchError):
            call(model, plan_of(other, [0]), inplace=True)
    with pytest.raises(cl.InputError):
        cl.prune(model, plan, inplace=True, verify=tiny_text(1, 65))
    with pytest.raises(cl.InputError):
        cl.prune(model, [0, 1])  # type: ignore[arg-type]
    assert model.num_parameters() == before


def test_a_cut_is_the_pruned_model_without_a_manifest() -> None:
    model, ids = tiny_model(), tiny_text(1).input_ids
    once = cl.prune(model, plan_of(model, [0, 5]))
    for start in (model, once):  # `once` has a manifest, which is not that of what is cut out of it
        plan = plan_of(start, [1, 7], _2=1.25)
        bare = cut(start, plan)
        assert not hasattr(bare, "cocurve_manifest")
        assert torch.equal(full_logits(bare, ids), full_logits(cl.prune(start, plan), ids))
        with pytest.raises(cl.InputError):
            cl.save_pruned(bare, "nowhere")
    assert once.cocurve_manifest["pruned_units"] == ["L0.attention[0]", "L0.ffn[3]"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_are_folded_into_the_kept_columns(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    plan = plan_of(model, [0, 3], _2=1.25, _10=0.5)
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    if dtype == torch.float32:
        units, ids = plan.units, tiny_text(1).input_ids
        with masked_by_hand(model, [units[0], units[3]], {units[2]: 1.25, units[10]: 0.5}):
            expected = full_logits(model, ids)
        assert (full_logits(pruned, ids) - expected).abs().max() < 2e-5
    # a layer that loses nothing may still have gains; they are rounded once
    gained = cl.prune(model, plan_of(model, [], _2=1.1))
    down, dense = (m.model.layers[0].mlp.down_proj.weight for m in (gained, model))
    assert torch.equal(down[:, :11], (dense[:, :11].double() * 1.1).to(dtype))
    assert torch.equal(down[:, 11:], dense[:, 11:])


# Generation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random 2", "all attention of the first layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_in_a_padded_batch(family: str, name: str) -> None:
    model = tiny_model(family)
    plan = plan_of(model, PLANS[name](cl.enumerate_units(model, GROUPS)))
    pruned = cl.prune(model, plan)
    ids = tiny_text(2, 8, seed=3).input_ids
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0  # left padding
    found = pruned.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    expected = masked_greedy(model, plan, ids, mask, 8)
    assert torch.equal(found, expected)
    alone = masked_greedy(model, plan, ids[1:, 3:], mask[1:, 3:], 8)
    assert torch.equal(found[1:, 3:], alone)


# The check itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spoiled",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_one_bit_of_a_weight_is_noticed(dtype: torch.dtype, spoiled: str) -> None:
    model = tiny_model(dtype=dtype)
    plan = plan_of(model, [0, 3, 12])
    pruned = cl.prune(model, plan)
    cl.check_equivalence(model, pruned, plan, tiny_text(2))
    weight = pruned.get_parameter(spoiled).data
    bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits.view(-1)[-1] ^= 1  # of the embedding: the row of a token that the text lacks
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, plan, tiny_text(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_plan_and_nan_are_noticed(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    ours, theirs = plan_of(model, [0, 3]), plan_of(model, [0, 5])
    pruned = cl.prune(model, theirs)
    for wrong in (ours, plan_of(model, [0]), plan_of(model, [0, 5], _2=1.5)):
        with pytest.raises(cl.EquivalenceError):
            cl.check_equivalence(model, pruned, wrong, tiny_text(2))
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, model, ours, tiny_text(2))
    pruned.lm_head.weight[:] = float("nan")
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, theirs, tiny_text(2))
    with pytest.raises(cl.InputError):
        cl.check_equivalence(model, pruned, theirs, tiny_text(2), sequences=0)


@pytest.mark.parametrize(
    ("family", "dtype", "name"),
    [
        *((family, torch.bfloat16, "random 1") for family in FAMILIES),
        *(("llama", torch.float16, name) for name in ("a whole layer", "the whole model")),
    ],
)
def test_half_precision_is_judged_layer_by_layer(
    family: str, dtype: torch.dtype, name: str
) -> None:
    model = tiny_model(family, dtype=dtype)
    plan = plan_of(model, PLANS[name](cl.enumerate_units(model, GROUPS)))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    found = cl.check_equivalence(model, pruned, plan, tiny_text(2))
    assert found.max_abs_difference < 1e-4  # float32 arithmetic on both sides
    assert "layer by layer" in str(found)
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert next(pruned.parameters()).dtype == dtype


# Files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "tied"),
    [
        *((family, "random 2", True) for family in FAMILIES),
        *(
            ("llama", name, False)
            for name in ("all attention of the first layer", "the whole model")
        ),
    ],
)
def test_saving_and_loading(tmp_path: Path, family: str, name: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    plan = plan_of(model, PLANS[name](cl.enumerate_units(model, GROUPS)))
    pruned = cl.prune(model, plan)
    folder = cl.save_pruned(pruned, tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    loaded = cl.load_pruned(folder)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert loaded.num_parameters() == pruned.num_parameters()
    ids = tiny_text(1).input_ids
    assert torch.equal(full_logits(loaded, ids), full_logits(pruned, ids))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(ids, **settings), pruned.generate(ids, **settings))
    cl.check_equivalence(model, loaded, plan, tiny_text(1))
    assert loaded.cocurve_manifest["pruned_units"] == [
        plan.units.units[i].name for i in plan.pruned
    ]
    if name == "the whole model":
        with pytest.raises(cl.InputError):
            cl.enumerate_units(loaded, GROUPS)
    else:
        assert cl.enumerate_units(loaded, GROUPS) == cl.enumerate_units(pruned, GROUPS)
    again = cl.load_pruned(cl.save_pruned(loaded, tmp_path / "again"))
    assert torch.equal(full_logits(again, ids), full_logits(pruned, ids))


def test_loading_in_another_precision(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.max_new_tokens = 7
    pruned = cl.prune(model, plan_of(model, [0, 3]))
    folder = cl.save_pruned(pruned, tmp_path / "small")
    half = cl.load_pruned(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.generation_config.max_new_tokens == 7
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.model.rotary_emb.inv_freq, pruned.model.rotary_emb.inv_freq)
    assert half.lm_head.weight.equal(pruned.lm_head.weight.bfloat16())
    back = cl.load_pruned(cl.save_pruned(half, tmp_path / "half"))
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16}
    assert back.cocurve_manifest["dtype"] == "bfloat16"


def test_folders_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    model = tiny_model()
    pruned = cl.prune(model, plan_of(model, [0, 3]))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for taken in ("notes", "file"):
        for overwrite in (False, True):
            with pytest.raises(cl.InputError):
                cl.save_pruned(pruned, tmp_path / taken, overwrite=overwrite)
    folder = cl.save_pruned(pruned, tmp_path / "small")
    with pytest.raises(cl.InputError):
        cl.save_pruned(pruned, folder)
    other = cl.prune(model, plan_of(model, [1]))
    cl.save_pruned(other, folder, overwrite=True)
    assert cl.load_pruned(folder).num_parameters() == other.num_parameters()
    with pytest.raises(cl.InputError):
        cl.save_pruned(model, tmp_path / "dense")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes", "small"]


def test_pruned_models_can_be_measured_and_copied() -> None:
    """What later steps do with a pruned model works where layers are empty, too."""
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(model, where(units, 0, "attention") + where(units, 2, "ffn"))
    pruned = cl.prune(model, plan)
    again = copy.deepcopy(pruned)
    text = tiny_text(2, 16, 4)
    curvature = cl.estimate_curvature(
        again, cl.enumerate_units(again, GROUPS), text, VOCAB, progress=False
    )
    assert len(curvature.units) == len(units) - len(plan)
    with cl.ablate(again, [curvature.units["L1.ffn[0]"]]):
        assert torch.isfinite(full_logits(again, text.input_ids)).all()
