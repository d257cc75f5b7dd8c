"""Replies of plans against whole greedy replies, and the statistics against hand-made tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import cocurve_lab as cl
from cocurve_lab.extensions.judging.answers import (
    ALL,
    AnswerOptions,
    AnswerTable,
    ReplyEngine,
    judge,
    wilson,
)
from cocurve_lab.extensions.judging.generation import Question
from helpers.problems import make_units
from helpers.tiny_models import GROUPS, full_logits, masked_by_hand, tiny_double, tiny_model

LENGTH = 5  # tokens of a reply
PROMPTS = ["ab", "cda", "a.bd ", "dd c", "bca", "cab d", "adcb", "b", "ca\n", "dbd"]


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """Letters and pairs of letters: most texts have several spellings in tokens."""
    from tokenizers import Tokenizer, decoders, models

    letters, pairs = "abcd .\n", ["ab", "cd", "ca", "bd"]
    vocab = {token: i for i, token in enumerate(["<end>", "<unk>", *letters, *pairs])}
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>", model_max_length=64
    )


TOKENIZER = spelling_tokenizer()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=len(TOKENIZER), eos_token_id=0, seed=3)


@pytest.fixture(scope="module")
def plans(model: PreTrainedModel) -> list[cl.Selection]:
    units = cl.enumerate_units(model, GROUPS)
    sets: list[list[int]] = [[], [0, 5], [3, 8, 14], [1, 2, 9, 16]]
    return [cl.Selection.from_pruned(units, chosen) for chosen in sets]


SAID: dict[tuple[tuple[int, ...], str], str] = {}


def reply(model: PreTrainedModel, plan: cl.Selection, prompt: str) -> str:
    """The greedy reply of the one fixture model, masked by hand; remembered."""
    if (plan.pruned, prompt) not in SAID:
        SAID[plan.pruned, prompt] = generate(model, plan, prompt)
    return SAID[plan.pruned, prompt]


def generate(model: PreTrainedModel, plan: cl.Selection, prompt: str) -> str:
    with masked_by_hand(model, [plan.units[u] for u in plan.pruned]):
        return cl.continue_text(model, TOKENIZER, prompt, LENGTH)


@pytest.fixture(scope="module")
def questions(model: PreTrainedModel, plans: list[cl.Selection]) -> list[Question]:
    """Answers that some plan gives, so that there are right and wrong replies of every plan."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        for plan in plans:
            said = reply(model, plan, prompt).lstrip(" ")
            head = said.split(".")[0].split("\n")[0].strip()
            if head and "<" not in head:
                found.append(Question(f"kind {number % 2}", prompt, head))
    return found


OPTIONS = AnswerOptions(max_new_tokens=LENGTH)


def ask(
    model: PreTrainedModel,
    plans: list[cl.Selection],
    questions: list[Question],
    options: AnswerOptions = OPTIONS,
) -> AnswerTable:
    return cl.answer_accuracy(model, TOKENIZER, plans, questions, options=options, progress=False)


def test_the_verdict_is_that_of_a_whole_greedy_reply(
    model: PreTrainedModel, plans: list[cl.Selection], questions: list[Question]
) -> None:
    inside = [
        Question(q.capability, q.prompt, (q.answer or "").split()[-1], within=True)
        for q in questions
    ]
    questions = [*questions, *inside]
    table = ask(model, plans, questions)
    expected = [[q.is_right(reply(model, plan, q.prompt)) for q in questions] for plan in plans]
    assert table.right.tolist() == expected
    # other spellings of a right answer are what decoding is for
    for told in (table.decoded & table.right, table.decoded & ~table.right):
        assert told.any()
    assert (~table.decoded & table.right).any()


