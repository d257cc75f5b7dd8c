"""Documents by source, and none that is in the held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cocurve_lab as cl
from cocurve_lab.studies.certainty import sensitivity
from cocurve_lab.studies.certainty.sensitivity import outside, text_sources
from helpers.tiny_models import word_tokenizer

TOKENIZER = word_tokenizer()
DOCUMENTS = [" ".join(f"w{(7 * n + k * k) % 90}" for k in range(30)) for n in range(12)]


def rows(documents: list[str], count: int, length: int = 20) -> cl.CalibrationSet:
    return cl.CalibrationSet.from_texts(iter(documents), TOKENIZER, count, length, "all")


def test_documents_across_rows_are_found() -> None:
    held_out = rows(DOCUMENTS[:3], 4)  # 93 tokens, cut into rows of 20
    assert outside(DOCUMENTS, TOKENIZER, held_out) == DOCUMENTS[3:]
    # a document shares the beginning only of another number: 1 is not 12
    assert outside(["w1"], TOKENIZER, rows(["w12 w13 w14 w15"] * 8, 2)) == ["w1"]
    assert outside([""], TOKENIZER, held_out) == []


def test_a_text_file_without_its_held_out_part(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(DOCUMENTS))
    _, held_out = cl.default_calibration(
        "any", TOKENIZER, 5, 3, text_file=path, seq_len=20, positions_per_sequence="all"
    )
    sources = text_sources("any", TOKENIZER, held_out, path)
    assert list(sources) == ["text"]
    kept = sources["text"]
    assert 0 < len(kept) < len(DOCUMENTS)
    ids = " ".join(map(str, held_out.input_ids.flatten().tolist()))
    for document in DOCUMENTS:
        first = " ".join(str(int(word[1:]) + 2) for word in document.split()[:16])
        assert (first in ids) == (document not in kept)
    path.write_text(DOCUMENTS[0])
    with pytest.raises(cl.InputError, match="all 1 documents are in the held-out text"):
        text_sources("any", TOKENIZER, rows(DOCUMENTS[:1], 1), path)


def test_the_hub_is_read_where_calibration_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def stream(dataset: str, *, name: str | None, split: str, field_name: str) -> Iterator[str]:
        asked.append(split)
        yield from DOCUMENTS

    monkeypatch.setattr(sensitivity, "stream_hub", stream)
    held_out = rows(DOCUMENTS[1:2], 1)
    found = text_sources("any", TOKENIZER, held_out, documents=4)
    assert found == {"text": [DOCUMENTS[0], *DOCUMENTS[2:4]]}
    assert asked == ["validation"]


def test_the_embedded_text_by_family() -> None:
    _, tokenizer = cl.load_model("demo")
    _, held_out = cl.default_calibration("demo", tokenizer, 1, 2, positions_per_sequence="all")
    sources = text_sources("demo", tokenizer, held_out)
    assert list(sources) == ["mixed", "stories", "code"]
    assert set(sources["stories"]) | set(sources["code"]) < set(sources["mixed"])
    assert not set(sources["stories"]) & set(sources["code"])
