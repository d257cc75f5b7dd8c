"""The card of a saved pruned model: what it states, and that its code repeats the model."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.judging.perplexity import Perplexity
from cocurve_lab.extensions.publishing.card import model_card
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.pruner.folder import CardFacts
from helpers.tiny_models import (
    GROUPS,
    tiny_model,
)

UNEVEN = ["L0.attention[0]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]


GAINS = {"L0.ffn[2]": 1.25, "L1.ffn[0]": 0.8}  # kept in every case but where a block is gone


def plan_of(
    model: PreTrainedModel, names: list[str], gains: dict[str, float] | None = None
) -> cl.Selection:
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, names)
    return plan.with_gains({units.index(name): gain for name, gain in (gains or {}).items()})


def card_of(folder: Path, facts: CardFacts | None = None) -> tuple[dict[str, Any], str]:
    """Front matter and text of the card of one tiny model."""
    model = tiny_model()
    plan = plan_of(model, UNEVEN, GAINS)
    cl.save_pruned(cl.prune(model, plan), folder, evaluation=facts, overwrite=True)
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def measured(value: float, protocol: str = "One text.") -> Perplexity:
    return Perplexity(value, 1.5, 10, protocol, 8, 4, (15.0,), (10,))


def test_the_card_states_what_was_given_and_no_more(tmp_path: Path) -> None:
    front, text = card_of(tmp_path / "small")
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert not {"base_model", "license"} & set(front)
    assert text.count("not measured") >= 3
    perplexities = {"dense_perplexity": measured(4.5), "pruned_perplexity": measured(9.25)}
    facts = CardFacts(
        "someone/a-model", "mit", 0.125, 0.03, "8 rows of a test text.", **perplexities
    )
    front, text = card_of(tmp_path / "small", facts)
    assert (front["base_model"], front["license"]) == ("someone/a-model", "mit")
    said = ("0.125 ± 0.03", "8 rows of a test text.", "| 9.25 (", "| 4.5 (", "One text.")
    assert all(words in text for words in said)
    assert "not measured" not in text
    with pytest.raises(cl.MismatchError):
        CardFacts(dense_perplexity=measured(4.0), pruned_perplexity=measured(5.0, "Another."))


def test_the_card_counts_what_was_removed(tmp_path: Path) -> None:
    _, text = card_of(tmp_path / "small")
    model = tiny_model()
    plan = plan_of(model, UNEVEN, GAINS)
    left = model.num_parameters() - plan.pruned_cost
    for number in (f"{plan.realized_ratio:.2%}", f"{plan.pruned_cost:,} ", f"{left:,} in float32"):
        assert number in text
    rows = re.findall(r"^\| (\d+(?: \| \d+){5}) \|$", text, re.MULTILINE)
    assert [list(map(int, row.split(" | "))) for row in rows] == [
        [0, 1, 16, 42, 1, 0],
        [1, 2, 32, 31, 0, 1],
        [2, 2, 32, 21, 0, 2],
    ]


@pytest.mark.parametrize("base", ['a/"b\nlicense: evil', "../elsewhere", "demo"])
def test_odd_names_do_not_break_the_front_matter(tmp_path: Path, base: str) -> None:
    front, text = card_of(tmp_path / "small", CardFacts(base_model=base, license="a: [b"))
    assert ("base_model" in front, front["license"]) == (False, "a: [b")
    assert f"# {' '.join(base.split())}, pruned\n" in text


def test_what_a_manifest_holds_stays_a_literal_in_the_code(tmp_path: Path) -> None:
    card_of(tmp_path / "small")
    manifest = json.loads((tmp_path / "small" / MANIFEST).read_text())
    evil = '"; __import__("os").abort(); "\n```\n'
    manifest |= {"selection_fingerprint": evil, "ffn_groups": evil, "guards": {evil: evil}}
    card = model_card(manifest | {"target": None}, CardFacts(), has_tokenizer=False)
    code = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[-1]
    calls = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert "__import__" not in calls


def test_the_card_repeats_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, range(0, len(units), 3)).with_gains({5: 1.5})
    pruned = cl.prune(model, plan)
    folder = cl.save_pruned(pruned, tmp_path / "small", tokenizer=tokenizer)
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    exec(code, names)
    again = names["pruned"].to("cpu").state_dict()
    assert all(torch.equal(again[key], value) for key, value in pruned.state_dict().items())
