"""A saved pruned model, read without the library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.publishing import modeling_cocurve
from cocurve_lab.extensions.publishing.configuration import MODELING_FILE
from cocurve_lab.models.identity import MANIFEST
from helpers.bare_process import run_bare, save_expected
from helpers.tiny_models import (
    GROUPS,
    LLAMA_3,
    full_logits,
    masked_by_hand,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

UNEVEN = ["L0.attention[0]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]


EVEN = [f"L{layer}.{unit}" for layer in range(3) for unit in ("attention[0]", "ffn[0]")]


def whole(layer: int, kind: str, heads: int = 2) -> list[str]:
    return [f"L{layer}.{kind}[{i}]" for i in range(heads if kind == "attention" else GROUPS)]


CASES: dict[str, tuple[str, str, list[str], dict[str, Any], str]] = {
    "one key head": ("llama", "mqa", [*UNEVEN[1:], *whole(1, "attention", 1)], {}, "CocurveLlama"),
    "no heads": ("llama", "gqa", whole(0, "attention") + UNEVEN[1:], {}, "CocurveLlama"),
    "no heads, bias": (
        *("llama", "gqa", whole(0, "attention") + whole(1, "ffn")),
        *({"attention_bias": True, "mlp_bias": True}, "CocurveLlama"),
    ),
    "no FFN": ("llama", "gqa", UNEVEN[:2] + whole(2, "ffn"), {}, "CocurveLlama"),
    "tied": ("llama", "gqa", UNEVEN, {"tie_word_embeddings": True}, "CocurveLlama"),
    "mistral": ("mistral", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveMistral"),
    "qwen2": ("qwen2", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveQwen2"),
    "qwen3": ("qwen3", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveQwen3"),
    "phi3": ("phi3", "gqa", UNEVEN + whole(0, "ffn"), {}, "CocurvePhi3"),
    "gemma": ("gemma", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveGemma"),
    "gemma2": ("gemma2", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveGemma2"),
    "gemma3": ("gemma3_text", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveGemma3"),
    "nothing": ("llama", "gqa", [], {}, "Llama"),
    "uniform llama": ("llama", "gqa", EVEN, {}, "Llama"),
    # 32 is no multiple of 3 heads: Llama refuses, Mistral computes the same but has no biases
    "uniform as mistral": ("llama", "mha", EVEN, {"rope_parameters": LLAMA_3}, "Mistral"),
    "uniform refused": ("llama", "mha", EVEN, {"attention_bias": True}, "CocurveLlama"),
    "uniform qwen2": ("qwen2", "mha", EVEN, {}, "Qwen2"),
}


GAINS = {"L0.ffn[2]": 1.25, "L1.ffn[0]": 0.8}  # kept in every case but where a block is gone


def plan_of(
    model: PreTrainedModel, names: list[str], gains: dict[str, float] | None = None
) -> cl.Selection:
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, names)
    return plan.with_gains({units.index(name): gain for name, gain in (gains or {}).items()})


def saved_case(folder: Path, name: str) -> None:
    """A folder, and beside it what the dense model under hooks of our own computes."""
    family, heads, names, changes, _ = CASES[name]
    model = tiny_model(family, heads, **changes)
    gains = {unit: gain for unit, gain in GAINS.items() if unit not in names and names != []}
    plan = plan_of(model, names, gains)
    cl.save_pruned(cl.prune(model, plan), folder, tokenizer=word_tokenizer())
    ids = tiny_text(2, 14).input_ids
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left
    inputs = {"input_ids": ids, "attention_mask": mask}
    removed = [plan.units.units[i] for i in plan.pruned]
    scaled = {plan.units.units[i]: gain for i, gain in plan.gains.items()}
    with masked_by_hand(model, removed, scaled):
        save_expected(model, inputs, folder)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the library saw of every case."""
    place = tmp_path_factory.mktemp("bare")
    for name in CASES:
        saved_case(place / name, name)
    found = run_bare("load", [place / name for name in CASES], place / "home")
    for name in CASES:
        found[name]["folder"] = place / name
        found[name]["manifest"] = json.loads((place / name / MANIFEST).read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_it_without_us(seen: dict[str, Any], name: str) -> None:
    *_, changes, reader = CASES[name]
    saw = seen[name]
    assert saw["class"] == f"{reader}ForCausalLM"
    assert not saw["config"].startswith("Cocurve")
    assert not any(saw["info"].values()), "missing, unexpected or mismatched weights"
    assert saw["parameters"] == saw["manifest"]["parameters"]
    tied = changes.get("tie_word_embeddings", reader in ("CocurveGemma2", "CocurveGemma3"))
    assert saw["tied"] is tied
    ways = ("difference", "eager", "switched to eager", "switched to sdpa", "base", "again", "card")
    for way in ways:
        assert saw[way] < 1e-5, way  # float32, logits of order 1
    assert saw["generated"] == {"cache": True, "none": True}
    assert (saw["half"], saw["half finite"]) == (["torch.bfloat16"], True)


@pytest.mark.parametrize("name", CASES)
def test_its_configuration_says_what_is_in_each_layer(seen: dict[str, Any], name: str) -> None:
    folder, manifest = seen[name]["folder"], seen[name]["manifest"]
    config = json.loads((folder / "config.json").read_text())
    own = CASES[name][4].startswith("Cocurve")
    assert manifest["loads_with"] == ("own code" if own else "stock")
    assert (folder / MODELING_FILE).exists() is own
    assert (MODELING_FILE in seen[name]["again files"]) is own
    if not own:
        assert not {"auto_map", "per_layer_config"} & set(config)
        return
    for layer, widths in enumerate(manifest["layers"]):
        counts = config | config["per_layer_config"].get(str(layer), {})
        gone = counts.get("skip", [])
        assert ("attention" in gone) is (widths["attention_columns"] == 0)
        assert ("mlp" in gone) is (widths["ffn_columns"] == 0)
        if "attention" not in gone:
            columns = counts["num_attention_heads"] * config["head_dim"]
            assert columns == widths["attention_columns"]
        kept = {w["key_value_heads"] for w in manifest["layers"]} - {0}
        # vLLM keeps a cache of so many heads for a layer without any
        assert counts["num_key_value_heads"] == (widths["key_value_heads"] or min(kept))
        assert "mlp" in gone or counts["intermediate_size"] == widths["ffn_columns"]


@pytest.mark.parametrize("name", ["no heads", "phi3", "uniform qwen2"])
def test_our_loader_reads_the_same_folder(seen: dict[str, Any], name: str) -> None:
    folder = seen[name]["folder"]
    expected = load_file(f"{folder}.expected.safetensors")
    ids, mask = expected["input_ids"], expected["attention_mask"]
    loaded = cl.load_pruned(folder)
    assert not loaded.config.is_heterogeneous
    assert not hasattr(loaded.config, "auto_map")
    logits = loaded(ids, attention_mask=mask).logits
    assert (logits - expected["logits"])[mask > 0].abs().max() < 1e-5
    again = cl.load_pruned(cl.save_pruned(loaded, folder.parent / f"{name} ours again"))
    assert torch.equal(full_logits(again, ids), full_logits(loaded, ids))


def test_the_modeling_file_imports_only_what_every_user_has() -> None:
    code = Path(modeling_cocurve.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", code, re.MULTILINE))
    assert imported == {"__future__", "torch", "transformers", "typing", "warnings"}


def test_without_trust_nothing_is_loaded_wrongly(seen: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(seen["no FFN"]["folder"], trust_remote_code=False)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox"])
def test_other_families_say_that_they_need_us(tmp_path: Path, family: str) -> None:
    model, ids = tiny_model(family, "mha"), tiny_text(1).input_ids
    plan = plan_of(model, ["L0.ffn[0]", "L1.ffn[2]"])
    folder = cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    assert json.loads((folder / MANIFEST).read_text())["loads_with"] == "cocurve_lab"
    assert "auto_map" not in (folder / "config.json").read_text()
    assert "trust_remote_code" not in (folder / "README.md").read_text()
    with masked_by_hand(model, [plan.units.units[i] for i in plan.pruned]):
        masked = full_logits(model, ids)
    assert (full_logits(cl.load_pruned(folder), ids) - masked).abs().max() < 1e-5


@pytest.mark.slow
def test_the_harness_scores_it_by_path(tmp_path: Path) -> None:
    saved_case(tmp_path / "no heads", "no heads")
    found = run_bare("harness", [tmp_path / "no heads"], tmp_path / "home")["no heads"]
    assert found["score"] == pytest.approx(found["by hand"], abs=1e-4)


@pytest.mark.slow
def test_adapters_train_on_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    names = ("no heads", "no FFN")
    for name in names:
        saved_case(tmp_path / name, name)
    seen = run_bare("adapter", [tmp_path / name for name in names], tmp_path / "home")
    for name in names:
        found = seen[name]
        assert found["trained"] > 0, name
        assert found["after"] < found["before"], name
        assert found["read back"] == pytest.approx(found["after"], abs=1e-5), name
