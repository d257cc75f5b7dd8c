"""Pruning in steps: the rebuilt H is that of what is left, and the plans are comparable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.studies.shared import Recipe, compared, plan_overlap
from cocurve_lab.studies.trust import iterative
from cocurve_lab.studies.trust.iterative import (
    IterativeOptions,
    iterative_step,
    iterative_study,
    repriced,
    without,
)
from cocurve_lab.tables import pick
from helpers.tiny_models import full_logits, naive_risk, tiny_model, tiny_text

TEXT, HELD_OUT = tiny_text(4), tiny_text(6, seed=1)
OPTIONS = IterativeOptions(ffn_groups=4)
RECIPE = Recipe(TEXT, top_r=20, progress=False)


def built(model: Any, units: cl.UnitSet, text: cl.CalibrationSet = TEXT) -> cl.Curvature:
    return cl.estimate_curvature(model, units, text, top_r=20, progress=False)


def test_a_zeroed_copy_computes_what_the_pruned_model_computes() -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    units = cl.enumerate_units(model, 4)
    plan = cl.Selection.from_pruned(units, [0, 3, 8, 17])
    found = full_logits(without(model, plan), TEXT.input_ids)
    expected = full_logits(cl.prune(model, plan), TEXT.input_ids)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((found - full_logits(model, TEXT.input_ids)).abs().max()) > 1e-2
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_the_rebuilt_matrix_is_that_of_the_physically_pruned_model() -> None:
    # attention units only: the FFN groups of the cut model are then those of the dense one
    model = tiny_model(heads="mha")
    units = cl.enumerate_units(model, 4)
    gone = [index for index, unit in enumerate(units) if unit.kind == "attention"][::3]
    plan = cl.Selection.from_pruned(units, gone)
    rebuilt = built(without(model, plan), units).matrix
    cut = cl.prune(model, plan)
    expected = built(cut, cl.enumerate_units(cut, 4)).matrix
    kept = np.ix_(plan.kept, plan.kept)
    np.testing.assert_allclose(rebuilt[kept], expected, rtol=1e-3, atol=1e-5 * expected.max())
    assert np.abs(rebuilt[gone]).max() < 1e-5 * expected.max()  # rounding
    assert np.diagonal(rebuilt)[gone].max() < 1e-9 * expected.max()


def test_a_second_step_keeps_the_first_and_minds_only_what_is_left() -> None:
    model = tiny_model()
    dense = built(model, cl.enumerate_units(model, 4))
    first = cl.solve_greedy(dense, 0.2)
    plan = iterative_step(model, first, 0.4, RECIPE)
    assert plan.pruned[: len(first)] == first.pruned
    rebuilt = built(without(model, first), dense.units)
    expected = cl.solve_greedy(rebuilt, 0.4, include=first.pruned)
    assert plan.pruned == expected.pruned
    assert plan.predicted_risk == pytest.approx(rebuilt.risk(plan.pruned[len(first) :]), rel=1e-6)
    priced = repriced(plan, dense)
    assert priced.predicted_risk == pytest.approx(dense.risk(plan.pruned), rel=1e-9)
    assert (priced.requested_ratio, priced.interaction_strength) == (0.4, 1.0)


def test_every_row_is_what_is_measured_the_slow_way() -> None:
    model = tiny_model()
    table = iterative_study(model, RECIPE, HELD_OUT, OPTIONS)
    assert [row["plan"] for row in table] == ["one shot", "iterative"] * 2
    units = cl.enumerate_units(model, 4)
    dense = built(model, units)
    largest = int(units.costs.max()) / units.total_cost
    for strength in (0.0, 1.0):
        shot, steps = pick(table, interaction_strength=strength)
        assert 0.4 <= shot["realized_ratio"] < 0.4 + largest
        assert 0.4 <= steps["realized_ratio"] < 0.4 + largest
        half = cl.solve_greedy(dense, 0.2, strength)
        plan = iterative_step(model, half, 0.4, RECIPE)
        slow = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
        one = cl.solve_greedy(dense, 0.4, strength)
        base = naive_risk(model, [units[i] for i in one.pruned], HELD_OUT)
        assert steps["kl"] == pytest.approx(slow.mean(), rel=1e-3)
        assert steps["difference"] == pytest.approx((slow - base).mean(), rel=1e-2, abs=1e-5)
        error = (slow - base).std(ddof=1) / np.sqrt(6)
        assert steps["difference_error"] == pytest.approx(error, rel=1e-2, abs=1e-5)
        assert (shot["difference"], shot["overlap"]) == (0.0, 1.0)
        assert steps["overlap"] == plan_overlap(plan, one)


def test_without_news_from_the_rebuild_both_plans_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a world where ablations add up: what is left costs what it cost before
    model = tiny_model()
    dense = built(model, cl.enumerate_units(model, 4))
    flat = np.diag(dense.saliency)

    def same(_: Recipe, rest: Any, units: cl.UnitSet) -> cl.Curvature:
        heads = [rest.model.layers[u.layer] for u in units]
        columns = [
            (layer.self_attn.o_proj if u.kind == "attention" else layer.mlp.down_proj).weight
            for u, layer in zip(units, heads, strict=True)
        ]
        left = np.array(
            [bool(w[:, u.start : u.stop].any()) for u, w in zip(units, columns, strict=True)]
        )
        return cl.Curvature(flat * left, units)

    monkeypatch.setattr(Recipe, "build", same)
    table = iterative_study(model, RECIPE, HELD_OUT, OPTIONS)
    for row in pick(table, plan="iterative"):
        assert (row["overlap"], row["difference"]) == (1.0, 0.0)


def test_a_rebuild_that_finds_a_unit_dear_spares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, 4)
    dense = built(model, units)
    first, one = cl.solve_greedy(dense, 0.2, 0.0), cl.solve_greedy(dense, 0.4, 0.0)
    dear = one.pruned[-1]
    matrix = np.diag(dense.saliency)
    matrix[dear, dear] = 1e3
    monkeypatch.setattr(Recipe, "build", lambda *_: cl.Curvature(matrix, units))
    plan = iterative_step(model, first, 0.4, RECIPE)
    assert dear in one.pruned
    assert dear not in plan.pruned


def test_a_table_is_kept_and_nothing_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    recipe = replace(RECIPE, cache=tmp_path)
    first = iterative_study(model, recipe, HELD_OUT, OPTIONS)
    dense = built(model, cl.enumerate_units(model, 4))
    firsts = {frozenset(cl.solve_greedy(dense, 0.2, strength).pruned) for strength in (0.0, 1.0)}
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
    plan = cl.Selection.from_pruned(units, [0]).with_gains({3: 1.1})
    with pytest.raises(cl.InputError, match="gains"):
        without(model, plan)
    partial = built(model, units).with_provenance(complete=False)
    monkeypatch.setattr(
        "cocurve_lab.estimator.estimate.estimate_curvature", lambda *_, **__: partial
    )
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
