"""Errors over draws of H: what is combined, that it covers, and what is measured for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.measuring import risk
from cocurve_lab.measuring.risk import PlanTable
from cocurve_studies.draws import Redrawn, redraw
from cocurve_studies.findings import ABOVE, column_of, longer
from cocurve_studies.shared import resampled
from cocurve_studies.structure.edges import edge_study
from cocurve_studies.tables import Table, pick
from cocurve_studies.trust.choices import NONE, diagonal_study
from helpers.problems import make_units, random_curvature
from helpers.studies import QUIET, Problem, forbidden


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
    assert Redrawn().columns("x", 0.05, "a", "b") == {"x_error": 0.05}


@pytest.mark.parametrize("note", ["H has no group Grams", ""])
def test_an_error_that_is_unknown_in_part_gives_no_verdict(note: str) -> None:
    nan = np.array([math.nan, math.nan, 1.0])  # greedy stalled in two of the three draws
    drawn = Redrawn(3, {} if note else {"a": nan, "b": nan}, {}, rows=4, groups=4, note=note)
    for pair in (("a", "b"), ("stopped", "b")):
        row = {"d": 0.2} | drawn.columns("d", 0.01, *pair)
        assert (row["d_error"], row["d_draws_error"]) == (0.01, None)
        assert row["d_note"]
        assert column_of(row, "d").judged(ABOVE) is None


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


def ends(h: cl.Curvature, problem: Problem) -> float:
    """KL(lambda 0) - KL(lambda 1) of one H."""
    plans = [cl.solve_greedy(h, 0.4, strength) for strength in (0.0, 1.0)]
    table = cl.measure_plans(problem.model, plans, problem.texts.report, progress=False)
    return table.paired(0, 1)[0]


def run(name: str, p: Problem, draws: int, cache: Path | None) -> Table:
    if name == "edges":
        how: dict[str, Any] = {"draws": draws, "cache": cache, "progress": False}
        return edge_study(p.model, p.curvature, p.texts.report, (0.4,), **how)
    how = {"options": QUIET, "draws": draws, "cache": cache}
    return diagonal_study(p.model, p.curvature, p.texts, (0.4,), **how)


@pytest.mark.parametrize("name", ["edges", "diagonal"])
def test_every_difference_carries_both_errors(name: str, problem: Problem, tmp_path: Path) -> None:
    plain, table = (pick(run(name, problem, draws, tmp_path)) for draws in (0, 3))
    column = "difference" if name == "edges" else "edge_benefit"
    wanted = {"variant": "diagonal"} if name == "edges" else {"search": NONE}
    (before,), (after,) = pick(plain, **wanted), pick(table, **wanted)
    parts = [after[f"{column}_{part}_error"] for part in ("rows", "draws")]
    assert after[f"{column}_error"] == pytest.approx(math.hypot(*parts))
    assert parts[0] == pytest.approx(before[f"{column}_error"])
    gaps = [ends(h, problem) for h in resampled(problem.curvature, 3)]
    assert parts[1] == pytest.approx(float(np.std(gaps, ddof=1)) * math.sqrt(4 / 3), rel=1e-3)
    with forbidden(problem.model):  # a kept table of more draws is used
        assert pick(run(name, problem, 2, tmp_path)) == table
    with pytest.raises(cl.InputError, match="draws is 1"):
        run(name, problem, 1, tmp_path)
