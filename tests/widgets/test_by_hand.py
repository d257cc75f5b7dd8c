"""By hand: a plan made by clicks, the measured edge of two units, and the next token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.judging.lockstep import next_token_probabilities
from cocurve_widgets import LambdaExplorer, Session
from cocurve_widgets.packing import plan_mark
from helpers.instruments import received, say, settle
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

MODEL, TOKENIZER, TEXT = tiny_model(), word_tokenizer(), tiny_text(5)
CURVATURE = random_curvature(cl.enumerate_units(MODEL, 4), seed=7)


@pytest.fixture
def explorer() -> Iterator[LambdaExplorer]:
    session = Session(CURVATURE, MODEL, TOKENIZER)
    made = LambdaExplorer(CURVATURE, session=session, held_out=TEXT, ratio=0.4, prompt="w1 w2")
    yield made
    made.close()


def test_clicks_make_plan_a_and_it_is_measured(explorer: LambdaExplorer) -> None:
    start = explorer.selection.pruned
    kept = next(u for u in range(len(CURVATURE.units)) if u not in start)
    say(explorer, toggle=kept)
    say(explorer, toggle=start[0])
    assert set(explorer.pinned.pruned) == (set(start) | {kept}) - {start[0]}
    assert explorer.selection.pruned == start  # B stays the solver's plan
    pin = received(explorer, "pin")
    assert (pin["hand"], pin["controls"]) == (True, None)
    assert pin["node"] + pin["edge"] == pytest.approx(CURVATURE.risk(pin["order"]))
    settle(explorer)
    found = explorer.damage.of(explorer.pinned)
    assert found.risk == pytest.approx(cl.pruning_risk(MODEL, explorer.pinned, TEXT))
    explorer.toggle(CURVATURE.units[kept].name)  # restored, by name
    assert set(explorer.pinned.pruned) == set(start) - {start[0]}
    say(explorer, toggle=None)
    assert explorer.pinned.pruned == ()
    explorer.pin(cl.Selection.from_pruned(CURVATURE.units, [1, 2]))
    assert not received(explorer, "pin")["hand"]  # of code
    explorer.toggle(3)
    assert received(explorer, "pin")["hand"]
    assert set(explorer.pinned.pruned) == {1, 2, 3}


def test_an_edge_is_what_two_units_cost_beyond_what_each_costs(explorer: LambdaExplorer) -> None:
    u, v = 2, 9
    explorer.pair = [u, v]
    settle(explorer)
    plans = [cl.Selection.from_pruned(CURVATURE.units, part) for part in ([u], [v], [u, v])]
    kl = cl.measure_plans(MODEL, plans, TEXT, progress=False).kl
    by_row = kl[2] - kl[0] - kl[1]
    edge = received(explorer, "damage")["edge"]
    assert edge["difference"] == pytest.approx(by_row.mean())
    assert edge["error"] == pytest.approx(by_row.std(ddof=1) / np.sqrt(5))
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
        explorer.close()
