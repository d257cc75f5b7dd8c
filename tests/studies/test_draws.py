"""Errors over draws of H: what is combined, that it covers, and what is measured for it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import Table, pick
from cocurve_lab.estimator.estimate import exact_curvature
from cocurve_lab.measuring import risk
from cocurve_lab.measuring.risk import PlanTable
from cocurve_studies import draws
from cocurve_studies.draws import PARTS, Redrawn, again, redraw
from cocurve_studies.findings import ABOVE, judged_column, longer, with_error
from cocurve_studies.shared import resampled
from cocurve_studies.structure.edges import EdgeOptions, edge_study
from cocurve_studies.structure.findings import edge_findings
from cocurve_studies.trust import findings
from cocurve_studies.trust.choices import (
    Texts,
    guards_study,
    strength_study,
    strength_summary,
)
from cocurve_studies.trust.improving import refinement_study
from cocurve_studies.trust.infinitesimal import PlanGrid, measure_infinitesimal
from cocurve_studies.trust.redundancy import RedundancyOptions, Subject, redundancy_study
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

QUIET = cl.ChoiceOptions(progress=False)


# The error ----------------------------------------------------------------------------------------


def test_two_variances_are_added_and_the_draws_of_one_h_are_not_averaged() -> None:
    kl = {"a": np.array([0.3, 0.5, 0.1, 0.3]), "b": np.array([0.1, 0.1, 0.1, 0.1])}
    drawn = Redrawn(4, kl, {}, rows=10, groups=5)
    row = {"difference": 0.2} | drawn.columns("difference", 0.05, "a", "b")
    over_draws = np.var([0.2, 0.4, 0.0, 0.2], ddof=1) * 5 / 4
    assert row["difference_draws_error"] == pytest.approx(math.sqrt(over_draws))
    assert row["difference_rows_error"] == 0.05
    assert row["difference_error"] == pytest.approx(math.sqrt(0.05**2 + over_draws))
    doubt = 0.05**4 / 9 + over_draws**2 * (1 / 3 + 1 / 4)
    assert row["difference_degrees"] == pytest.approx((0.05**2 + over_draws) ** 2 / doubt)
    assert row["difference_draws"] == 4
    assert "(rows 0.05, 4 draws of H 0.18)" in with_error(row, "difference")


def test_without_draws_the_error_is_over_rows_as_before() -> None:
    row = {"difference": 0.2} | Redrawn().columns("difference", 0.05, "a", "b")
    assert row == {"difference": 0.2, "difference_error": 0.05}
    assert judged_column(row, "difference", *ABOVE) is True
    assert with_error(row, "difference") == "0.200 ± 0.050"


def test_one_plan_in_every_draw_has_no_error_at_all() -> None:
    same = Redrawn(3, {"a": np.ones(3)}, {}, rows=4, groups=4)
    row = {"difference": 0.0} | same.columns("difference", 0.0, "a", "a")
    assert (row["difference_error"], row["difference_degrees"]) == (0, math.inf)
    assert judged_column(row, "difference", *ABOVE) is False


@pytest.mark.parametrize("note", ["H has no group Grams", ""])
def test_an_error_that_is_unknown_in_part_gives_no_verdict(note: str) -> None:
    nan = np.array([math.nan, math.nan, 1.0])  # greedy stalled in two of the three draws
    drawn = Redrawn(3, {} if note else {"a": nan, "b": nan}, {}, rows=4, groups=4, note=note)
    row = {"difference": 0.2} | drawn.columns("difference", 0.01, "a", "b")
    assert row["difference_error"] == 0.01
    assert row["difference_draws_error"] is None
    assert judged_column(row, "difference", *ABOVE) is None
    reason = note or "fewer than two draws have both plans"
    assert f"(over rows alone; {reason}, so other" in with_error(row, "difference")
    alone = {"difference": 0.2} | drawn.columns("difference", None, "a", "b")  # a single row
    assert with_error(alone, "difference") == "0.2"


def test_a_plan_that_a_race_stopped_has_its_error_over_rows() -> None:
    drawn = Redrawn(3, {"winner": np.ones(3)}, {"winner": np.ones(3)}, rows=4, groups=4)
    for by in ("kl", "nll", "perplexity"):
        for pair in (("stopped", "winner"), ("winner", "stopped"), ("stopped", "another")):
            row = drawn.columns("difference", 0.05, *pair, by)
            assert row["difference_error"] == row["difference_rows_error"] == 0.05
            assert row["difference_draws_error"] is None
            assert row["difference_draws"] == 0
            assert row["difference_note"] == "not solved again on draws"


def test_few_degrees_of_freedom_ask_for_a_longer_bar() -> None:
    assert longer(2.0, math.inf) == 2.0
    assert longer(2.0, 1e9) == pytest.approx(2.0)
    assert longer(2.0, 5) > longer(2.0, 15) > 2.0
    row = {"x": 2.2, "x_error": 1.0, "x_degrees": 4.0}
    assert judged_column(row, "x", *ABOVE) is None
    assert judged_column(row | {"x_degrees": math.inf}, "x", *ABOVE) is True


# Coverage -----------------------------------------------------------------------------------------


class Population:
    """Text whose H is known: a row is `POSITIONS` feature vectors with covariance H."""

    ROWS, GROUPS, POSITIONS = 16, 16, 6

    def __init__(self) -> None:
        self.units = make_units()
        truth = random_curvature(self.units, 3, shared=1.0, positions=400).matrix
        # alike in saliency, so that the draw decides which units go
        scale = np.sqrt(np.diagonal(truth))
        truth = truth / np.outer(scale, scale) ** 0.9
        self.root = np.linalg.cholesky(truth + 1e-9 * np.eye(len(truth)))
        self.rng = np.random.default_rng(5)

    def rows(self, count: int) -> np.ndarray:
        """Grams [rows, M, M] of independent rows, nats."""
        noise = self.rng.normal(size=(count, len(self.root), self.POSITIONS))
        # heavy tails between rows, as in text
        noise *= np.exp(0.5 * self.rng.normal(size=(count, 1, 1)))
        features = self.root @ noise
        return features @ features.transpose(0, 2, 1)

    def calibration(self) -> cl.Curvature:
        grams = self.rows(self.GROUPS)
        size = np.full(self.GROUPS, self.POSITIONS)
        return cl.Curvature.from_groups(self.units, grams, size, None, {})

    def table(self, plans: list[cl.Selection], grams: np.ndarray) -> Any:
        """The "measured" KL of plans on rows, ½ sᵀ H_row s: a table like that of measure_plans."""
        chosen = np.array([plan.indicator for plan in plans], dtype=float)
        kl = 0.5 * np.einsum("pu,ruv,pv->pr", chosen, grams, chosen) / self.POSITIONS
        return PlanTable(tuple(plans), kl, nll=kl)


def plans_of(curvature: cl.Curvature) -> dict[Any, cl.Selection]:
    return {strength: cl.solve_greedy(curvature, 0.3, strength) for strength in (0.0, 1.0)}


def test_the_error_covers_the_true_difference_and_that_over_rows_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The truth is the mean difference of the plans of lambda 0 and 1, over fresh calibrations."""
    text = Population()
    # many rows, so that the draw of H is most of the error
    expected = text.rows(4000).mean(axis=0)[None]
    several = [text.table([*plans_of(text.calibration()).values()], expected) for _ in range(800)]
    true = float(np.mean([table.paired(0, 1)[0] for table in several]))
    hits = {"both": 0, "rows": 0}
    trials = 200
    for _ in range(trials):
        curvature, held_out = text.calibration(), text.rows(text.ROWS)
        monkeypatch.setattr(
            risk, "measure_plans", lambda _, plans, rows, **__: text.table(plans, rows)
        )
        value, error = text.table([*plans_of(curvature).values()], held_out).paired(0, 1)
        drawn = redraw(None, [curvature], plans_of, held_out, 8)  # type: ignore[arg-type]
        row = {"d": value - true} | drawn.columns("d", error, 0.0, 1.0)
        hits["both"] += abs(row["d"]) <= longer(2.0, row["d_degrees"]) * row["d_error"]
        hits["rows"] += abs(row["d"]) <= 2 * error
    assert 0.91 * trials <= hits["both"] <= 0.99 * trials  # the nominal rate is 95.4 %
    assert hits["rows"] <= 0.8 * trials


