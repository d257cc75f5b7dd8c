"""Abilities by plan: planted answers against McNemar by hand, the cache, verdicts, the picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

import cocurve_lab as cl
from cocurve_lab.extensions.judging.answers import AnswerTable
from cocurve_lab.extensions.judging.generation import Question
from cocurve_studies import abilities
from cocurve_studies.abilities import ALL, CODE, DENSE, FULL
from cocurve_studies.tables import Table, pick, shown
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import (
    GROUPS,
    masked_by_hand,
    tiny_model,
    tiny_text,
    units_by_hand,
    word_tokenizer,
)

UNITS = make_units(4)
CURVATURE = random_curvature(UNITS, seed=1, shared=0.8)
QUESTIONS = [Question(name, f"{name} {i}", "x") for name in (CODE, "other") for i in range(20)]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every plan with k units gets the first 40 - k questions right; counts how many are asked."""
    asked: list[int] = []

    def answer(_: Any, __: Any, plans: Any, questions: Any, **___: Any) -> AnswerTable:
        asked.append(len(plans))
        right = np.array([[q < 40 - len(plan) for q in range(40)] for plan in plans])
        return AnswerTable(tuple(plans), tuple(questions), right, -1.0 - right, np.ones(40), right)

    monkeypatch.setattr(abilities, "answer_accuracy", answer)
    return asked


def study(plans: Table, cache: Any = None) -> Table:
    return abilities.ability_study(
        tiny_model(), word_tokenizer(), plans, QUESTIONS, cache=cache, progress=False
    )


def entry(variant: str, units: int, base: str = "λ 0", ratio: float = 0.2) -> dict[str, Any]:
    plan = cl.Selection.from_pruned(UNITS, list(range(units)))
    named = {"variant": variant, "base": base, "requested_ratio": ratio, "note": ""}
    return named | {"selection": plan}


def test_pairs_are_counted_and_tested_by_hand(planted: list[int]) -> None:
    table = study([entry("λ 0", 10), entry("λ 1", 3)])
    dense, zero, one = (
        pick(table, variant=v, capability="other")[0] for v in (DENSE, "λ 0", "λ 1")
    )
    assert (dense["accuracy"], zero["accuracy"], one["accuracy"]) == (1.0, 0.5, 17 / 20)
    assert (dense["difference"], zero["p_value"]) == (None, None)
    assert (one["gained"], one["lost"], one["questions"]) == (7, 0, 20)
    assert one["difference"] == pytest.approx(7 / 20)
    pairs = np.array([1.0] * 7 + [0.0] * 13)
    assert one["difference_error"] == pytest.approx(pairs.std(ddof=1) / 20**0.5)
    assert one["p_value"] == pytest.approx(2 * binom.cdf(0, 7, 0.5))
    assert one["log_likelihood_difference"] == pytest.approx(-7 / 20)
    code = pick(table, variant="λ 1", capability=CODE)[0]
    assert (code["difference"], code["p_value"]) == (0, 1)
    assert pick(table, variant="λ 1", capability=ALL)[0]["questions"] == 40
    assert len(shown(table, abilities.COLUMNS).data) == len(table)


def test_a_plan_like_another_says_so_and_one_without_a_solution_says_why(
    planted: list[int],
) -> None:
    missing = entry("λ 2", 1) | {"selection": None, "note": "no such plan"}
    table = study([entry("λ 0", 4), entry("λ 1", 4), missing])
    assert pick(table, variant="λ 1", capability=ALL)[0]["same_as"] == "λ 0"
    assert planted == [3]
    (lost,) = pick(table, variant="λ 2", capability=ALL)
    assert (lost["accuracy"], lost["p_value"], lost["note"]) == (None, None, "no such plan")
    found = abilities.strength_ability_findings(table)
    assert {finding.agrees for finding in found} == {None}  # the same plan tells nothing
    assert "1 plans without" in abilities.plot_abilities(table).layout.title.text


@pytest.mark.parametrize(("units", "expected"), [(2, True), (9, None), (18, False)])
def test_verdicts_on_lambda_need_mcnemar(
    planted: list[int], units: int, expected: bool | None
) -> None:
    table = study([entry("λ 0", 10), entry("λ 1", units)])
    found = abilities.strength_ability_findings(table)
    assert found[0].agrees is expected
    assert "lost of 40" in found[0].ours
    assert found[2].agrees is None  # no question of code is decided


