"""Studies of lambda, guards, gains and refinement, on a tiny model."""

from __future__ import annotations

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.settings import choose_guards
from cocurve_studies.tables import Table, pick
from cocurve_studies.trust.choices import (
    guards_study,
    strength_study,
    strength_summary,
)
from cocurve_studies.trust.diagonal import NONE, OWN, diagonal_study
from cocurve_studies.trust.improving import gains_study, refinement_study
from helpers.studies import Problem
from helpers.tiny_models import naive_risk

QUIET = cl.ChoiceOptions(progress=False)
RATIOS = (0.2, 0.4)


@pytest.fixture(scope="module")
def table(problem: Problem) -> Table:
    return strength_study(problem.model, problem.curvature, problem.texts, RATIOS, options=QUIET)


# Lambda -------------------------------------------------------------------------------------------


def test_rows_are_the_measured_plans(problem: Problem, table: Table) -> None:
    for ratio in RATIOS:
        part = pick(table, requested_ratio=ratio)
        assert sum(row["role"] == "candidate" and row["chosen"] for row in part) == 1
        one = pick(part, role="lambda 1")[0]
        plan = cl.solve_greedy(problem.curvature, ratio, 1.0)
        chosen = [plan.units.units[i] for i in plan.pruned]
        expected = naive_risk(problem.model, chosen, problem.texts.report).mean()
        assert one["kl"] == pytest.approx(expected, rel=1e-4)
        assert one["edge_mass"] == pytest.approx(plan.edge_risk)
        assert one["remainder"] == pytest.approx(one["kl"] - plan.predicted_risk)
        zero = pick(part, role="lambda 0")[0]
        assert one["edge_benefit"] == pytest.approx(zero["kl"] - one["kl"])


def test_the_surrogate_meets_the_risk_at_the_fitting_lambda(table: Table) -> None:
    for row in pick(strength_summary(table)):
        node = row["kl_lambda_1"] - row["remainder"] - row["edge_mass"]
        assert node + row["fitting"] * row["edge_mass"] == pytest.approx(row["kl_lambda_1"])
        assert row["printed"] == pytest.approx(2 - row["fitting"])


# Guards, refinement, gains ------------------------------------------------------------------------


def test_guards_by_both_judges(problem: Problem) -> None:
    inputs = (problem.model, problem.curvature, problem.texts, (0.2,))
    table = guards_study(*inputs, options=QUIET)
    assert {row["judge"] for row in pick(table)} == {"kl", "nll"}
    for judge, column in (("kl", "kl"), ("nll", "perplexity")):
        part = pick(table, judge=judge, role="candidate")
        winner = min(pick(part, stopped_early=False), key=lambda row: row[column])
        (chosen,) = pick(part, chosen=True)
        assert winner["difference"] == 0
        assert chosen["difference"] <= chosen["difference_error"] or chosen is winner
        assert {"best", "no guards"} < {row["role"] for row in pick(table, judge=judge)}


def test_edges_against_the_diagonal_are_two_plans_on_the_same_rows(problem: Problem) -> None:
    model, curvature, texts = problem.model, problem.curvature, problem.texts
    table = diagonal_study(model, curvature, texts, RATIOS, options=QUIET)
    assert [(row["requested_ratio"], row["search"]) for row in pick(table)] == [
        (ratio, search) for ratio in RATIOS for search in (NONE, OWN)
    ]
    for row in pick(table):
        plans = []
        for strength in (0.0, 1.0):
            chosen = choose_guards(
                *(model, curvature, row["requested_ratio"], texts.choose),
                interaction_strength=strength,
                options=QUIET,
            )
            plans.append(chosen.best)
            if row["search"] == NONE:
                plans[-1] = cl.solve_greedy(curvature, row["requested_ratio"], strength)
            else:
                assert row[f"out_{strength:g}"] == len(chosen.infeasible) > 0
        kl = cl.measure_plans(model, plans, texts.report, progress=False)
        benefit, error = kl.paired(0, 1)
        assert row["edge_benefit"] == pytest.approx(benefit, rel=1e-4, abs=1e-9)
        assert row["edge_benefit_error"] == pytest.approx(error, rel=1e-3, abs=1e-9)
        assert row["loss_benefit"] == pytest.approx(
            (kl.nll[0] - kl.nll[1]).mean(), rel=1e-3, abs=1e-7
        )
        assert (row["overlap"] == 1) == (plans[0].fingerprint == plans[1].fingerprint)


def test_refinement_lies_between_greedy_and_the_bound(problem: Problem) -> None:
    table = refinement_study(
        problem.model, problem.curvature, problem.texts.report, RATIOS, (0.0, 1.0), progress=False
    )
    assert len(table) == 4
    for row in pick(table):
        assert row["bound"] <= row["refined_objective"] + 1e-12
        assert row["refined_objective"] <= row["objective"] + 1e-12
        if row["units_exchanged"] == 0:
            assert row["difference"] == 0
        assert row["difference"] == pytest.approx(row["refined_kl"] - row["kl"])


def test_gains_are_reported_on_other_rows(problem: Problem) -> None:
    model, curvature, texts = problem.model, problem.curvature, problem.texts
    table = gains_study(model, curvature, texts, RATIOS, (1.0,), options=QUIET)
    helpful, useless = (pick(table, requested_ratio=ratio) for ratio in RATIOS)
    first, *others = pick(helpful, role="candidate")
    assert (first["ridge"], first["difference"], len(others)) == (None, 0, 3 * 2)
    (report,) = pick(helpful, role="report")
    plan = cl.solve_greedy(curvature, RATIOS[0], 1.0)
    both = [plan, plan.with_gains(cl.solve_gains(curvature, plan, report["ridge"], report["clip"]))]
    kl = cl.measure_plans(model, both, texts.report, progress=False)
    assert report["difference"] == pytest.approx(kl.paired(1, 0)[0], rel=1e-4)
    assert report["difference"] != 0
    (report,) = pick(useless, role="report")
    assert (report["ridge"] is None) == (report["difference"] == 0)  # no gains help here