# Studies ------------------------------------------------------------------------------------------


class Problem:
    """A tiny model, its H from four groups, H* of the same rows, and texts they have not seen."""

    def __init__(self) -> None:
        self.model = tiny_model()
        units = cl.enumerate_units(self.model, GROUPS)
        self.curvature = cl.estimate_curvature(self.model, units, tiny_text(4), 16, progress=False)
        self.exact = exact_curvature(self.model, units, tiny_text(4), 16, progress=False)
        text = tiny_text(8, 20, 5, seed=1)
        self.texts = Texts(text.rows(0, 4), text.rows(4, 8))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


def spread(problem: Problem, text: cl.CalibrationSet, count: int, *settings: Any) -> float:
    """Standard deviation over draws of KL(lambda 0) - KL(lambda 1), the slow way."""
    gaps = []
    for h in resampled(problem.curvature, count):
        plans = [cl.solve_greedy(h, settings[0], strength) for strength in settings[1:]]
        table = cl.measure_plans(problem.model, plans, text, progress=False)
        gaps.append(table.paired(0, 1)[0])
    return float(np.std(gaps, ddof=1)) * math.sqrt(4 / 3)


def require_parts(row: dict[str, Any], name: str, count: int) -> None:
    """The parts of an error are there and add up."""
    assert {f"{name}{end}" for end in PARTS} <= set(row)
    assert row[f"{name}_draws"] == count
    both = math.hypot(row[f"{name}_rows_error"], row[f"{name}_draws_error"])
    assert row[f"{name}_error"] == pytest.approx(both)


