"""Pruned models that other tools trained and saved, or use: no manifest, only their own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import cocurve_lab as cl
from cocurve_lab.extensions.publishing import modeling_cocurve
from cocurve_lab.models.identity import MANIFEST, weight_marks
from helpers.tiny_models import GROUPS, full_logits, tiny_model, tiny_text, word_tokenizer

UNEVEN = ["L0.attention[0]", "L0.attention[1]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]
GONE = [f"L1.ffn[{group}]" for group in range(GROUPS)]
FAMILIES = {
    "llama": ("llama", UNEVEN, {"attention_bias": True}),
    "phi3": ("phi3", [*UNEVEN[:2], *GONE], {}),
    "tied gemma": ("gemma3_text", UNEVEN[1:], {}),
}


def pruned(family: str = "llama", names: list[str] = UNEVEN, **changes: Any) -> Any:
    model = tiny_model(family, "gqa", **changes)
    return cl.prune(model, cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), names))


def trained(folder: Path) -> Any:
    """What a trainer holds: the saved class, with other weights."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(modeling_cocurve, name).from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn_like(weight)
    return model


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A folder that a trainer saved, with a tokenizer."""
    trained(cl.save_pruned(pruned(), tmp_path / "small")).save_pretrained(tmp_path / "tuned")
    word_tokenizer().save_pretrained(tmp_path / "tuned")
    return tmp_path / "tuned"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_trainer_saved_is_read_and_pruned_again(tmp_path: Path, name: str) -> None:
    """And the object itself, saved by us."""
    family, names, changes = FAMILIES[name]
    small = pruned(family, names, **changes)
    model = trained(cl.save_pruned(small, tmp_path / "small"))
    model.save_pretrained(tmp_path / "tuned")
    loaded: Any = cl.load_pruned(tmp_path / "tuned")
    ids = tiny_text(2).input_ids
    assert (full_logits(loaded, ids) - full_logits(model, ids)).abs().max() < 1e-5
    assert loaded.cocurve_manifest["layers"] == small.cocurve_manifest["layers"]
    for number, each in enumerate((loaded, model)):
        again = cl.save_pruned(each, tmp_path / f"again {number}")
        manifest = json.loads((again / MANIFEST).read_text())
        assert manifest["weights_since_pruning"] == "trained elsewhere"
        assert weight_marks(cl.load_pruned(again)) == weight_marks(loaded)
    plan = cl.Selection.from_pruned(cl.enumerate_units(loaded, GROUPS), ["L2.ffn[1]"])
    manifest = cl.prune(cl.load_pruned(again), plan, verify=tiny_text(1)).cocurve_manifest
    (first,) = manifest["earlier_rounds"]
    assert (first["weights_since_pruning"], first["pruned_units"]) == ("trained elsewhere", [])
    assert manifest["base_model"] is None


def test_verbs_read_it(tuned: Path, tmp_path: Path) -> None:
    from cocurve_lab.cli import main

    plan = cl.Selection.from_pruned(cl.enumerate_units(cl.load_pruned(tuned)), ["L2.ffn[1]"])
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "text.txt").write_text("\n\n".join(["w1 w2 w3 w4 w5 w6 w7"] * 40))
    rows = ("--sequences", "4", "--length", "8", "--out", str(tmp_path / "H"))
    for command in (
        ("inventory", str(tuned)),
        ("build", str(tuned), "--text", str(tmp_path / "text.txt"), *rows),
        ("export", str(tuned), "--gguf", str(tmp_path / "a.gguf"), "--no-tokenizer"),
        ("prune", str(tuned), str(tmp_path / "plan.json"), "--out", str(tmp_path / "twice")),
    ):
        assert main([*command]) == 0
    memory = cl.prune(cl.load_pruned(tuned), plan)
    assert weight_marks(cl.load_pruned(tmp_path / "twice")) == weight_marks(memory)
    with pytest.raises(cl.InputError):
        cl.load_model(tuned)


def test_a_separate_head_survives_a_configuration_that_ties_it(tuned: Path) -> None:
    before = cl.load_pruned(tuned)
    edit(tuned, tie_word_embeddings=True)
    assert weight_marks(cl.load_pruned(tuned)) == weight_marks(before)


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


def test_a_folder_with_an_adapter_is_refused(tuned: Path) -> None:
    (tuned / "adapter_config.json").write_text("{}")
    with pytest.raises(cl.InputError):
        cl.load_pruned(tuned)


@pytest.mark.parametrize(
    "own",
    [
        {"1": {"intermediate_size": 10**6}},
        {"1": {"intermediate_size": "7"}},
        [1],
        {"1": 3},
    ],
    ids=str,
)
def test_widths_that_cannot_be_are_refused(tuned: Path, own: Any) -> None:
    edit(tuned, per_layer_config=own)
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(tuned)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_classifier_is_made_of_it(tmp_path: Path, family: str) -> None:
    small = pruned(family, UNEVEN[1:])
    folder = cl.save_pruned(small, tmp_path / "small")
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, num_labels=3
    ).eval()
    ids = tiny_text(2).input_ids
    with torch.no_grad():
        hidden = small.base_model(ids).last_hidden_state[:, -1]
        assert (model(ids[:1]).logits - model.score(hidden[:1])).abs().max() < 1e-5
