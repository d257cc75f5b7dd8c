"""GenerationCompare without a kernel: texts, stopping, plans, the ribbon, the menu and code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text, forced_kl, generate_rows
from cocurve_lab.models.runtime import exclusive
from cocurve_widgets import GenerationCompare, Session, generation_compare
from cocurve_widgets.session import Cancelled
from helpers.instruments import say, settle
from helpers.problems import random_curvature
from helpers.tiny_models import CHAT, GROUPS, tiny_model, word_tokenizer
from helpers.waiting import eventually

PROMPT = "w1 w5 w7 w20"


class Bench:
    """A tiny model with a curvature of its own, and what the instrument sends to the page."""

    def __init__(self) -> None:
        self.model = tiny_model(max_position_embeddings=400)
        self.tokenizer = word_tokenizer()
        self.curvature = random_curvature(cl.enumerate_units(self.model, GROUPS))
        self.session = Session(self.curvature)
        self.sent: list[dict[str, Any]] = []

    def instrument(self, **controls: Any) -> GenerationCompare:
        usual = {"session": self.session, "prompt": PROMPT, "max_new_tokens": 8, "live": False}
        usual |= {"columns": "plans"}
        controls = usual | controls
        found = GenerationCompare(self.model, self.tokenizer, self.curvature, **controls)
        found.send = lambda content, buffers=None: self.sent.append(content)
        return found

    def alone(self, prompt: str = PROMPT, new: int = 8, **more: Any) -> Any:
        """The pair of texts that the library writes for the session's plan."""
        plan, chat = self.session.selection, more.pop("chat", False)
        sampling = Sampling(new, **more)
        return compare_text(self.model, self.tokenizer, prompt, plan, sampling, chat=chat)

    def run_code(self, g: GenerationCompare) -> dict[str, Any]:
        names = {"model": self.model, "tokenizer": self.tokenizer, "curvature": self.curvature}
        exec(g.code(), names)
        return names


@pytest.fixture
def bench() -> Bench:
    return Bench()


def press(instrument: GenerationCompare, do: str, **values: Any) -> None:
    """What the page sends."""
    say(instrument, do=do, set=values)


# Writing ----------------------------------------------------------------------------------------


def test_generate_and_its_button_write_both_texts(bench: Bench) -> None:
    g, other = bench.instrument(), bench.instrument()
    expected = bench.alone("w3 w4", 6)
    assert g.generate("w3 w4", 6) == (expected.dense, expected.pruned)
    assert [token for token, *_ in g.tokens["pruned"]] == list(expected.pruned_ids)
    assert "".join(piece for _, piece, *_ in g.tokens["dense"]) == expected.dense
    assert g.divergence == expected.divergence
    assert (g.busy, g.error, g.stale) == (False, "", "")
    press(other, "generate", prompt="w3 w4", max_new_tokens=6, temperature=0.0, seed=0)
    settle(other)
    names = ("texts", "divergence", "ribbon", "tokens", "prompt")
    assert [getattr(other, name) for name in names] == [getattr(g, name) for name in names]


def test_what_is_sent_joins_to_the_text(bench: Bench) -> None:
    g = bench.instrument(max_new_tokens=300)
    g.generate()
    start, *batches = bench.sent
    assert start["start"]["prompt"] == PROMPT
    counts = {"dense": 0, "diagonal": 0, "pruned": 0}
    for batch in batches:
        assert batch["after"] == counts
        for side, new in batch["append"].items():
            assert g.tokens[side][counts[side] : counts[side] + len(new)] == new
            counts[side] += len(new)
    assert 1 < len(batches) < 300, "tokens go in batches"


SETTINGS = [  # of a text, and another value of one of them
    ({"temperature": 1.5, "seed": 4}, {"seed": 5}),
    ({"temperature": 1.5, "seed": 4}, {"temperature": 0.0}),
    ({"chat": None}, {"chat": False}),  # asked as a chat where the tokenizer has a template
    ({"chat": False}, {"chat": True}),
]


@pytest.mark.parametrize(("given", "other"), SETTINGS)
def test_texts_and_code_follow_sampling_and_chat(bench: Bench, given: Any, other: Any) -> None:
    bench.tokenizer.chat_template = CHAT
    g = bench.instrument(**given)
    pair = bench.alone(**{"chat": True} | {k: v for k, v in given.items() if v is not None})
    assert g.generate() == g.generate() == (pair.dense, pair.pruned)
    assert bench.run_code(g)["pair"] == pair
    ((name, value),) = other.items()
    setattr(g, name, value)
    assert g.stale == "of earlier controls"
    assert g.generate() != (pair.dense, pair.pruned)
    assert g.stale == ""


