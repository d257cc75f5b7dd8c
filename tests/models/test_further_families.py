"""Families of shapes that others have: one row of the contract each, on one tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cocurve_lab as cl
from cocurve_lab.models import families
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.families import FAMILIES, Family
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.models.layers import weights_of
from helpers.bare_process import run_bare, save_expected
from helpers.contract import TEXT, by_hand, measure_contract, plans
from helpers.tiny_models import (
    EVERY_FAMILY,
    EXPERT_FAMILIES,
    FURTHER,
    GROUPS,
    HYBRIDS,
    MULTIMODAL,
    full_logits,
    masked_by_hand,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

# transformers alone cannot give one layer fewer heads in these
ONLY_US = ("helium", "stablelm", "stablelm+norms", "gemma4_unified_text")


def pruned_of(family: str) -> tuple[Any, cl.Selection, Any]:
    """A tiny model, a plan that takes a head of layer 0 and the FFN of layer 1, and the rest."""
    model = tiny_model(family, layers=2)
    units = cl.enumerate_units(model, GROUPS)
    gone = [i for i, unit in enumerate(units) if (unit.layer, unit.kind) == (1, "ffn")]
    plan = cl.Selection.from_pruned(units, [0, units.index("L0.ffn[2]"), *gone])
    return model, plan, cl.prune(model, plan)


@pytest.fixture(scope="module")
def saw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the library sees of each saved folder that it can read."""
    place, found = tmp_path_factory.mktemp("further"), {}
    for family in FURTHER:
        model, plan, pruned = pruned_of(family)
        folder = cl.save_pruned(pruned, place / family)
        ids = tiny_text(2, 14).input_ids
        with masked_by_hand(model, *by_hand(plan)):
            save_expected(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder)
        found[family] = {"folder": folder}
    folders = [place / family for family in FURTHER if family not in ONLY_US]
    for family, seen in run_bare("read_it", folders, place / "home").items():
        found[family] |= seen
    return found


@pytest.mark.parametrize("family", FURTHER)
def test_the_contract(family: str) -> None:
    found = measure_contract(family, "gqa", layers=2, save=False)
    assert (found.inventory, found.parameters) == (0, 0)
    assert found.logits < 1e-5
    assert found.h_error < 1e-5
    assert found.texts_equal


@pytest.mark.parametrize("family", FURTHER)
def test_a_saved_folder_loads(saw: dict[str, Any], family: str) -> None:
    folder = saw[family]["folder"]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["loads_with"] == ("cocurve_lab" if family in ONLY_US else "own code")
    expected = load_file(f"{folder}.expected.safetensors")
    loaded = cl.load_pruned(folder, device="cpu")
    assert (loaded(expected["input_ids"]).logits - expected["logits"]).abs().max() < 1e-5
    if family not in ONLY_US:
        assert not any(saw[family]["info"].values()), "missing or unexpected weights"
        assert max(saw[family]["difference"], saw[family]["eager"]) < 1e-5
        assert saw[family]["generated"]


@pytest.mark.parametrize("family", FURTHER)
def test_it_is_streamed_and_cut_on_disk(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, plan, pruned = pruned_of(family)
    model.save_pretrained(tmp_path / "dense")
    word_tokenizer().save_pretrained(tmp_path / "dense")
    streamed, _ = cl.load_model(tmp_path / "dense", device="cpu", stream=True)
    stream = weights_of(streamed)
    assert sorted(stream.layers) == [0, 1]
    assert torch.equal(full_logits(streamed, TEXT.input_ids), full_logits(model, TEXT.input_ids))
    found = cl.load_pruned(cl.prune(streamed, plan, out=tmp_path / "small"), device="cpu")
    weights, expected = found.state_dict(), pruned.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


ALL = [*dict(EVERY_FAMILY), *FURTHER]


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_logits_are_the_models_own(family: str) -> None:
    model = tiny_model(family, dict(EVERY_FAMILY).get(family, "gqa"), layers=2)
    architecture = describe(model)
    found = architecture.logits(architecture.last_hidden(TEXT.input_ids))
    torch.testing.assert_close(found.double(), full_logits(model, TEXT.input_ids))


def test_every_declared_family_is_tested() -> None:
    """Of those that the installed transformers has."""
    from transformers import CONFIG_MAPPING

    every = [*ALL, *EXPERT_FAMILIES, *HYBRIDS, *MULTIMODAL]
    models = [tiny_model(family, "mha") for family in every]
    tested = {model.config.get_text_config().model_type for model in models}
    assert {model.config.model_type for model in models} >= set(families.MULTIMODAL)
    declared = {name for family in FAMILIES for name in family.model_types}
    assert tested == {name for name in declared if name in CONFIG_MAPPING}


# Entries from outside -----------------------------------------------------------------------------


def test_a_family_is_registered_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", [*FAMILIES])
    model = tiny_model("starcoder2")
    model.config.model_type = "their_own"
    with pytest.raises(cl.ArchitectureError, match="register_family"):
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


def test_experts_beside_a_dense_ffn_are_refused() -> None:
    model = tiny_model("doge", is_moe=True, num_experts=16, num_experts_per_tok=2)
    with pytest.raises(cl.ArchitectureError, match="several of them together"):
        cl.enumerate_units(model)
