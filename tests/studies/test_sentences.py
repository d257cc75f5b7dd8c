"""Sentences after pictures are computed: on a second model they say what that model shows."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.extensions.judging.answers import AnswerTable
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.pretrained.kept import kept_curvature
from cocurve_studies import sentences
from cocurve_studies.certainty import coverage, precision
from cocurve_studies.tables import Table, pick
from helpers.problems import make_units, random_curvature
from helpers.studies import Problem

NUMBER = r"(\d+) at (\d+)%"


@pytest.fixture(scope="module", params=["tiny model", "planted"])
def curvature(request: pytest.FixtureRequest) -> cl.Curvature:
    """Of a tiny model, and one without a model at all."""
    return (
        Problem().curvature
        if request.param == "tiny model"
        else random_curvature(make_units(), groups=16)
    )


def plans(curvature: cl.Curvature, ratio: float) -> list[set[int]]:
    guards = cl.opening_guards(curvature.units)
    return [set(cl.solve_greedy(curvature, ratio, s, guards).pruned) for s in (0.0, 1.0)]


def test_the_units_that_lambda_changes_are_counted(curvature: cl.Curvature) -> None:
    said = sentences.lambda_changes(curvature)
    counts = {int(ratio) / 100: int(count) for count, ratio in re.findall(NUMBER, said)}
    assert list(counts) == list(sentences.RATIOS)
    for ratio, count in counts.items():
        zero, one = plans(curvature, ratio)
        assert count == len(zero - one) + len(one - zero)
    most = max(counts.values())
    where = re.findall(r"(\d+)%", said.split("most at")[1]) if most else []
    assert [int(ratio) / 100 for ratio in where] == [r for r, n in counts.items() if n == most > 0]


def test_edges_that_are_not_there_change_nothing() -> None:
    planted = random_curvature(make_units(), groups=16)
    diagonal = cl.Curvature(np.diag(planted.saliency), planted.units)
    assert "none: edges change nothing here" in sentences.lambda_changes(diagonal)
    assert sentences.lambda_changes(diagonal, ()) == "No plan reaches any of these ratios."
    assert sentences.bridge_fate(diagonal, ()) == "No plan reaches any of these ratios."


def test_the_fate_of_bridges_is_that_of_the_two_plans(curvature: cl.Curvature) -> None:
    bridges, units = set(bridge_units(curvature)), curvature.units
    lines = sentences.bridge_fate(curvature).splitlines()
    assert len(lines) == len(sentences.RATIOS)
    for line, ratio in zip(lines, sentences.RATIOS, strict=True):
        zero, one = plans(curvature, ratio)
        start = f"{ratio:.0%}: of {len(bridges)} bridges λ 0 removes {len(bridges & zero)}, λ 1 "
        assert line.startswith(f"{start}{len(bridges & one)} (")
        kept, taken = re.search(r"alone: (.*); removed by them alone: (.*)\)\.$", line).groups()
        assert _named(units, kept) == bridges & zero - one
        assert _named(units, taken) == bridges & one - zero


def test_the_trade_between_kinds_is_counted(curvature: cl.Curvature) -> None:
    units, bridges = curvature.units, set(bridge_units(curvature))
    table = sentences.trade_table({"here": curvature}, (0.2, 0.4))
    assert [(row["of"], row["requested_ratio"]) for row in pick(table)] == [
        ("here", 0.2),
        ("here", 0.4),
    ]
    said = sentences.trade(curvature, (0.2, 0.4))
    for row in pick(table):
        heads = []
        for strength, plan in enumerate(plans(curvature, row["requested_ratio"])):
            kinds = [units[u].kind for u in plan]
            heads.append(kinds.count("attention"))
            assert row[f"attention, λ {strength}"] == heads[-1]
            assert row[f"FFN, λ {strength}"] == kinds.count("ffn")
            assert row[f"bridges, λ {strength}"] == len(plan & bridges)
        side = "more" if heads[1] > heads[0] else "fewer" if heads[1] < heads[0] else "as many"
        (part,) = re.findall(rf"(more|fewer|as many) at [^;]*{row['requested_ratio']:.0%}", said)
        assert part == side
    assert sentences.trade(curvature, ()) == "No plan reaches any of these ratios."


def test_the_kept_real_model_trades_attention_for_ffn_and_keeps_bridges() -> None:
    """What notebooks 02 and 03 show of it; nothing is fetched."""
    real = kept_curvature("smollm2")
    assert real is not None
    assert real.units.num_layers == 30
    (row,) = pick(sentences.trade_table({"SmolLM2": real}, (0.15,)))
    assert row["attention, λ 1"] > row["attention, λ 0"]
    assert row["FFN, λ 1"] < row["FFN, λ 0"]
    assert "more at 15%" in sentences.trade(real, (0.15,))
    (row,) = pick(sentences.trade_table({"SmolLM2": real}, (0.2,)))
    assert 0 < row["bridges, λ 1"] < row["bridges, λ 0"]


def _named(units: cl.UnitSet, names: str) -> set[int]:
    return set() if names == "none" else set(units.indices(names.split(", ")))


def test_neighbors_that_overlap_are_counted(curvature: cl.Curvature) -> None:
    table = precision.interval_table(curvature)
    said = sentences.intervals(table)
    alive = sorted((r["saliency"], r["low"], r["high"]) for r in pick(table) if r["saliency"] > 0)
    meet = sum(alive[n][2] >= alive[n + 1][1] for n in range(len(alive) - 1))
    assert said.endswith(f"Of {len(alive) - 1} pairs of neighbors in the ranking, {meet} overlap.")
    assert f"is {alive[-1][0] / alive[0][0]:.3g} times" in said
    assert sentences.intervals(table[:1]) == "Fewer than two units have a saliency."


def test_plans_settle_as_the_table_says(curvature: cl.Curvature) -> None:
    table = coverage.stability_table(curvature, (0.3,), (0.0, 1.0), draws=5)
    zero, one = sentences.settling(table).splitlines()
    for line, strength in ((zero, 0.0), (one, 1.0)):
        rows = [row for row in pick(table) if row["interaction_strength"] == strength]
        assert f"{rows[0]['groups']} to {rows[-1]['groups']} rows" in line
        assert f"optimism {rows[0]['optimism']:.0%} to {rows[-1]['optimism']:.0%}" in line


def test_an_error_counts_as_small_where_it_stays_so() -> None:
    names = ("risk_error", "saliency_error", "optimism")

    def row(rows: int, *errors: float) -> dict[str, Any]:
        return {"rows": rows, "tolerance": 0.3, **dict(zip(names, errors, strict=True))}

    table: Table = [row(1, *3 * [math.nan]), row(2, 0.2, 0.2, 0.9), row(3, 0.2, 0.4, 0.2)]
    table.append(row(4, 0.1, 0.3, 0.5))
    assert sentences.stopping(table) == (
        "Within 30% to the end: predicted risk from 2 rows on, saliency from 4 rows on, "
        "optimism never."
    )


def test_an_answer_shows_after_the_guess_alone() -> None:
    ask, said = sentences.guess(["positive", "negative"], "H: negative; ρ < 0.").children
    assert (ask.value, said.value) == (None, "")
    ask.value = "positive"
    assert said.value == "<pre>You: positive. H: negative; ρ &lt; 0.</pre>"


def test_the_ability_that_loses_an_answer_first_is_named() -> None:
    units = make_units()
    plans = [cl.Selection.from_pruned(units, [], requested_ratio=r) for r in (0, 0.2, 0.4)]
    questions = [Question(name, "?", "!") for name in ("sums", "code") for _ in range(3)]
    right = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]], bool)
    zeros = np.zeros(right.shape)
    table = AnswerTable(tuple(plans), tuple(questions), right, zeros, zeros[0], right)
    first, _, head, *rows = sentences.right_by_ability(table).splitlines()
    assert first == "Here: code at 20%."
    assert head.split() == ["right", "answers", "0%", "20%", "40%"]
    assert [row.split() for row in rows] == [["sums", "3", "3", "0"], ["code", "2", "1", "2"]]
    kept = AnswerTable(tuple(plans), tuple(questions), right[[0, 0, 0]], zeros, zeros[0], right)
    assert sentences.right_by_ability(kept).startswith("Here: none.")