# Stopping, waiting ------------------------------------------------------------------------------


def slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every token take some time; returns a list with one entry per token."""
    made: list[int] = []
    original = generate_rows

    def slow(*args: Any, **more: Any) -> Iterator[Any]:
        for pair in original(*args, **more):
            time.sleep(0.02)
            made.append(1)
            yield pair

    monkeypatch.setattr(generation_compare, "generate_rows", slow)
    return made


def test_stop_stops_within_a_token_and_keeps_the_text(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = slowly(monkeypatch)
    g = bench.instrument(max_new_tokens=300)
    press(g, "generate")
    assert g.busy
    eventually(lambda: len(made) >= 5)
    press(g, "stop")
    at_stop = len(made)
    settle(g)
    assert len(made) <= at_stop + 1
    count = len(g.tokens["dense"])
    assert at_stop <= count <= at_stop + 1
    assert (g.shown["stopped"], g.busy) == (True, False)
    pair = bench.alone(new=count)
    assert (g.texts["dense"], g.texts["pruned"]) == (pair.dense, pair.pruned)
    assert len(g.ribbon) == len(pair.prompt_ids) + count - 1


def test_interrupting_a_cell_keeps_the_text(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = generate_rows

    def interrupted(*args: Any, **more: Any) -> Iterator[Any]:
        for number, pair in enumerate(original(*args, **more)):
            if number == 3:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(generation_compare, "generate_rows", interrupted)
    g = bench.instrument()
    with pytest.raises(KeyboardInterrupt):
        g.generate()
    assert g.texts["dense"] == bench.alone(new=3).dense
    assert (g.shown["stopped"], g.busy) == (True, False)
    assert exclusive(bench.model).acquire(blocking=False)
    exclusive(bench.model).release()


def test_waiting_for_the_model_can_be_stopped(bench: Bench) -> None:
    g = bench.instrument()
    with exclusive(bench.model):  # as a build in a cell does
        press(g, "generate")
        eventually(lambda: "waiting for the model" in g.status)
        press(g, "stop")
        settle(g)
        assert (g.error, g.busy, g.texts) == ("", False, {})
        with ThreadPoolExecutor(1) as cells:
            cell = cells.submit(g.generate)
            eventually(lambda: g.busy)
            g.stop()
            assert isinstance(cell.exception(20), Cancelled)
        press(g, "generate")
        assert not bench.session.worker.join(0.2)
    settle(g)
    assert g.texts["dense"] == bench.alone().dense


def test_the_newest_request_wins_and_instruments_do_not_cancel_each_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = slowly(monkeypatch)
    g, other = bench.instrument(max_new_tokens=300), bench.instrument(prompt="w2 w3")
    press(g, "generate")
    eventually(lambda: len(made) >= 2)
    press(g, "generate", prompt="w9", max_new_tokens=5)
    press(other, "generate")
    settle(g)
    assert g.texts["dense"] == bench.alone("w9", 5).dense
    assert (g.shown["stopped"], g.shown["run"], g.busy) == (False, 2, False)
    assert other.texts["dense"] == bench.alone("w2 w3").dense


# Plans ------------------------------------------------------------------------------------------


def test_the_plan_is_the_sessions(bench: Bench) -> None:
    g = bench.instrument()
    plan, other = g.selection, cl.solve_greedy(bench.curvature, 0.4, 0.0)
    assert bench.session.selection is plan
    assert plan.pruned == cl.solve_greedy(bench.curvature, 0.2, 1.0).pruned
    second = bench.instrument(selection=other)
    assert g.selection is second.selection is bench.session.selection is other
    g.selection = plan
    assert bench.session.selection is second.selection is plan


def test_another_plan_or_prompt_makes_the_text_stale(bench: Bench) -> None:
    g = bench.instrument()
    g.selection = plan = cl.solve_greedy(bench.curvature, 0.3)
    assert g.stale == ""  # there is no text yet
    text = g.generate()
    g.selection = cl.Selection.from_pruned(plan.units, reversed(plan.pruned))
    assert g.stale == ""  # the same units in another order
    ffn = next(i for i in plan.kept if plan.units[i].kind == "ffn")
    for other in (cl.solve_greedy(bench.curvature, 0.5), plan.with_gains({ffn: 2.0}), None):
        g.selection = other
        assert g.stale == "of earlier controls"
    assert (g.texts["dense"], g.texts["pruned"]) == text
    g.selection = plan
    g.prompt = "w8"
    assert g.stale == "of earlier controls"


def test_the_refitted_text_is_that_of_the_plan_with_the_gains_of_h(bench: Bench) -> None:
    g = bench.instrument(columns="refitted")
    g.ratio = 0.5
    plan = bench.session.selection
    _, pruned = g.generate()
    with_gains = plan.with_gains(cl.solve_gains(bench.curvature, plan))
    with cl.ablate(bench.model, with_gains):
        alone = cl.continue_text(bench.model, bench.tokenizer, PROMPT, 8)
    assert g.texts["refitted"] == alone
    assert alone not in (pruned, g.texts["dense"])
    assert [*g.tokens] == ["dense", "pruned", "refitted"]
    g.columns = "plans"
    settle(g)
    assert "refitted" not in g.texts


def test_it_opens_with_a_question_that_tells_what_pruning_does(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    asked: list[Any] = []
    right = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0]], bool)

    def answers(*given: Any, **_: Any) -> SimpleNamespace:
        asked.append(given)
        return SimpleNamespace(right=right)

    monkeypatch.setattr(cl, "answer_accuracy", answers)
    questions = [Question(f"ability {n // 3}", f"w{n}", "w1") for n in range(7)]
    usual = {"session": bench.session, "prompts": questions, "max_new_tokens": 8, "ratio": 0.25}
    g = GenerationCompare(bench.model, bench.tokenizer, bench.curvature, **usual)
    g._ipython_display_()
    settle(g)
    (_, _, plans, tried), *_ = asked
    assert [[*plan.pruned] for plan in plans] == [
        [],
        [*bench.session.selection.pruned],
        [*cl.solve_greedy(bench.curvature, 0.5).pruned],
    ]
    assert tried == [questions[n] for n in (0, 1, 3, 4, 6)]  # two of each ability
    assert g.prompt == "w3"  # known, and lost at twice the ratio
    assert (g.texts["dense"] != "", g.busy) == (True, False)
    given = GenerationCompare(bench.model, bench.tokenizer, bench.curvature, prompt="w2", **usual)
    given._ipython_display_()
    settle(given)
    assert (given.prompt, len(asked), given.texts["dense"] != "") == ("w2", 1, True)


def test_the_sliders_write_the_dense_text_and_those_of_a_and_b(bench: Bench) -> None:
    g = bench.instrument(live=True, interaction_strength=0.5)
    assert (g.ratio, g.selection.interaction_strength) == (0.2, 0.5)
    assert not g.busy  # a notebook that is run writes nothing by itself
    g.ratio = 0.6
    settle(g)
    a, b = (cl.solve_greedy(bench.curvature, 0.6, strength) for strength in (0.0, 0.5))
    assert set(a.pruned) != set(b.pruned)
    assert bench.session.selection.pruned == g.selection.pruned == b.pruned
    expected = bench.alone()
    assert (g.texts["dense"], g.texts["pruned"]) == (expected.dense, expected.pruned)
    bench.session.selection = a
    assert (g.ratio, g.interaction_strength) == (0.6, 0.0)
    settle(g)
    assert list(g.texts) == ["dense", "pruned"]  # A is B
    diagonal, run = g.texts["pruned"], g.shown["run"]
    assert diagonal == bench.alone().pruned
    for strength in (0.5, 0.5001):  # the same plan: its text is there
        g.interaction_strength = strength
        settle(g)
        assert (g.texts["pruned"], g.texts["diagonal"]) == (expected.pruned, diagonal)
    assert g.shown["run"] == run + 1
    g.live = False
    g.ratio = 0.3
    assert (g.busy, g.stale) == (False, "of earlier controls")
    g.ratio = 1.0
    assert "ratio" in g.error
    by_hand = cl.Selection.from_pruned(bench.curvature.units, [1, 8, 14])
    g.selection = by_hand  # no lambda makes it, and the sliders do not replace it
    assert bench.session.selection is by_hand


def test_a_reply_ends_with_its_line_unless_it_is_a_turn_of_a_chat(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = bench.instrument().generate()[0].split()
    bench.tokenizer.chat_template = CHAT
    turn = bench.instrument().generate()[0].split()
    bench.tokenizer.chat_template = None
    last = {next(word for word in text if word != text[0]) for text in (free, turn)}
    decode = type(bench.tokenizer).decode

    def with_lines(self: Any, *args: Any, **more: Any) -> str:
        words = decode(self, *args, **more).split(" ")
        return " ".join(f"{word}\n" if word in last else word for word in words)

    monkeypatch.setattr(type(bench.tokenizer), "decode", with_lines)
    question = {"prompts": [Question("own", PROMPT, "w1")], "prompt": ""}
    g = bench.instrument(**question)
    assert g.generate()[0].split() == free[: min(free.index(x) for x in last if x in free) + 1]
    assert bench.run_code(g)["pair"].dense == g.texts["dense"]
    assert bench.instrument(prompts=[PROMPT]).generate()[0].split() == free
    bench.tokenizer.chat_template = CHAT
    assert bench.instrument(**question).generate()[0].split() == turn


# The ribbon and the menu ------------------------------------------------------------------------


def values(g: GenerationCompare) -> np.ndarray:
    return np.array([bar["kl"] for bar in g.ribbon])


def test_the_ribbon_is_the_forced_kl_of_the_named_text_and_its_plan(bench: Bench) -> None:
    g = bench.instrument()
    g.generate()
    pair, plan = bench.alone(), bench.session.selection
    for name, ids in (("dense", pair.dense_ids), ("pruned", pair.pruned_ids)):
        g.forced_text = name
        settle(g)
        row = [*pair.prompt_ids, *ids]
        np.testing.assert_allclose(values(g), forced_kl(bench.model, plan, row), rtol=1e-6)
        risk = cl.pruning_risk(bench.model, plan, cl.CalibrationSet(torch.tensor([row])))
        assert values(g).mean() == pytest.approx(risk, rel=1e-5)
        assert [bar["generated"] for bar in g.ribbon] == [False] * 3 + [True] * 8
        names = [bar["token"].strip() for bar in g.ribbon]
        assert names == bench.tokenizer.convert_ids_to_tokens(row)[1:]
        bench.session.selection = cl.solve_greedy(bench.curvature, 0.6)  # the text stays of `plan`


def test_a_text_of_ones_own(bench: Bench) -> None:
    g = bench.instrument()
    g.forced_text = "custom"
    g.custom_text = "w4 w5 w6 w7"
    settle(g)  # before any text was generated
    expected = forced_kl(bench.model, bench.session.selection, [6, 7, 8, 9])
    np.testing.assert_allclose(values(g), expected, rtol=1e-6)
    g.custom_text = "w4"  # nothing to predict
    settle(g)
    assert g.ribbon == []
    g.custom_text = "w4 " * 401  # the text columns do not depend on it
    press(g, "generate")
    settle(g)
    assert "context is 400" in g.error
    assert g.texts["dense"] == bench.alone().dense
    g.custom_text = "w4 w5"
    settle(g)
    assert (g.error, len(g.ribbon)) == ("", 1)


def test_the_menu_is_what_the_user_gives_and_answers_are_judged(bench: Bench) -> None:
    text = bench.instrument().generate()[0]
    questions = [Question("own", PROMPT, text.strip()), "w5 w6"]
    g = bench.instrument(prompts=questions, prompt="")
    assert g.prompt == PROMPT
    _, pruned = g.generate()
    right = {"dense": True, "diagonal": g.texts["diagonal"] == text, "pruned": pruned == text}
    assert (g.shown["answer"], g.shown["right"]) == (text.strip(), right)
    g.generate("w9 w9")
    assert (g.shown["answer"], {*g.shown["right"].values()}) == (None, {None})
    assert bench.instrument(prompts=questions, prompt="w9").prompt == "w9"


# Errors and code --------------------------------------------------------------------------------


def test_what_the_page_cannot_mean_no_plan_and_nan(bench: Bench) -> None:
    g = bench.instrument()
    press(g, "generate", max_new_tokens="many")
    assert "max_new_tokens" in g.error
    plan, g.selection = g.selection, None
    press(g, "generate")
    assert "no plan" in g.error
    with pytest.raises(cl.InputError, match="no plan"):
        g.code()
    g.selection = plan
    with torch.no_grad():
        bench.model.model.norm.weight[0] = float("nan")
    press(g, "generate")
    settle(g)
    assert "NaN" in g.error
    assert not g.busy


@pytest.mark.parametrize("forced", ["dense", "pruned", "custom"])
def test_code_reproduces_what_is_shown(bench: Bench, forced: str) -> None:
    g = bench.instrument(temperature=0.7, seed=11, custom_text="w3 'w4' \"w5\"")
    assert bench.run_code(g)["pair"].dense == g.generate()[0]  # before there is a text
    g.generate("w2 w3 w4")
    g.forced_text = forced
    settle(g)
    g.prompt = "something else by now"
    names = bench.run_code(g)
    assert (names["pair"].dense, names["pair"].pruned) == (g.texts["dense"], g.texts["pruned"])
    np.testing.assert_allclose(names["kl"], values(g), rtol=1e-6)
