"""Damage measured while one looks: coarse first, then finer, stopped by the next move; by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.judging.answers import AnswerOptions
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.kept import answers_file
from cocurve_lab.extensions.judging.lockstep import next_token_probabilities
from cocurve_widgets import LambdaExplorer, MeasuredPlan, Session
from cocurve_widgets.damage import STAGES, plain_record
from cocurve_widgets.packing import plan_mark
from cocurve_widgets.session import text_name
from helpers.instruments import received, settle
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer
from helpers.waiting import eventually

MODEL, TOKENIZER, TEXT = tiny_model(), word_tokenizer(), tiny_text(6)
CURVATURE = random_curvature(cl.enumerate_units(MODEL, 4), seed=7)
QUESTIONS = [Question(name, f"w{n}", f"w{n + 1}") for name in ("easy", "hard") for n in range(4)]


def make(**more: object) -> LambdaExplorer:
    given = {"held_out": TEXT, "questions": QUESTIONS, "ratio": 0.4} | more
    session = given.pop("session", None) or Session(CURVATURE, MODEL, TOKENIZER)
    return LambdaExplorer(CURVATURE, session=session, **given)


@pytest.fixture
def explorer() -> LambdaExplorer:
    return make(prompt="w1 w2")


def test_a_rest_measures_both_plans_to_the_end(explorer: LambdaExplorer) -> None:
    settle(explorer)
    a, b = cl.solve_greedy(CURVATURE, 0.4, 0.0), explorer.selection
    assert set(a.pruned) != set(b.pruned)
    table = cl.measure_plans(MODEL, [a, b], TEXT, progress=False)
    answers = cl.answer_accuracy(MODEL, TOKENIZER, [a, b], QUESTIONS, progress=False)
    for k, plan in enumerate((a, b)):
        found = explorer.damage.of(plan)
        assert found.risk == pytest.approx(table.mean[k])
        assert found.standard_error == pytest.approx(table.standard_error[k])
        assert (found.rows, found.text) == (6, text_name(TEXT))
        right = {n: int(answers.right[k][answers.of(n)].sum()) for n in ("easy", "hard")}
        assert found.abilities == {name: (count, 4) for name, count in right.items()}
    shown = received(explorer, "damage")
    paired = shown["paired"]
    assert (paired["difference"], paired["error"]) == pytest.approx(table.paired(1, 0))
    assert paired["plans"] == [plan_mark(plan.pruned) for plan in (a, b)]
    assert not shown["busy"]
    assert [m["rows"] for m in shown["measured"]] == [6, 6, 6]  # the dense model first
    assert shown["measured"][0]["risk"] == 0
    known = {m.selection.fingerprint for m in explorer.session.measured}
    assert known == {a.fingerprint, b.fingerprint}  # so that other views have it too


def test_a_first_kl_comes_from_two_rows_and_answers_come_before_more_rows() -> None:
    steps: list[tuple[int, int]] = []
    explorer = make(live=False)

    def note(change: Any) -> None:
        mark = plan_mark(explorer.selection.pruned)
        found = [m for m in change["new"]["measured"] if m["plan"] == mark]
        steps.extend((m["rows"], sum(n for _, n in m["abilities"].values())) for m in found)

    explorer.observe(note, "_damage")
    explorer.live = True
    settle(explorer)
    assert steps[0] == (1, 0)
    rows, each = STAGES[0]
    assert (rows, 2 * each) in steps  # the first stage: few rows, then some right answers
    assert steps == sorted(steps)
    assert steps[-1] == (6, 8)


def test_the_next_move_stops_a_measurement_within_a_pass() -> None:
    model = tiny_model()
    entered, go_on, later = threading.Event(), threading.Event(), []

    def wait(*_: object) -> None:
        entered.set()
        assert go_on.wait(20)

    hook = model.model.layers[0].register_forward_hook(wait)
    last = model.model.layers[-1].register_forward_hook(lambda *_: later.append(1))
    explorer = make(session=Session(CURVATURE, model, TOKENIZER), questions=())
    first = explorer.selection
    assert entered.wait(20)
    explorer.ratio = 0.2
    hook.remove()
    go_on.set()
    settle(explorer)
    last.remove()
    assert explorer.damage.of(first) is None  # its pass never reached the end
    assert explorer.damage.of(explorer.selection).rows == 6
    assert explorer.error == ""


def test_plans_passed_by_are_not_measured_and_a_plan_that_returns_is_known_at_once() -> None:
    explorer = make(questions=())
    settle(explorer)
    before = explorer.damage.of(explorer.selection)
    with explorer.session.lock:  # a drag: the worker gets no turn in between
        for ratio in np.linspace(0.1, 0.3, 20):
            explorer.ratio = float(ratio)
            assert explorer.damage.of(explorer.selection) is None
        explorer.ratio = 0.4
    assert received(explorer, "damage")["measured"][-1] == plain_record(before)
    settle(explorer)
    assert len(explorer.session.measured) == 2  # A and B of 0.4 alone


def test_a_plan_that_the_session_knows_on_this_text_is_not_measured_again() -> None:
    session = Session(CURVATURE, MODEL, TOKENIZER)
    plans = [cl.solve_greedy(CURVATURE, 0.4, strength) for strength in (0.0, 1.0)]
    session.add_measured(
        *(MeasuredPlan(p, 0.5 + k, 0.01, text_name(TEXT), rows=6) for k, p in enumerate(plans)),
        MeasuredPlan(plans[1], 9.0, 0.01, "another text", rows=50),
    )
    explorer = make(session=session, questions=(), prompt="")
    assert not explorer.damage.busy
    settle(explorer)
    assert explorer.damage.of(explorer.selection).risk == 1.5
    assert len(session.measured) == 3


def test_it_can_be_switched_off_and_an_error_ends_the_work(
    explorer: LambdaExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(explorer)
    explorer.live = False
    explorer.ratio = 0.2
    settle(explorer)
    assert explorer.damage.of(explorer.selection) is None
    explorer.live = True
    settle(explorer)
    assert explorer.damage.of(explorer.selection).rows == 6

    def fail(*_: object) -> None:
        raise cl.NumericalError("the model gives NaN logits.")

    monkeypatch.setattr("cocurve_lab.measuring.risk.Meter.measure", fail)
    explorer.ratio = 0.3
    eventually(lambda: explorer.error, lambda text: "NaN logits" in text)
    settle(explorer)
    assert received(explorer, "damage")["busy"] is False


def test_kl_and_answers_outlive_the_kernel_in_a_folder_shared_with_the_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = cl.solve_greedy(CURVATURE, 0.4)
    options = AnswerOptions(checkpoint=answers_file(tmp_path, MODEL, QUESTIONS))
    cl.answer_accuracy(MODEL, TOKENIZER, [plan], QUESTIONS, options=options, progress=False)
    first = make(cache=tmp_path)
    settle(first)
    before = first.damage.of(first.selection)
    assert before.abilities
    first.close()
    # another kernel has another session, which knows nothing, and measures nothing again
    forbidden = pytest.fail
    monkeypatch.setattr("cocurve_lab.extensions.judging.answers.ReplyEngine.measure", forbidden)
    monkeypatch.setattr("cocurve_lab.measuring.risk._Engine.measure", forbidden)
    second = make(cache=tmp_path, prompt="")
    settle(second)
    after = second.damage.of(second.selection)
    assert (after.risk, after.abilities) == (before.risk, before.abilities)
    assert second.error == ""


# By hand: a plan made by clicks, the measured edge of two units, and the next token


def test_clicks_make_plan_a_and_it_is_measured(explorer: LambdaExplorer) -> None:
    start = explorer.selection.pruned
    kept = next(u for u in range(len(CURVATURE.units)) if u not in start)
    by_hand = {"strength": None, "ratio": None, "controls": None, "hand": True}
    explorer.set_state({"_pin": {"order": [*start[1:], kept]} | by_hand})  # as the page does
    assert set(explorer.pinned.pruned) == (set(start) | {kept}) - {start[0]}
    assert explorer.selection.pruned == start  # B stays the solver's plan
    pin = received(explorer, "pin")
    assert (pin["hand"], pin["controls"]) == (True, None)
    settle(explorer)
    found = explorer.damage.of(explorer.pinned)
    assert found.risk == pytest.approx(cl.pruning_risk(MODEL, explorer.pinned, TEXT))
    explorer.pinned = cl.Selection.from_pruned(CURVATURE.units, [1, 2])
    assert not received(explorer, "pin")["hand"]  # of code
    explorer.set_state({"_pin": {}})
    assert explorer.pinned is None


def test_an_edge_is_what_two_units_cost_beyond_what_each_costs(explorer: LambdaExplorer) -> None:
    u, v = 2, 9
    explorer.pair = [u, v]
    settle(explorer)
    plans = [cl.Selection.from_pruned(CURVATURE.units, part) for part in ([u], [v], [u, v])]
    kl = cl.measure_plans(MODEL, plans, TEXT, progress=False).kl
    by_row = kl[2] - kl[0] - kl[1]
    edge = received(explorer, "damage")["edge"]
    assert edge["difference"] == pytest.approx(by_row.mean())
    assert edge["error"] == pytest.approx(by_row.std(ddof=1) / np.sqrt(6))
    assert edge["plans"] == [plan_mark([u, v])]
    shown = {m["plan"]: m["risk"] for m in received(explorer, "damage")["measured"]}
    for plan, risk in zip(plans, kl.mean(axis=1), strict=True):
        assert shown[plan_mark(plan.pruned)] == pytest.approx(risk)
    explorer.pair = [u]
    assert "edge" not in received(explorer, "damage")
    # pairs are no plans: other views do not get them
    assert all(len(m.selection) > 2 for m in explorer.session.measured)


def test_the_next_token_under_both_plans(explorer: LambdaExplorer) -> None:
    settle(explorer)
    plans = [explorer.damage.dense, cl.solve_greedy(CURVATURE, 0.4, 0.0), explorer.selection]
    expected = next_token_probabilities(MODEL, TOKENIZER, plans, "w1 w2")
    rows = received(explorer, "damage")["next"]["rows"]
    top = np.argsort(-expected[0])[:5]
    assert [row["token"] for row in rows[:5]] == [TOKENIZER.decode([i]) for i in top]
    np.testing.assert_allclose([row["shares"] for row in rows[:5]], expected[:, top].T)
    explorer.prompt = "w7"
    assert received(explorer, "damage")["next"]["rows"] == []  # of another prompt
    settle(explorer)
    assert received(explorer, "damage")["next"]["prompt"] == "w7"
    assert len(received(explorer, "damage")["next"]["rows"]) >= 5


def test_a_prompt_begins_as_the_text_and_needs_a_tokenizer() -> None:
    for tokenizer in (TOKENIZER, None):
        session = Session(CURVATURE, MODEL, tokenizer)
        explorer = LambdaExplorer(CURVATURE, session=session, held_out=TEXT)
        begun = TOKENIZER.decode(TEXT.input_ids[0][:24], skip_special_tokens=True)
        settle(explorer)
        assert explorer.prompt == (begun if tokenizer else "")
        assert ("next" in received(explorer, "damage")) == bool(tokenizer)
        assert explorer.error == ""
