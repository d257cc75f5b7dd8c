"""Saved folders of every family, read without the library and with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cocurve_lab as cl
from cocurve_lab.models.identity import MANIFEST
from helpers.bare_process import run_bare, save_expected
from helpers.contract import by_hand
from helpers.tiny_models import (
    FURTHER,
    GROUPS,
    HYBRIDS,
    MULTIMODAL,
    masked_by_hand,
    tiny_model,
    tiny_text,
)

# transformers alone cannot give one layer fewer heads in these: layers of different widths need a
# class of the modeling file
ONLY_US = ("helium", "stablelm", "stablelm+norms", "gemma4_unified_text", "qwen3_5", *HYBRIDS)
EVEN = ("gemma3", "qwen2_5_vl", "llava", "qwen3_5")
SAVED = [
    *((family, "heads") for family in FURTHER),
    *((family, "uneven") for family in (*MULTIMODAL, "lfm2")),
    *((family, "even") for family in EVEN),
    *((name, "even") for name in HYBRIDS if not HYBRIDS[name][1].get("num_experts_per_tok")),
]


def plan_of(model: Any, name: str) -> cl.Selection:
    """The same units in each layer; a layer without heads beside one without FFN; or one head."""
    units = cl.enumerate_units(model, GROUPS)
    if name == "even":
        gone = [i for i, u in enumerate(units) if u.index == 0 and u.kind != "expert"]
        return cl.Selection.from_pruned(units, gone)
    first = min(unit.layer for unit in units if unit.kind == "attention")
    heads = [units.index(f"L{first}.attention[0]")]
    if name == "uneven":
        heads = [i for i, u in enumerate(units) if (u.layer, u.kind) == (first, "attention")]
    ffn = [i for i, u in enumerate(units) if (u.layer, u.kind) == (1 - first, "ffn")]
    return cl.Selection.from_pruned(units, [*heads, *ffn, units.index(f"L{first}.ffn[2]")])


def can_be_read(family: str, plan: str) -> bool:
    """Qwen2.5-VL divides its hidden size by its heads, so it cannot have fewer of them."""
    return family not in ONLY_US if plan != "even" else family != "qwen2_5_vl"


@pytest.fixture(scope="module")
def saw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the library sees of each saved folder that it can read."""
    place, found = tmp_path_factory.mktemp("saved"), {}
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


@pytest.mark.parametrize(("family", "plan"), SAVED)
def test_a_saved_folder_loads(saw: dict[str, Any], family: str, plan: str) -> None:
    seen = saw[f"{family} {plan}"]
    manifest = json.loads((seen["folder"] / MANIFEST).read_text())
    by_plan = "stock" if plan == "even" else "own code"
    readable = can_be_read(family, plan)
    assert manifest["loads_with"] == (by_plan if readable else "cocurve_lab")
    expected = load_file(f"{seen['folder']}.expected.safetensors")
    loaded = cl.load_pruned(seen["folder"], device="cpu")
    assert (loaded(expected["input_ids"]).logits - expected["logits"]).abs().max() < 1e-5
    if readable:
        assert not any(seen["info"].values())
        assert max(seen["difference"], seen["eager"]) < 1e-5
        assert seen["generated"]
    # the parts that read images, and what mixes tokens without attention, have the bits they had
    weights = loaded.state_dict()
    for name, weight in seen["dense"].items():
        parts = ("vis", "projector", "linear_attn", "mamba", ".conv.")
        if any(part in name for part in parts):
            assert torch.equal(weights[name], weight), name
