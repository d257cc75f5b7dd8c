"""Texts of files and of the hub: read as what they are, refused by name, and made into rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.texts.documents import default_rows, read_documents
from cocurve_lab.models.identity import demo_folder
from cocurve_lab.models.loading import load_tokenizer
from helpers.tiny_models import opening_tokenizer, word_tokenizer

TEXTS = [" ".join(f"w{(7 * d + k) % 90}" for k in range(3 + d % 5)) for d in range(60)]


def as_csv(texts: list[str], delimiter: str = ",") -> bytes:
    table = io.StringIO()
    rows = [["id", "text"], *([number, text] for number, text in enumerate(texts))]
    csv.writer(table, delimiter=delimiter).writerows(rows)
    return table.getvalue().encode()


def as_parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pandas.DataFrame({"text": texts}).to_parquet(file)
    return file.getvalue()


RECORDS = [{"text": text} for text in TEXTS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode() + b"\n"
TABLE_FILES = {
    "a.jsonl": lambda: LINES,
    "a.ndjson": lambda: LINES,
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "lines.json": lambda: LINES,
    "lines.json.gz": lambda: gzip.compress(LINES),
    "a.json": lambda: json.dumps(RECORDS, indent=1).encode(),
    "texts.json": lambda: json.dumps(TEXTS).encode(),
    "inside.json": lambda: json.dumps({"version": 1, "data": RECORDS}).encode(),
    "a.csv": lambda: as_csv(TEXTS),
    "a.TSV": lambda: as_csv(TEXTS, "\t"),
    "a.parquet": lambda: as_parquet(TEXTS),
    "a.txt.gz": lambda: gzip.compress("\n\n".join(TEXTS).encode()),
}


@pytest.mark.parametrize("name", TABLE_FILES)
def test_files_are_read_as_what_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TABLE_FILES[name]())
    assert read_documents(tmp_path / name) == TEXTS
    settings = {"num_sequences": 2, "seq_len": 8, "positions_per_sequence": "all"}
    rows = cl.CalibrationSet.from_file(tmp_path / name, word_tokenizer(), **settings)
    assert rows.source == name
    assert torch.equal(
        rows.input_ids,
        cl.CalibrationSet.from_texts(TEXTS, word_tokenizer(), **settings).input_ids,
    )


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", "w1 w2\nw3\n\n\n  w4 \n\n", ["w1 w2\nw3", "w4"]),
        *(("a.txt", f"w1{end}w2{end}{end}w3", ["w1\nw2", "w3"]) for end in ("\n", "\r\n", "\r")),
        ("a.jsonl", '{"text": "w1 \u2028 w2 \x85 w3"}\n', ["w1 \u2028 w2 \x85 w3"]),
    ],
)
def test_documents_end_where_they_end(
    tmp_path: Path, name: str, content: str, documents: list[str]
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_documents(tmp_path / name) == documents


USER, OTHER = {"role": "user", "content": "w1"}, {"role": "x", "content": "w2"}
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
DATED = "{{ strftime_now('%d %b %Y, %-d %B') }}. " + TURNS  # the same on any day


@pytest.mark.parametrize(
    ("record", "written", "bare"),
    [
        ({"prompt": "w1 w2", "completion": " w3"}, "w1 w2 w3", "w1 w2 w3"),
        ({"messages": [USER, OTHER]}, "user: w1;x: w2;", "w1\n\nw2"),
        ({"prompt": [USER], "completion": [OTHER]}, "user: w1;x: w2;", "w1\n\nw2"),
    ],
    ids=["pair", "messages", "pair of chats"],
)
def test_chats_are_written_by_the_template(
    tmp_path: Path, record: Any, written: str, bare: str
) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(record))
    tokenizer, date = word_tokenizer(), "" if written == bare else "26 Jul 2024, 26 July. "
    for template, text in ((TURNS, written), (DATED, date + written), (None, bare)):
        tokenizer.chat_template = template
        assert read_documents(tmp_path / "chat.jsonl", tokenizer) == [text]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", b'{"text": "w1"}\n{', "line 2"),
        ("a.jsonl", b'{"text": "w1"}\n{"body": "x"}', "record 2"),
        ("a.jsonl", b'{"text": "w1"}\n["text"]', "record 2"),
        ("a.jsonl", b'{"text": 5}', "record 1"),
        ("a.jsonl", b"3", "record 1"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "messages"),
        ("a.jsonl", b'{"prompt": "w1", "completion": []}', "completion"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.json", b'[{"text": "w1"}, {"text": null}]', "record 2"),
        ("a.json", b"[]", "no record"),
        ("a.json", b'{"text": "w1"}\n{"text": ', "line 2"),
        ("a.json", b'[{"text": "w1"}', "JSON"),
        ("a.json", b'{"a": [1], "b": [2]}', "a, b"),
        ("a.csv", b"text\nw1,w2\n", "row 1"),
        ("a.csv", b"id,text\n1\n", "row 1"),
        ("a.csv", b"id,body\n1,w1\n", "id, body"),
        ("a.parquet", b"PAR1\x15\x04" + bytes(64) + b"PAR1", "parquet"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "gz"),
        ("a.jsonl.gz", LINES, "gz"),
        ("a.txt", "Grüße".encode("latin-1"), "UTF-8"),
        ("a.pdf", b"%PDF-1.7\xff\xfe", ".pdf file"),
        ("a.jsonl.zst", LINES, ".zst file"),
        ("a.html.gz", gzip.compress(b"<p>w1</p>", mtime=0), ".html file"),
        ("a.jsonl", b'[{"text": "w1"}]', "[{"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(cl.InputError, match=re.escape(named)):
        read_documents(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.txt"])
@pytest.mark.parametrize(("encoding", "end"), [("utf-8", "\n"), ("utf-8-sig", "\r\n")])
def test_a_byte_order_mark_is_no_text_and_line_ends_do_not_matter(
    tmp_path: Path, name: str, encoding: str, end: str
) -> None:
    json_lines = name.lower().endswith("jsonl")
    lines = [json.dumps({"text": text}) if json_lines else text for text in TEXTS]
    content = (end if json_lines else f"{end} {end}").join(lines)
    (tmp_path / name).write_bytes(content.encode(encoding))
    assert read_documents(tmp_path / name) == TEXTS


class FakeHub:
    """Stands in for the datasets package, and for what it streams."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.taken, self.asked, self.shuffled = error, 0, (), None

    def load_dataset(self, *asked: Any, **options: Any) -> FakeHub:
        self.asked = (*asked, options)
        if self.error is not None:
            raise self.error
        return self

    def shuffle(self, **options: Any) -> FakeHub:
        self.shuffled = options
        return self

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(10**9):
            self.taken += 1
            words = [f"w{number * step % 90}" for step in range(1, 41)]
            yield {"text": f"w{number // 90 % 90} {' '.join(words)}"}


