"""Studies of lambda, guards, gains and refinement, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import Table, pick
from cocurve_lab.measuring.risk import PlanTable
from cocurve_studies.trust import choices, improving
from cocurve_studies.trust.choices import (
    RELEASED,
    Texts,
    guards_study,
    plot_strength,
    strength_study,
    strength_summary,
)
from cocurve_studies.trust.improving import gains_study, plot_gains, refinement_study
from helpers.tiny_models import GROUPS, naive_risk, tiny_model, tiny_text

QUIET = cl.ChoiceOptions(progress=False)
RATIOS = (0.2, 0.4)


class Problem:
    """A tiny model, its H, and texts it has not seen."""

    def __init__(self) -> None:
        self.model = tiny_model()
        units = cl.enumerate_units(self.model, GROUPS)
        self.curvature = cl.estimate_curvature(self.model, units, tiny_text(4), 16, progress=False)
        text = tiny_text(8, 20, 5, seed=1)
        self.texts = Texts(text.rows(0, 4), text.rows(4, 8))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


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
    for row in strength_summary(table):
        node = row["kl_lambda_1"] - row["remainder"] - row["edge_mass"]
        assert node + row["fitting"] * row["edge_mass"] == pytest.approx(row["kl_lambda_1"])
        assert row["printed"] == pytest.approx(2 - row["fitting"])


def test_a_kept_study_measures_nothing(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Any = (problem.model, problem.curvature, problem.texts, RATIOS)
    first = strength_study(*arguments, options=QUIET, cache=tmp_path)
    monkeypatch.setattr(choices, "choose_interaction_strength", None)
    assert strength_study(*arguments, options=QUIET, cache=tmp_path) == first
    with pytest.raises(TypeError):  # other ratios are another study
        strength_study(*arguments[:3], (0.3,), options=QUIET, cache=tmp_path)


def test_shared_rows_are_refused(problem: Problem) -> None:
    texts = Texts(problem.texts.choose, problem.texts.choose)
    with pytest.raises(cl.MismatchError):
        strength_study(problem.model, problem.curvature, texts, RATIOS, options=QUIET)


def test_the_released_strengths_are_small() -> None:
    assert all(0 < strength < 0.3 for strength in RELEASED.values())


def test_pictures_have_a_curve_per_ratio_and_error_bars(table: Table) -> None:
    figure = plot_strength(table)
    curves = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [trace.name for trace in curves] == ["20%", "40%"]
    assert all(trace.error_y.array is not None for trace in curves)


# Guards, refinement, gains ------------------------------------------------------------------------


def test_guards_by_both_judges(problem: Problem, tmp_path: Path) -> None:
    table = guards_study(
        problem.model, problem.curvature, problem.texts, (0.2,), options=QUIET, cache=tmp_path
    )
    assert {row["judge"] for row in table} == {"kl", "nll"}
    for judge in ("kl", "nll"):
        part = pick(table, judge=judge, role="candidate")
        column = "kl" if judge == "kl" else "perplexity"
        whole = [row for row in part if not row["stopped_early"]]
        winner = min(whole, key=lambda row: row[column])
        chosen = next(row for row in part if row["chosen"])
        assert winner["difference"] == 0
        assert chosen["difference"] <= chosen["difference_error"] or chosen is winner
        assert {row["role"] for row in pick(table, judge=judge)} >= {
            "candidate",
            "best",
            "no guards",
        }


def test_refinement_lies_between_greedy_and_the_bound(problem: Problem) -> None:
    table = refinement_study(
        problem.model, problem.curvature, problem.texts.report, RATIOS, (0.0, 1.0), progress=False
    )
    assert len(table) == 4
    for row in table:
        assert row["bound"] <= row["refined_objective"] + 1e-12
        assert row["refined_objective"] <= row["objective"] + 1e-12
        if row["units_exchanged"] == 0:
            assert row["difference"] == 0
        assert row["difference"] == pytest.approx(row["refined_kl"] - row["kl"])


def test_gains_are_reported_on_other_rows(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = gains_study(
        problem.model, problem.curvature, problem.texts, (0.4,), (1.0,), options=QUIET
    )
    candidates = pick(table, role="candidate")
    assert len(candidates) == 1 + 3 * 2
    assert candidates[0]["ridge"] is None
    assert candidates[0]["difference"] == 0
    (report,) = pick(table, role="report")
    plan = cl.solve_greedy(problem.curvature, 0.4, 1.0)
    if report["ridge"] is None:
        assert report["difference"] == 0
    else:
        gains = cl.solve_gains(problem.curvature, plan, report["ridge"], report["clip"])
        kl = cl.measure_plans(
            problem.model, [plan, plan.with_gains(gains)], problem.texts.report, progress=False
        )
        assert report["difference"] == pytest.approx(kl.paired(1, 0)[0], rel=1e-4)
    assert len(plot_gains(table).data) == 6


def test_plans_are_measured_once_for_all_studies(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = problem.texts.report
    arguments: Any = (problem.model, problem.curvature, text, (0.2,))
    refinement_study(*arguments, (0.0, 1.0), cache=tmp_path, progress=False)
    asked = []
    real = improving.measure_plans

    def counted(*args: Any, **named: Any) -> PlanTable:
        table = real(*args, **named)
        asked.append(named["checkpoint"])
        return table

    monkeypatch.setattr(improving, "measure_plans", counted)
    monkeypatch.setattr(
        "cocurve_lab.measuring.risk._scored_hidden", None
    )  # any forward pass would fail
    refinement_study(*arguments, (0.0,), cache=tmp_path, progress=False)
    assert len(asked) == 1


def test_a_matrix_the_bound_does_not_hold_for_is_refused(problem: Problem) -> None:
    units = cl.enumerate_units(problem.model, GROUPS)
    matrix = np.ones((len(units),) * 2) * 2 - np.eye(len(units))
    with pytest.raises(cl.NumericalError):
        refinement_study(
            problem.model, cl.Curvature(matrix, units), problem.texts.report, (0.2,), progress=False
        )
