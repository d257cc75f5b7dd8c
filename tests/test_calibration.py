"""Calibration: rows always full, positions that can be scored, and no text used twice."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.texts.documents import default_rows, read_documents
from cocurve_lab.models.identity import demo_folder
from helpers.tiny_models import GROUPS, opening_tokenizer, tiny_model, tiny_text, word_tokenizer

TEXTS = [" ".join(f"w{(7 * d + k) % 90}" for k in range(3 + d % 5)) for d in range(60)]


def pack(texts: Any = TEXTS, **options: Any) -> cl.CalibrationSet:
    settings = {"num_sequences": 4, "seq_len": 16, "positions_per_sequence": 5} | options
    return cl.CalibrationSet.from_texts(texts, word_tokenizer(), **settings)


def test_documents_are_joined_by_the_end_token_and_cut() -> None:
    rows = pack(iter(TEXTS))  # a stream is taken as it comes
    expected = [token for text in TEXTS for token in [*(int(w[1:]) + 2 for w in text.split()), 0]]
    assert rows.input_ids.flatten().tolist() == expected[:64]
    assert rows.input_ids.shape == (4, 16)


def test_rows_take_all_the_text_there_is() -> None:
    tokens = sum(len(text.split()) + 1 for text in TEXTS)
    assert len(pack(num_sequences=tokens // 16)) == tokens // 16
    with pytest.raises(cl.InputError, match=f"has {tokens} tokens, but {tokens // 16 + 1} rows"):
        pack(num_sequences=tokens // 16 + 1)


def test_lists_are_shuffled_by_the_seed_and_repeatable() -> None:
    a, b, c = pack(seed=1), pack(seed=1), pack(seed=2)
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert torch.equal(a.input_ids, b.input_ids)
    assert torch.equal(a.scored, b.scored)
    assert not torch.equal(a.input_ids, c.input_ids)
    assert not torch.equal(a.scored, c.scored)
    assert a.seed == 1


def test_positions_are_distinct_ascending_and_have_a_next_token() -> None:
    rows = pack(num_sequences=20, positions_per_sequence=14)
    assert rows.scored.shape == (20, 14)
    assert (rows.scored.diff(dim=1) > 0).all()
    assert rows.scored.min() == 0
    assert rows.scored.max() == 14  # 15 is the last token: nothing follows it
    assert len({tuple(row) for row in rows.scored.tolist()}) > 1


def test_all_positions() -> None:
    for rows in (pack(positions_per_sequence="all"), tiny_text(4, 16)):
        assert rows.scored.tolist() == [list(range(15))] * 4
        assert rows.positions_per_sequence == 15
        assert "15 scored per row (all)" in repr(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"num_sequences": 0},
        {"seq_len": 1},
        *({"positions_per_sequence": wanted} for wanted in (0, 16)),
        *({"eos": eos} for eos in ("two words", "", 10**6, -1)),
        *({"bos": bos} for bos in ("two words", 10**6, -1)),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(cl.InputError, match=f"^{name} is "):
        pack(**options)


@pytest.mark.parametrize(
    "texts", ["", [], ["", "  \n"], iter(())], ids=["", "[]", "blank", "iterator"]
)
def test_empty_text_is_refused(texts: Any) -> None:
    with pytest.raises(cl.InputError):
        pack(texts)


def test_empty_documents_are_skipped_wherever_they_are() -> None:
    padded = [""] * 700 + TEXTS
    assert torch.equal(pack(iter(padded)).input_ids, pack(iter(TEXTS)).input_ids)


def test_only_joined_documents_need_an_end_token() -> None:
    endless, one = word_tokenizer(eos=None), " ".join(TEXTS)
    found = cl.CalibrationSet.from_texts(["", one], endless, 2, 8, 5)
    expected = endless(one, add_special_tokens=False)["input_ids"][:16]
    assert found.input_ids.flatten().tolist() == expected
    with pytest.raises(cl.InputError):
        cl.CalibrationSet.from_texts(TEXTS, endless, 2, 8, 5)


@pytest.mark.parametrize("eos", ["<unk>", 1])
def test_the_end_token_can_be_chosen(eos: str | int) -> None:
    for tokenizer in (word_tokenizer(eos=None), word_tokenizer()):  # also in place of its own
        assert tokenizer.get_vocab()["<unk>"] == 1
        found = cl.CalibrationSet.from_texts(iter(TEXTS), tokenizer, 2, 8, 5, eos=eos)
        joined = " <unk> ".join(TEXTS)
        expected = tokenizer(joined, add_special_tokens=False)["input_ids"][:16]
        assert found.input_ids.flatten().tolist() == expected


@pytest.mark.parametrize("starts", [["<unk>"], ["<unk>", "w3"]], ids=str)
def test_every_row_begins_as_the_tokenizer_begins_a_text(starts: list[str]) -> None:
    tokenizer, many = opening_tokenizer(*starts), len(starts)
    rows = cl.CalibrationSet.from_texts(iter(TEXTS), tokenizer, 4, 16, "all")
    assert rows.input_ids[:, :many].tolist() == [tokenizer("w1")["input_ids"][:many]] * 4
    bare = pack(iter(TEXTS), seq_len=16 - many, positions_per_sequence="all")
    assert torch.equal(rows.input_ids[:, many:], bare.input_ids)  # the same text, in the same order
    assert all(start in rows.source for start in starts)
    plain = cl.CalibrationSet.from_texts(iter(TEXTS), tokenizer, 4, 16, "all", bos="")
    assert plain.fingerprint == pack(iter(TEXTS), positions_per_sequence="all").fingerprint
    with pytest.raises(cl.InputError, match=r"^seq_len is "):
        cl.CalibrationSet.from_texts(iter(TEXTS), tokenizer, 4, many, "all")


@pytest.mark.parametrize("bos", ["<unk>", 1])
def test_the_first_token_of_rows_can_be_chosen(bos: str | int) -> None:
    rows = pack(iter(TEXTS), bos=bos)
    assert rows.input_ids[:, 0].tolist() == [1] * 4
    assert torch.equal(rows.input_ids[:, 1:], pack(iter(TEXTS), seq_len=15).input_ids)


def test_row_length_defaults_to_the_tokenizers_context_up_to_2048() -> None:
    long = ["w1 w2 w3"] * 600

    def rows(context: int) -> cl.CalibrationSet:
        return cl.CalibrationSet.from_texts(
            long, word_tokenizer(context), num_sequences=1, positions_per_sequence=4
        )

    assert rows(32).seq_len == 32
    assert rows(131_072).seq_len == rows(10**30).seq_len == 2048


IDS = torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("ids", "positions"),
    [
        (torch.zeros(4, dtype=torch.long), "all"),
        (torch.zeros(0, 4, dtype=torch.long), "all"),
        (torch.zeros(2, 1, dtype=torch.long), "all"),
        (torch.zeros(2, 4), "all"),
        (torch.full((2, 4), -1), "all"),
        (IDS, torch.tensor([[0], [3]])),
        (IDS, torch.tensor([[0], [-1]])),
        (IDS, torch.tensor([[0]])),
        (IDS, torch.zeros(2, 0)),
        (IDS, torch.tensor([[0, 0], [0, 1]])),
        (IDS, torch.tensor([[0.5], [1.0]])),
    ],
)
def test_bad_explicit_rows_are_refused(ids: torch.Tensor, positions: Any) -> None:
    with pytest.raises(cl.InputError):
        cl.CalibrationSet(input_ids=ids, positions=positions)


def test_split_parts_are_disjoint_and_complete() -> None:
    rows = pack(num_sequences=9)
    parts = rows.split(held_out=3, test=2)
    assert [len(part) for part in parts] == [4, 3, 2]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), rows.input_ids)
    marks = [set(part.row_fingerprints) for part in parts]
    assert not marks[0] & marks[1] | marks[0] & marks[2] | marks[1] & marks[2]
    assert [len(part) for part in rows.split(test=4)] == [5, 4]
    with pytest.raises(cl.InputError):
        rows.split(held_out=5, test=4)
    with pytest.raises(cl.InputError):
        rows.split(held_out=-1)


def test_overlap_is_refused_by_content() -> None:
    rows = tiny_text(6, 16, 4)
    others = cl.CalibrationSet(rows.input_ids[4:].clone(), rows.scored[:2])  # other positions
    with pytest.raises(cl.MismatchError):
        rows.require_disjoint(others)
    rows.require_disjoint(tiny_text(6, 16, 4, seed=1))
    repeated = cl.CalibrationSet(rows.input_ids[[0, 1, 0]])
    with pytest.raises(cl.MismatchError):
        repeated.split(held_out=1)


def test_overlap_with_what_a_matrix_was_built_on_is_refused() -> None:
    model, text = tiny_model(), tiny_text(4, 16, 4)
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, text.rows(0, 2), 16, progress=False)
    text.rows(2, 4).require_disjoint(curvature)
    with pytest.raises(cl.MismatchError):
        cl.CalibrationSet(text.input_ids[[2, 1, 0]]).require_disjoint(curvature)


def as_csv(texts: list[str], delimiter: str = ",") -> bytes:
    table = io.StringIO()
    rows = [["id", "text"], *([number, text] for number, text in enumerate(texts))]
    csv.writer(table, delimiter=delimiter).writerows(rows)
    return table.getvalue().encode()


def as_parquet(texts: list[str]) -> bytes:
    pandas, file = pytest.importorskip("pandas"), io.BytesIO()
    pytest.importorskip("pyarrow")
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
    assert torch.equal(rows.input_ids, pack(**settings).input_ids)


def test_plain_text_is_split_at_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2\nw3\n\n\n  w4 \n\n")
    assert read_documents(tmp_path / "a.txt") == ["w1 w2\nw3", "w4"]
    with pytest.raises(FileNotFoundError):
        cl.CalibrationSet.from_file(tmp_path / "none.txt", word_tokenizer())


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "w1 w2", "completion": " w3"}, "w1 w2 w3"),
        ({"messages": [{"role": "user", "content": "w1"}, {"role": "x", "content": "w2"}]}, None),
        (
            {
                "prompt": [{"role": "user", "content": "w1"}],
                "completion": [{"role": "x", "content": "w2"}],
            },
            None,
        ),
    ],
    ids=["pair", "messages", "pair of chats"],
)
def test_chats_are_written_by_the_template(tmp_path: Path, record: Any, text: str | None) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(record))
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    assert read_documents(tmp_path / "chat.jsonl", tokenizer) == [text or "user: w1;x: w2;"]
    assert read_documents(tmp_path / "chat.jsonl", word_tokenizer()) == [text or "w1\n\nw2"]


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
    with pytest.raises(cl.InputError) as caught:
        read_documents(tmp_path / name)
    assert name in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.txt"])
def test_a_byte_order_mark_is_no_text_and_line_ends_do_not_matter(
    tmp_path: Path, name: str
) -> None:
    json_lines = name.lower().endswith("jsonl")
    lines = [json.dumps({"text": text}) if json_lines else text for text in TEXTS]
    content = ("\n" if json_lines else "\n \n").join(lines)
    for encoding, text in (("utf-8", content), ("utf-8-sig", content.replace("\n", "\r\n"))):
        (tmp_path / name).write_bytes(text.encode(encoding))
        assert read_documents(tmp_path / name) == TEXTS


def test_line_ends_inside_a_document_make_no_other_rows(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "a.txt").write_bytes(f"w1{end}w2{end}{end}w3".encode())
        assert read_documents(tmp_path / "a.txt") == ["w1\nw2", "w3"]


def test_a_template_that_writes_the_date_gives_the_same_rows_on_any_day(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %-d %B') }}. {% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    assert read_documents(tmp_path / "a.jsonl", tokenizer) == ["26 Jul 2024, 26 July. w1 w2 w3"]
    rows = cl.CalibrationSet.from_file(
        tmp_path / "a.jsonl", tokenizer, num_sequences=1, seq_len=4, positions_per_sequence=1
    )
    assert rows.source == "a.jsonl, chats dated 2024-07-26"


def test_rows_of_another_tokenizer_are_refused() -> None:
    model, tokenizer = cl.load_model()
    foreign = cl.CalibrationSet.from_texts(["w1 w2 w3 w4 w5 w6"], word_tokenizer(), 1, 4, "all")
    own = cl.CalibrationSet.from_texts(["The cat sat on the mat."], tokenizer, 1, 4, "all")
    assert cl.pruning_risk(model, [0], own) > 0
    with pytest.raises(cl.MismatchError, match="another tokenizer"):
        cl.pruning_risk(model, [0], foreign)
    with pytest.raises(cl.MismatchError, match="another tokenizer"):
        cl.continue_text(model, word_tokenizer(), "w1 w2")


def test_json_strings_may_hold_any_line_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "w1 \u2028 w2 \x85 w3"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_documents(path) == [text]


def test_missing_datasets_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(cl.InputError):
        cl.default_calibration("some/model", word_tokenizer(), seq_len=8)


class FakeHub:
    """Stands in for the datasets package."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.taken, self.asked = error, 0, ()

    def load_dataset(self, *asked: Any, **options: Any) -> Iterator[dict[str, str]]:
        self.asked = (*asked, options)
        if self.error is not None:
            raise self.error
        return self.stream()

    def stream(self) -> Iterator[dict[str, str]]:
        for number in range(10**9):
            self.taken += 1
            yield {"text": f"w{number % 90} w{number // 90 % 90} w3"}


