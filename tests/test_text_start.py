"""The tokens before a text: every road to the model begins as the tokenizer begins a text, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import cocurve_lab as cl
from cocurve_lab.calibration import bare_ids, text_start
from cocurve_lab.evaluation.tasks import TaskOptions, evaluate_tasks
from cocurve_lab.extensions.judging.answers import AnswerOptions
from cocurve_lab.extensions.judging.generation import Question, encode_prompt
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text, next_token_probabilities
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from helpers.tiny_models import CHAT, opening_tokenizer, tiny_model, word_tokenizer

TEXT = " ".join(f"w{n % 80}" for n in range(3, 200))
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


def rows(model: Any, tokenizer: Any, _: Path) -> None:
    calibration = cl.CalibrationSet.from_texts(iter([TEXT]), tokenizer, 2, 16, "all")
    cl.pruning_risk(model, [0], calibration)


def chats(model: Any, tokenizer: Any, folder: Path) -> None:
    record = {"messages": [{"role": "user", "content": TEXT}]}
    (folder / "chats.jsonl").write_text(json.dumps(record))
    size: dict[str, Any] = {"seq_len": 16, "positions_per_sequence": "all"}
    file = folder / "chats.jsonl"
    calibration = cl.CalibrationSet.from_file(file, tokenizer, num_sequences=2, **size)
    cl.pruning_risk(model, [0], calibration)


def windows(model: Any, tokenizer: Any, _: Path) -> None:
    cl.perplexity(model, tokenizer, TEXT, 16, 4, PerplexityOptions(progress=False))


def prompt(model: Any, tokenizer: Any, _: Path) -> None:
    cl.continue_text(model, tokenizer, "w3 w4", 2)
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), [0])
    compare_text(model, tokenizer, "w3 w4", plan, Sampling(2))
    next_token_probabilities(model, tokenizer, [plan], "w3 w4")


def questions(model: Any, tokenizer: Any, _: Path) -> None:
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), [0])
    asked = [Question("a", "w3 w4", "w5")]
    options = AnswerOptions(1)
    cl.answer_accuracy(model, tokenizer, [plan], asked, options=options, progress=False)


def tasks(model: Any, tokenizer: Any, folder: Path) -> None:
    pytest.importorskip("lm_eval")
    for name, record in RECORDS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(record))
    options = TaskOptions(files=[folder], progress=False, batch_size=1)
    report = evaluate_tasks(model, tokenizer, "local", options=options)
    assert set(report.values) == set(RECORDS)


Road = Callable[[Any, Any, Path], None]


@pytest.mark.parametrize("kind", ["plain", "chat", "closing"])
@pytest.mark.parametrize("road", [rows, chats, windows, prompt, questions, tasks])
def test_every_road_begins_as_the_tokenizer_begins_a_text(
    road: Road, kind: str, tmp_path: Path
) -> None:
    model, tokenizer = tiny_model(), opening_tokenizer("<unk>")
    if kind == "chat":  # this template writes the first token, as most do
        tokenizer.chat_template = "<unk> " + CHAT
    if kind == "closing":  # w85 is in no text, and a prompt goes on where a text would end
        known = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<unk>", "w85")]
        closing = TemplateProcessing("<unk> $A w85", None, known)
        tokenizer.backend_tokenizer.post_processor = closing
    with read_by(model) as read:
        road(model, tokenizer, tmp_path)
    assert read
    counts = [(row == START).sum().item() for row in read]
    assert (counts, [int(row[0]) for row in read]) == ([1] * len(read), [START] * len(read))
    assert not any((row == 87).any() for row in read)
    with read_by(model) as bare:  # where the tokenizer adds nothing, there is nothing
        road(model, word_tokenizer(), tmp_path)
    assert not any((row == START).any() for row in bare)


def test_what_stands_before_a_text_can_be_chosen() -> None:
    tokenizer = opening_tokenizer("<unk>", "w3")
    assert text_start(tokenizer) == tokenizer("w9")["input_ids"][:-1] == [1, 5]
    assert (text_start(tokenizer, ""), text_start(tokenizer, "w4"), text_start(tokenizer, 7)) == (
        [],
        [6],
        [7],
    )
    assert bare_ids(tokenizer, "w3 w9") == [5, 11]


@pytest.mark.parametrize("chat", [None, True, False])
def test_a_task_s_prompt_is_asked_as_any_prompt(chat: bool | None, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    model, tokenizer = tiny_model(), opening_tokenizer("<unk>")
    tokenizer.chat_template = "<unk> " + CHAT
    (tmp_path / "one.jsonl").write_text(json.dumps(RECORDS["reply"]))
    options = TaskOptions(files=[tmp_path / "one.jsonl"], progress=False)
    with read_by(model) as read:
        report = evaluate_tasks(model, tokenizer, "local", options=options, chat=chat)
    assert read[0].tolist() == encode_prompt(model, tokenizer, "w3 w4", chat)
    assert report.settings["chat"] is (chat is not False)
    how = "without" if chat is False else "through"
    assert f"prompts were asked {how} the tokenizer's chat template" in repr(report)
    assert "chat" not in repr(evaluate_tasks(model, word_tokenizer(), "local", options=options))
    with pytest.raises(cl.InputError, match="chat"):
        evaluate_tasks(model, word_tokenizer(), "local", options=options, chat=True)
