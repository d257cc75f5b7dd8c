"""Bridges, pairs, edge variants and the structure of H: against loops and planted matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, sem

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.gate import noise_of
from cocurve_lab.extensions.judging.answers import AnswerTable, answer_accuracy
from cocurve_lab.extensions.judging.generation import Question
from cocurve_studies import abilities
from cocurve_studies.abilities import ALL, CODE, DENSE, FULL
from cocurve_studies.structure import bridges, causal, edges, geometry
from cocurve_studies.tables import Table, column, pick
from helpers.problems import make_units, random_curvature
from helpers.studies import Problem
from helpers.tiny_models import naive_risk, tiny_model, units_by_hand, word_tokenizer

UNITS = make_units(4, 2, 3)
BUILT = random_curvature(UNITS, seed=2, groups=8, positions=400)


# Bridges ------------------------------------------------------------------------------------------


def test_counts_by_threshold_against_a_loop() -> None:
    curvature = random_curvature(make_units(4, 2, 4), 1, shared=1.0)
    table = bridges.bridge_table(curvature, (0.25, 0.5, 0.75), ratio=0.3)
    matrix, size = curvature.matrix, len(curvature.units)
    degree = [sum(abs(matrix[u, v]) for v in range(size) if v != u) for u in range(size)]
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
        assert row["bridges"] == len(found)
        assert row["jaccard"] == pytest.approx(len(found & middle) / len(found | middle))
        assert row["pruned_by_diagonal"] == len(found & plans[0])
        assert row["pruned_by_edges"] == len(found & plans[1])
        assert row["correlation"] == pytest.approx(np.corrcoef(np.diagonal(matrix), degree)[0, 1])
        assert row["correlation_error"] is None  # no groups of text
    assert len({row["bridges"] for row in pick(table)}) > 3


def test_the_strongest_edges_of_a_bridge() -> None:
    units = make_units(2, 1, 2)  # L0.attn, L0.ffn0, L0.ffn1, L1.attn, L1.ffn0, L1.ffn1
    matrix = np.diag([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    for v, edge in ((0, 0.3), (2, -0.4), (4, 0.2)):
        matrix[1, v] = matrix[v, 1] = edge
    first, second, third = pick(bridges.bridge_edges(cl.Curvature(matrix, units), [1], top=3))
    assert (first["partner"], first["curvature"]) == ("L0.ffn[1]", -0.4)
    assert (first["same_layer"], first["cross_module"]) == (True, False)
    assert first["correlation"] == pytest.approx(-0.4 / math.sqrt(6))
    assert first["to_saliency"] == pytest.approx(0.2)
    assert (second["partner"], second["cross_module"]) == (units[0].name, True)
    assert (third["partner"], third["same_layer"]) == ("L1.ffn[0]", False)
    (row,) = pick(bridges.bridge_edges(BUILT, [3], top=1))
    partner = BUILT.units.indices([row["partner"]])[0]
    assert row["curvature_error"] == cl.jackknife(BUILT, "edges").standard_error[3, partner]


# The causal test ----------------------------------------------------------------------------------


def may_pair(h: cl.Curvature, chosen: list[int], b: int, c: int, caliper: float) -> bool:
    """The rule of a pair, condition by condition."""
    mine, other, matrix = h.units[b], h.units[c], np.abs(h.matrix)
    gap = abs(math.log(matrix[b, b] / matrix[c, c]))
    alike = (mine.kind, mine.cost) == (other.kind, other.cost)
    degree = [matrix[u].sum() - matrix[u, u] for u in (b, c)]
    return c not in chosen and alike and gap <= caliper and degree[1] < degree[0]


def best_assignment(h: cl.Curvature, chosen: list[int], caliper: float) -> tuple[int, float]:
    """Most pairs, then least total distance, over every assignment there is."""
    logs = np.log(h.saliency)

    def search(row: int, used: frozenset[int]) -> tuple[int, float]:
        if row == len(chosen):
            return 0, 0.0
        best = search(row + 1, used)
        for c in range(len(h.units)):
            if c not in used and may_pair(h, chosen, chosen[row], c, caliper):
                count, total = search(row + 1, used | {c})
                best = min(best, (count - 1, total + abs(logs[chosen[row]] - logs[c])))
        return best

    return search(0, frozenset())


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    caliper=st.sampled_from([0.0, 0.1, 0.3, 1.0, 5.0]),
    count=st.integers(1, 4),
)
def test_the_assignment_is_the_best_of_all_and_the_arms_share_the_rest(
    seed: int, caliper: float, count: int
) -> None:
    h = random_curvature(UNITS, seed, shared=1.0)
    chosen = np.random.default_rng(seed).choice(len(UNITS), count, replace=False).tolist()
    matching = causal.match_controls(h, chosen, caliper)
    negative, total = best_assignment(h, chosen, caliper)
    assert len(matching.pairs) == -negative
    distances = column(causal.pair_table(h, matching), "distance") if matching.pairs else []
    assert sum(distances) == pytest.approx(total)
    assert all(may_pair(h, chosen, *pair, caliper) for pair in matching.pairs)
    assert sorted([*(b for b, _ in matching.pairs), *matching.unmatched]) == sorted(chosen)
    if not matching.pairs:
        return
    bridge, control = causal.causal_arms(h, matching, 0.5)
    k = bridge.forced
    pairs = [tuple(arm.pruned[:k]) for arm in (bridge, control)]
    assert list(zip(*pairs, strict=True)) == list(matching.pairs[:k])
    rest = list(bridge.pruned[k:])
    assert rest == list(control.pruned[k:])
    everyone = {*chosen, *(c for _, c in matching.pairs)}
    assert not everyone & set(rest)
    assert bridge.pruned_cost == control.pruned_cost >= 0.5 * UNITS.total_cost - 1e-9
    # greedy at lambda 1 over the rest alone, every marginal from scratch
    for step, unit in enumerate(rest):
        free = [u for u in range(len(UNITS)) if u not in everyone and u not in rest[:step]]
        price = {
            u: (h.matrix[u, u] / 2 + h.matrix[u, rest[:step]].sum()) / UNITS[u].cost for u in free
        }
        assert unit == min(free, key=lambda u: price[u])


def test_the_causal_study_measures_both_arms(problem: Problem) -> None:
    model, h, text = problem.model, problem.curvature, problem.texts.report
    options = causal.CausalOptions(0.3, ((0.6, 0.3),), caliper=1.0)
    questions = [Question("odd" if n % 2 else "even", f"w{n}", f"w{5 * n} w3") for n in range(6)]
    asked: dict[str, Any] = {"tokenizer": word_tokenizer(), "questions": questions}
    table = causal.causal_study(model, h, text, options, progress=False, **asked)
    matching = causal.match_controls(h, cl.bridge_units(h, 0.6, 0.3), 1.0)
    arms = causal.causal_arms(h, matching, 0.3)
    hand = units_by_hand(model)
    kl = [naive_risk(model, [hand[u] for u in arm.pruned], text) for arm in arms]
    (row,) = pick(table, outcome="kl")
    assert row["bridge"] == pytest.approx(kl[0].mean(), rel=1e-3)
    assert row["difference"] == pytest.approx((kl[0] - kl[1]).mean(), rel=1e-2, abs=1e-6)
    assert row["difference_error"] == pytest.approx(sem(kl[0] - kl[1]), rel=1e-2, abs=1e-6)
    answers = answer_accuracy(model, word_tokenizer(), list(arms), questions, progress=False)
    (row,) = pick(table, outcome="accuracy", family="odd")
    right = answers.right[:, answers.of("odd")].mean(axis=1)
    assert (row["bridge"], row["control"]) == tuple(right)
    with pytest.raises(cl.InputError, match="none fits"):
        causal.causal_arms(h, matching, 0.001)


# Edge variants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("diagonal", {"structure": "diagonal"}),
        ("cross block, no diagonal", {"structure": "cross", "keep_diagonal": False}),
        ("absolute", {"sign": "absolute"}),
    ],
)
def test_a_variant_is_solved_on_its_own_h_and_priced_on_the_full_one(
    variant: str, changes: dict[str, Any], problem: Problem
) -> None:
    model, h, text = problem.model, problem.curvature, problem.texts.report
    table = edges.edge_study(model, h, text, (0.2, 0.5), progress=False)
    (row,) = pick(table, variant=variant, requested_ratio=0.2)
    solved, full = cl.solve_greedy(cl.edge_variant(h, **changes), 0.2), cl.solve_greedy(h, 0.2)
    assert row["predicted_risk"] == pytest.approx(h.risk(solved.pruned))
    assert row["common"] == len(set(solved.pruned) & set(full.pruned))
    hand = units_by_hand(model)
    mine, other = (
        naive_risk(model, [hand[u] for u in plan.pruned], text) for plan in (solved, full)
    )
    assert row["measured"] == pytest.approx(mine.mean(), rel=1e-4)
    assert row["difference"] == pytest.approx((mine - other).mean(), abs=1e-5)
    assert row["difference_error"] == pytest.approx(sem(mine - other), abs=1e-5)
    nll = cl.measure_plans(model, [solved, full], text, progress=False).nll
    assert row["perplexity"] == pytest.approx(math.exp(nll[0].mean()))
    spread = sem(nll[0] - nll[1]) * math.exp(nll[0].mean())
    assert row["perplexity_difference_error"] == pytest.approx(spread, rel=1e-3, abs=1e-6)
    (none,) = pick(table, variant="head-only", requested_ratio=0.5)
    assert none["measured"] is None
    assert none["note"]


# Structure ----------------------------------------------------------------------------------------


def test_planted_blocks_are_read_back_by_distance() -> None:
    kinds, layers, size = UNITS.kinds, UNITS.layers, len(UNITS)
    near = np.where(layers[:, None] == layers, 0.02, 0.01)
    rho = np.where(kinds[:, None] == kinds, near, -2 * near)
    np.fill_diagonal(rho, 1)
    scale = np.exp(np.random.default_rng(0).normal(size=size))
    table = geometry.block_table(cl.Curvature(rho * np.outer(scale, scale), UNITS))
    for block, sign in (("attention", 1), ("ffn", 1), ("cross", -2)):
        for reach, value in (("same layer", 0.02), ("adjacent layers", 0.01), ("further", 0.01)):
            (row,) = pick(table, block=block, reach=reach)
            assert row["mean_absolute"] == pytest.approx(abs(sign) * value)
            assert row["mean_signed"] == pytest.approx(sign * value)
            assert row["mean_absolute_error"] is None
    (ffn,) = pick(geometry.block_table(BUILT), reach="all", block="ffn")
    assert ffn["corrected"] == pytest.approx(noise_of(BUILT, BUILT.pair_mask("ffn"))[1])


def test_budgets_add_up_to_the_plan_and_one_no_text_can_change_has_no_spread() -> None:
    table = geometry.budget_table(BUILT, 0.4)
    for strength in (0.0, 1.0):
        rows = pick(table, interaction_strength=strength)
        plan = cl.solve_greedy(BUILT, 0.4, strength)
        assert sum(column(rows, "units")) == len(plan)
        cost = {"attention": 2 * 5, "ffn": 3 * 11}
        gone = sum(row["share"] * cost[row["kind"]] for row in rows)
        assert gone == pytest.approx(plan.pruned_cost)
    assert max(column(table, "share_error")) > 0


@pytest.mark.parametrize("rho", [0.02, 0.3])
def test_equal_saliencies_and_correlations_meet_the_balance_exactly(rho: float) -> None:
    size = len(UNITS)
    even = cl.Curvature(0.01 * ((1 - rho) * np.eye(size) + rho), UNITS)
    table = geometry.proposition_table(even, (0.2, 0.5))
    for row in pick(table, quantity="edge over diagonal"):
        assert row["value"] == pytest.approx(2 * (row["units"] - 1) * rho)
        assert row["reference"] == pytest.approx(2 * row["units"] * rho)
    off = pick(table, quantity="share of |H| off the diagonal")[0]["value"]
    assert off == pytest.approx((size - 1) * rho / (1 + (size - 1) * rho))
    assert {r["value"] for r in pick(table, quantity="share of positive edges")} == {1.0}


def test_the_weighted_correlation_gives_the_edge_risk() -> None:
    """Prop. offdiag: its two sides, pair by pair."""
    table = geometry.proposition_table(BUILT, (0.4,))
    (row,) = pick(table, quantity="weighted mean correlation")
    plan, h = cl.solve_greedy(BUILT, 0.4, 0.0), BUILT.matrix
    trace = sum(h[u, u] for u in plan.pruned)
    root = sum(np.sqrt(h[u, u]) for u in plan.pruned)
    assert row["value"] * (root**2 - trace) / 2 == pytest.approx(plan.edge_risk)
    assert row["value_error"] > 0
    (balance,) = pick(table, quantity="edge over diagonal")
    gate = cl.redundancy_gate(BUILT, 0.4)
    assert balance["value"] == pytest.approx(gate.edge_to_diagonal_measured)
    for over in pick(table, quantity="overshoot"):
        assert 0 <= over["value"] <= over["reference"] == UNITS.costs.max() / UNITS.total_cost
    (gram,) = pick(table, quantity="smallest eigenvalue over the largest")
    values = np.linalg.eigvalsh(h)
    assert gram["value"] == pytest.approx(values[0] / values[-1])


ASKED_UNITS = make_units(4)
QUESTIONS = [Question(name, f"{name} {i}", "x") for name in (CODE, "other") for i in range(20)]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan with k units gets the first 40 - k questions right."""

    def answer(_: Any, __: Any, plans: Any, questions: Any, **___: Any) -> AnswerTable:
        right = np.array([[q < 40 - len(plan) for q in range(40)] for plan in plans])
        return AnswerTable(tuple(plans), tuple(questions), right, -1.0 - right, right)

    monkeypatch.setattr(abilities, "answer_accuracy", answer)


def study(plans: list[dict[str, Any]]) -> Table:
    return abilities.ability_study(tiny_model(), word_tokenizer(), plans, QUESTIONS)


def entry(variant: str, units: int, base: str = "λ 0") -> dict[str, Any]:
    plan = cl.Selection.from_pruned(ASKED_UNITS, list(range(units)))
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


@pytest.mark.parametrize(("units", "expected"), [(2, False), (9, None), (18, True), (10, None)])
def test_verdicts_need_mcnemar(units: int, expected: bool | None) -> None:
    table = study([entry(FULL, 10, FULL), entry("diagonal", units, FULL)])
    table = [row for row in pick(table) if row["capability"] == ALL]
    diagonal, *rest = abilities.edge_ability_findings(table)
    assert diagonal.agrees is expected
    assert {finding.agrees for finding in rest} == {None}  # nothing was asked of them
