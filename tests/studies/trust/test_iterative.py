"""Pruning in steps against one shot: the plans are those of `staged_plan`, and comparable."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import pick
from cocurve_lab.extensions.surrogates.staged import staged_plan
from cocurve_studies.shared import Recipe, compared, plan_overlap
from cocurve_studies.trust.iterative import IterativeOptions, iterative_study
from helpers.tiny_models import naive_risk, tiny_model, tiny_text

TEXT, HELD_OUT = tiny_text(4), tiny_text(6, seed=1)
OPTIONS = IterativeOptions(ffn_groups=4, surrogates=("H", "additive KL"))
RECIPE = Recipe(TEXT, top_r=20, progress=False, sketch_positions=1024)  # for the additive KL


def test_every_row_is_what_is_measured_the_slow_way() -> None:
    model = tiny_model()
    table = iterative_study(model, RECIPE, HELD_OUT, OPTIONS)
    assert [row["plan"] for row in table] == ["one shot", "iterative"] * 4
    assert [row["builds"] for row in table] == [1, 2] * 4
    units = cl.enumerate_units(model, 4)
    dense = RECIPE.build(model, units)
    largest = int(units.costs.max()) / units.total_cost
    for surrogate, strength in product(("H", "additive KL"), (0.0, 1.0)):
        shot, steps = pick(table, surrogate=surrogate, interaction_strength=strength)
        assert 0.4 <= shot["realized_ratio"] < 0.4 + largest
        assert 0.4 <= steps["realized_ratio"] < 0.4 + largest
        plan, one = (
            staged_plan(
                *(model, dense, TEXT, 0.4, stages, strength), surrogate=surrogate, progress=False
            )
            for stages in ([0.2], [])
        )
        slow = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
        base = naive_risk(model, [units[i] for i in one.pruned], HELD_OUT)
        assert steps["kl"] == pytest.approx(slow.mean(), rel=1e-3)
        assert steps["difference"] == pytest.approx((slow - base).mean(), rel=1e-2, abs=1e-5)
        error = (slow - base).std(ddof=1) / np.sqrt(6)
        assert steps["difference_error"] == pytest.approx(error, rel=1e-2, abs=1e-5)
        assert (shot["difference"], shot["overlap"]) == (0.0, 1.0)
        assert steps["overlap"] == plan_overlap(plan, one)
        assert steps["predicted_risk"] == pytest.approx(dense.risk(plan.pruned))


def test_plans_over_other_units_have_no_overlap() -> None:
    model = tiny_model()
    ours = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [0, 1, 2])
    half = cl.Selection.from_pruned(ours.units, [1, 2, 3])
    assert plan_overlap(ours, half) == pytest.approx(0.5)
    assert plan_overlap(ours, cl.Selection.from_pruned(cl.enumerate_units(model, 3), [0])) is None
    empty = cl.Selection.from_pruned(ours.units, [])
    assert plan_overlap(empty, empty) == 1.0
    assert plan_overlap(empty, ours) == 0.0
    table = cl.measure_plans(model, [ours, empty], HELD_OUT, progress=False)
    row = compared(table, 1, 0)
    assert (row["kl"], row["difference"]) == (0.0, -table.mean[0])
    assert row["perplexity"] == pytest.approx(row["dense_perplexity"])