def test_lambda_is_solved_again_on_every_draw(problem: Problem) -> None:
    arguments: Any = (problem.model, problem.curvature, problem.texts, (0.4,))
    plain = strength_study(*arguments, options=QUIET)
    table = strength_study(*arguments, options=QUIET, draws=3)
    for before, after in zip(plain, table, strict=True):
        assert before["kl"] == pytest.approx(after["kl"])
        assert after["edge_benefit_rows_error"] == pytest.approx(before["edge_benefit_error"])
        require_parts(after, "edge_benefit", 3)
        if not after["stopped_early"]:
            require_parts(after, "difference", 3)
    expected = spread(problem, problem.texts.report, 3, 0.4, 0.0, 1.0)
    assert expected > 0
    assert table[0]["edge_benefit_draws_error"] == pytest.approx(expected, rel=1e-3)
    (best,) = strength_summary(table)
    require_parts(best, "edge_benefit", 3)
    require_parts(best, "lambda_0_behind", 3)
    benefit = findings.strength_findings(table)[0].ours
    assert "nats per token (rows " in benefit
    assert "3 draws of H" in benefit


def test_guards_edges_and_search_carry_both_errors(problem: Problem) -> None:
    model, h, texts = problem.model, problem.curvature, problem.texts
    guards = guards_study(model, h, texts, (0.2,), options=QUIET, draws=3)
    reported = [row for row in guards if row["role"] != "candidate"]
    for row in reported:
        require_parts(row, "difference", 3)
    same = Redrawn(3, {"best": np.ones(3)}, {}, 4, 4).columns("difference", 0.0, "best", "best")
    for row in pick(reported, role="best"):
        assert {name: row[name] for name in same} == same
    assert len(findings.guards_findings(guards)) == 3

    table = edge_study(model, h, texts.report, EdgeOptions((0.4,)), progress=False, draws=3)
    for row in pick(table, note=""):
        require_parts(row, "difference", 3)
        require_parts(row, "perplexity_difference", 3)
    expected = spread(problem, texts.report, 3, 0.4, 0.0, 1.0)
    diagonal = pick(table, variant="diagonal")[0]
    assert diagonal["difference_draws_error"] == pytest.approx(expected, rel=1e-3)
    for row in pick(table, variant="signed"):  # the method itself, in every draw
        assert row["difference_error"] == row["perplexity_difference_error"] == 0
    assert "3 draws of H" in " ".join(finding.ours for finding in edge_findings(table))

    search = refinement_study(model, h, texts.report, (0.4,), (1.0,), draws=3, progress=False)
    require_parts(search[0], "difference", 3)
    assert findings.refinement_findings(search)


def test_the_benefit_of_each_model_carries_both_errors(problem: Problem) -> None:
    subject = Subject(problem.model, tiny_text(4), problem.texts.report, GROUPS)
    asked = RedundancyOptions(ratio=0.4, top_r=16)
    (row,) = redundancy_study({"m": subject}, asked, draws=3, progress=False)
    require_parts(row, "edge_benefit", 3)
    expected = spread(problem, problem.texts.report, 3, 0.4, 0.0, 1.0)
    assert row["edge_benefit_draws_error"] == pytest.approx(expected, rel=1e-3)
    helps = judged_column(row, "edge_benefit", *ABOVE)
    assert row["gate_right"] == (None if helps is None else helps == (row["gate_lambda"] > 0))
    assert "3 draws of H" in findings.redundancy_findings([row])[1].ours