def test_hub_text_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    tokenizer = word_tokenizer()
    settings = {"seq_len": 16, "positions_per_sequence": 4}
    built, held_out = cl.default_calibration("some/model", tokenizer, 5, 2, **settings)
    assert hub.asked == ("allenai/c4", "en", {"split": "train", "streaming": True})
    assert hub.taken <= 512
    assert (len(built), len(held_out)) == (5, 2)
    built.require_disjoint(held_out)
    assert built.source == "allenai/c4 en"


def test_an_unreachable_hub_asks_for_a_text_file(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(ConnectionError("no route"))
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    with pytest.raises(cl.InputError):
        cl.default_calibration("some/model", word_tokenizer(), 2, 1, seq_len=8)


def test_default_calibration_of_the_embedded_model() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    built, held_out = cl.default_calibration("demo", tokenizer, 6, 3, seq_len=80)
    texts = ("calibration text of the demo model", "held-out text of the demo model")
    assert (built.source, held_out.source) == texts
    assert (len(built), len(held_out)) == (6, 3)
    built.require_disjoint(held_out)
    assert default_rows("demo", tokenizer, 6, seq_len=80).fingerprint == built.fingerprint
    with pytest.raises(cl.InputError):  # it is a file of its own
        cl.default_calibration("demo", tokenizer, 6, 10**5, seq_len=80)
    folder = cl.default_calibration(str(demo_folder()), tokenizer, 6, 3, seq_len=80)
    assert folder[0].fingerprint == built.fingerprint


def test_default_calibration_from_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join(TEXTS))
    built, held_out = cl.default_calibration(
        "some/model", word_tokenizer(), 4, 2, text_file=path, seq_len=16, positions_per_sequence=4
    )
    assert (len(built), len(held_out)) == (4, 2)
    assert built.source == "own.txt"


