"""Abilities by plan: planted answers against McNemar by hand, and the verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

import cocurve_lab as cl
from cocurve_lab.extensions.judging.answers import AnswerTable
from cocurve_lab.extensions.judging.generation import Question
from cocurve_studies import abilities
from cocurve_studies.abilities import ALL, CODE, DENSE, FULL
from cocurve_studies.tables import Table, pick
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, word_tokenizer

UNITS = make_units(4)
QUESTIONS = [Question(name, f"{name} {i}", "x") for name in (CODE, "other") for i in range(20)]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan with k units gets the first 40 - k questions right."""

    def answer(_: Any, __: Any, plans: Any, questions: Any, **___: Any) -> AnswerTable:
        right = np.array([[q < 40 - len(plan) for q in range(40)] for plan in plans])
        return AnswerTable(tuple(plans), tuple(questions), right, -1.0 - right, np.ones(40), right)

    monkeypatch.setattr(abilities, "answer_accuracy", answer)


def study(plans: list[dict[str, Any]]) -> Table:
    return abilities.ability_study(tiny_model(), word_tokenizer(), plans, QUESTIONS)


def entry(variant: str, units: int, base: str = "λ 0") -> dict[str, Any]:
    plan = cl.Selection.from_pruned(UNITS, list(range(units)))
    return {"variant": variant, "base": base, "requested_ratio": 0.2, "selection": plan}


def test_pairs_are_counted_and_tested_by_hand() -> None:
    table = study([entry("λ 0", 10), entry("λ 1", 3), entry("λ 2", 10)])
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
    same = pick(table, variant="λ 2", capability=ALL)[0]  # the same units as its base
    assert (same["difference"], same["p_value"]) == (None, None)


@pytest.mark.parametrize(("units", "expected"), [(2, True), (9, None), (18, False), (10, None)])
def test_verdicts_on_lambda_need_mcnemar(units: int, expected: bool | None) -> None:
    table = study([entry("λ 0", 10), entry("λ 1", units)])
    found = abilities.strength_ability_findings(table)
    assert found[0].agrees is expected
    assert found[2].agrees is None  # no question of code is decided


def test_verdicts_on_edges_are_against_the_method() -> None:
    table = study([entry(FULL, 1, FULL), entry("diagonal", 18, FULL), entry("FFN-only", 1, FULL)])
    table = [row | {"capability": CODE if row["capability"] == ALL else "-"} for row in pick(table)]
    found = dict(zip(abilities.VARIANTS, abilities.edge_ability_findings(table), strict=True))
    assert found["diagonal"].agrees is True
    assert found["FFN-only"].agrees is None  # the same plan
    assert found["head-only"].agrees is None  # not asked
    names = [row["variant"] for row in abilities.edge_plans(random_curvature(UNITS, 1), 0.4)]
    assert names[0] == FULL
    assert set(abilities.VARIANTS) < set(names)


@pytest.mark.parametrize(
    ("loss", "right", "agrees"),
    [(0.2, 0.1, True), (-0.2, 0.1, False), (0.2, -0.1, False), (0.01, 0.1, None)],
)
def test_a_trade_off_needs_both_to_rise(loss: float, right: float, agrees: bool | None) -> None:
    row = {"variant": "λ 1", "requested_ratio": 0.2, "perplexity": 7.0}
    row |= {"loss_difference": loss, "loss_difference_error": 0.01}
    row |= {"difference": right, "difference_error": 0.01}
    (found,) = abilities.trade_off_finding([row])
    assert found.agrees is agrees