def test_h_and_its_limit_are_drawn_together(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    real = draws.resampled

    def watched(h: cl.Curvature, count: int, seed: int) -> Any:
        seen.append((h.matrix, np.array([drawn.matrix for drawn in real(h, count, seed)])))
        return real(h, count, seed)

    monkeypatch.setattr(draws, "resampled", watched)
    grid = PlanGrid((0.4,), (0.0, 1.0))
    two = (problem.curvature, problem.exact)
    table = measure_infinitesimal(
        problem.model, *two, problem.texts.report, grid, draws=3, progress=False
    )
    for row in table:
        require_parts(row, "difference", 3)
    # the same weights of the same groups make both
    for part, (_, drawn) in zip(two, seen, strict=True):
        expected = [h.matrix for h in resampled(part, 3)]
        np.testing.assert_array_equal(drawn, expected)
    verdicts = findings.infinitesimal_findings(table)
    assert all("3 draws of H" in finding.ours for finding in verdicts)


def test_a_limit_without_groups_leaves_the_verdict_open(problem: Problem) -> None:
    exact = problem.exact
    bare = cl.Curvature(exact.matrix, exact.units, exact.provenance)
    table = measure_infinitesimal(
        problem.model,
        problem.curvature,
        bare,
        problem.texts.report,
        PlanGrid((0.4,), (0.0,)),
        draws=3,
        progress=False,
    )
    (finding,) = findings.infinitesimal_findings(table)
    assert finding.agrees is None
    assert "over rows alone; H* has no group Grams" in finding.ours


def test_a_draw_without_a_plan_is_counted_out(problem: Problem) -> None:
    plan = cl.solve_greedy(problem.curvature, 0.2, 1.0)
    assert again(replace(plan, requested_ratio=0.2), problem.curvature) is not None

    def solve(h: cl.Curvature, found: list[int] = []) -> dict[Any, Any]:  # noqa: B006
        found.append(1)
        return {"a": plan if len(found) > 1 else None, "b": plan}

    text = problem.texts.report
    drawn = redraw(problem.model, [problem.curvature], solve, text, 4, progress=False)
    assert np.isnan(drawn.kl["a"]).tolist() == [True, False, False, False]
    assert drawn.columns("x", 0.1, "a", "b")["x_draws"] == 3


def test_equal_plans_are_measured_once(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = risk.measure_plans

    def counted(model: Any, plans: Any, *rest: Any, **named: Any) -> PlanTable:
        asked.append(len(plans))
        return real(model, plans, *rest, **named)

    monkeypatch.setattr(risk, "measure_plans", counted)
    plan = cl.solve_greedy(problem.curvature, 0.2, 1.0)
    text = problem.texts.report
    redraw(
        problem.model,
        [problem.curvature],
        lambda _: dict.fromkeys("abc", plan),
        text,
        8,
        progress=False,
    )
    assert asked == [1]  # and all draws in one call, which runs the teacher once per row


def test_a_kept_table_of_more_draws_is_used(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Any = (problem.model, problem.curvature, problem.texts.report, (0.4,), (1.0,))

    def study(count: int) -> Table:
        return refinement_study(*arguments, draws=count, cache=tmp_path, progress=False)

    many = study(4)
    monkeypatch.setattr("cocurve_lab.measuring.risk._scored_hidden", None)  # no forward pass
    assert study(2) == many
    assert study(0)[0]["difference_error"] == many[0]["difference_rows_error"]
    assert len(list(tmp_path.glob("study_refinement_*"))) == 2
    with pytest.raises(TypeError):  # fewer are kept than wanted
        study(6)
    other = SimpleNamespace(group_grams=None)
    _, count = draws.draw_marks(tmp_path, "refinement", {}, 2, [other])  # type: ignore[list-item]
    assert count == 2


@pytest.mark.parametrize("count", [-1, 1])
def test_one_draw_has_no_spread(count: int, problem: Problem) -> None:
    with pytest.raises(cl.InputError, match="at least 2"):
        refinement_study(
            problem.model, problem.curvature, problem.texts.report, (0.2,), (1.0,), draws=count
        )
