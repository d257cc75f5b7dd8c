"""One contract over every family: what is removable, masks = physical removal, H = naive.

The families of experts, the hybrids and the multimodal models stand in the same tables; what is
particular to experts is tested in tests/extensions/experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteConfig,
    GraniteForCausalLM,
    PaliGemmaConfig,
    PhimoeConfig,
    PreTrainedModel,
)

import cocurve_lab as cl
from cocurve_lab.models import families
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.families import FAMILIES, Family
from cocurve_lab.pruner.cutting import cut
from helpers import tiny_models
from helpers.contract import (
    SCORED,
    TEXT,
    by_hand,
    logit_difference,
    measure_contract,
    plans,
    text_is_equal,
)
from helpers.tiny_models import (
    EVERY,
    EXPERT_FAMILIES,
    FURTHER,
    GROUPS,
    HYBRIDS,
    MHA_ONLY,
    MORE_FAMILIES,
    MULTIMODAL,
    VOCAB,
    full_logits,
    masked_by_hand,
    naive_risk,
    tiny_model,
    tiny_text,
)

OTHERS = (*MORE_FAMILIES, *FURTHER, *EXPERT_FAMILIES, *MULTIMODAL, *HYBRIDS)


def own_heads(family: str) -> str:
    return "mha" if family in MHA_ONLY else "gqa"


EVERYONE = [*EVERY, *((family, own_heads(family)) for family in OTHERS)]


@pytest.mark.parametrize(("family", "heads"), EVERYONE)
def test_the_contract(family: str, heads: str) -> None:
    # folders of the further families are read back in tests/pruner
    layers, save = (2 if family in OTHERS else 3), family not in FURTHER
    found = measure_contract(family, heads, layers=layers, save=save)
    assert (found.inventory, found.parameters) == (0, 0)
    # the paper asks for 1e-3; rounding grows with the logits, which reach 3.5 in the hybrids
    assert found.logits < 1e-5 * (max(1, found.size) if family in HYBRIDS else 1)
    assert found.h_error < 1e-5
    assert found.texts_equal
    assert found.reloaded <= (1e-6 if family in EXPERT_FAMILIES else 0)


@pytest.mark.parametrize("family", OTHERS)
def test_the_plans_matter_and_the_logits_are_the_models_own(family: str) -> None:
    """Else the contract would hold for masks that do nothing."""
    model = tiny_model(family, own_heads(family), layers=2)
    dense, architecture = full_logits(model, TEXT.input_ids), describe(model)
    with torch.no_grad():
        found = architecture.logits(architecture.last_hidden(TEXT.input_ids))
    torch.testing.assert_close(found.double(), dense)
    for name, selection in plans(cl.enumerate_units(model, GROUPS)).items():
        with masked_by_hand(model, *by_hand(selection)):
            moved = (full_logits(model, TEXT.input_ids) - dense).abs().max()
        assert moved > 0.05, name


MEASURED = ("gemma2", "gpt_neox", "opt_350m", "granite", "qwen3_moe", "qwen3_vl", "qwen3_5")


@pytest.mark.parametrize("family", [*MEASURED, "falcon_h1"])
def test_measured_kl_is_naive(family: str) -> None:
    """Batches of plans, each row with its own mask, over logits as the model makes them."""
    model = tiny_model(family, own_heads(family))
    if family in EXPERT_FAMILIES:
        model.set_experts_implementation("eager")  # the one in float64
    selections = list(plans(cl.enumerate_units(model, GROUPS)).values())
    table = cl.measure_plans(model, selections, SCORED, progress=False, plans_per_batch=3)
    for row, selection in zip(table.kl, selections, strict=True):
        units, gains = by_hand(selection)
        np.testing.assert_allclose(row, naive_risk(model, units, SCORED, gains), rtol=1e-4)


def test_every_declared_family_is_tested() -> None:
    """Of those that the installed transformers has."""
    known = tiny_models.FAMILIES | MORE_FAMILIES | FURTHER | EXPERT_FAMILIES | HYBRIDS | MULTIMODAL
    tested = {make.model_type for make, _ in known.values()}
    tested |= {tiny_model(name).config.get_text_config().model_type for name in MULTIMODAL}
    assert tested >= set(families.MULTIMODAL)
    declared = {name for family in FAMILIES for name in family.model_types}
    assert declared & set(CONFIG_MAPPING) <= tested


@pytest.mark.parametrize("family", MORE_FAMILIES)
@torch.no_grad()
def test_a_cache_counts_tokens_also_where_a_layer_has_no_heads(family: str) -> None:
    model = tiny_model(family, own_heads(family))
    plan = plans(cl.enumerate_units(model, GROUPS))["whole blocks"]  # layer 0 has none
    pruned, ids = cl.prune(model, plan), TEXT.input_ids
    expected, cache = full_logits(pruned, ids), {}
    for start, stop in ((0, 10), (10, 13), (13, 14), (14, 24)):
        out = pruned(input_ids=ids[:, start:stop], use_cache=True, **cache)
        name = "cache" if "cache" in out else "past_key_values"
        cache = {name: out[name]}
        assert (out.logits.double() - expected[:, start:stop]).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2", "gpt_neox", "gpt2", "opt"])
def test_a_pruned_model_is_measured_like_a_dense_one(family: str) -> None:
    """A second round: H of what is left, empty blocks included, and a plan on top."""
    model = tiny_model(family, own_heads(family))
    first = plans(cl.enumerate_units(model, GROUPS))["whole blocks"]
    pruned = cl.prune(model, first)
    units = cl.enumerate_units(pruned, GROUPS)
    assert units.total_cost == first.units.total_cost - first.pruned_cost
    found = cl.estimate_curvature(pruned, units, SCORED, 32, progress=False)
    pairs = {(u.layer, u.kind, u.start, u.stop): i for i, u in enumerate(first.units)}
    masked = tiny_model(family, own_heads(family))
    left = [pairs[u.layer, u.kind, u.start, u.stop] for u in units]
    with cl.ablate(masked, first):
        whole = cl.estimate_curvature(masked, first.units, SCORED, 32, progress=False)
    expected = whole.matrix[np.ix_(left, left)]
    assert np.abs(found.matrix - expected).max() < 1e-4 * np.abs(expected).max()
    again = cl.prune(pruned, cl.Selection.from_pruned(units, [0, len(units) - 1]))
    assert again.num_parameters() == pruned.num_parameters() - int(units.costs[[0, -1]].sum())


# What each family keeps ---------------------------------------------------------------------------


# Entries from outside -----------------------------------------------------------------------------


def test_a_family_is_registered_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", [*FAMILIES])
    model = tiny_model("starcoder2")
    model.config.model_type = "their_own"
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(model)
    names: dict[str, Any] = {"gate_up": ("c_fc",), "stacked": (), "ffn_output": "c_proj"}
    for _ in range(2):  # a cell of a notebook may run again
        cl.register_family("their_own", **names)
    plan = plans(cl.enumerate_units(model, GROUPS))["scattered"]
    cl.check_equivalence(model, cl.prune(model, plan), plan, tiny_text(2))
    for declared, others in (("their_own", {}), ("llama", names)):
        with pytest.raises(cl.InputError):
            cl.register_family(declared, **others)
    assert len(families.FAMILIES) == len(FAMILIES) + 1


# fused by default; norms with weights of each head; values of all heads; rows of other channels
WRONG = {
    "arcee": {"gate_up": ("up_proj",)},
    "cohere+norms": {"logit_scale": ("logit_scale", 1)},
    "doge": {},
    "glm": {"gate_up": ("gate_up_proj",), "stacked": ()},
}


@pytest.mark.parametrize("family", WRONG)
def test_an_entry_that_does_not_fit_is_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, entry = tiny_model(family), dict(WRONG[family])
    monkeypatch.setattr(families, "FAMILIES", [Family((model.config.model_type,), **entry)])
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(model)


# What is refused ----------------------------------------------------------------------------------


def small(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 9,
    } | more


def test_models_that_are_almost_supported_are_refused() -> None:
    """Another mixture of experts, images read by another part, and experts beside a dense FFN."""
    towers = {"text_config": small(), "vision_config": small()}
    inner = tiny_model("llava", layers=1).config
    inner.text_config = tiny_model("gpt_neox", "mha", layers=1).config
    mixture = PhimoeConfig(**small(num_local_experts=4, pad_token_id=None))
    with torch.device("meta"):
        others = [
            AutoModelForCausalLM.from_config(mixture),
            AutoModelForImageTextToText.from_config(PaliGemmaConfig(**towers)),
            AutoModelForImageTextToText.from_config(inner),
        ]
    others.append(tiny_model("doge", is_moe=True, num_experts=16, num_experts_per_tok=2))
    for model in others:
        with pytest.raises(cl.ArchitectureError):
            cl.enumerate_units(model)


class Linear4bit(nn.Module):
    """What bitsandbytes' layer of this name looks like: packed weights that only it can read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.zeros((linear.weight.numel() + 1) // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias, self.hidden = linear.bias, [linear]  # a list, so that it is no submodule

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](columns)