@pytest.mark.parametrize("recipe", [{}, {"seed": 7}, {"recipe": "release", "seed": 42}])
def test_hub_text_is_streamed(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]) -> None:
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    settings = {"seq_len": 16, "positions_per_sequence": 4} | recipe
    built, held_out = cl.default_calibration("some/model", word_tokenizer(), 5, 2, **settings)
    assert hub.asked == ("allenai/c4", "en", {"split": "train", "streaming": True})
    assert hub.taken <= 512
    assert hub.shuffled == ({"seed": recipe["seed"], "buffer_size": 10_000} if recipe else None)
    assert (len(built), len(held_out)) == (5, 2)
    built.require_disjoint(held_out)


def test_without_a_hub_a_text_file_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    far: Any = FakeHub(ConnectionError("no route"))
    monkeypatch.setitem(sys.modules, "datasets", far)
    with pytest.raises(cl.InputError):
        cl.default_calibration("some/model", word_tokenizer(), 2, 1, seq_len=8)


def test_default_calibration_of_the_embedded_model() -> None:
    tokenizer = load_tokenizer()
    built, held_out = cl.default_calibration("demo", tokenizer, 6, 3, seq_len=80)
    assert built.source != held_out.source
    assert (len(built), len(held_out)) == (6, 3)
    built.require_disjoint(held_out)
    assert default_rows("demo", tokenizer, 6, seq_len=80).fingerprint == built.fingerprint
    with pytest.raises(cl.InputError):  # it is a file of its own
        cl.default_calibration("demo", tokenizer, 6, 10**5, seq_len=80)
    folder = cl.default_calibration(str(demo_folder()), tokenizer, 6, 3, seq_len=80)
    assert folder[0].fingerprint == built.fingerprint


