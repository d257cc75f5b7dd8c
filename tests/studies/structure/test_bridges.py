"""Bridge thresholds, edges and the causal study, against loops and independent measurements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.judging.answers import ALL, answer_accuracy
from cocurve_lab.extensions.judging.generation import Question
from cocurve_studies.structure import causal
from cocurve_studies.structure.arms import CausalOptions
from cocurve_studies.structure.bridges import (
    bridge_edges,
    bridge_table,
)
from cocurve_studies.structure.causal import Outcomes, causal_study, plot_causal
from cocurve_studies.structure.matching import causal_arms, match_controls
from cocurve_studies.tables import Table, pick
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import (
    GROUPS,
    full_logits,
    masked_by_hand,
    naive_risk,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

# Thresholds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("connectivity", ["sum", "relative"])
def test_counts_by_threshold_against_a_loop(connectivity: Any) -> None:
    curvature = random_curvature(make_units(4, 2, 4), 1, shared=1.0)
    table = bridge_table(curvature, (0.25, 0.5, 0.75), connectivity, ratio=0.3)
    assert len(table) == 9
    matrix, size = curvature.matrix, len(curvature.units)
    scale = np.sqrt(np.diagonal(matrix)) if connectivity == "relative" else np.ones(size)
    degree = [
        sum(abs(matrix[u, v]) / scale[u] / scale[v] for v in range(size) if v != u)
        for u in range(size)
    ]
    plans = [set(cl.solve_greedy(curvature, 0.3, strength).pruned) for strength in (0.0, 1.0)]

    def passing(low: float, high: float) -> set[int]:
        return {
            u
            for u in range(size)
            if matrix[u, u] <= np.quantile(np.diagonal(matrix), low)
            and degree[u] >= np.quantile(degree, high) - 1e-15
        }

    middle = passing(0.5, 0.5)
    for row in pick(table):
        found = passing(row["saliency_quantile"], row["connectivity_quantile"])
        attention = {u for u in found if curvature.units[u].kind == "attention"}
        assert row["bridges"] == len(found)
        assert (row["attention"], row["ffn"]) == (len(attention), len(found - attention))
        assert row["ranked"] == (len(found) < 5)
        assert row["jaccard"] == pytest.approx(len(found & middle) / len(found | middle))
        assert row["pruned_by_diagonal"] == len(found & plans[0])
        assert row["pruned_by_edges"] == len(found & plans[1])
        assert row["correlation"] == pytest.approx(np.corrcoef(np.diagonal(matrix), degree)[0, 1])
        assert row["correlation_error"] is None  # no groups of text
    assert len({row["bridges"] for row in pick(table)}) > 3
    assert pick(table, saliency_quantile=0.5, connectivity_quantile=0.75)[0]["expected"] == 3.0


def test_the_error_of_the_correlation_is_the_jackknife_over_groups() -> None:
    curvature = random_curvature(make_units(), 0, groups=6)
    assert curvature.group_grams is not None
    grams = curvature.group_grams / 10  # 60 positions, 6 groups

    def correlation(matrix: np.ndarray) -> float:
        saliency = np.diagonal(matrix)
        return float(np.corrcoef(saliency, np.abs(matrix).sum(axis=1) - saliency)[0, 1])

    left = np.array([correlation((grams.sum(axis=0) - gram) / 5) for gram in grams])
    expected = math.sqrt(5 / 6 * ((left - left.mean()) ** 2).sum())
    assert bridge_table(curvature, [0.5])["correlation_error"][0] == pytest.approx(expected)


def test_the_strongest_edges_of_a_bridge() -> None:
    units = make_units(2, 1, 2)  # L0.attn, L0.ffn0, L0.ffn1, L1.attn, L1.ffn0, L1.ffn1
    matrix = np.diag([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    for v, edge in ((0, 0.3), (2, -0.4), (4, 0.2)):
        matrix[1, v] = matrix[v, 1] = edge
    first, second, third = pick(bridge_edges(Curvature(matrix, units), [1], top=3))
    assert (first["partner"], first["curvature"]) == ("L0.ffn[1]", -0.4)
    assert (first["same_layer"], first["cross_module"]) == (True, False)
    assert first["correlation"] == pytest.approx(-0.4 / math.sqrt(6))
    assert first["to_saliency"] == pytest.approx(0.2)
    assert (second["partner"], second["cross_module"]) == (units[0].name, True)
    assert (third["partner"], third["same_layer"]) == ("L1.ffn[0]", False)
    assert first["saliency_share"] == pytest.approx(2 / 6)
    assert first["connectivity_share"] == pytest.approx(1 / 6)
    assert [row["rank"] for row in (first, second, third)] == [1, 2, 3]
    assert first["curvature_error"] is None
    assert len(bridge_edges(Curvature(matrix, units), [1, 0], top=99)) == 10


def test_edges_have_errors_where_there_are_groups() -> None:
    curvature = random_curvature(make_units(), 0, groups=6)
    (row,) = pick(bridge_edges(curvature, [3], top=1))
    partner = curvature.units.indices([row["partner"]])[0]
    assert row["curvature_error"] == cl.jackknife(curvature, "edges").standard_error[3, partner]
    assert row["curvature_error"] > 0


# The causal study ---------------------------------------------------------------------------------

THRESHOLDS = ((0.6, 0.3),)
OPTIONS = CausalOptions(ratio=0.3, thresholds=THRESHOLDS, seeds=(0, 1, 2), caliper=1.0)
TEXT = tiny_text(5, 12)
QUESTIONS = [
    Question("odd" if n % 2 else "even", f"w{n} w{n + 7}", f"w{(5 * n) % 60} w3") for n in range(8)
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(layers=4)


@pytest.fixture(scope="module")
def curvature(model: PreTrainedModel) -> Curvature:
    return random_curvature(cl.enumerate_units(model, GROUPS), 5, shared=1.0)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return Outcomes(TEXT, QUESTIONS, word_tokenizer(), {"other": tiny_text(3, 10, seed=9)})


@pytest.fixture(scope="module")
def table(model: PreTrainedModel, curvature: Curvature, outcomes: Outcomes) -> Table:
    return causal_study(model, curvature, outcomes, OPTIONS, progress=False)


def arms_of(curvature: Curvature, fill: Any, seed: int = 0) -> tuple[cl.Selection, cl.Selection]:
    bridges = cl.bridge_units(curvature, *THRESHOLDS[0])
    matching = match_controls(curvature, bridges, OPTIONS.caliper)
    return causal_arms(curvature, matching, OPTIONS.ratio, fill=fill, seed=seed)


def naive_nll(model: PreTrainedModel, plan: cl.Selection) -> np.ndarray:
    """Mean nll [rows] of the next token under a plan."""
    with masked_by_hand(model, [plan.units[u] for u in plan.pruned]):
        logs = torch.log_softmax(full_logits(model, TEXT.input_ids)[:, :-1], dim=-1)
    return -logs.gather(-1, TEXT.input_ids[:, 1:, None]).mean(dim=(1, 2)).numpy()


def test_differences_are_those_measured_independently(
    model: PreTrainedModel, curvature: Curvature, table: Table
) -> None:
    for fill in ("greedy", "diagonal"):
        a, b = arms_of(curvature, fill)
        risks = [naive_risk(model, [arm.units[u] for u in arm.pruned], TEXT) for arm in (a, b)]
        (row,) = pick(table, fill=fill, outcome="kl", family=ALL)
        gap = risks[0] - risks[1]
        assert row["difference"] == pytest.approx(gap.mean(), rel=1e-4)
        assert row["difference_error"] == pytest.approx(gap.std(ddof=1) / math.sqrt(5), rel=1e-3)
        assert (row["observations"], row["seeds"], row["seed_spread"]) == (5, 1, None)
        assert row["dense"] == pytest.approx(0, abs=1e-9)
        predicted = [0.5 * arm.indicator @ curvature.matrix @ arm.indicator for arm in (a, b)]
        assert row["predicted_difference"] == pytest.approx(predicted[0] - predicted[1])
        assert row["shared"] + row["forced"] == len(a)
        assert row["shared"] == len(set(a.pruned) & set(b.pruned))
        assert row["realized_ratio"] == row["control_realized_ratio"] == a.realized_ratio
        (row,) = pick(table, fill=fill, outcome="perplexity", family=ALL)
        nll = [naive_nll(model, arm) for arm in (a, b)]
        assert row["bridge"] == pytest.approx(math.exp(nll[0].mean()), rel=1e-5)
        assert row["control"] == pytest.approx(math.exp(nll[1].mean()), rel=1e-5)
        slope = row["bridge"] * nll[0] - row["control"] * nll[1]
        assert row["difference_error"] == pytest.approx(slope.std(ddof=1) / math.sqrt(5), rel=1e-3)


def test_seeds_and_sampling_error_stay_apart(
    model: PreTrainedModel, curvature: Curvature, table: Table
) -> None:
    rows = pick(table, fill="random", outcome="kl", family=ALL)
    singles, (summary,) = [row for row in rows if row["seed"] is not None], pick(rows, seed=None)
    assert [row["seed"] for row in singles] == [0, 1, 2]
    gaps = []
    for row in singles:
        a, b = arms_of(curvature, "random", row["seed"])
        risks = [naive_risk(model, [arm.units[u] for u in arm.pruned], TEXT) for arm in (a, b)]
        gaps.append(risks[0] - risks[1])
        assert row["difference"] == pytest.approx(gaps[-1].mean(), rel=1e-4)
        assert row["seed_spread"] is None
    means = np.mean(gaps, axis=1)
    assert summary["difference"] == pytest.approx(means.mean(), rel=1e-4)
    assert summary["seed_spread"] == pytest.approx(means.std(ddof=1), rel=1e-3)
    error = np.mean(gaps, axis=0).std(ddof=1) / math.sqrt(5)
    assert summary["difference_error"] == pytest.approx(error, rel=1e-3)
    assert summary["seeds"] == 3
    expected = np.mean([row["predicted_difference"] for row in singles])
    assert summary["predicted_difference"] == pytest.approx(expected)


def test_capabilities_are_compared_question_by_question(
    model: PreTrainedModel, curvature: Curvature, table: Table
) -> None:
    answers = answer_accuracy(
        model, word_tokenizer(), arms_of(curvature, "greedy"), QUESTIONS, progress=False
    )
    for pair in pick(answers.paired(0, 1)):
        (accuracy,) = pick(table, fill="greedy", outcome="accuracy", family=pair["capability"])
        assert accuracy["difference"] == pair["accuracy"]
        assert accuracy["bridge_only_right"] == pair["gained"]
        assert accuracy["control_only_right"] == pair["lost"]
        (row,) = pick(table, fill="greedy", outcome="log_likelihood", family=pair["capability"])
        assert row["difference"] == pytest.approx(pair["log_likelihood"], abs=1e-5)
        assert row["difference_error"] == pytest.approx(pair["log_likelihood_error"], rel=1e-3)
        assert row["observations"] == pair["questions"]
        assert row["difference"] != 0
    assert {row["family"] for row in pick(table, outcome="kl")} == {ALL, "other"}


def test_questions_that_one_arm_alone_gets_right_are_counted_per_seed() -> None:
    bridge, control = [[1, 0, 0, 1], [1, 1, 0, 0]], [[1, 1, 1, 0], [0, 1, 1, 0]]
    arms = np.array([bridge, control], dtype=float).transpose(1, 0, 2)  # [seeds, 2, questions]
    row = causal._difference(causal._Effect("accuracy", ALL, arms), arms)
    assert (row["bridge"], row["control"], row["difference"]) == (0.5, 0.625, -0.125)
    assert (row["bridge_only_right"], row["control_only_right"]) == (1.0, 1.5)
    assert row["seed_spread"] == pytest.approx(np.std([-0.25, 0.0], ddof=1))
    assert row["difference_error"] == pytest.approx(np.std([0.5, -0.5, -1, 0.5], ddof=1) / 2)


def test_no_pair_and_too_few_parameters_are_said(
    model: PreTrainedModel, curvature: Curvature, outcomes: Outcomes
) -> None:
    strict = CausalOptions(ratio=0.3, thresholds=THRESHOLDS, seeds=(0,), caliper=0.0)
    rows = pick(causal_study(model, curvature, outcomes, strict, progress=False))
    assert len(rows) == 3
    assert {row["outcome"] for row in rows} == {None}
    assert all("no bridge has a control" in row["note"] for row in rows)
    assert all("away in log saliency" in row["reasons"] and " x " in row["reasons"] for row in rows)
    assert {row["unmatched"] for row in rows} == {rows[0]["bridges"]}
    with pytest.raises(cl.InputError, match="no bridge has a control"):
        plot_causal(rows)
    matching = match_controls(curvature, cl.bridge_units(curvature, *THRESHOLDS[0]), 1.0)
    pairs, costs = len(matching), curvature.units.costs[list(matching.bridges)]
    ratio = (costs.sum() - 1) / curvature.units.total_cost  # one parameter short
    small = CausalOptions(ratio=ratio, thresholds=THRESHOLDS, fills=("greedy",), caliper=1.0)
    rows = pick(causal_study(model, curvature, Outcomes(TEXT), small, progress=False))
    assert 0 < rows[0]["pairs"] < pairs
    assert f"of {pairs} pairs fit" in rows[0]["note"]
    assert rows[0]["realized_ratio"] == rows[0]["control_realized_ratio"]
    tiny = CausalOptions(ratio=0.01, thresholds=THRESHOLDS, fills=("greedy",), caliper=1.0)
    (row,) = pick(causal_study(model, curvature, Outcomes(TEXT), tiny, progress=False))
    assert (row["outcome"], row["pairs"]) == (None, pairs)
    assert "not even one pair fits" in row["note"]


def test_texts_by_family_score_every_position() -> None:
    _, tokenizer = cl.load_model("demo")
    texts = causal.family_texts(tokenizer, rows=2, seq_len=32)
    assert set(texts) == {"arithmetic", "code", "commonsense", "knowledge", "stories"}
    assert all(text.positions_per_sequence == 31 and len(text) == 2 for text in texts.values())
    written = tokenizer.decode(texts["arithmetic"].input_ids[0])
    assert "+" in written or "plus" in written or "minus" in written or "-" in written