def test_where_only_the_held_out_rows_lack_text_the_error_says_so(tmp_path: Path) -> None:
    path, cut = tmp_path / "one.txt", {"seq_len": 8, "positions_per_sequence": 4}
    path.write_text(" ".join(f"w{number % 90}" for number in range(100)))
    ours = {"text_file": path} | cut
    with pytest.raises(cl.InputError):
        cl.default_calibration("some/model", word_tokenizer(), 4, 2, **ours)
    with pytest.raises(cl.InputError):
        cl.default_calibration("some/model", word_tokenizer(), 20, 2, **ours)
    with pytest.raises(cl.InputError):
        cl.default_calibration("some/model", word_tokenizer(), 4, 0, **ours)
    alone = default_rows("some/model", word_tokenizer(), 4, **ours)
    path.write_text(path.read_text() + "\n\n" + path.read_text()[4:])
    several, _ = cl.default_calibration("some/model", word_tokenizer(), 4, 2, **ours)
    assert len(alone) == len(several) == 4
    assert (
        default_rows("some/model", word_tokenizer(), 4, **ours).fingerprint == several.fingerprint
    )


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
    assert "the release's recipe" in rows.source
    wide = [f"w1\u00a0{text}\t\tw2\n\n\n\nw3 " for text in LONG]
    narrow = [f"w1 {text} w2\n\nw3" for text in LONG]
    spaced = (
        cl.CalibrationSet.from_texts(iter(t), tokenizer, 40, **options, **FEW)
        for t in (wide, narrow)
    )
    assert len({found.fingerprint for found in spaced}) == 1
    with pytest.raises(cl.InputError, match="recipe"):
        pack(recipe="papers")
    with pytest.raises(cl.InputError, match="0 tokens"):
        pack(recipe="release")


def test_the_release_s_recipe_shuffles_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    class Stream(list[dict[str, str]]):
        def shuffle(self, *, seed: int, buffer_size: int) -> list[dict[str, str]]:
            assert (seed, buffer_size) == (42, 10_000)
            return self[::-1]

    found = Stream({"text": text} for text in LONG if len(text.split()) >= 32)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    options: dict[str, Any] = {"seq_len": 16, "positions_per_sequence": "all", "seed": 42}
    rows = default_rows("any", word_tokenizer(), 8, recipe="release", **options)
    assert rows.input_ids[0, 0] == int(found[-1]["text"].split()[0][1:]) + 2
    assert default_rows("any", word_tokenizer(), 8, **options).input_ids[0, 0] == 2 + int(
        found[0]["text"].split()[0][1:]
    )


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
    with pytest.raises(cl.InputError, match=r"a\.txt has no more text"):
        default_rows("any", word_tokenizer(), 110, mix, **options)
    for wrong in ({}, {tmp_path / "a.txt": 0}, {tmp_path / "a.txt": float("inf")}):
        with pytest.raises(cl.InputError, match="share"):
            cl.CalibrationSet.from_file(wrong, word_tokenizer(), num_sequences=2, **options)
