"""Intervals of every unit, and a build that ends by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.estimator.build import Build
from cocurve_studies.certainty.precision import (
    interval_table,
    plot_intervals,
    plot_stopping,
    stopping_study,
)
from cocurve_studies.shared import Recipe
from cocurve_studies.tables import column, pick
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model, tiny_text

MODEL, TEXT = tiny_model(layers=2), tiny_text(20, length=12)
UNITS = cl.enumerate_units(MODEL, 4)


def test_intervals_are_those_of_the_jackknife() -> None:
    curvature = random_curvature(UNITS, groups=16)
    table = interval_table(curvature, 0.9)
    assert [row["unit"] for row in pick(table)] == [unit.name for unit in UNITS]
    parts = np.diagonal(curvature.group_grams, axis1=1, axis2=2)
    positions = curvature.group_positions
    means = parts / positions[:, None]
    weights = positions / (positions.sum() - positions)
    error = np.sqrt((weights[:, None] * (means - curvature.saliency) ** 2).mean(axis=0))
    assert column(table, "relative_error") == pytest.approx(error / curvature.saliency)
    half = (column(table, "high") - column(table, "low")) / 2
    assert half == pytest.approx(1.7530503 * error)  # t(15), 95 % quantile
    assert column(table, "saliency") == pytest.approx(curvature.saliency)


def test_intervals_are_drawn_by_size_and_above_zero() -> None:
    table = interval_table(random_curvature(UNITS, groups=2))
    assert (column(table, "low") < 0).any()  # t(1) is 12.7
    table.loc[0, "saliency"] = 0.0  # a dead unit has no place on a log axis
    figure = plot_intervals(table)
    drawn = sum(len(trace.x) for trace in figure.data)
    assert drawn == len(table) - 1
    for trace in figure.data:
        assert (np.asarray(trace.error_y.arrayminus) < np.asarray(trace.y)).all()
        order = np.argsort(trace.x)
        assert (np.diff(np.asarray(trace.y)[order]) >= 0).all()


def recipe(cache: Path | None = None, groups: int = 16) -> Recipe:
    return Recipe(TEXT, 20, groups, cache, progress=False)


def stop(tolerance: float = 9.0, patience: int = 2) -> cl.StopWhenConverged:
    return cl.StopWhenConverged(0.2, 0.0, tolerance, patience)


def test_a_build_stops_after_its_patience(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []
    given = stop()

    def watch(build: Build) -> None:
        seen.append((build.done, build.stopped != ""))

    table = stopping_study(MODEL, UNITS, recipe(tmp_path), given, watch=watch)
    # every error is below 9, so the yeses start with the sixteenth row
    assert [row["rows"] for row in pick(table)] == list(range(1, 18))
    assert seen == [*((done, False) for done in range(1, 18)), (17, True)]  # told of the stop too
    assert [row["converged"] for row in pick(table)] == [False] * 15 + [True] * 2
    assert [row["stopped"] for row in pick(table)] == [False] * 16 + [True]
    assert math.isnan(table["optimism"][0])
    assert {row["rows_given"] for row in pick(table)} == {20}
    whole = cl.estimate_curvature(MODEL, UNITS, TEXT.rows(0, 17), 20, progress=False)
    readout = cl.is_converged(whole, 0.2, 0.0, 9.0)
    assert pick(table)[-1]["risk_error"] == pytest.approx(readout.risk_error)
    assert pick(table)[-1]["saliency_error"] == pytest.approx(readout.saliency_error)
    assert given.history == []
    figure = plot_stopping(table)
    assert len(figure.data) == 3
    assert {shape.x0 for shape in figure.layout.shapes} >= {17}


def test_a_build_that_never_converges_is_whole() -> None:
    table = stopping_study(MODEL, UNITS, recipe(), stop(tolerance=1e-6))
    assert pick(table)[-1]["rows"] == 20
    assert not any(row["stopped"] or row["converged"] for row in pick(table))


def test_a_build_stopped_by_hand_is_not_kept(tmp_path: Path) -> None:
    def interrupt(build: Any) -> None:
        if build.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopping_study(MODEL, UNITS, recipe(tmp_path), stop(), watch=interrupt)
    assert not list(tmp_path.iterdir())
