"""Foreign text in every writer: parsed again, the structure is that of a harmless text."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

import cocurve_lab as cl
from cocurve_lab.extensions.publishing.card import as_markdown, as_markdown_text, model_card
from cocurve_lab.extensions.writing import as_csv
from cocurve_lab.pruner.folder import CardFacts
from cocurve_lab.pruner.manifest import manifest_on
from helpers.tiny_models import tiny_model

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


@hostile
def test_a_cell_of_csv_is_no_formula(text: str) -> None:
    table = as_csv([{"a": text, text: 1.5}, {"a": "x"}])
    read = list(csv.reader(io.StringIO(table, newline="")))
    assert [len(row) for row in read] == [2, 2, 2]
    for cell in (read[0][1], read[1][0]):
        assert cell.removeprefix("'") == text
        visible = re.sub(r"[\s\ufeff]", "", cell)
        assert visible[0] not in "=+-@"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [0, 5])
    found = manifest_on(cl.prune(model, plan))
    assert found is not None
    refit = {"kinds": ["ffn"], "ridge": 1.0, "positions": 9, "sequential": False, "sequences": 3}
    marks = {"calibration": "TEXT", "calibration_fingerprint": "0" * 64, "target": "dense"}
    changes: dict[str, Any] = {"repair": refit | marks, "interaction_strength": 1.0}
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
    assert yaml.safe_load(front)["license"] == text
    assert structure(body) == structure(card(manifest, "harmless").split("---\n", 2)[2])
    blocks = [token.content for token in MARKDOWN.parse(body) if token.info == "python"]
    for block in blocks:
        ast.parse(block)


def _front(made: str) -> list[str]:
    """The parts of a card whose front matter has lines of signs inside a value."""
    front, _, body = made.removeprefix("---\n").partition("\n---\n\n# ")
    return ["", front, "\n# " + body]
