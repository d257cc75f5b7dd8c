"""Physical removal: what is computed, what is gone, what is untouched, what can be read back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.models import identity
from cocurve_lab.models.identity import MANIFEST
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


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("family", "heads"), EVERY)
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


def test_nothing_pruned_is_the_same_model() -> None:
    model = tiny_model(tie_word_embeddings=True)
    pruned = cl.prune(model, plan_of(model, []))
    assert torch.equal(
        full_logits(pruned, tiny_text(1).input_ids), full_logits(model, tiny_text(1).input_ids)
    )
    assert pruned.lm_head.weight is pruned.model.embed_tokens.weight


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


def test_verification_refuses_before_anything_is_cut() -> None:
    model, other = tiny_model("llama", "gqa"), tiny_model("llama", "mha")
    before = model.num_parameters()
    with pytest.raises(cl.MismatchError):
        cl.prune(model, plan_of(other, [0]), inplace=True)
    too_long = tiny_text(1, 65)
    with pytest.raises(cl.InputError):
        cl.prune(model, plan_of(model, [0]), inplace=True, verify=too_long)
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


def test_a_plan_of_another_model_is_never_cut() -> None:
    model, other = tiny_model("llama", "gqa"), tiny_model("llama", "mha")
    before = model.num_parameters()
    with pytest.raises(cl.MismatchError):
        cut(model, plan_of(other, [0]), inplace=True)
    assert model.num_parameters() == before


def test_weights_are_read_once_for_both_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    once = cl.prune(model, plan_of(model, [0]))
    seen: list[int] = []
    original = identity.fingerprint_tensor
    monkeypatch.setattr(
        identity, "fingerprint_tensor", lambda tensor: seen.append(0) or original(tensor)
    )
    twice = cl.prune(once, plan_of(once, [0]))
    assert len(seen) == len(once.state_dict()) + len(twice.state_dict())
    assert twice.cocurve_manifest["earlier_rounds"][0]["weights_since_pruning"] == "unchanged"


def test_gains_are_folded_into_the_kept_columns() -> None:
    model = tiny_model()
    plan = plan_of(model, [0, 3], _2=1.25, _10=0.5)
    units = plan.units
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    with masked_by_hand(model, [units[0], units[3]], {units[2]: 1.25, units[10]: 0.5}):
        expected = full_logits(model, tiny_text(1).input_ids)
    found = full_logits(pruned, tiny_text(1).input_ids)
    assert (found - expected).abs().max() < 2e-5
    # a layer that loses nothing may still have gains
    gained = cl.prune(model, plan_of(model, [], _2=2.0))
    down, dense = (m.model.layers[0].mlp.down_proj.weight for m in (gained, model))
    assert torch.equal(down[:, :11], 2 * dense[:, :11])
    assert torch.equal(down[:, 11:], dense[:, 11:])


# Generation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random 1", "all attention of the first layer", "a whole layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_is_the_masked_models(family: str, name: str) -> None:
    model = tiny_model(family)
    plan = plan_of(model, PLANS[name](cl.enumerate_units(model, GROUPS)))
    pruned = cl.prune(model, plan)
    for length, seed in ((1, 0), (5, 1), (9, 2)):
        ids = tiny_text(1, max(2, length), seed=seed).input_ids[:, :length]
        mask = torch.ones_like(ids)
        settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        found = pruned.generate(ids, attention_mask=mask, use_cache=True, **settings)
        assert torch.equal(found, masked_greedy(model, plan, ids, mask, 12))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spoiled",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_changed_weight_is_noticed(dtype: torch.dtype, spoiled: str) -> None:
    model = tiny_model(dtype=dtype)
    plan = plan_of(model, [0, 3, 12])
    pruned = cl.prune(model, plan)
    cl.check_equivalence(model, pruned, plan, tiny_text(2))
    pruned.get_parameter(spoiled)[:] *= 1.1
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, plan, tiny_text(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_plan_is_noticed(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    ours, theirs = plan_of(model, [0, 3]), plan_of(model, [0, 5])
    pruned = cl.prune(model, theirs)
    for wrong in (ours, plan_of(model, [0]), plan_of(model, [0, 5], _2=1.5)):
        with pytest.raises(cl.EquivalenceError):
            cl.check_equivalence(model, pruned, wrong, tiny_text(2))
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, model, ours, tiny_text(2))


def test_nan_is_not_equivalent() -> None:
    model = tiny_model()
    plan = plan_of(model, [0])
    pruned = cl.prune(model, plan)
    pruned.lm_head.weight[:] = float("nan")
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, plan, tiny_text(2))
    with pytest.raises(cl.InputError):
        cl.check_equivalence(model, pruned, plan, tiny_text(2), sequences=0)


@pytest.mark.parametrize("name", ["random 1", "a whole layer", "the whole model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_judged_layer_by_layer(
    family: str, dtype: torch.dtype, name: str
) -> None:
    model = tiny_model(family, dtype=dtype)
    plan = plan_of(model, PLANS[name](cl.enumerate_units(model, GROUPS)))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    found = cl.check_equivalence(model, pruned, plan, tiny_text(2))
    assert found.max_abs_difference < 1e-4  # float32 arithmetic on both sides
    with masked_by_hand(model, [plan.units.units[i] for i in plan.pruned]):
        masked = full_logits(model, tiny_text(2).input_ids)
    raw = (full_logits(pruned, tiny_text(2).input_ids) - masked).abs().max()
    assert found.raw_difference == pytest.approx(float(raw), abs=3 * found.logit_spacing)
    largest = float(masked.abs().max())
    assert found.logit_spacing == 2.0 ** np.floor(np.log2(largest)) * torch.finfo(dtype).eps
    assert "raw" in str(found)
    assert "spacing" in str(found)
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert next(pruned.parameters()).dtype == dtype


def test_half_precision_gains_are_rounded_once() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    plan = plan_of(model, [0, 9], _2=1.1, _3=0.87)
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    exact = model.model.layers[0].mlp.down_proj.weight[:, :11].double() * 1.1
    assert torch.equal(pruned.model.layers[0].mlp.down_proj.weight[:, :11], exact.bfloat16())


# Files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", ["random 2", "all attention of the first layer", "the whole model"]
)
@pytest.mark.parametrize("family", FAMILIES)
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
    pruned = cl.prune(model, plan_of(model, [0, 3]))
    folder = cl.save_pruned(pruned, tmp_path / "small")
    half = cl.load_pruned(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.model.rotary_emb.inv_freq, pruned.model.rotary_emb.inv_freq)
    assert half.lm_head.weight.equal(pruned.lm_head.weight.bfloat16())
    back = cl.load_pruned(cl.save_pruned(half, tmp_path / "half"))
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16}
    assert back.cocurve_manifest["dtype"] == "bfloat16"


def test_generation_settings_travel_along(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = 5
    model.generation_config.max_new_tokens = 7
    pruned = cl.prune(model, plan_of(model, [0]))
    loaded = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "small"))
    assert loaded.generation_config.eos_token_id == 5
    assert loaded.generation_config.max_new_tokens == 7


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


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


MISUSE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "has no cocurve_manifest.json.*load_model"),
    "not JSON": (lambda f: (f / MANIFEST).write_text("{"), "is damaged"),
    "not a dict": (lambda f: (f / MANIFEST).write_text("[]"), "is damaged"),
    "other version": (lambda f: edit(f, lambda m: m.update(version=9)), "version 9"),
    "other format": (lambda f: edit(f, lambda m: m.update(format="gguf")), "'gguf'"),
    "no layers": (lambda f: edit(f, lambda m: m.pop("layers")), "layers"),
    "no width": (lambda f: edit(f, lambda m: m["layers"][1].pop("ffn_columns")), "ffn_columns"),
    "a layer less": (lambda f: edit(f, lambda m: m["layers"].pop()), "2 layers.* 3"),
    "odd dtype": (lambda f: edit(f, lambda m: m.update(dtype="load")), "dtype"),
    "too wide": (
        lambda f: edit(f, lambda m: m["layers"][0].update(ffn_columns=999)),
        "layer 0 999 ffn columns",
    ),
    "half a head": (
        lambda f: edit(f, lambda m: m["layers"][0].update(attention_columns=9)),
        "layer 0 9 attention columns",
    ),
    "wrong shapes": (
        lambda f: edit(f, lambda m: m["layers"][2].update(ffn_columns=40)),
        r"model\.layers\.2\.mlp\..*has shape .* the configuration beside it says",
    ),
    "truncated weights": (cut_weights, "model.safetensors cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds neither"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_a_saved_folder_is_a_clear_error(tmp_path: Path, name: str) -> None:
    spoil, message = MISUSE[name]
    model = tiny_model()
    folder = cl.save_pruned(cl.prune(model, plan_of(model, [0, 3])), tmp_path / "small")
    spoil(folder)
    with pytest.raises(cl.FileFormatError, match=message):
        cl.load_pruned(folder)


def test_extra_and_missing_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model()
    folder = cl.save_pruned(cl.prune(model, plan_of(model, [0])), tmp_path / "small")
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"stray": torch.zeros(2)}, file)
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(folder)
    weights.pop("lm_head.weight")
    save_file(weights, file)
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(folder)


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    pruned = cl.prune(model, plan_of(model, [0]))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pruned, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        cl.save_pruned(pruned, tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


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


def test_a_list_of_units_is_no_plan() -> None:
    with pytest.raises(cl.InputError):
        cl.prune(tiny_model(), [0, 1])  # type: ignore[arg-type]
