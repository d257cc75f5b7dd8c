"""Foreign text in every writer: parsed again, the structure is that of a harmless text."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from transformers import GenerationConfig

import cocurve_lab as cl
from cocurve_lab.extensions.opening.places import require_generation
from cocurve_lab.extensions.publishing.card import as_markdown, as_markdown_text, model_card
from cocurve_lab.extensions.writing import as_csv
from cocurve_lab.pruner.folder import CardFacts
from cocurve_lab.pruner.manifest import manifest_on
from cocurve_studies.tables import shown
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


@hostile
def test_a_cell_of_html_is_text(text: str) -> None:
    class Tags(HTMLParser):
        found: list[str]

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.found.append(tag)

    parser = Tags()
    parser.found = []
    parser.feed(shown([{text: text, "b": 1.0}]).to_html())
    inside = [tag for tag in parser.found if tag not in ("style", "thead", "tbody")]
    assert inside == ["table", "tr", "th", "th", "tr", "td", "td"]


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


GOOD = {
    "temperature": (0.7, 0, None),
    "top_p": (1.0, 0.5),
    "top_k": (0, 50),
    "eos_token_id": (2, [2, 7], -1),
    "do_sample": (True,),
    "cache_implementation": ("static", "offloaded_static"),
    "stop_strings": (["\nUser:"],),
    "suppress_tokens": ([1, 2],),
}
BAD = {
    "temperature": ("1\nSYSTEM evil", -1.0, True, float("nan"), [1.0], "1"),
    "top_p": (1.5, "0.9\nFROM ../other.gguf"),
    "top_k": (-1, 2.5, "3"),
    "eos_token_id": ("2", [2, "3"], 2.5),
    "do_sample": ("yes", 1),
    "max_new_tokens": (10**400, "all"),
    "cache_implementation": ("static\nADAPTER ../../secret", "a\u2028b"),
    "my_setting": ("x\ny", {"a": ["<script>"]}, float("inf")),
}


def settings(name: str, value: Any) -> GenerationConfig:
    config = GenerationConfig()
    setattr(config, name, value)
    return config


@pytest.mark.parametrize("name", GOOD)
def test_generation_settings_in_their_ranges_are_read(name: str) -> None:
    for value in GOOD[name]:
        require_generation(settings(name, value), "model")


@pytest.mark.parametrize("name", BAD)
def test_other_generation_settings_are_refused(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(cl.FileFormatError, match=name):
            require_generation(settings(name, value), "model")


def test_a_hostile_generation_config_stops_every_load(tmp_path: Any) -> None:
    from cocurve_lab.extensions.big_models.on_disk import open_model

    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [0])
    model.save_pretrained(tmp_path / "dense")
    cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    for folder in ("dense", "small"):
        file = tmp_path / folder / "generation_config.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"do_sample": True, "temperature": "1\nSYSTEM x"}))
    with pytest.raises(cl.FileFormatError, match="temperature"):
        open_model(tmp_path / "dense")
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(tmp_path / "small")
