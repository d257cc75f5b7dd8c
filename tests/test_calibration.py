"""Calibration: rows always full, positions that can be scored, and no text used twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import cocurve_lab as cl
from cocurve_lab.evaluation.tasks import TaskOptions, evaluate_tasks
from cocurve_lab.extensions.judging.answers import AnswerOptions
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text, next_token_probabilities
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from helpers.tiny_models import (
    CHAT,
    opening_tokenizer,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

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
    with pytest.raises(cl.InputError):
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


@pytest.mark.parametrize(
    "options",
    [
        {"num_sequences": 0},
        {"seq_len": 1},
        *({"positions_per_sequence": wanted} for wanted in (0, 16)),
        *({"eos": eos} for eos in ("two words", "", 10**6, -1)),
        *({"bos": bos} for bos in ("two words", 10**6, -1)),
        *({"texts": texts} for texts in ("", [], ["", "  \n"], iter(()))),
    ],
    ids="".join,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(cl.InputError):
        pack(**options)


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
    with pytest.raises(cl.InputError):
        cl.CalibrationSet.from_texts(iter(TEXTS), tokenizer, 4, many, "all")


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
    rows, model = tiny_text(6, 16, 4), tiny_model()
    h = cl.estimate_curvature(model, None, rows.rows(0, 2), 16, progress=False)
    others = cl.CalibrationSet(rows.input_ids[4:].clone(), rows.scored[:2])  # other positions
    mixed = cl.CalibrationSet(rows.input_ids[[2, 1, 0]])
    for one, other in ((rows, others), (mixed, h)):
        with pytest.raises(cl.MismatchError):
            one.require_disjoint(other)
    rows.require_disjoint(tiny_text(6, 16, 4, seed=1))
    rows.rows(2, 4).require_disjoint(h)
    with pytest.raises(cl.MismatchError):
        cl.CalibrationSet(rows.input_ids[[0, 1, 0]]).split(held_out=1)


def test_rows_of_another_tokenizer_are_refused() -> None:
    model, tokenizer = cl.load_model()
    own = cl.CalibrationSet.from_texts(["The cat sat on the mat."], tokenizer, 1, 4, "all")
    assert cl.pruning_risk(model, [0], own) > 0
    for use in (
        lambda: cl.pruning_risk(model, [0], pack(seq_len=8)),
        lambda: cl.continue_text(model, word_tokenizer(), "w1 w2"),
    ):
        with pytest.raises(cl.MismatchError):
            use()


# What stands before a text ------------------------------------------------------------------------

LONG_TEXT = " ".join(f"w{n % 80}" for n in range(3, 200))
START = 1  # id of <unk>, which is nowhere in the texts
RECORDS = {
    "choices": {"query": "w3 w4", "choices": ["w5", "w6 w7"], "gold": 0},
    "reply": {"prompt": "w3 w4", "answer": "w5"},
    "cloze": {"context": "w3 w4", "continuation": "w5"},
}


@contextmanager
def read_by(model: Any) -> Iterator[list[Tensor]]:
    """Collect the rows of ids that the model reads from their start, without a cache."""
    found: list[Tensor] = []

    def note(_: Any, args: Any, given: Any) -> None:
        cache = given.get("cache", given.get("past_key_values"))
        if cache is None or cache.get_seq_length() == 0:
            found.extend(given["input_ids"] if "input_ids" in given else args[0])

    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    yield found
    handle.remove()


SIZE: dict[str, Any] = {"num_sequences": 2, "seq_len": 16, "positions_per_sequence": "all"}
ROADS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "rows": lambda model, tokenizer, folder: cl.pruning_risk(
        model, [0], cl.CalibrationSet.from_texts(iter([LONG_TEXT]), tokenizer, **SIZE)
    ),
    "chats": lambda model, tokenizer, folder: cl.pruning_risk(
        model, [0], cl.CalibrationSet.from_file(folder / "chats.jsonl", tokenizer, **SIZE)
    ),
    "windows": lambda model, tokenizer, folder: cl.perplexity(
        model, tokenizer, LONG_TEXT, 16, 4, PerplexityOptions(progress=False)
    ),
    "prompt": lambda model, tokenizer, folder: cl.continue_text(model, tokenizer, "w3 w4", 2),
    "pair": lambda model, tokenizer, folder: compare_text(
        model, tokenizer, "w3 w4", first_of(model), Sampling(2)
    ),
    "next token": lambda model, tokenizer, folder: next_token_probabilities(
        model, tokenizer, [first_of(model)], "w3 w4"
    ),
    "questions": lambda model, tokenizer, folder: cl.answer_accuracy(
        model,
        tokenizer,
        [first_of(model)],
        [Question("a", "w3 w4", "w5")],
        options=AnswerOptions(1),
        progress=False,
    ),
    "tasks": lambda model, tokenizer, folder: evaluate_tasks(
        model,
        tokenizer,
        "local",
        options=TaskOptions(files=[folder / "tasks"], progress=False, batch_size=1),
    ),
}


def first_of(model: Any) -> cl.Selection:
    return cl.Selection.from_pruned(cl.enumerate_units(model), [0])


@pytest.mark.parametrize("kind", ["plain", "chat", "closing"])
@pytest.mark.parametrize("road", ROADS)
def test_every_road_begins_as_the_tokenizer_begins_a_text(
    road: str, kind: str, tmp_path: Path
) -> None:
    model, tokenizer = tiny_model(), opening_tokenizer("<unk>")
    if kind == "chat":  # this template writes the first token, as most do
        tokenizer.chat_template = "<unk> " + CHAT
    if kind == "closing":  # w85 is in no text, and a prompt goes on where a text would end
        known = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<unk>", "w85")]
        closing = TemplateProcessing("<unk> $A w85", None, known)
        tokenizer.backend_tokenizer.post_processor = closing
    chat = {"messages": [{"role": "user", "content": LONG_TEXT}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    (tmp_path / "tasks").mkdir()
    for name, record in RECORDS.items():
        (tmp_path / "tasks" / f"{name}.jsonl").write_text(json.dumps(record))
    with read_by(model) as read:
        ROADS[road](model, tokenizer, tmp_path)
    assert read
    counts = [(row == START).sum().item() for row in read]
    assert (counts, [int(row[0]) for row in read]) == ([1] * len(read), [START] * len(read))
    assert not any((row == 87).any() for row in read)
    with read_by(model) as bare:  # where the tokenizer adds nothing, there is nothing
        ROADS[road](model, word_tokenizer(), tmp_path)
    assert not any((row == START).any() for row in bare)
