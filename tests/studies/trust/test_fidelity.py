"""Surrogate fidelity: planted agreements and exponents; measurements against naive passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_studies.shared import sequence_columns, sequence_values
from cocurve_studies.tables import Table, column, pick
from cocurve_studies.trust import fidelity
from cocurve_studies.trust.fidelity import FidelityOptions
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, naive_risk, tiny_model, tiny_text, units_by_hand

MODEL = tiny_model()
HELD_OUT = tiny_text(3, 16, seed=7)
CURVATURE = cl.estimate_curvature(
    MODEL, cl.enumerate_units(MODEL, GROUPS), tiny_text(4, 16), 97, progress=False
)
OPTIONS = FidelityOptions(ratios=(0.0, 0.2, 0.5), pool_size=7)


def by_hand(names: list[str]) -> list[Any]:
    hand = units_by_hand(MODEL)
    return [hand[CURVATURE.units.indices([name])[0]] for name in names]


# Single units -------------------------------------------------------------------------------------


def test_a_risk_that_is_a_multiple_of_half_h_has_that_ratio_without_error() -> None:
    built = random_curvature(make_units(), groups=5, positions=63)
    factors = np.linspace(0.5, 4, len(built.units))
    assert built.group_risks is not None
    built = replace(built, groups=replace(built.groups, risks=built.group_risks * factors))
    table = fidelity.single_unit_fidelity(built)
    assert column(table, "measured_over_predicted") == pytest.approx(factors)
    assert column(table, "measured_over_predicted_error") == pytest.approx(0, abs=1e-7)
    assert column(table, "predicted") == pytest.approx(built.saliency / 2)
    assert column(table, "measured") == pytest.approx(built.single_unit_risk)
    assert [row["kind"] for row in pick(table)] == built.units.kinds.tolist()


def test_single_unit_errors_are_those_of_the_jackknife() -> None:
    built = random_curvature(make_units(), groups=6)
    table = fidelity.single_unit_fidelity(built)
    expected = cl.jackknife(built, "saliency").standard_error / 2
    assert column(table, "predicted_error") == pytest.approx(expected)


def test_a_unit_that_changes_nothing_has_no_ratio() -> None:
    built = random_curvature(make_units(), groups=3)
    assert built.group_grams is not None
    grams = built.group_grams.copy()
    grams[:, 2, :] = grams[:, :, 2] = 0
    positions, risks = built.group_positions, built.group_risks
    assert positions is not None
    assert risks is not None
    flat = cl.Curvature.from_groups(built.units, Groups(grams, positions, risks), {})
    rows = pick(fidelity.single_unit_fidelity(flat))
    assert rows[2]["measured_over_predicted"] is None
    assert rows[2]["predicted"] == 0
    assert rows[1]["measured_over_predicted"] > 0


# Plans --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Table:
    return fidelity.fidelity_study(MODEL, CURVATURE, HELD_OUT, OPTIONS, progress=False)


def test_plans_are_measured_as_naive_passes_measure_them(measured: Table) -> None:
    row = pick(measured, method="lambda 1", requested_ratio=0.5)[0]
    plan = cl.solve_greedy(CURVATURE, 0.5)
    hand = [units_by_hand(MODEL)[index] for index in plan.pruned]
    expected = naive_risk(MODEL, hand, HELD_OUT)
    assert sequence_values([row])[0] == pytest.approx(expected, rel=1e-4)
    assert row["measured"] == pytest.approx(expected.mean(), rel=1e-4)
    assert row["measured_error"] == pytest.approx(expected.std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert row["predicted"] == pytest.approx(plan.predicted_risk)
    assert row["measured_over_predicted"] == pytest.approx(row["measured"] / row["predicted"])
    alone = CURVATURE.single_unit_risk
    assert alone is not None
    assert row["diagonal"] == pytest.approx(plan.node_risk)
    assert row["single_units"] == pytest.approx(alone[list(plan.pruned)].sum())


def test_every_plan_has_a_row_and_the_empty_one_costs_nothing(measured: Table) -> None:
    assert len(pick(measured, group=fidelity.ACROSS)) == 6
    assert len(pick(measured, group=fidelity.POOL)) == 7
    for row in pick(measured, requested_ratio=0.0):
        assert (row["units"], row["predicted"], row["measured"]) == (0, 0, 0)
        assert row["measured_over_predicted"] is None


def test_predicted_errors_are_jackknife_errors_of_the_plan(measured: Table) -> None:
    plan = list(cl.solve_greedy(CURVATURE, 0.2).pruned)
    expected = cl.jackknife(CURVATURE, lambda c: c.risk(plan)).standard_error
    row = pick(measured, method="lambda 1", requested_ratio=0.2)[0]
    assert row["predicted_error"] == pytest.approx(float(expected), rel=1e-6)


# Summary of plans ---------------------------------------------------------------------------------


def planted(predicted: Any, kl: np.ndarray, **columns: Any) -> Table:
    """A table of `fidelity_study` with the given numbers: kl [plans, sequences]."""
    count = len(kl)
    fixed = {"group": fidelity.ACROSS, "method": "lambda 1", "requested_ratio": 0.2} | columns
    spread = kl.std(axis=1, ddof=1) / math.sqrt(kl.shape[1])
    lists = {name: value for name, value in fixed.items() if isinstance(value, list)}
    return [
        fixed
        | {name: value[i] for name, value in lists.items()}
        | {"predicted": float(predicted[i]), "diagonal": -float(predicted[i]), "single_units": None}
        | {"measured": kl[i].mean(), "measured_error": spread[i]}
        | sequence_columns(kl[i])
        for i in range(count)
    ]


def found(table: Table, group: str, statistic: str) -> dict[str, Any]:
    (row,) = [r for r in pick(table) if (r["group"], r["statistic"]) == (group, statistic)]
    return row


def test_a_cubic_gap_is_found_and_gaps_within_noise_are_left_out() -> None:
    units = np.array([2, 4, 8, 16, 32, 64])
    predicted = 1e-3 * units**1.5
    kl = np.repeat((predicted + 1e-4 * units**3.0)[:, None], 4, axis=1)
    kl[0] = predicted[0] + np.array([1, -1, 1, -0.9]) * 1e-2  # a gap nobody can see
    summary = fidelity.fidelity_summary(planted(predicted, kl, units=units.tolist()), draws=50)
    row = found(summary, "across ratios, lambda 1", "gap exponent in units")
    assert row["value"] == pytest.approx(3)
    assert row["fit_error"] == pytest.approx(0, abs=1e-6)
    assert (row["points"], row["left_out"], row["paper"]) == (5, 1, 3.0)
    row = found(summary, fidelity.ACROSS, "gap exponent in predicted risk")
    assert row["value"] == pytest.approx(2)


def test_correlations_are_those_of_scipy_and_of_agreement() -> None:
    rng = np.random.default_rng(3)
    predicted, kl = rng.uniform(0.1, 1, 9), rng.uniform(0.1, 1, (9, 6))
    table = planted(predicted, kl, units=list(range(2, 11)))
    summary = fidelity.fidelity_summary(table, draws=400)
    one = cl.agreement(predicted, kl.mean(axis=1))
    group = fidelity.ACROSS
    expected = {
        "pearson": pearsonr(predicted, kl.mean(axis=1)).statistic,
        "pearson_log": one.pearson_log,
        "spearman": one.spearman,
        "median_ratio": one.median_ratio,
    }
    for name, value in expected.items():
        row = found(summary, group, name)
        assert row["value"] == pytest.approx(value)
        assert row["low"] <= row["high"]
    diagonal = found(summary, group, "spearman, diagonal")  # planted: the other way round
    assert diagonal["value"] == pytest.approx(-one.spearman)
    unknown = found(summary, group, "spearman, single_units")
    assert (unknown["value"], unknown["points"], unknown["left_out"]) == (None, 0, 9)
    draws = np.random.default_rng(0).integers(6, size=(400, 6))
    naive = [spearmanr(predicted, kl[:, d].mean(axis=1)).statistic for d in draws]
    assert found(summary, group, "spearman")["value_error"] == pytest.approx(np.std(naive), rel=0.2)


def test_the_rank_table_has_every_score_of_every_group(measured: Table) -> None:
    summary = fidelity.fidelity_summary(measured, draws=50)
    table = fidelity.rank_table(measured, draws=50)
    assert [row["group"] for row in pick(table)] == list(dict.fromkeys(summary["group"]))
    assert set(fidelity.RANK_COLUMNS) <= set(pick(table)[0])
    for row in pick(table):
        assert row["predicted_spearman"] == found(summary, row["group"], "spearman")["value"]
        for name in ("diagonal", "single_units"):
            same = found(summary, row["group"], f"spearman, {name}")
            assert row[f"{name}_spearman"] == same["value"]
            assert row[f"{name}_spearman_error"] == same["value_error"]


def test_the_pool_says_how_much_worse_random_plans_are() -> None:
    methods = ["edge-aware greedy", "diagonal greedy", "random", "random", "local swap"]
    kl = np.outer([0.1, 0.2, 0.5, 0.7, 0.3], [1.0, 3.0, 2.0])
    table = planted(kl.mean(axis=1), kl, group=fidelity.POOL, method=methods, units=[3] * 5)
    summary = fidelity.fidelity_summary(table, draws=40)
    assert found(summary, fidelity.POOL, "random over structured")["value"] == pytest.approx(3)
    greedy = found(summary, fidelity.POOL, "random over greedy")
    assert greedy["value"] == pytest.approx(6)
    assert greedy["value_error"] == pytest.approx(0, abs=1e-9)  # every sequence says so
    assert found(summary, "same budget, structured", "spearman")["points"] == 3
    assert found(summary, "same budget, random", "spearman")["value"] is None  # two points


def test_plans_without_a_logarithm_are_counted(measured: Table) -> None:
    summary = fidelity.fidelity_summary(measured, draws=20)
    row = found(summary, fidelity.ACROSS, "pearson_log")
    assert (row["points"], row["left_out"]) == (4, 2)  # two empty plans
