"""Gains on models that really run them, and the rule that applies them or does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.gains import GainsChoice, choose_gains
from cocurve_lab.measuring.risk import PlanTable
from helpers.problems import make_units
from helpers.tiny_models import naive_build, naive_risk, tiny_model, tiny_text

UNITS = make_units()  # 3 layers of 2 attention and 3 FFN units
QUIET = cl.ChoiceOptions(progress=False)


def plan_of(curvature: cl.Curvature, pruned: list[int]) -> cl.Selection:
    return cl.Selection.from_pruned(curvature.units, pruned, curvature)


# On models ----------------------------------------------------------------------------------------


def twin_model(factor: float = 1.0) -> Any:
    """L1.ffn[0] and L1.ffn[1] compute alike; [0] writes `factor` times what [1] writes."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[:11] = projection.weight[11:22]
        mlp.down_proj.weight[:, :11] = factor * mlp.down_proj.weight[:, 11:22]
    return model


def built(model: Any, text: cl.CalibrationSet) -> cl.Curvature:
    """H by the slow definition, with the rows it was built on."""
    matrix, _ = naive_build(model, text, 97)
    units = cl.enumerate_units(model, 4)
    return cl.Curvature(matrix, units, {"row_fingerprints": text.row_fingerprints})


def texts() -> tuple[cl.CalibrationSet, ...]:
    return tiny_text(10, 20).split(held_out=3, test=3)


def test_a_twin_on_a_real_model_takes_over_exactly() -> None:
    """The sign of the whole chain: masks, features, H, alpha, gain. With it wrong the KL grows."""
    model, (calibration, held_out, test) = twin_model(), texts()
    curvature = built(model, calibration)
    plan = plan_of(curvature, [curvature.units.index("L1.ffn[0]")])
    gains = cl.solve_gains(curvature, plan, 1e-7)
    assert gains[curvature.units.index("L1.ffn[1]")] == pytest.approx(2, abs=1e-4)
    assert all(abs(value - 1) < 1e-4 for u, value in gains.items() if u != 9)
    choice = choose_gains(
        model, curvature, plan, held_out, (1e-7, 1.0), (1.0,), test, options=QUIET
    )
    assert choice.applied
    assert choice.setting == (1e-7, 1.0)
    assert choice.report is not None
    plain, chosen = choice.report.mean
    assert plain > 1e-4
    assert chosen < 1e-6 * plain
    row = choice.curve[choice.curve["chosen"]].iloc[0]
    assert (row["ridge"], row["clip"]) == (1e-7, 1.0)


def test_gains_that_hurt_are_not_applied() -> None:
    """H of a model whose twin writes the opposite sign: its gains push the wrong way."""
    model, (calibration, held_out, test) = twin_model(), texts()
    wrong = built(twin_model(-1.0), calibration)
    plan = plan_of(wrong, [8])
    choice = choose_gains(model, wrong, plan, held_out, (1e-7,), report_on=test, options=QUIET)
    assert not choice.applied
    assert choice.setting is None
    assert choice.best.gains == {}
    assert choice.curve["difference"][1] > 0
    assert choice.curve["chosen"].tolist() == [True, False, False]
    assert choice.report is not None
    assert choice.report.mean[0] == choice.report.mean[1]


def test_the_table_is_what_the_plans_really_cost() -> None:
    model, (calibration, held_out, _) = tiny_model(), texts()
    curvature = built(model, calibration)
    plan = cl.solve_greedy(curvature, 0.3).with_gains({})
    choice = choose_gains(model, curvature, plan, held_out, (0.2,), (1.0,), options=QUIET)
    units = curvature.units
    gains = cl.solve_gains(curvature, plan, 0.2, 1.0)
    by_hand = naive_risk(
        model,
        [units[u] for u in plan.pruned],
        held_out,
        {units[u]: gain for u, gain in gains.items()},
    )
    np.testing.assert_allclose(choice.measured.kl[1], by_hand, rtol=1e-4)
    assert choice.measured.selections[0].gains == {}
    assert choice.predicted[1] < choice.predicted[0] == pytest.approx(plan.predicted_risk)


# The rule -----------------------------------------------------------------------------------------


def choice_of(*kl: list[float]) -> GainsChoice:
    """The rule on given KL rows: plain first, then settings named (n, 1)."""
    plan = cl.Selection.from_pruned(UNITS, [0])
    table = PlanTable((plan,) * len(kl), np.array(kl))
    return GainsChoice(tuple((float(n), 1.0) for n in range(1, len(kl))), table, np.zeros(len(kl)))


def test_the_rule() -> None:
    assert choice_of([1.0, 2.0, 3.0], [0.8, 1.9, 2.7]).setting == (1.0, 1.0)
    unclear = choice_of([1.0, 1.0, 1.0], [1.3, 1.1, 0.5])  # -0.033 +- 0.24
    assert not unclear.applied
    assert unclear.curve["difference"][1] == pytest.approx(-0.1 / 3)
    assert not choice_of([1.0, 2.0], [1.0, 2.0]).applied
    # ties go to the most cautious setting that helps by itself
    plain = [1.0, 1.0, 1.0, 1.0]
    cautious, winner = [0.72, 0.78, 0.70, 0.80], [0.68, 0.80, 0.66, 0.82]
    helpless = [0.0, 1.4, 0.2, 1.4]  # ties with the winner, but not better than plain
    assert choice_of(plain, helpless, cautious, winner).setting == (2.0, 1.0)
    assert choice_of(plain, winner, cautious).setting == (1.0, 1.0)


def test_settings_stand_in_order_of_caution() -> None:
    model, (calibration, held_out, _) = tiny_model(), texts()
    curvature = built(model, calibration)
    nothing = plan_of(curvature, [])
    choice = choose_gains(model, curvature, nothing, held_out, options=QUIET)
    expected = ((1.0, 1.0), (1.0, 2.0), (0.2, 1.0), (0.2, 2.0), (0.05, 1.0), (0.05, 2.0))
    assert choice.settings == expected
    assert not choice.applied  # gains of one on the dense model: KL 0 against KL 0
    assert (choice.measured.kl == 0).all()


def test_shared_rows_too_few_rows_and_empty_grids_are_refused() -> None:
    model, (calibration, held_out, test) = tiny_model(), texts()
    curvature = built(model, calibration)
    plan = plan_of(curvature, [3])
    for rows, shared in ((calibration, None), (held_out, held_out), (held_out, calibration)):
        with pytest.raises(cl.MismatchError):
            choose_gains(model, curvature, plan, rows, report_on=shared)
    with pytest.raises(cl.InputError):
        choose_gains(model, curvature, plan, held_out.rows(0, 1), report_on=test)
    with pytest.raises(cl.InputError):
        choose_gains(model, curvature, plan, held_out, ridges=())


def test_a_checkpoint_saves_the_measurements_of_both_texts(tmp_path: Any) -> None:
    model, (calibration, held_out, test) = tiny_model(), texts()
    curvature = built(model, calibration)
    plan = plan_of(curvature, [3, 9])
    options = replace(QUIET, checkpoint=tmp_path / "gains")
    first, again = (
        choose_gains(model, curvature, plan, held_out, (0.2,), (1.0,), test, options=options)
        for _ in range(2)
    )
    assert {path.name for path in tmp_path.iterdir()} == {"gains.held_out", "gains.report"}
    np.testing.assert_array_equal(first.table.kl, again.table.kl)
