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
from markdown_it import MarkdownIt
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.judging.perplexity import Perplexity
from cocurve_lab.extensions.publishing.card import as_markdown, as_markdown_text, model_card
from cocurve_lab.pruner.folder import CardFacts
from cocurve_lab.pruner.manifest import manifest_on
from helpers.tiny_models import GROUPS, tiny_model

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


# Foreign text: parsed again, the structure is that of a harmless text --------------------------

HOSTILE = {
    "a tag": '"><script>alert(1)</script>',
    "a link": "x](javascript:alert(1)) [y](http://e)",
    "a picture": "![x](http://e/x.png)",
    "an address": "<http://e> https://e.example www.e.example",
    "a comment": "<!-- x",
    "an entity": "&lt;b&gt; &#124;",
    "a cell": "a | b \\| c \\\\| d",
    "lines": "x\n\n# Title\n\n- item\r\n***\x0b\x85\u2028y",
    "code": "`x` ``y``\n```python\nimport os\n```",
    "emphasis": "*x* **y** _z_ ~~w~~",
    "front matter": "x\n---\nlicense: mit\n---\n",
    "a template": "{{ 7 * 7 }}{% raw %}",
    "a formula": "=1+1",
    "a spaced formula": " \u00a0\ufeff=cmd|' /C calc'!A0",
    "a formula below": "\n@SUM(1)",
    "a zero": "x\x00\x1b[31my",
    "one sign": "|",
    "a call": '"; __import__("os").abort(); "\n```\n',
}
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})


def structure(markdown: str) -> list[Any]:
    """Types of all tokens, inside lines too; not the texts, nor how many there are in a row."""
    found: list[Any] = []
    for token in MARKDOWN.parse(markdown):
        found.append((token.type, token.tag))
        found += [child.type for child in token.children or () if child.type != "text"]
    return found


def contents(markdown: str) -> str:
    tokens = MARKDOWN.parse(markdown)
    return "".join(child.content for token in tokens for child in token.children or ())


@hostile
def test_a_line_of_markdown_shows_the_text(text: str) -> None:
    line = f"# {as_markdown_text(text)}, pruned"
    assert structure(line) == structure("# harmless, pruned")
    plain = "".join(c if c.isprintable() else " " for c in text)
    assert contents(line) == f"{' '.join(plain.split())}, pruned"


@hostile
def test_a_cell_stays_in_its_markdown_table(text: str) -> None:
    table = as_markdown((text, "b"), [("c", text), (text, 1)])
    cells = [token for token in structure(table) if token in (("td_open", "td"), ("th_open", "th"))]
    assert len(cells) == 6
    assert len(table.splitlines()) == 4


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [0, 5])
    found = manifest_on(cl.prune(model, plan))
    assert found is not None
    refit = {"kinds": ["ffn"], "ridge": 1.0, "positions": 9, "sequential": False, "sequences": 3}
    marks = {"calibration": "TEXT", "calibration_fingerprint": "0" * 64, "target": "dense"}
    changes: dict[str, Any] = {"repair": refit | marks, "interaction_strength": 1.0}
    changes |= {"selection_fingerprint": "TEXT", "ffn_groups": "TEXT"}
    known = {"parameters": 1, "loads_with": "stock", "base_model": "TEXT", "target": "TEXT"}
    return found | changes | known | {"guards": {"depth": "TEXT"}}


def card(manifest: dict[str, Any], text: str) -> str:
    changed = json.loads(json.dumps(manifest).replace('"TEXT"', json.dumps(text)))
    facts = CardFacts(kl=0.1, kl_text=text, base_model=text, license=text)
    return model_card(changed, facts, has_tokenizer=False)


@hostile
def test_a_card_keeps_its_structure(manifest: dict[str, Any], text: str) -> None:
    made = card(manifest, text)
    _, front, body = made.split("---\n", 2) if text.count("---") == 0 else _front(made)
    stated, harmless = yaml.safe_load(front), card(manifest, "harmless").split("---\n", 2)[2]
    assert (stated["license"], "base_model" in stated) == (text, False)
    assert structure(body) == structure(harmless)
    assert code_of(body) == code_of(harmless)


def code_of(markdown: str) -> list[type[ast.AST]]:
    """The types of all nodes of all Python of a card: what is foreign stays one literal."""
    blocks = [token.content for token in MARKDOWN.parse(markdown) if token.info == "python"]
    return [type(node) for block in blocks for node in ast.walk(ast.parse(block))]


def _front(made: str) -> list[str]:
    """The parts of a card whose front matter has lines of signs inside a value."""
    front, _, body = made.removeprefix("---\n").partition("\n---\n\n# ")
    return ["", front, "\n# " + body]