def test_the_likelihood_is_the_sum_over_the_answers_tokens(
    model: PreTrainedModel, plans: list[cl.Selection], questions: list[Question]
) -> None:
    table, wide = ask(model, plans, questions), tiny_double(model)
    for p, plan in enumerate(plans):
        for q in (0, len(questions) // 2, len(questions) - 1):
            asked = questions[q]
            prompt = TOKENIZER(asked.prompt)["input_ids"]
            space = "" if asked.prompt[-1] in " \n" else " "
            ids = TOKENIZER(asked.prompt + space + str(asked.answer))["input_ids"]
            if ids[: len(prompt)] != prompt:  # "a" + "b" would merge
                ids = prompt + TOKENIZER(space + str(asked.answer))["input_ids"]
            with masked_by_hand(wide, [plan.units[u] for u in plan.pruned]):
                logs = torch.log_softmax(full_logits(wide, torch.tensor([ids])), dim=-1)[0]
            expected = sum(float(logs[t - 1, ids[t]]) for t in range(len(prompt), len(ids)))
            assert table.log_likelihood[p, q] == pytest.approx(expected, rel=1e-4)


def test_memory_that_runs_out_halves_the_batch(
    model: PreTrainedModel,
    plans: list[cl.Selection],
    questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, whole, most = ask(model, plans, questions), ReplyEngine._read_answers, 3

    def small(self: ReplyEngine, plans: Any, part: Any) -> Any:
        if len(part) > most:
            raise torch.OutOfMemoryError
        return whole(self, plans, part)

    monkeypatch.setattr(ReplyEngine, "_read_answers", small)
    assert (ask(model, plans, questions).right == expected.right).all()
    most = 0
    with pytest.raises(cl.InputError):
        ask(model, plans, questions)


def test_an_interrupted_measurement_goes_on_and_a_checkpoint_remembers_plans(
    model: PreTrainedModel,
    plans: list[cl.Selection],
    questions: list[Question],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = questions * 2  # more than one part
    options = AnswerOptions(LENGTH, checkpoint=tmp_path / "replies.pkl")
    whole, measured, stop = ReplyEngine.measure, [], 1

    def counting(self: ReplyEngine, scales: Any, part: Any) -> np.ndarray:
        if len(measured) == stop:
            raise KeyboardInterrupt
        measured.append(len(scales))
        return whole(self, scales, part)

    expected = ask(model, plans, asked)
    monkeypatch.setattr(ReplyEngine, "measure", counting)
    with pytest.raises(KeyboardInterrupt):
        ask(model, plans[:3], asked, options)
    stop = -1
    first = ask(model, plans[:3], asked, options)
    assert (first.right == expected.right[:3]).all()
    measured.clear()
    again = ask(model, plans, asked, options)
    assert set(measured) == {1}  # only the fourth plan is new
    assert (again.log_likelihood[:3] == first.log_likelihood).all()
    other = tiny_model(vocab_size=len(TOKENIZER), seed=4)
    shorter = AnswerOptions(4, checkpoint=options.checkpoint)
    for call in ((model, asked[1:], options), (model, asked, shorter), (other, asked, options)):
        with pytest.raises(cl.MismatchError):
            ask(call[0], plans, *call[1:])


@pytest.mark.parametrize(
    ("said", "ended", "within", "verdict"),
    [
        ("", False, False, None),
        (" tw", False, False, None),
        (" two", False, False, None),
        (" two ", False, False, None),
        (" two.", False, False, True),
        ("two\nthree", False, False, True),
        (" two words.", False, False, False),
        (" two w", False, False, False),
        (" twe", False, False, False),
        ("\n two", False, False, False),
        (" two", True, False, True),
        (" tw", True, False, False),
        ("it is two", False, True, None),
        ("it is two,", False, True, True),
        ("it is twofold", False, True, None),
        ("it is one", False, True, None),
        ("it is one.", False, True, False),
        ("it is two", True, True, True),
    ],
)
def test_a_reply_is_judged_when_nothing_can_change_it(
    said: str, ended: bool, within: bool, verdict: bool | None
) -> None:
    assert judge(Question("words", "one", "two", within=within), said, ended) is verdict


def hand_made() -> AnswerTable:
    """Two plans; sums: 4 questions, plan 1 loses two and gains one; words: 2, nothing changes."""
    names = ["sums"] * 4 + ["words"] * 2
    right = np.array([[1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=bool)
    likelihood = np.array([[-1.0, -2, -3, -4, -1, -1], [-2.0, -4, -3, -4, -1, -3]])
    plan = cl.Selection.from_pruned(make_units(), [0])
    return AnswerTable(
        (plan, plan),
        tuple(Question(name, "p", "a") for name in names),
        right,
        likelihood,
        np.ones(6, dtype=int),
        np.zeros((2, 6), dtype=bool),
    )


def test_differences_are_paired_and_flips_are_counted() -> None:
    sums, words, every = hand_made().paired(1, 0).to_dict("records")
    difference = np.array([-1, -1, 0, 1])
    expected = {
        "lost": 2,
        "gained": 1,
        "questions": 4,
        "accuracy": -0.25,
        "accuracy_error": pytest.approx(difference.std(ddof=1) / 2),
        "p_value": 1.0,  # 2 of 3: P(at least 2 or at most 1) = 1
        "log_likelihood": -0.75,
        "log_likelihood_error": pytest.approx(np.std([-1, -2, 0, 0], ddof=1) / 2),
    }
    assert expected == {name: sums[name] for name in expected}
    assert (words["lost"], words["accuracy_error"], words["p_value"]) == (0, 0, 1.0)
    assert (every["capability"], every["questions"], every["lost"]) == (ALL, 6, 2)


def test_rows_by_capability() -> None:
    rows = hand_made().table.to_dict("records")
    assert [(row["plan"], row["capability"]) for row in rows] == [
        (plan, name) for plan in (0, 1) for name in ("sums", "words", ALL)
    ]
    found = rows[0]["accuracy"], rows[0]["accuracy_error"], rows[3]["accuracy"]
    assert found == pytest.approx((0.75, 0.25, 0.5))
    bounds = rows[1]["accuracy_low"], rows[1]["accuracy_high"]
    assert bounds == pytest.approx((2 / (2 + 1.96**2), 1))
    assert rows[4]["log_likelihood"] == -2


def test_wilsons_interval_solves_its_equation() -> None:
    """Its ends are the shares p at which the observed share is 1.96 standard deviations away."""
    for successes, count in ((3, 10), (199, 200)):
        for end in wilson(successes, count):
            deviation = np.sqrt(end * (1 - end) / count)
            assert abs(successes / count - end) == pytest.approx(1.96 * deviation)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("ab", None),
        ("ab", "a.b"),  # a full stop ends an answer
        ("ab", ""),
        (" ", "cd"),
        ("ab", "c" * 80),  # more than the context
    ],
)
def test_bad_input_is_refused(
    model: PreTrainedModel, plans: list[cl.Selection], prompt: str, answer: str | None
) -> None:
    with pytest.raises(cl.InputError):
        ask(model, plans, [Question("words", prompt, answer)])


def test_plans_and_questions_that_do_not_fit(
    model: PreTrainedModel, plans: list[cl.Selection]
) -> None:
    good = Question("words", "ab", "cd")
    with pytest.raises(cl.InputError):
        ask(model, [], [good])
    with pytest.raises(cl.MismatchError):
        ask(model, [cl.Selection.from_pruned(make_units(), [0])], [good])
    table = ask(model, plans, [Question("words", "ab"), good])
    assert (table.left_out, table.right.shape) == (1, (len(plans), 1))
