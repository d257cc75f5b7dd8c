"""Pruning in steps against one shot: the plans are those of `staged_plan`, and comparable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import pick
from cocurve_lab.extensions.surrogates.staged import staged_plan
from cocurve_studies.shared import Recipe, compared, plan_overlap
from cocurve_studies.trust import iterative
from cocurve_studies.trust.iterative import IterativeOptions, iterative_study
from helpers.tiny_models import naive_risk, tiny_model, tiny_text

TEXT, HELD_OUT = tiny_text(4), tiny_text(6, seed=1)
OPTIONS = IterativeOptions(ffn_groups=4, surrogates=("H", "additive KL"))
RECIPE = Recipe(TEXT, top_r=20, progress=False)


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


def test_a_table_is_kept_and_nothing_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    recipe = replace(RECIPE, cache=tmp_path)
    first = iterative_study(model, recipe, HELD_OUT, OPTIONS)
    dense = RECIPE.build(model, cl.enumerate_units(model, 4))
    firsts = {
        frozenset(solve(0.2, strength).pruned)
        for solve in (partial(cl.solve_greedy, dense), dense.additive().solve)
        for strength in (0.0, 1.0)
    }
    assert len(list(tmp_path.glob("H_*.pkl"))) == 1 + len(firsts)
    assert len(list(tmp_path.glob("plans_*.ckpt"))) == 1
    monkeypatch.setattr(Recipe, "build", None)
    monkeypatch.setattr(iterative, "measure_plans", None)
    assert iterative_study(model, recipe, HELD_OUT, OPTIONS) == first
    other = IterativeOptions(ratios=(0.3,), ffn_groups=4)
    with pytest.raises(TypeError):  # another study: it wants to build
        iterative_study(model, recipe, HELD_OUT, other)


def test_what_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with pytest.raises(cl.InputError, match="steps is 1"):
        IterativeOptions(steps=1)
    with pytest.raises(cl.MismatchError, match="not held out"):
        iterative_study(model, RECIPE, TEXT.rows(1, 3), OPTIONS)
    units = cl.enumerate_units(model, 4)
    half = RECIPE.build(model, units).with_provenance(complete=False)
    monkeypatch.setattr("cocurve_lab.estimator.estimate.estimate_curvature", lambda *_, **__: half)
    with pytest.raises(KeyboardInterrupt, match="go on"):
        RECIPE.build(model, units)


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
