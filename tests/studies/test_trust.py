"""Predictions, interactions, lambda, guards, error bars, texts: against naive passes and scipy."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, sem, spearmanr

import cocurve_lab as cl
from cocurve_lab.cli import main
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.extensions.choosing.settings import choose_guards
from cocurve_studies.certainty import purposes
from cocurve_studies.certainty.findings import sensitivity_findings
from cocurve_studies.certainty.resampling import coverage
from cocurve_studies.certainty.sensitivity import SensitivityOptions, sensitivity_study
from cocurve_studies.paper import shipped
from cocurve_studies.shared import sequence_columns, sequence_values
from cocurve_studies.structure.findings import DIFFERENT, LOW
from cocurve_studies.tables import Rows, column, pick
from cocurve_studies.trust import choices, experts, fidelity, reach, redundancy
from helpers.gaussian import UNITS
from helpers.problems import make_units, random_curvature
from helpers.studies import QUIET, Problem
from helpers.tiny_models import (
    GROUPS,
    naive_build,
    naive_risk,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)

# Predictions --------------------------------------------------------------------------------------


def test_a_risk_that_is_a_multiple_of_half_h_has_that_ratio_without_error() -> None:
    built = random_curvature(make_units(), groups=5, positions=63)
    factors = np.linspace(0.5, 4, len(built.units))
    assert built.group_risks is not None
    built = replace(built, groups=replace(built.groups, risks=built.group_risks * factors))
    table = fidelity.single_unit_fidelity(built)
    assert column(table, "measured_over_predicted") == pytest.approx(factors)
    assert column(table, "predicted") == pytest.approx(built.saliency / 2)


def test_plans_are_measured_as_naive_passes_measure_them(problem: Problem) -> None:
    asked = fidelity.FidelityOptions((0.0, 0.5), pool_size=7)
    inputs = problem.model, problem.curvature, problem.texts.report, asked
    table = fidelity.fidelity_study(*inputs, progress=False)
    assert len(pick(table, group=fidelity.POOL)) == 7
    row = pick(table, method="lambda 1", requested_ratio=0.5)[0]
    plan = cl.solve_greedy(problem.curvature, 0.5)
    hand = [units_by_hand(problem.model)[index] for index in plan.pruned]
    expected = naive_risk(problem.model, hand, problem.texts.report)
    assert sequence_values([row])[0] == pytest.approx(expected, rel=1e-4)
    assert row["measured_error"] == pytest.approx(sem(expected), rel=1e-3)
    assert row["predicted"] == pytest.approx(plan.predicted_risk)
    error = cl.jackknife(problem.curvature, lambda c: c.risk(plan.pruned)).standard_error
    assert row["predicted_error"] == pytest.approx(float(error), rel=1e-6)
    assert row["single_units"] == pytest.approx(
        problem.curvature.single_unit_risk[list(plan.pruned)].sum()
    )
    nothing = pick(table, method="lambda 1", requested_ratio=0.0)[0]
    assert (nothing["measured"], nothing["measured_over_predicted"]) == (0, None)


def planted(predicted: Any, kl: np.ndarray, **columns: Any) -> Rows:
    """A table of `fidelity_study` with the given numbers: kl [plans, sequences]."""
    fixed = {"group": fidelity.ACROSS, "method": "lambda 1", "requested_ratio": 0.2} | columns
    return [
        {name: value[i] if isinstance(value, list) else value for name, value in fixed.items()}
        | {"predicted": float(predicted[i]), "diagonal": -float(predicted[i]), "single_units": None}
        | {"measured": kl[i].mean(), "measured_error": sem(kl[i])}
        | sequence_columns(kl[i])
        for i in range(len(kl))
    ]


def found(table: Any, group: str, statistic: str) -> dict[str, Any]:
    return pick(table, group=group, statistic=statistic)[0]


def test_a_cubic_gap_is_found_and_gaps_within_noise_are_left_out() -> None:
    units = np.array([2, 4, 8, 16, 32, 64])
    predicted = 1e-3 * units**1.5
    kl = np.repeat((predicted + 1e-4 * units**3.0)[:, None], 4, axis=1)
    kl[0] = predicted[0] + np.array([1, -1, 1, -0.9]) * 1e-2  # a gap nobody can see
    summary = fidelity.fidelity_summary(planted(predicted, kl, units=units.tolist()), draws=50)
    row = found(summary, "across ratios, lambda 1", "gap exponent in units")
    assert row["value"] == pytest.approx(3)
    assert row["value_error"] == pytest.approx(0, abs=1e-6)
    assert row["points"] == 5


def test_correlations_are_those_of_scipy_with_errors_over_text() -> None:
    rng = np.random.default_rng(3)
    predicted, kl = rng.uniform(0.1, 1, 9), rng.uniform(0.1, 1, (9, 6))
    table = planted(predicted, kl, units=list(range(2, 11)))
    summary = fidelity.fidelity_summary(table, draws=400)
    one = cl.agreement(predicted, kl.mean(axis=1))
    expected = {
        "pearson": pearsonr(predicted, kl.mean(axis=1)).statistic,
        "spearman": one.spearman,
        "median_ratio": one.median_ratio,
        "spearman, diagonal": -one.spearman,  # planted: the other way round
    }
    for name, value in expected.items():
        assert found(summary, fidelity.ACROSS, name)["value"] == pytest.approx(value)
    assert found(summary, fidelity.ACROSS, "spearman, single_units")["value"] is None
    draws = np.random.default_rng(0).integers(6, size=(400, 6))
    naive = [spearmanr(predicted, kl[:, d].mean(axis=1)).statistic for d in draws]
    error = found(summary, fidelity.ACROSS, "spearman")["value_error"]
    assert error == pytest.approx(np.std(naive), rel=0.2)


# Interactions -------------------------------------------------------------------------------------
OPTIONS = reach.ReachOptions((0.3, 0.7), pairs=3, sizes=(3, 99), sets=4, blocks=3, layers=2)


def members(units: cl.UnitSet, name: str) -> list[int]:
    """The units of a part by its name in the table: a unit, a block (L0.ffn) or a layer (L0)."""
    names = [(unit.name, f"L{unit.layer}.{unit.kind}", f"L{unit.layer}") for unit in units]
    return [number for number, known in enumerate(names) if name in known]


def test_interactions_are_those_of_naive_passes(problem: Problem) -> None:
    units, matrix, text = problem.units, problem.curvature.matrix, problem.texts.report
    hand = units_by_hand(problem.model)
    table = reach.edge_reach(problem.model, problem.curvature, text, OPTIONS, progress=False)
    scales = list(dict.fromkeys(row["scale"] for row in pick(table)))
    assert scales == [reach.STRONGEST, reach.ANY, "3 units", "2 blocks", "2 layers"]
    for scale in scales:
        row = pick(table, scale=scale)[-1]
        parts = [members(units, name) for name in row["parts"].split(", ")]
        together = [n for part in parts for n in part]
        edges = [matrix[u, v] for a, b in combinations(parts, 2) for u in a for v in b]
        assert row["predicted"] == pytest.approx(sum(edges))
        extra = naive_risk(problem.model, [hand[n] for n in together], text)
        extra = extra - sum(naive_risk(problem.model, [hand[n] for n in p], text) for p in parts)
        assert row["interaction"] == pytest.approx(extra.mean(), rel=1e-3, abs=1e-8)
        assert row["interaction_error"] == pytest.approx(sem(extra), rel=1e-2)


RNG = np.random.default_rng(0)
H = RNG.normal(size=30) * 1e-2


def cases(measured: np.ndarray) -> Rows:
    """Cases of these measured interactions, with little noise over rows; each part costs 0.05."""
    noise = 1e-5 * RNG.normal(size=(len(measured), 4))
    return [
        {"scale": reach.ANY, "predicted": h}
        | sequence_columns(0.1 + value + noise[n])
        | sequence_columns(np.full(4, 0.1), "alone")
        for n, (h, value) in enumerate(zip(H, measured, strict=True))
    ]


def test_the_summary_counts_and_correlates() -> None:
    measured = H + RNG.normal(size=30) * 1e-2
    (row,) = pick(reach.reach_summary(cases(measured)))
    assert row["same_sign"] == np.mean(np.sign(H) == np.sign(measured))
    assert row["spearman"] == pytest.approx(spearmanr(H, measured).statistic)
    assert row["size"] == pytest.approx(np.abs(measured).mean() / np.abs(H).mean(), rel=1e-2)
    assert row["factor"] == pytest.approx(1 + measured.mean() / 0.1, rel=1e-3)
    assert row["factor_error"] == pytest.approx(sem(measured / 0.1), rel=1e-2)  # over cases
    (all_agree,) = pick(reach.reach_summary(cases(H)))
    assert 0.03 < all_agree["same_sign_error"] < 0.1
    (few,) = pick(reach.reach_summary(cases(H)[:5]))
    assert few["factor_error"] is None  # of five cases nothing is known


# Lambda and guards --------------------------------------------------------------------------------


def test_lambda_is_chosen_on_one_text_and_reported_on_the_other(problem: Problem) -> None:
    model, curvature, texts = problem.model, problem.curvature, problem.texts
    table = choices.strength_study(model, curvature, texts, (0.2, 0.4), options=QUIET)
    for ratio in (0.2, 0.4):
        assert len(pick(table, requested_ratio=ratio, plan="candidate", chosen=True)) == 1
        (one,) = pick(table, requested_ratio=ratio, plan="lambda 1")
        plan = cl.solve_greedy(curvature, ratio, 1.0)
        hand = [plan.units.units[i] for i in plan.pruned]
        expected = naive_risk(model, hand, texts.report).mean()
        assert one["kl"] == pytest.approx(expected, rel=1e-4)
        assert one["edge_mass"] == pytest.approx(plan.edge_risk)
        assert one["remainder"] == pytest.approx(one["kl"] - plan.predicted_risk)
        # R_lambda = node + lambda E meets the measured risk at the fitting lambda
        met = plan.node_risk + one["fitting"] * one["edge_mass"]
        assert met == pytest.approx(one["kl"])
        assert one["printed"] == pytest.approx(2 - one["fitting"])


def test_edges_against_the_diagonal_are_two_plans_on_the_same_rows(problem: Problem) -> None:
    model, curvature, texts = problem.model, problem.curvature, problem.texts
    table = choices.diagonal_study(model, curvature, texts, (0.4,), options=QUIET)
    assert [row["search"] for row in pick(table)] == [choices.NONE, choices.OWN]
    for row in pick(table):
        plans = [cl.solve_greedy(curvature, 0.4, strength) for strength in (0.0, 1.0)]
        if row["search"] == choices.OWN:
            plans = [
                choose_guards(
                    *(model, curvature, 0.4, texts.choose),
                    interaction_strength=strength,
                    options=QUIET,
                ).best
                for strength in (0.0, 1.0)
            ]
        kl = cl.measure_plans(model, plans, texts.report, progress=False)
        benefit, error = kl.paired(0, 1)
        assert row["edge_benefit"] == pytest.approx(benefit, rel=1e-4, abs=1e-9)
        assert row["edge_benefit_error"] == pytest.approx(error, rel=1e-3, abs=1e-9)
        loss = (kl.nll[0] - kl.nll[1]).mean()
        assert row["loss_benefit"] == pytest.approx(loss, rel=1e-3, abs=1e-7)


# Redundancy, experts ------------------------------------------------------------------------------


def test_redundancy_stands_beside_what_edges_save(problem: Problem) -> None:
    zero, one = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.5, 3.5])
    row = redundancy.redundancy_row("m", problem.curvature, 0.2, zero, one)
    assert row["redundancy"] == problem.curvature.ffn_redundancy
    assert row["edge_benefit"] == pytest.approx((zero - one).mean())
    assert row["edge_benefit_error"] == pytest.approx(sem(zero - one))
    assert row["relative_benefit"] == pytest.approx((zero - one).mean() / 2)
    (mine, *papers) = redundancy.plot_redundancy([row]).data
    assert (mine.y[0], mine.error_y.array[0]) == (
        row["relative_benefit"],
        row["relative_benefit_error"],
    )
    assert sum(len(series.x) for series in papers) == 10  # Table ffncorr


def test_experts_are_measured_beside_reap_and_their_pairs_beside_h() -> None:
    model, text = tiny_model("mixtral"), tiny_text(6, 20, "all")
    units, rows, apart = cl.enumerate_units(model, GROUPS), text.rows(0, 3), text.rows(3, 6)
    curvature = cl.estimate_curvature(model, units, rows, 16, progress=False)
    table = pick(experts.experts_study(model, curvature, rows, apart, (0.2,)))
    assert [row["plan"] for row in table] == ["REAP", "Expert frequency", *experts.SOLVED]
    free = cl.solve_greedy(curvature, 0.2, 1.0, cl.Guards(kinds=("expert",)), uniform=())
    (mine,) = pick(table, plan="H, free counts")
    assert mine["kl"] == pytest.approx(cl.pruning_risk(model, free, apart), rel=1e-5)
    assert mine["difference"] == pytest.approx(mine["kl"] - table[0]["kl"])
    measured = experts.pairs_of_experts(model, curvature, apart)
    same = pick(experts.stand_ins(curvature, measured, draws=10))[0]
    inside = [
        (measured.interaction[a, b], curvature.matrix[one, two])
        for (a, (one,)), (b, (two,)) in combinations(enumerate(measured.parts), 2)
        if units[one].layer == units[two].layer
    ]
    ranks = spearmanr(*zip(*inside, strict=True)).statistic
    assert same["rank_correlation"] == pytest.approx(ranks)
    assert math.isfinite(same["rank_correlation_error"])


# Error bars, the knobs of a build, and texts ------------------------------------------------------


HELD_OUT = tiny_text(5, seed=9)
KNOBS = SensitivityOptions(3, 20, row_counts=(1, 5), top_rs=(97,), draws=2)


def test_every_knob_is_the_build_it_claims_to_be() -> None:
    model, text = tiny_model(), tiny_text(6, 24, "all")
    table = sensitivity_study(model, text, HELD_OUT, KNOBS, progress=False)
    base = naive_build(model, text.rows(0, 3), 20, groups=16)[0]
    expected: dict[tuple[str, Any], Any] = {
        ("top_r", 97): naive_build(model, text.rows(0, 3), 97, groups=16)[0],
        ("rows", 1): naive_build(model, text.rows(0, 1), 20, groups=16)[0],
        ("rows", 5): naive_build(model, text.rows(0, 5), 20, groups=16)[0],
        ("seed", 1): naive_build(model, text.rows(3, 6), 20, groups=16)[0],
    }
    for (knob, value), matrix in expected.items():
        row = pick(table, knob=knob, value=value, interaction_strength=1.0)[0]
        distance = relative_error(matrix, base)
        assert row["matrix_distance"] == pytest.approx(distance, rel=1e-3, abs=1e-6)
    units = cl.enumerate_units(model)
    built = cl.estimate_curvature(model, units, text.rows(0, 3), 20, progress=False)
    plan = cl.solve_greedy(built, 0.2, 1.0)
    slow = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
    (row,) = pick(table, knob="rows", value=3, interaction_strength=1.0)
    assert row["is_base"]
    assert row["kl"] == pytest.approx(slow.mean(), rel=1e-3)
    assert len(sensitivity_findings(table)) == 4


# Intervals ----------------------------------------------------------------------------------------


def test_coverage_is_that_of_a_loop_by_hand() -> None:
    reference = random_curvature(UNITS, groups=100, positions=800)
    found = coverage(reference, "saliency", size=10, groups=4, draws=30, seed=5)
    rng, held = np.random.default_rng(5), np.zeros(len(UNITS))
    for _ in range(30):
        rows = np.array_split(rng.integers(100, size=10), 4)
        grams = np.stack([reference.group_grams[r].sum(axis=0) for r in rows])
        sizes = np.array([reference.group_positions[r].sum() for r in rows])
        drawn = cl.Curvature.from_groups(UNITS, Groups(grams, sizes), {})
        low, high = jackknife(drawn, "saliency").interval
        held += (low <= reference.saliency) & (reference.saliency <= high)
    np.testing.assert_allclose(found.share, held / 30)
    large = random_curvature(UNITS, groups=300, positions=6000)
    nominal = coverage(large, "edges", 48, 16, 200)
    assert 0.91 < nominal.share.mean() < 0.98
    assert 0.85 < np.median(nominal.error_ratio) < 1.15
    with pytest.raises(cl.InputError, match="groups <= size"):
        coverage(large, "edges", 8, 9, 5)


# Purposes -----------------------------------------------------------------------------------------


def test_plans_of_several_texts_are_judged_on_all_of_them() -> None:
    real = REAL
    table = purposes.kept_purposes(real, 0.2)
    wanted = {"calibrated_on": "WikiText", "judged_on": "C4", "interaction_strength": 1.0}
    (row,) = pick(table, **wanted)
    mine, own = (real.plans[f"H of {x}, lambda 1", 0.2].kl["c4"] for x in ("WikiText", "C4"))
    assert row["kl"] == pytest.approx(mine.mean())
    assert row["against_own"] == pytest.approx((mine - own).mean())
    assert all(row["against_own"] == 0 for row in pick(table, own=True))
    assert len(table) == len(purposes.KEPT) ** 2 * len(purposes.STRENGTHS)


# The paper beside what ships with SmolLM2 ---------------------------------------------------------


REAL = shipped.shipped()


def test_a_difference_has_the_error_of_rows_and_of_draws() -> None:
    for text in ("c4", "wikitext", "manual"):
        gap = REAL.less(shipped.ONE, shipped.ZERO, 0.2, text)
        rows = [REAL.rows(name, 0.2, text) for name in (shipped.ONE, shipped.ZERO)]
        apart = rows[0] - rows[1]
        drawn = [
            REAL.rows(f"draw {n} of H, lambda 1", 0.2, text)
            - REAL.rows(f"draw {n} of H, lambda 0", 0.2, text)
            for n in range(20)
            if len(REAL.rows(f"draw {n} of H, lambda 1", 0.2, text))
        ]
        drawn = [values[: min(map(len, drawn))].mean() for values in drawn]
        over_draws = np.var(drawn, ddof=1) * 24 / 23  # 24 rows behind H
        assert gap is not None
        assert gap.value == pytest.approx(apart.mean())
        assert gap.error == pytest.approx((apart.var(ddof=1) / len(apart) + over_draws) ** 0.5)
        assert gap.degrees is not None
        assert gap.degrees < len(apart) - 1 + len(drawn) - 1
    other = REAL.less(shipped.ONE, "SlimLLM", 0.2, "c4")
    alone = REAL.less("searched", "SlimLLM", 0.2, "c4", of_one_h=True)
    assert other is not None
    assert alone is not None
    assert (other.error or 0) > (alone.error or 0)  # one plan of H varies with H
    unknown = REAL.less(shipped.ONE, shipped.ZERO, 0.15, "c4")  # no draws were measured
    assert unknown is not None
    assert unknown.judged((-10, 10)) is None


def test_no_sentence_agrees_where_its_premise_fails() -> None:
    found = shipped.paper_findings(REAL)
    assert len({(f.claim, f.ours) for f in found}) == len(found) > 12
    (helps,) = (f for f in found if f.claim == shipped.HELP.claim and "20%" in f.ours)
    for claim in (LOW, DIFFERENT):
        (finding,) = (f for f in found if f.claim == claim.claim)
        assert finding.agrees is not True or helps.agrees


def test_the_command_prints_what_ships_and_asks_for_a_folder_else() -> None:
    assert main(["paper", "smollm2"]) == 0
    assert main(["paper", "demo"]) == 1
