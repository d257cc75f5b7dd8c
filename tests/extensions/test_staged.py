"""Plans in stages: each stage is greedy on what the last one left, and stops do not show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import cocurve_lab as cl
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.extensions.surrogates import staged
from cocurve_lab.extensions.surrogates.staged import SURROGATES
from cocurve_lab.solver.guards import reachable_ratio
from helpers.problems import interrupt_at
from helpers.tiny_models import naive_risk, tiny_model, tiny_text

TEXT, TOP = tiny_text(4), 40
MODEL = tiny_model()
UNITS = cl.enumerate_units(MODEL, 4)
WHOLE = 10**6  # more positions and tokens than there are


def build(top_r: int = TOP, **options: Any) -> cl.Curvature:
    options = {"sketch_positions": WHOLE, "sketch_top": WHOLE, "groups": 2} | options
    return cl.estimate_curvature(
        MODEL, UNITS, TEXT, top_r, progress=False, options=cl.BuildOptions(**options)
    )


DENSE = build()


def staged_plan(ratio: float = 0.6, stages: Any = (0.2, 0.4), *more: Any, **rest: Any) -> Any:
    rest = {"progress": False} | rest
    return staged.staged_plan(MODEL, DENSE, TEXT, ratio, stages, *more, **rest)


def solved(on: cl.Curvature, surrogate: str, *more: Any, **rest: Any) -> cl.Selection:
    if surrogate == "additive KL":
        return on.additive().solve(*more, **rest)
    return cl.solve_greedy(on if surrogate == "H" else on.pair_kl(), *more, **rest)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_no_stage_is_the_plan_in_one_shot(surrogate: str) -> None:
    for strength in (0.0, 1.0):
        guards = cl.Guards(layer_cap_factor=1.8)
        plan = staged_plan(0.4, (), strength, guards, surrogate=surrogate)
        shot = solved(DENSE, surrogate, 0.4, strength, guards)
        assert plan.pruned == shot.pruned
        assert plan.predicted_risk == pytest.approx(DENSE.risk(shot.pruned))
        assert (plan.surrogate, plan.guards, plan.stages) == (surrogate, guards, ())
        assert (plan.requested_ratio, plan.interaction_strength) == (0.4, strength)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_each_stage_is_greedy_on_what_the_last_one_left(surrogate: str) -> None:
    plan, done = staged_plan(surrogate=surrogate), solved(DENSE, surrogate, 0.2)
    for ratio in (0.4, 0.6):
        done = solved(build(removed=done.pruned), surrogate, ratio, include=done.pruned)
    assert plan.pruned == done.pruned
    assert plan.realized_ratio >= 0.6
    assert plan.stages == (0.2, 0.4)
    assert plan.ordered
    assert plan.predicted_risk == pytest.approx(DENSE.risk(plan.pruned))  # by the whole model's H
    again = cl.Selection.from_json(plan.to_json())
    assert (again.pruned, again.stages, again.surrogate) == (plan.pruned, plan.stages, surrogate)
    assert "measured anew at 20%, 40%" in repr(again)


def test_stages_compute_as_the_first_build_did(tmp_path: Path) -> None:
    dense = build(bfloat16_products=True)
    staged.staged_plan(MODEL, dense, TEXT, 0.4, (0.2,), folder=tmp_path, progress=False)
    (stage,) = tmp_path.glob("H_*.pkl")
    assert cl.Curvature.load(stage).provenance["products"] == "bfloat16"


def test_f_at_the_removed_units_is_their_measured_kl() -> None:
    """The whole vocabulary as support, so that prediction and measurement are of one thing."""
    plan = solved(DENSE, "additive KL", 0.6)
    measured = naive_risk(MODEL, [UNITS[u] for u in plan.pruned], TEXT).mean()
    there = build(97, removed=plan.pruned).additive().predict(plan)
    assert there == pytest.approx(measured, rel=1e-5)
    assert abs(build(97).additive().predict(plan) / measured - 1) > 0.01


def test_guards_are_those_of_the_final_ratio() -> None:
    guards = cl.Guards(layer_cap_factor=2.0, protect_first=1)
    plan = staged_plan(0.4, (0.1, 0.2), guards=guards)
    shares = [
        UNITS.costs[[u for u in plan.pruned if UNITS.layers[u] == layer]].sum()
        / UNITS.costs[UNITS.layers == layer].sum()
        for layer in range(3)
    ]
    assert shares[0] == 0
    assert max(shares) <= 2.0 * 0.4
    assert plan.guards == guards
    # the first stage may already go as far as the last
    first = cl.solve_greedy(
        DENSE, 0.1, guards=replace(guards, layer_cap_factor=None, layer_cap=0.8)
    )
    assert plan.pruned[: len(first)] == first.pruned
    assert reachable_ratio(UNITS, guards, 0.1) < 0.1  # under the cap of its own ratio


def test_a_stage_that_a_unit_jumps_over_is_left_out(tmp_path: Path) -> None:
    plan = staged_plan(0.4, (0.2, 0.201, 0.202), folder=tmp_path)
    assert len(list(tmp_path.glob("H_*.pkl"))) == len(plan.stages) == 1
    assert plan.pruned == staged_plan(0.4, plan.stages).pruned


# Stopping and going on ----------------------------------------------------------------------------


def test_a_plan_is_the_same_wherever_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = staged_plan(surrogate="additive KL")
    for stopped in (1, 4, 6):  # in the second stage, after it, in the third
        folder = tmp_path / str(stopped)
        with monkeypatch.context() as patch:
            interrupt_at(patch, stopped, KeyboardInterrupt("stop"))
            with pytest.raises(KeyboardInterrupt):
                staged_plan(surrogate="additive KL", folder=folder)
        assert len(list(folder.glob("H_*.pkl"))) == stopped // 4
        assert len(list(folder.glob("H_*.ckpt"))) == bool(stopped % 4)
        measured = Mock(side_effect=features.gram_matrix)
        with monkeypatch.context() as patch:
            patch.setattr(features, "gram_matrix", measured)
            plan = staged_plan(surrogate="additive KL", folder=folder)
        assert measured.call_count == 8 - stopped  # nothing finished is measured again
        assert plan.to_json() == expected.to_json()


def test_another_plan_or_model_takes_none_of_its_files(tmp_path: Path) -> None:
    staged_plan(folder=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    staged_plan(0.6, (0.3,), folder=tmp_path)
    other = tiny_model(seed=1)
    dense = cl.estimate_curvature(other, UNITS, TEXT, TOP, progress=False)
    mine = staged.staged_plan(other, dense, TEXT, 0.6, (0.2, 0.4), folder=tmp_path, progress=False)
    alone = staged.staged_plan(other, dense, TEXT, 0.6, (0.2, 0.4), progress=False)
    assert mine.pruned == alone.pruned
    assert {path: path.read_bytes() for path in files} == files
    assert len(list(tmp_path.glob("H_*.pkl"))) == 5
    # under the name of another stage
    one, two, *_ = sorted(files, key=lambda path: path.suffix != ".pkl")
    one.write_bytes(two.read_bytes())
    with pytest.raises(cl.MismatchError):
        staged_plan(folder=tmp_path)


def test_it_tells_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    staged_plan(progress="lines")
    shown = capsys.readouterr().out
    assert f"Stage 2 of 3: {len(solved(DENSE, 'H', 0.2))} units" in shown
    assert "Stage 3 of 3" in shown
