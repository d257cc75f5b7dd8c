"""Multimodal models, and hybrids: the contract, saving, what stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PaliGemmaConfig

import cocurve_lab as cl
from cocurve_lab.models.identity import MANIFEST
from helpers.bare_process import run_bare, save_expected
from helpers.contract import SCORED, TEXT, by_hand, measure_contract, plans
from helpers.tiny_models import (
    GROUPS,
    HYBRIDS,
    MULTIMODAL,
    full_logits,
    masked_by_hand,
    naive_risk,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

OTHERS = [name for name in HYBRIDS if HYBRIDS[name][1].get("num_experts_per_tok") is None]
SAVED = [
    *((family, "uneven") for family in MULTIMODAL),
    *((family, "even") for family in ("gemma3", "qwen2_5_vl", "llava", "qwen3_5", *OTHERS)),
    ("lfm2", "uneven"),
]
# layers of different widths need a class of the modeling file: hybrids have none
ONLY_US = ("qwen3_5", *HYBRIDS)


@pytest.mark.parametrize("family", [*MULTIMODAL, *HYBRIDS])
def test_the_contract(family: str) -> None:
    found = measure_contract(family, "gqa", layers=3 if family in HYBRIDS else 2)
    assert (found.inventory, found.parameters) == (0, 0)
    # rounding grows with the logits, which reach 3.5 in the mixtures
    assert found.logits < 1e-5 * max(1, found.size)
    assert found.h_error < 1e-5
    assert found.texts_equal
    assert found.reloaded == 0


def plan_of(model: Any, name: str) -> cl.Selection:
    """The same units in each layer, or a layer without heads beside one without FFN."""
    units = cl.enumerate_units(model, GROUPS)
    if name == "even":
        gone = [i for i, u in enumerate(units) if u.index == 0 and u.kind != "expert"]
        return cl.Selection.from_pruned(units, gone)
    first = min(unit.layer for unit in units if unit.kind == "attention")
    whole = [(first, "attention"), (1 - first, "ffn")]
    gone = [i for i, unit in enumerate(units) if (unit.layer, unit.kind) in whole]
    return cl.Selection.from_pruned(units, [*gone, units.index(f"L{first}.ffn[2]")])


@pytest.fixture(scope="module")
def saw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the library sees of each saved folder that it can read."""
    place, found = tmp_path_factory.mktemp("towers"), {}
    for family, name in SAVED:
        model = tiny_model(family, layers=2)
        plan = plan_of(model, name)
        folder = cl.save_pruned(cl.prune(model, plan), place / f"{family} {name}")
        ids = tiny_text(2, 14).input_ids
        with masked_by_hand(model, *by_hand(plan)):
            save_expected(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder)
        found[folder.name] = {"folder": folder, "dense": model.state_dict()}
    readable = [f"{family} {name}" for family, name in SAVED if can_be_read(family, name)]
    folders = [found[name]["folder"] for name in readable]
    for name, seen in run_bare("read_it", folders, place / "home").items():
        found[name] |= seen
    return found


def can_be_read(family: str, plan: str) -> bool:
    """Qwen2.5-VL divides its hidden size by its heads, so it cannot have fewer of them."""
    return family not in ONLY_US if plan == "uneven" else family != "qwen2_5_vl"


@pytest.mark.parametrize(("family", "plan"), SAVED)
def test_a_saved_folder_loads(saw: dict[str, Any], family: str, plan: str) -> None:
    seen = saw[f"{family} {plan}"]
    manifest = json.loads((seen["folder"] / MANIFEST).read_text())
    by_plan = {"even": "stock", "uneven": "own code"}[plan]
    by = by_plan if can_be_read(family, plan) else "cocurve_lab"
    assert manifest["loads_with"] == by
    expected = load_file(f"{seen['folder']}.expected.safetensors")
    loaded = cl.load_pruned(seen["folder"], device="cpu")
    assert (loaded(expected["input_ids"]).logits - expected["logits"]).abs().max() < 1e-5
    if can_be_read(family, plan):
        assert not any(seen["info"].values()), "missing or unexpected weights"
        assert max(seen["difference"], seen["eager"]) < 1e-5
        assert seen["generated"]
    # the parts that read images, and what mixes tokens without attention, have the bits they had
    weights = loaded.state_dict()
    for name, weight in seen["dense"].items():
        parts = ("vis", "projector", "linear_attn", "mamba", ".conv.")
        if any(part in name for part in parts):
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "llava", "lfm2", "granitemoehybrid"])
def test_it_is_loaded_streamed_and_cut_on_disk(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = tiny_model(family, layers=2, tie_word_embeddings=True)
    plan = plan_of(model, "uneven")
    model.save_pretrained(tmp_path / "dense")
    word_tokenizer().save_pretrained(tmp_path / "dense")
    loaded, _ = cl.load_model(tmp_path / "dense", device="cpu")
    streamed, _ = cl.load_model(tmp_path / "dense", device="cpu", stream=True)
    expected = full_logits(model, TEXT.input_ids)
    assert torch.equal(full_logits(loaded, TEXT.input_ids), expected)
    assert torch.equal(full_logits(streamed, TEXT.input_ids), expected)
    found = cl.load_pruned(cl.prune(streamed, plan, out=tmp_path / "small"), device="cpu")
    weights, expected = found.state_dict(), cl.prune(loaded, plan).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert found.lm_head.weight is found.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "falcon_h1"])
def test_measured_kl_is_naive(family: str) -> None:
    model = tiny_model(family)
    selections = list(plans(cl.enumerate_units(model, GROUPS)).values())
    table = cl.measure_plans(model, selections, SCORED, progress=False, plans_per_batch=3)
    for row, plan in zip(table.kl, selections, strict=True):
        units, gains = by_hand(plan)
        assert row == pytest.approx(naive_risk(model, units, SCORED, gains), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_a_layer_without_attention_has_ffn_units_alone(family: str) -> None:
    model = tiny_model(family)
    units = cl.enumerate_units(model, GROUPS)
    assert {unit.kind for unit in units if unit.layer == 0} == {"ffn"}
    assert {unit.layer for unit in units if unit.kind == "attention"} == {1}
    with pytest.raises(cl.ArchitectureError, match="hybrid"):
        cl.repair(model, cl.Selection.from_pruned(units, [0]), tiny_text(8))


def test_a_state_space_beside_attention_lets_a_refit_lower_the_kl() -> None:
    model, text = tiny_model("falcon_h1"), tiny_text(8)
    plan = plans(cl.enumerate_units(model, GROUPS))["scattered"]
    dense = full_logits(model, text.input_ids).log_softmax(-1)

    def kl(pruned: Any) -> float:
        other = full_logits(pruned, text.input_ids).log_softmax(-1)
        return float((dense.exp() * (dense - other)).sum(-1).mean())

    assert kl(cl.repair(model, plan, text)) < 0.8 * kl(cl.prune(model, plan))


# What is refused ----------------------------------------------------------------------------------


def test_other_multimodal_models_are_refused_with_the_reason() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": 9}
    inner = tiny_model("llava", layers=1).config
    inner.text_config = tiny_model("gpt_neox", "mha", layers=1).config
    with torch.device("meta"):
        other = AutoModelForImageTextToText.from_config(
            PaliGemmaConfig(text_config=sizes | {"num_key_value_heads": 1}, vision_config=sizes)
        )
        unknown = AutoModelForImageTextToText.from_config(inner)
    with pytest.raises(cl.ArchitectureError, match="qwen3_vl"):
        cl.enumerate_units(other)
    with pytest.raises(cl.ArchitectureError, match="language model"):
        cl.enumerate_units(unknown)
