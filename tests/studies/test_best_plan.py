"""Plans of several ways, their refits, and swaps by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import InputError, MismatchError
from cocurve_lab.measuring.risk import model_risk
from cocurve_studies.best_plan import duel, plans_by_way, swapped, way_table
from cocurve_studies.tables import pick
from helpers.tiny_models import GROUPS, tiny_model, tiny_text


@pytest.fixture(scope="module")
def lab() -> tuple[Any, cl.Curvature, cl.CalibrationSet]:
    """A tiny model, its H, and held-out text."""
    model, text = tiny_model(layers=4, seed=5), tiny_text(12, 24)
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, text, 16, progress=False)
    return model, curvature, tiny_text(3, 24, seed=1)


def test_a_plan_comes_from_h_or_from_the_kl_of_each_unit(lab: Any) -> None:
    _, curvature, _ = lab
    plans = plans_by_way(curvature, 0.4)
    assert plans["H, λ 0"].pruned == cl.solve_greedy(curvature, 0.4, 0.0).pruned
    assert plans["H, λ 1"].pruned == cl.solve_greedy(curvature, 0.4, 1.0).pruned
    alone = curvature.single_unit_risk / curvature.units.costs
    order = plans["each unit alone"].pruned
    assert order == tuple(np.argsort(alone, kind="stable")[: len(order)])


def test_ways_are_measured_and_refitted_and_kept(
    lab: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    model, curvature, text = lab
    rows = tiny_text(12, 24)
    plans = plans_by_way(curvature, 0.3)
    two = {"first": plans["H, λ 0"], "second": plans["each unit alone"]}
    table = way_table(model, two, {"first": 1, "second": 7}, rows, text, cache=tmp_path)
    first, second = pick(table)
    refitted = model_risk(model, cl.repair(model, two["second"], rows), text)
    assert second["refitted"] == pytest.approx(refitted.mean(), rel=1e-4)
    measured = cl.measure_plans(model, list(two.values()), text, progress=False)
    difference, error = measured.paired(1, 0)
    assert second["kl"] == pytest.approx(measured.mean[1])
    assert (second["against_first"], second["against_first_error"]) == pytest.approx(
        (difference, error)
    )
    assert (first["against_first"], first["evaluations"], second["evaluations"]) == (0, 1, 7)
    monkeypatch.setattr("cocurve_studies.best_plan.repair", None)  # a second run calls none
    again = way_table(model, two, {"first": 1, "second": 7}, rows, text, cache=tmp_path)
    assert again.equals(table)
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
