"""Plans of H, Q and F: what is solved and predicted on which positions, refits, and swaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import InputError, MismatchError
from cocurve_lab.extensions.surrogates.sketched import with_shifts
from cocurve_lab.measuring.risk import model_risk
from cocurve_studies.surrogates import (
    duel,
    plans_by_way,
    plot_predictions,
    prediction_table,
    preferred,
    shortfalls,
    swapped,
    way_table,
)
from helpers.tiny_models import GROUPS, tiny_model, tiny_text


@pytest.fixture(scope="module")
def lab() -> tuple[Any, cl.Curvature, cl.CalibrationSet]:
    """A tiny model, its H with a sketch, and held-out text."""
    model, text = tiny_model(layers=4, seed=5), tiny_text(12, 24)
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, text, 16, progress=False)
    return model, curvature, tiny_text(3, 24, seed=1)


def test_predictions_are_on_positions_that_nothing_was_solved_on(lab: Any) -> None:
    model, curvature, text = lab
    plans = plans_by_way(curvature, (0.2, 0.4))
    table = prediction_table(model, curvature, plans, text)
    assert [(row["requested_ratio"], row["way"]) for row in table] == [
        (ratio, way) for ratio in (0.2, 0.4) for way in ("H, λ 0", "H, λ 1", "Q", "F")
    ]
    plan, row = plans[0.4]["F"], table[-1]
    additive = curvature.additive()
    assert plan.pruned == additive.solve(0.4, part="fit").pruned
    assert plan.pruned != additive.solve(0.4, 0.0, part="fit").pruned
    assert row["by_f"] == additive.predict(plan, "price") != additive.predict(plan, "fit")
    assert row["by_q"] == curvature.pair_kl("price").risk(plan.pruned)
    assert row["by_h"] == curvature.risk(plan.pruned)
    assert row["measured"] == pytest.approx(cl.pruning_risk(model, plan, text), rel=1e-4)


ROWS = [
    {"by_h": h, "by_q": q, "by_f": f, "measured": kl, "way": way, "requested_ratio": 0.2}
    | {"measured_error": None}
    for way, h, q, f, kl in (("a", 0.1, 0.4, 0.3, 0.5), ("b", 0.2, -0.1, 0.4, 0.3))
]


def test_the_preferred_plan_is_the_lowest_in_each_column() -> None:
    assert preferred(ROWS) == [
        {"requested_ratio": 0.2, "measured": "b", "H": "a", "Q": "b", "F": "a"}
    ]


def test_the_measured_kl_is_told_as_a_multiple_of_each_prediction() -> None:
    assert shortfalls(ROWS) == (
        "20% removed: measured 3.25 times that of H, 1.25 times that of Q, 1.21 times that of F."
    )


def test_an_h_without_shifts_has_plans_of_its_own(lab: Any) -> None:
    model, whole, text = lab
    curvature = with_shifts(whole, None)
    plans = plans_by_way(curvature, (0.2,))
    assert list(plans[0.2]) == ["H, λ 0", "H, λ 1"]
    table = prediction_table(model, curvature, plans, text)
    assert {row[name] for row in table for name in ("by_q", "by_f", "by_f_error")} == {None}
    assert preferred(table)[0]["Q"] is preferred(table)[0]["F"] is None
    assert shortfalls(table).endswith("times that of H.")
    assert len(plot_predictions(table).data) == 2  # H, and the line of equal values


def test_the_picture_has_what_a_log_axis_can_show() -> None:
    figure = plot_predictions(ROWS)
    assert [list(trace.x) for trace in figure.data] == [[0.1, 0.2], [0.4], [0.3, 0.4], [0.1, 0.4]]
    assert list(figure.data[1].y) == [0.5]


def test_ways_are_measured_and_refitted_and_kept(
    lab: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    model, curvature, text = lab
    rows = tiny_text(12, 24)
    plans = plans_by_way(curvature, (0.3,))[0.3]
    two = {"first": plans["H, λ 0"], "second": plans["F"]}
    table = way_table(model, two, {"first": 1, "second": 7}, rows, text, cache=tmp_path)
    first, second = table
    refitted = model_risk(model, cl.repair(model, two["second"], rows), text)
    assert second["refitted"] == pytest.approx(refitted.mean(), rel=1e-4)
    measured = cl.measure_plans(model, list(two.values()), text, progress=False)
    difference, error = measured.paired(1, 0)
    assert second["kl"] == pytest.approx(measured.mean[1])
    assert (second["against_first"], second["against_first_error"]) == pytest.approx(
        (difference, error)
    )
    assert (first["against_first"], first["evaluations"], second["evaluations"]) == (0, 1, 7)
    monkeypatch.setattr("cocurve_studies.surrogates.repair", None)  # a second run calls none
    assert way_table(model, two, {"first": 1, "second": 7}, rows, text, cache=tmp_path) == table
    with pytest.raises(MismatchError):
        way_table(model, two, {"first": 1, "second": 7}, rows, rows)


# Swaps --------------------------------------------------------------------------------------------


def test_a_swap_keeps_the_target_and_names_what_is_wrong(lab: Any) -> None:
    _, curvature, _ = lab
    units, plan = curvature.units, cl.solve_greedy(curvature, 0.3)
    out = plan.pruned[0]
    into = next(u for u in plan.kept if units[u].cost == units[out].cost)
    made = swapped(plan, [units[out].name], [into])
    assert set(made.pruned) == set(plan.pruned) - {out} | {into}
    assert made.requested_ratio == plan.requested_ratio
    with pytest.raises(InputError, match="not in the plan"):
        swapped(plan, [into], [])
    with pytest.raises(InputError, match="in the plan already"):
        swapped(plan, [], [out])
    with pytest.raises(InputError, match="its target needs"):
        swapped(plan, list(plan.pruned), [])


def test_a_duel_says_which_plan_costs_less(lab: Any) -> None:
    model, curvature, text = lab
    plan = cl.solve_greedy(curvature, 0.3)
    units = curvature.units
    assert duel(model, plan, [], [], text).startswith("nothing is swapped")
    harm = curvature.single_unit_risk / units.costs
    out = min(plan.pruned, key=lambda u: harm[u])
    into = max((u for u in plan.kept if units[u].cost >= units[out].cost), key=lambda u: harm[u])
    worse = swapped(plan, [out], [into])
    kl = [cl.pruning_risk(model, each, text) for each in (worse, plan)]
    said = duel(model, plan, [out], [into], text)
    assert f"{kl[0]:.4f}, the plan {kl[1]:.4f}" in said
    assert said.endswith("yours costs more")
    back = duel(model, worse, [into], [out], text)
    assert back.endswith("yours costs less")
    assert np.sign(kl[0] - kl[1]) == 1
