"""The paper's numbers against its TeX and against sums in it; its models; the release's files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

import cocurve_lab as cl
from cocurve_lab.evaluation.suites import PAPER_HARNESS
from cocurve_lab.extensions.choosing.settings import RELEASE_GUARDS
from cocurve_lab.solver.guards import FREE
from cocurve_studies.paper.published import (
    paper_names,
    published,
    read_data,
    recognized,
    reference_metrics,
)

DATA = Path(__file__).resolve().parents[2] / "data" / "paper_results.json"
STORED: dict[str, Any] = json.loads(DATA.read_text())
COMMONSENSE = [name for name, task in PAPER_HARNESS.items() if task.average is not None]
# the paper's own text, which is not in the repository; beside a checkout or above a worktree of it
TEX = [p for up in Path(__file__).parents if (p := up / "shared" / "paper.tex").is_file()]


def rows() -> list[dict[str, Any]]:
    return [row for name in paper_names() for row in published(name).rows]


# The TeX ------------------------------------------------------------------------------------------
LABELS = {  # columns of the TeX that name a row, where they are not the first alone
    "tab:cross-model": (0, 1),
    "tab:hparam": (0, 1),
    "tab:recovery": (0, 1),
    "tab:ablation-full": (0, 1),
    "tab:ablation-edge": (0, 4),
    "tab:gsm8b": (0, 2),
}
IN_PERCENT = {("tab:gsm8b", "gsm8k"), ("tab:efficiency-band", "removed share")}
KEYS = {"model", "method", "ratio", "interaction_strength"}
TEXT = {"tab:notation", "tab:datasets", "tab:positioning"}  # tables without numbers


def body(label: str) -> list[list[str]]:
    """The cells of a table, without its head and without commands."""
    after = TEX[0].read_text().split(f"\\label{{{label}}}")[1]
    text = after.split("\\end{tabular}")[0].split("\\midrule", 1)[1]
    text = text.replace("\\method", "CoCurve").replace("\\nemobc", ".015").split("Estimation &")[0]
    for pattern in (
        r"(?<!\\)%.*",
        r"\\phantom{.*?}",
        r"\^(\\\w+|{[^}]*})",
        r"\\(multi\w+|cmidrule)({\w+}|)",
    ):
        text = re.sub(pattern, " ", text)
    text = re.sub(r"\\[a-zA-Z]+({(headgray|oursblue|l|c|\*)})?|[{}$]", " ", text)
    return [line.split("&") for line in text.split("\\\\")]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", text)]


def names(text: str, known: set[str]) -> list[str]:
    return re.findall("|".join(map(re.escape, sorted(known, key=len, reverse=True))), text)


def without_repeats(found: list[str]) -> list[str]:
    return [name for name, _ in groupby(found)]


@pytest.mark.skipif(not TEX, reason="the paper's TeX is not beside the repository")
@pytest.mark.parametrize("label", STORED["tables"])
def test_every_stored_number_is_in_the_paper_and_every_one_there_is_stored(label: str) -> None:
    cells, table = body(label), STORED["tables"][label]
    labels = LABELS.get(label, (0,))
    stated = [
        [each for at, cell in enumerate(line) if at not in labels for each in numbers(cell)]
        for line in cells
    ]
    if label == "tab:seedvar":  # the one whose rows are our columns
        stated = [list(line) for line in zip(*filter(None, stated), strict=True)]
    mine: list[float] = []
    # the values of r and of the rows of calibration text are in the names of the variants
    named = KEYS if label == "tab:sensitivity" else {*KEYS, "variant"}
    for row in table["rows"]:
        for column, value in zip(table["columns"], row, strict=True):
            if column not in named and value is not None:
                scale = 100 if (label, column) in IN_PERCENT else 1
                mine += [scale * found for found in numbers(str(value))]
    assert mine == pytest.approx(list(chain.from_iterable(stated)))
    for column in ("model", "method"):
        if column in table["columns"]:
            ours = [row[table["columns"].index(column)] for row in table["rows"]]
            text = " ".join(line[at] for line in cells for at in labels if at < len(line))
            theirs = names(text, {row[column] for row in rows()})
            ours = [name for name in ours if name in theirs]
            assert without_repeats(ours) == without_repeats(theirs)


@pytest.mark.skipif(not TEX, reason="the paper's TeX is not beside the repository")
def test_no_table_of_the_paper_is_missing() -> None:
    labels = set(re.findall(r"\\label{(tab:[^}]+)}", TEX[0].read_text()))
    assert STORED["tables"].keys() == labels - TEXT


def test_averages_of_the_papers_rows_are_those_it_states() -> None:
    """Each checks seven numbers: a wrong digit moves the mean."""
    checked = 0
    for row in rows():
        if {"average", "boolq"} <= row["values"].keys():
            mean = np.mean([row["values"][name] for name in COMMONSENSE])
            assert mean == pytest.approx(row["values"]["average"], abs=6e-4), row
            checked += 1
    assert checked == 11


def test_all_eleven_models_have_numbers_and_guards() -> None:
    assert len(paper_names()) == 11
    for name in paper_names():
        assert published(name).rows
        assert published(name).guards_at(0.4) == RELEASE_GUARDS
    llama = cl.Guards(layer_cap=0.3, protect_first=2, protect_last=2)
    assert published("Llama-3.1-8B-Instruct").guards_at(0.2) == llama
    assert published("Phi-4").guards_at(0.2) == RELEASE_GUARDS
    assert published("") == ("", [], "")
    assert published("").guards_at(0.2) == FREE


@dataclass(frozen=True)
class Tokenizer:
    vocabulary: int
    chat_template: str | None = None

    def __len__(self) -> int:
        return self.vocabulary


@pytest.mark.parametrize("name", paper_names())
def test_a_model_is_recognized_by_its_shape_and_tokenizer(name: str) -> None:
    facts = STORED["models"][name]
    for checkpoint in facts["checkpoints"]:
        values = read_data("paper_models.json")[checkpoint]
        kind = values.pop("model_type")
        config = CONFIG_MAPPING[kind](**values | {"pad_token_id": None})
        chat = "{{ messages }}" if facts.get("chat") else None
        assert recognized(config, Tokenizer(values["vocab_size"], chat)) == name
        assert recognized(config, Tokenizer(values["vocab_size"] // 2, chat)) == ""
        other = recognized(config, Tokenizer(values["vocab_size"], None if chat else "{{ m }}"))
        assert other == ("" if "chat" in facts else name)  # a base model of the same shape
        config.num_hidden_layers += 1
        assert recognized(config, Tokenizer(values["vocab_size"], chat)) == ""


def write(folder: Path, content: Any) -> Path:
    (folder / "r20").mkdir(exist_ok=True)
    (folder / "r20" / "reference_metrics.json").write_text(json.dumps(content))
    return folder


def test_reference_metrics_are_those_of_the_papers_tables(tmp_path: Path) -> None:
    content = {
        "wikitext": {"metric": "perplexity", "nll": 7.0, "ppl": 12.5, "token_limit": None},
        "mmlu": {"accuracy_norm": 0.38, "accuracy_raw": 0.35, "num_samples": 14042},
        "boolq": {"accuracy_norm": 0.1, "accuracy_raw": 0.78},
        "race": {"accuracy_norm": 0.5, "accuracy_raw": 0.5},
        "gsm8k": {"accuracy": 0.04},
    }
    found = {"wikitext2": 12.5, "mmlu": 0.38, "boolq": 0.78, "gsm8k": 0.04}
    assert reference_metrics(write(tmp_path, content), 0.2) == found
    assert reference_metrics(write(tmp_path, {"wikitext": 9, "mcavg": 0.6}), 0.2) == {
        "wikitext2": 9.0
    }


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1]", ""),
        ('{"mmlu": "high"}', "'high'"),
        ('{"ptb": true}', "ptb is True"),
        ('{"ptb": -5}', "ptb is -5"),
        ('{"wikitext": {"ppl": 0.0}}', "wikitext is"),
        ("git-lfs", ""),
    ],
)
def test_another_layout_is_named(content: str, named: str, tmp_path: Path) -> None:
    (write(tmp_path, {}) / "r20" / "reference_metrics.json").write_text(content)
    with pytest.raises(cl.FileFormatError, match=named or "reference_metrics"):
        reference_metrics(tmp_path, 0.2)
    with pytest.raises(cl.InputError, match="r30"):
        reference_metrics(tmp_path, 0.3)
