"""The text that every machine has for SmolLM2: its parts, its rows, and the roads to them."""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import own_questions
from cocurve_lab.extensions.pretrained.smollm2 import smollm2_folder
from cocurve_lab.extensions.texts.documents import default_rows, own_text
from helpers.bpe import byte_level


def tokenizer_with_end() -> Any:
    """A tokenizer whose end of a document is not its eos, as in a model made for chats."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    spec = byte_level("smollm")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spec.backend_tokenizer, eos_token=spec.eos_token
    )
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def test_the_parts_of_the_manual_are_whole_and_disjoint() -> None:
    read = own_text("smollm2")
    (built, source), (judge, other) = read("calibration"), read("held_out")
    assert sorted(built + judge) == sorted(pydoc_data.topics.topics.values())
    assert not set(built) & set(judge)
    assert min(sum(map(len, part)) for part in (built, judge)) > 80_000
    assert source.split("part")[1] == other.split("part")[1]  # the hash of all
    assert own_text(str(smollm2_folder())) == read
    assert own_text("./smollm2") is None


def test_rows_begin_with_and_are_joined_by_the_end_of_a_document(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_end()
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    built, judge = cl.default_calibration("smollm2", tokenizer, 40, 8, seed=1)
    assert default_rows("smollm2", tokenizer, 40, seed=1).fingerprint == built.fingerprint
    text = tmp_path / "own.txt"
    text.write_text("one\n\ntwo\n\n" + "three " * 300)
    own = default_rows("smollm2", tokenizer, 1, text, seq_len=70, eos=None)
    for rows in (built, judge, own):
        assert (rows.input_ids[:, 0] == end).all()
        assert (rows.input_ids[:, 1:] == end).any()
        assert not (rows.input_ids == tokenizer.eos_token_id).any()
    chosen = default_rows("smollm2", tokenizer, 1, text, seq_len=70, eos="<|end|>", bos="")
    assert not (chosen.input_ids == end).any()


@pytest.mark.real
def test_the_dense_model_answers_each_of_its_questions(smollm2: Any) -> None:
    """One that it does not answer would say nothing about a plan."""
    model, tokenizer = smollm2
    questions = own_questions("smollm2", 100)
    assert {"capitals", "opposites", "sums", "instruction"} == {q.capability for q in questions}
    dense = cl.Selection.from_pruned(cl.enumerate_units(model), [])
    table = cl.answer_accuracy(model, tokenizer, [dense], questions, progress=False)
    assert [q.prompt for q, right in zip(questions, table.right[0], strict=True) if not right] == []
    question = questions[0]
    said = cl.continue_text(model, tokenizer, question.prompt)
    assert question.is_right(said)
    assert said != cl.continue_text(model, tokenizer, question.prompt, chat=False)


def test_a_python_without_the_manual_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(cl.InputError):
        cl.default_calibration("smollm2", byte_level("smollm"))
