"""Errors over draws of H: what is combined, that it covers, and what is measured for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.measuring import risk
from cocurve_lab.measuring.risk import PlanTable
from cocurve_studies import draws
from cocurve_studies.draws import PARTS, Redrawn, redraw
from cocurve_studies.findings import ABOVE, Finding, judged_column, longer, with_error
from cocurve_studies.shared import resampled
from cocurve_studies.structure.edges import EdgeOptions, edge_study
from cocurve_studies.structure.findings import edge_findings
from cocurve_studies.tables import Table, pick
from cocurve_studies.trust import findings
from cocurve_studies.trust.choices import guards_study, strength_study
from cocurve_studies.trust.diagonal import diagonal_study
from cocurve_studies.trust.improving import refinement_study
from cocurve_studies.trust.redundancy import RedundancyOptions, Subject, redundancy_study
from helpers.problems import make_units, random_curvature
from helpers.studies import Problem, forbidden
from helpers.tiny_models import GROUPS

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
    assert judged_column(row, "difference", *ABOVE) is None


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
        return cl.Curvature.from_groups(self.units, Groups(grams, size), {})

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
        drawn = redraw(None, curvature, plans_of, held_out, 8)  # type: ignore[arg-type]
        row = {"d": value - true} | drawn.columns("d", error, 0.0, 1.0)
        hits["both"] += abs(row["d"]) <= longer(2.0, row["d_degrees"]) * row["d_error"]
        hits["rows"] += abs(row["d"]) <= 2 * error
    assert 0.91 * trials <= hits["both"] <= 0.99 * trials  # the nominal rate is 95.4 %
    assert hits["rows"] <= 0.8 * trials


# Studies ------------------------------------------------------------------------------------------
Study = Callable[[Problem, int, Any], Table]
Pair = Callable[[cl.Curvature], list[cl.Selection]]


def ends(h: cl.Curvature) -> list[cl.Selection]:
    """The plans of lambda 0 and 1."""
    return [cl.solve_greedy(h, 0.4, strength) for strength in (0.0, 1.0)]


def spread(problem: Problem, pair: Pair) -> float:
    """Standard deviation over three draws of the difference of two plans, the slow way."""
    gaps = []
    for h in resampled(problem.curvature, 3):
        plans = pair(h)
        table = cl.measure_plans(problem.model, plans, problem.texts.report, progress=False)
        gaps.append(table.paired(0, 1)[0])
    return float(np.std(gaps, ddof=1)) * math.sqrt(4 / 3)


def refinement(p: Problem, draws: int, cache: Any = None) -> Table:
    arguments = (p.model, p.curvature, p.texts.report, (0.4,), (1.0,))
    return refinement_study(*arguments, draws=draws, cache=cache, progress=False)


# study -> how it is run, its findings, its differences, and the one known from `spread`
STUDIES: dict[str, tuple[Study, Callable[[Table], list[Finding]], tuple[str, ...], Pair | None]] = {
    "strength": (
        lambda p, draws, cache: strength_study(
            p.model, p.curvature, p.texts, (0.4,), options=QUIET, draws=draws, cache=cache
        ),
        findings.strength_findings,
        ("edge_benefit", "difference"),
        ends,
    ),
    "guards": (
        lambda p, draws, cache: guards_study(
            p.model, p.curvature, p.texts, (0.2,), options=QUIET, draws=draws, cache=cache
        ),
        findings.guards_findings,
        ("difference",),
        None,
    ),
    "diagonal": (
        lambda p, draws, cache: diagonal_study(
            p.model, p.curvature, p.texts, (0.4,), options=QUIET, draws=draws, cache=cache
        ),
        findings.diagonal_findings,
        ("edge_benefit", "loss_benefit"),
        ends,
    ),
    "edges": (
        lambda p, draws, cache: edge_study(
            *(p.model, p.curvature, p.texts.report, EdgeOptions((0.4,)), cache, False),
            draws=draws,
        ),
        edge_findings,
        ("difference", "perplexity_difference"),
        ends,
    ),
    "refinement": (refinement, findings.refinement_findings, ("difference",), None),
    "redundancy": (
        lambda p, draws, cache: redundancy_study(
            {"m": Subject(p.model, p.calibration, p.texts.report, GROUPS)},
            RedundancyOptions(ratio=0.4, top_r=16),
            draws=draws,
            cache=cache,
            progress=False,
        ),
        findings.redundancy_findings,
        ("edge_benefit",),
        ends,
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_difference_carries_both_errors(name: str, problem: Problem, tmp_path: Path) -> None:
    study, judge, columns, pair = STUDIES[name]
    plain, table = study(problem, 0, tmp_path), study(problem, 3, tmp_path)
    for column in columns:
        drawn = [
            (b, a)
            for b, a in zip(pick(plain), pick(table), strict=True)
            if a.get(f"{column}_draws")
        ]
        assert drawn
        for before, after in drawn:
            assert {f"{column}{end}" for end in PARTS} <= set(after)
            assert after[f"{column}_draws"] == 3
            parts = [after[f"{column}_{part}_error"] for part in ("rows", "draws")]
            assert after[f"{column}_error"] == pytest.approx(math.hypot(*parts))
            assert parts[0] == pytest.approx(before[f"{column}_error"])
    if pair is not None:  # the first plan that is not the one it is compared with
        found = next(e for row in pick(table) if (e := row.get(f"{columns[0]}_draws_error")))
        assert found == pytest.approx(spread(problem, pair), rel=1e-3)
        assert "3 draws of H" in " ".join(finding.ours for finding in judge(table))


def test_a_draw_without_a_plan_is_counted_out(problem: Problem) -> None:
    plan = cl.solve_greedy(problem.curvature, 0.2, 1.0)
    solved = iter([None, *[plan] * 3])
    drawn = redraw(
        problem.model,
        problem.curvature,
        lambda _: {"a": next(solved), "b": plan},
        problem.texts.report,
        4,
        progress=False,
    )
    assert np.isnan(drawn.kl["a"]).tolist() == [True, False, False, False]
    assert drawn.columns("x", 0.1, "a", "b")["x_draws"] == 3


def test_a_kept_table_of_more_draws_is_used(problem: Problem, tmp_path: Path) -> None:
    many = refinement(problem, 4, tmp_path)
    with forbidden(problem.model):
        assert refinement(problem, 2, tmp_path).equals(many)
        assert (
            refinement(problem, 0, tmp_path)["difference_error"][0]
            == (many["difference_rows_error"][0])
        )
        with pytest.raises(AssertionError):  # fewer are kept than wanted
            refinement(problem, 6, tmp_path)
    assert len(list(tmp_path.glob("study_refinement_*"))) == 2
    bare = cl.Curvature(problem.curvature.matrix, problem.units)
    assert draws.draw_marks(tmp_path, "refinement", {}, 2, bare)[1] == 2


@pytest.mark.parametrize("count", [-1, 1])
def test_one_draw_has_no_spread(count: int, problem: Problem) -> None:
    with pytest.raises(cl.InputError, match=str(count)):
        refinement(problem, count)