def test_where_only_the_held_out_rows_lack_text_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(" ".join(f"w{number % 90}" for number in range(100)))
    ours = {"text_file": path, "seq_len": 8, "positions_per_sequence": 4}
    for rows in ((4, 2), (20, 2), (4, 0)):
        with pytest.raises(cl.InputError):
            cl.default_calibration("some/model", word_tokenizer(), *rows, **ours)
    assert len(default_rows("some/model", word_tokenizer(), 4, **ours)) == 4
    path.write_text(path.read_text() + "\n\n" + path.read_text()[4:])
    several, _ = cl.default_calibration("some/model", word_tokenizer(), 4, 2, **ours)
    alone = default_rows("some/model", word_tokenizer(), 4, **ours)
    assert alone.fingerprint == several.fingerprint


# Recipes and mixes --------------------------------------------------------------------------------

FEW: dict[str, Any] = {"positions_per_sequence": 5}
LONG = [" ".join(f"w{(11 * d + k) % 90}" for k in range(30 + d % 6)) for d in range(40)]


def test_the_release_s_recipe_makes_its_rows_and_positions() -> None:
    asked = [*LONG, LONG[5] + " A. w1", "Choices: " + LONG[5], LONG[5] + "\nA) w2"]
    tokenizer = opening_tokenizer("<unk>")
    options: dict[str, Any] = {"seq_len": 16, "recipe": "release", "seed": 3}
    rows = cl.CalibrationSet.from_texts(iter(asked), tokenizer, 40, **options, **FEW)
    kept = [text.split() for text in LONG if len(text.split()) >= 32]
    assert 0 < len(kept) < len(LONG)
    end = tokenizer.eos_token_id
    joined = [token for text in kept for token in (*(int(word[1:]) + 2 for word in text), end)]
    assert len(joined) > 40 * 16
    for n, (row, drawn) in enumerate(zip(rows.input_ids, rows.scored, strict=True)):
        chunk = [token for token in joined[16 * n : 16 * n + 16] if token != end]
        wanted = [1, *chunk][:16]
        assert row.tolist() == wanted + [end] * (16 - len(wanted))
        chosen = np.random.default_rng(3 + n).choice(np.arange(len(wanted) - 1), 5, replace=False)
        assert drawn.tolist() == sorted(chosen)
    every = cl.CalibrationSet.from_texts(
        iter(asked), tokenizer, 40, positions_per_sequence="all", **options
    )
    shortest = int((rows.input_ids != end).sum(1).min())
    assert torch.equal(every.input_ids, rows.input_ids)
    assert every.scored.tolist() == [list(range(shortest - 1))] * 40
    wide = [f"w1\u00a0{text}\t\tw2\n\n\n\nw3 " for text in LONG]
    narrow = [f"w1 {text} w2\n\nw3" for text in LONG]
    spaced = (
        cl.CalibrationSet.from_texts(iter(t), tokenizer, 40, **options, **FEW)
        for t in (wide, narrow)
    )
    assert len({found.fingerprint for found in spaced}) == 1
    with pytest.raises(cl.InputError):
        cl.CalibrationSet.from_texts(TEXTS, tokenizer, 4, 16, 5, recipe="release")


def test_files_are_mixed_by_their_shares(tmp_path: Path) -> None:
    for name, first in (("a.txt", 0), ("b.txt", 45)):
        words = torch.randint(
            first, first + 45, (300, 3), generator=torch.Generator().manual_seed(0)
        )
        texts = [" ".join(f"w{word}" for word in row) for row in words.tolist()]
        (tmp_path / name).write_text("\n\n".join(texts))
    mix = {tmp_path / "a.txt": 3, tmp_path / "b.txt": 1}
    options: dict[str, Any] = {"seq_len": 16, "positions_per_sequence": "all"}
    rows = cl.CalibrationSet.from_file(mix, word_tokenizer(), num_sequences=40, **options)
    words = rows.input_ids[rows.input_ids > 1]
    assert (words < 47).double().mean() == pytest.approx(0.75, abs=0.02)
    assert rows.source == "0.75 a.txt + 0.25 b.txt"
    built, judge = cl.default_calibration("any", word_tokenizer(), 20, 20, mix, **options)
    assert torch.equal(torch.cat([built.input_ids, judge.input_ids]), rows.input_ids)
    with pytest.raises(cl.InputError):
        default_rows("any", word_tokenizer(), 110, mix, **options)
    for wrong in ({}, {tmp_path / "a.txt": 0}, {tmp_path / "a.txt": float("inf")}):
        with pytest.raises(cl.InputError):
            cl.CalibrationSet.from_file(wrong, word_tokenizer(), num_sequences=2, **options)
