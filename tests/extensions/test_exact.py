"""The study that compares H with the exact H* and the plans of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.estimator.estimate import exact_curvature
from cocurve_lab.solver.guards import FREE
from cocurve_studies.trust.infinitesimal import (
    PlanGrid,
    compare_curvatures,
    compare_plans,
    measure_infinitesimal,
    plot_infinitesimal,
)
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import (
    GROUPS,
    tiny_model,
    tiny_text,
)


def exact(model: Any, text: cl.CalibrationSet, top_r: int = 13) -> cl.Curvature:
    units = cl.enumerate_units(model, GROUPS)
    return exact_curvature(model, units, text, top_r, progress=False)


# Two matrices and their plans -------------------------------------------------------------------


def test_a_matrix_against_itself_and_against_a_multiple() -> None:
    one = random_curvature(make_units(), groups=4)
    assert one.group_grams is not None
    double = cl.Curvature(
        2 * one.matrix, one.units, one.provenance, 2 * one.group_grams, one.group_positions
    )
    found = compare_curvatures(one, double)
    assert found["frobenius_distance"] == pytest.approx(1.0)
    assert found["diagonal_ratio"] == pytest.approx(2.0)
    assert found["log_diagonal_correlation"] == pytest.approx(1.0)
    assert found["edge_spearman"] == pytest.approx(1.0)
    assert found["diagonal_ratio_error"] == pytest.approx(0.0, abs=1e-12)
    assert found["dead_units"] == 0
    for row in compare_plans(one, double, PlanGrid())[0]:
        assert row["overlap"] == 1.0
        assert row["risk_of_exact_by_exact"] == pytest.approx(2 * row["risk_of_exact_by_finite"])


def test_numbers_of_a_case_worked_by_hand() -> None:
    units = make_units(1, 1, 2, attention_cost=10, ffn_cost=10)
    finite = cl.Curvature(np.diag([1.0, 2.0, 4.0]), units)
    other = cl.Curvature(np.diag([3.0, 1.0, 0.0]), units)
    found = compare_curvatures(finite, other)
    assert found["frobenius_distance"] == pytest.approx(np.sqrt((4 + 1 + 16) / 21))
    assert found["diagonal_ratio"] == pytest.approx((3 + 0.5) / 2)
    assert found["log_diagonal_correlation"] == pytest.approx(-1)
    assert found["dead_units"] == 1
    assert np.isnan(found["edge_spearman"])  # all edges are 0
    assert found["frobenius_distance_error"] is None  # no groups
    (row,), _ = compare_plans(finite, other, PlanGrid((0.6,), (1.0,), FREE))
    # H prunes units 0 and 1; H* prunes 2 and 1
    assert row["overlap"] == pytest.approx(1 / 3)
    assert row["risk_of_finite_by_finite"] == pytest.approx(1.5)
    assert row["risk_of_finite_by_exact"] == pytest.approx(2.0)
    assert row["risk_of_exact_by_finite"] == pytest.approx(3.0)
    assert row["risk_of_exact_by_exact"] == pytest.approx(0.5)


def test_errors_of_the_matrices_are_the_jackknife() -> None:
    """Groups of equal size, each a multiple of one matrix, so ratios are means of the factors."""
    units, groups = make_units(), 8
    features = np.random.default_rng(1).normal(size=(len(units), 20))
    gram, factors = features @ features.T, np.arange(1.0, 1 + groups)
    counts, facts = np.full(groups, 20), {"row_fingerprints": ["a"]}
    even = cl.Curvature(gram / 20, units, facts, np.stack([gram] * groups), counts)
    grams = factors[:, None, None] * gram
    uneven = cl.Curvature(grams.mean(axis=0) / 20, units, facts, grams, counts)
    found = compare_curvatures(even, uneven)
    assert found["diagonal_ratio"] == pytest.approx(factors.mean())
    expected = factors.std(ddof=1) / np.sqrt(groups)  # the standard error of a mean
    assert found["diagonal_ratio_error"] == pytest.approx(expected)
    assert found["frobenius_distance_error"] == pytest.approx(expected)
    elsewhere = uneven.with_provenance(row_fingerprints=["b"])
    assert compare_curvatures(even, elsewhere)["diagonal_ratio_error"] is None


def test_a_plan_that_stalls_is_left_out_and_named() -> None:
    units = make_units()
    one, other = random_curvature(units), random_curvature(units, 1)
    guards = cl.Guards(protect_first=1, protect_last=1)
    rows, pairs = compare_plans(one, other, PlanGrid((0.1, 0.9), (1.0,), guards))
    assert [row["stalled"] for row in rows] == [None, "finite"]
    assert rows[1]["overlap"] is None
    assert rows[0]["overlap"] is not None
    assert [len(pair) for pair in pairs] == [2, 0]


# Measured ---------------------------------------------------------------------------------------


def test_measured_plans_and_their_cache(tmp_path: Path) -> None:
    model, text, held_out = tiny_model(), tiny_text(3), tiny_text(3, seed=7)
    units = cl.enumerate_units(model, GROUPS)
    finite = cl.estimate_curvature(model, units, text, 13, progress=False)
    limit = exact(model, text)
    grid = PlanGrid((0.3,), (0.0, 1.0))

    def measure(grid: PlanGrid = grid) -> Any:
        return measure_infinitesimal(
            model, finite, limit, held_out, grid, cache=tmp_path, progress=False
        )

    table = measure()
    assert len(table) == 2
    for row in table:
        plans = [
            cl.solve_greedy(matrix, row["requested_ratio"], row["interaction_strength"])
            for matrix in (finite, limit)
        ]
        kl = cl.measure_plans(model, plans, held_out, progress=False)
        assert row["measured_finite"] == pytest.approx(kl.mean[0], rel=1e-5)
        assert row["measured_exact"] == pytest.approx(kl.mean[1], rel=1e-5)
        difference, error = kl.paired(1, 0)
        assert row["difference"] == pytest.approx(difference, abs=1e-6)
        assert row["difference_error"] == pytest.approx(error, abs=1e-6)
    plain, _ = compare_plans(finite, limit, grid)
    assert [{name: row[name] for name in plain[0]} for row in table] == plain

    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert measure() == table
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files  # read back
    measure(PlanGrid((0.3,), (0.0,)))
    assert len(list(tmp_path.iterdir())) > len(files)
    assert plot_infinitesimal(table).data[1].error_y.array is not None


def test_what_was_calibrated_on_is_never_measured_on() -> None:
    model, text = tiny_model(), tiny_text(2)
    preview = cl.estimate_curvature(model, None, text, 13, method="probe", progress=False)
    other = preview.with_provenance(row_fingerprints=[])
    for pair in ((preview, other), (other, preview)):
        with pytest.raises(cl.MismatchError, match="held out"):
            measure_infinitesimal(model, *pair, text)


def test_with_every_plan_stalled_nothing_is_measured() -> None:
    model, text = tiny_model(), tiny_text(2)
    found = exact(model, text)
    grid = PlanGrid((0.9,), (1.0,), cl.Guards(protect_first=2))
    (row,) = measure_infinitesimal(model, found, found, tiny_text(1, seed=3), grid, progress=False)
    assert row["stalled"] == "finite"
    assert row["measured_finite"] is None
    assert plot_infinitesimal([row]).data[0].x == ()