def quantize(model: PreTrainedModel, layer: Any = Linear4bit) -> PreTrainedModel:
    """Every projection of every layer in 4 bits, the rest as it is."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer(module))
    return model


def test_packed_weights_are_measured_but_not_cut() -> None:
    plain, packed = tiny_model("qwen2"), quantize(tiny_model("qwen2"))
    units = cl.enumerate_units(packed, GROUPS)
    assert units == cl.enumerate_units(plain, GROUPS)
    assert units.total_parameters == plain.num_parameters()
    found = cl.estimate_curvature(packed, units, SCORED, 32, progress=False)
    expected = cl.estimate_curvature(plain, units, SCORED, 32, progress=False)
    np.testing.assert_allclose(found.matrix, expected.matrix, rtol=1e-3, atol=1e-7)
    plan = cl.solve_greedy(found, 0.25)
    risks = [cl.pruning_risk(model, plan, SCORED) for model in (packed, plain)]
    assert risks[0] == pytest.approx(risks[1], rel=1e-5)
    uses = [lambda: cl.prune(packed, plan), lambda: cut(packed, plan)]
    uses += [
        lambda name=name: cl.get_method(name).measure(packed, units, SCORED, progress=False)
        for name in ("magnitude", "llm-pruner", "slimgpt")
    ]
    for use in uses:
        with pytest.raises(cl.ArchitectureError):
            use()


def test_a_model_mapped_to_one_device_works() -> None:
    """accelerate's hooks answer for every module; replay, masks and pruning must not mind."""
    import accelerate

    model = tiny_model("gemma3_text")
    plain = tiny_model("gemma3_text")
    mapped = accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in mapped.modules())
    units = cl.enumerate_units(mapped, GROUPS)
    found = cl.estimate_curvature(mapped, units, SCORED, 32, progress=False)
    expected = cl.estimate_curvature(plain, units, SCORED, 32, progress=False)
    assert np.array_equal(found.matrix, expected.matrix)
    plan = plans(units)["scattered"]
    assert logit_difference(plain, cl.prune(mapped, plan), plan) < 1e-5
    assert text_is_equal(mapped, cl.prune(mapped, plan), plan, 4)


def test_logits_that_are_not_the_heads_are_refused() -> None:
    """Granite divides its logits; declared like Llama, its H would be wrong by that squared."""
    sizes = small(vocab_size=VOCAB, intermediate_size=48, pad_token_id=0)
    model = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=4.0)).eval()
    model.config.model_type = "llama"  # what a careless entry in families.py amounts to
    with pytest.raises(cl.ArchitectureError):
        cl.estimate_curvature(model, None, tiny_text(1), top_r=8, progress=False)
    with pytest.raises(cl.ArchitectureError):
        cl.pruning_risk(
            model, cl.Selection.from_pruned(cl.enumerate_units(model), [0]), tiny_text()
        )