def test_verdicts_on_edges_are_against_the_method(planted: list[int]) -> None:
    rows = [entry(FULL, 1, FULL), entry("diagonal", 18, FULL), entry("within module", 1, FULL)]
    table = study([row | {"base": FULL} for row in rows])
    table = [row | {"capability": CODE if row["capability"] == ALL else "-"} for row in pick(table)]
    found = {f.ours.split(" − ")[0]: f.agrees for f in abilities.edge_ability_findings(table)}
    assert found["diagonal"] is True
    assert found["within module"] is None  # the same plan
    assert found["head-only"] is None  # not asked


def test_plans_by_lambda_and_by_variant() -> None:
    rows = abilities.strength_plans(CURVATURE, (0.2,), (0.0, 1.0))
    assert [(r["variant"], r["base"]) for r in rows] == [("λ 0", "λ 0"), ("λ 1", "λ 0")]
    assert rows[1]["selection"].pruned == cl.solve_greedy(CURVATURE, 0.2, 1.0).pruned
    only = cl.Guards(kinds=("attention",))
    (row,) = abilities.strength_plans(CURVATURE, (0.9,), (0.0,), only)
    assert row["selection"] is None
    assert row["note"]
    names = [row["variant"] for row in abilities.edge_plans(CURVATURE, 0.4)]
    assert names[0] == FULL
    assert {"diagonal", "within module", "head-only", "FFN-only", "cross block"} <= set(names)
    assert "joint" not in names
    assert len(set(names)) == len(names)


def test_nothing_to_ask() -> None:
    model, tokenizer = tiny_model(), word_tokenizer()
    plans = [entry("λ 0", 2)]
    assert len(abilities.ability_study(model, tokenizer, plans, [])) == 0
    assert "No question" in abilities.plot_abilities([]).layout.title.text
    assert abilities.strength_ability_findings([]) == []
    assert {f.agrees for f in abilities.edge_ability_findings([])} == {None}
    with pytest.raises(cl.InputError, match="no plan to ask"):
        abilities.ability_study(model, tokenizer, [plans[0] | {"selection": None}], QUESTIONS)


def test_the_trade_off_sets_loss_beside_right_answers(planted: list[int]) -> None:
    """Perplexity of masked models by hand, and the answers of the ability study."""
    model, text = tiny_model(), tiny_text(3, 16, seed=7)
    units = cl.enumerate_units(model, GROUPS)
    hand, plans = units_by_hand(model), []
    for variant, size in (("λ 0", 6), ("λ 0.5", 2), ("λ 1", 1)):
        plan = cl.Selection.from_pruned(units, range(size))
        plans.append(entry(variant, 1) | {"selection": plan})
    answers = abilities.ability_study(
        model, word_tokenizer(), plans, QUESTIONS, cache=None, progress=False
    )
    table = abilities.trade_off(model, plans, answers, text, progress=False)
    losses = []
    for row in plans:
        with masked_by_hand(model, [hand[u] for u in row["selection"].pruned]), torch.no_grad():
            log_p = torch.log_softmax(model(text.input_ids).logits, dim=-1)
        by_row = [
            -np.mean([float(p[t, ids[t + 1]]) for t in positions.tolist()])
            for p, ids, positions in zip(log_p, text.input_ids, text.positions, strict=True)
        ]
        losses.append(np.array(by_row))
    for row, loss in zip(pick(table), losses, strict=True):
        assert row["perplexity"] == pytest.approx(np.exp(loss.mean()), rel=1e-4)
        apart = loss - losses[0]
        assert row["loss_difference"] == pytest.approx(apart.mean(), abs=1e-5)
        error = apart.std(ddof=1) / 3**0.5
        assert row["loss_difference_error"] == pytest.approx(error, abs=1e-5)
    assert [row["accuracy"] for row in pick(table)] == [34 / 40, 38 / 40, 39 / 40]
    assert [row["difference"] for row in pick(table)] == [None, 4 / 40, 5 / 40]
    assert len(abilities.plot_trade_off(table).data) == 1


@pytest.mark.parametrize(
    ("loss", "right", "agrees"),
    [
        (0.2, 0.1, True),
        (-0.2, 0.1, False),
        (0.2, -0.1, False),
        (0.01, 0.1, None),
        (0.2, None, None),
    ],
)
def test_a_trade_off_needs_both_to_rise(
    loss: float, right: float | None, agrees: bool | None
) -> None:
    row = {"variant": "λ 1", "requested_ratio": 0.2, "perplexity": 7.0}
    row |= {"loss_difference": loss, "loss_difference_error": 0.01}
    row |= {"difference": right, "difference_error": 0.01}
    (found,) = abilities.trade_off_finding([row])
    assert found.agrees is agrees
    assert abilities.trade_off_finding([]) == []
    assert len(abilities.trade_off(tiny_model(), [], [], tiny_text(2))) == 0
