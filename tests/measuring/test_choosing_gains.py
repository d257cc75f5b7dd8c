"""Gains on models that really run them, and the rule that applies them or does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.errors import InputError, MismatchError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.gains import GainsChoice, choose_gains
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.measuring.risk import PlanTable
from cocurve_lab.solver.gains import solve_gains
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from helpers.problems import make_units
from helpers.tiny_models import naive_build, naive_risk, tiny_model, tiny_text

UNITS = make_units()  # 3 layers of 2 attention and 3 FFN units
QUIET = ChoiceOptions(progress=False)


def plan_of(curvature: Curvature, pruned: list[int]) -> Selection:
    return Selection.from_pruned(curvature.units, pruned, curvature)


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


def built(model: Any, text: cl.CalibrationSet) -> Curvature:
    """H by the slow definition, with the rows it was built on."""
    matrix, _ = naive_build(model, text, 97)
    units = cl.enumerate_units(model, 4)
    return Curvature(matrix, units, {"row_fingerprints": text.row_fingerprints})


def texts() -> tuple[cl.CalibrationSet, ...]:
    return tiny_text(10, 20).split(held_out=3, test=3)


def test_a_twin_on_a_real_model_takes_over_exactly() -> None:
    """The sign of the whole chain: masks, features, H, alpha, gain. With it wrong the KL grows."""
    model, (calibration, held_out, test) = twin_model(), texts()
    curvature = built(model, calibration)
    plan = plan_of(curvature, [curvature.units.index("L1.ffn[0]")])
    gains = solve_gains(curvature, plan, 1e-7)
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
    assert "ridge 1e-07, clip 1" in repr(choice)


def test_gains_that_hurt_are_not_applied() -> None:
    """H of a model whose twin writes the opposite sign: its gains push the wrong way."""
    model, (calibration, held_out, test) = twin_model(), texts()
    wrong = built(twin_model(-1.0), calibration)
    plan = plan_of(wrong, [8])
    choice = choose_gains(model, wrong, plan, held_out, (1e-7,), report_on=test, options=QUIET)
    assert not choice.applied
    assert choice.setting is None
    assert choice.best.gains == {}
    assert choice.rows()[1]["difference"] > 0
    assert choice.rows()[0]["chosen"]
    assert choice.report is not None
    assert choice.report.mean[0] == choice.report.mean[1]


def test_the_table_is_what_the_plans_really_cost() -> None:
    model, (calibration, held_out, _) = tiny_model(), texts()
    curvature = built(model, calibration)
    plan = solve_greedy(curvature, 0.3).with_gains({})
    choice = choose_gains(model, curvature, plan, held_out, (0.2,), (1.0,), options=QUIET)
    units = curvature.units
    gains = solve_gains(curvature, plan, 0.2, 1.0)
    by_hand = naive_risk(
        model,
        [units[u] for u in plan.pruned],
        held_out,
        {units[u]: gain for u, gain in gains.items()},
    )
    np.testing.assert_allclose(choice.table.kl[1], by_hand, rtol=1e-4)
    assert choice.table.selections[0].gains == {}
    assert choice.predicted[1] < choice.predicted[0] == pytest.approx(plan.predicted_risk)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_gains_are_honoured_by_every_consumer(family: str) -> None:
    model, (calibration, held_out, _) = tiny_model(family), texts()
    curvature = built(model, calibration)
    plain = solve_greedy(curvature, 0.4)
    plan = plain.with_gains(solve_gains(curvature, plain, 0.05, 2.0))
    assert max(abs(gain - 1) for gain in plan.gains.values()) > 0.05
    pruned = cl.prune(model, plan, verify=held_out)
    assert cl.check_equivalence(model, pruned, plan, held_out).max_abs_difference < 1e-4
    risk = cl.pruning_risk(model, plan, held_out)
    assert risk != pytest.approx(cl.pruning_risk(model, plain, held_out), rel=1e-3)
    units = plan.units
    gains = {units[u]: gain for u, gain in plan.gains.items()}
    by_hand = naive_risk(model, [units[u] for u in plan.pruned], held_out, gains).mean()
    assert risk == pytest.approx(by_hand, rel=1e-4)
    row = held_out.input_ids[:1]
    with torch.no_grad(), cl.ablate(model, plan):
        masked = model(row).logits
    with torch.no_grad():
        torch.testing.assert_close(pruned(row).logits, masked, rtol=0, atol=1e-4)


def test_gains_are_folded_into_columns_and_cost_no_parameter() -> None:
    model = twin_model()
    units = cl.enumerate_units(model, 4)
    plain = Selection.from_pruned(units, ["L1.ffn[0]"])
    plan = plain.with_gains({units.index("L1.ffn[1]"): 2.0})
    folded, bare = (cl.prune(model, p).model.layers[1].mlp.down_proj for p in (plan, plain))
    dense = model.model.layers[1].mlp.down_proj.weight[:, 11:]
    scale = torch.ones(31)
    scale[:11] = 2.0
    assert torch.equal(bare.weight, dense)
    assert torch.equal(folded.weight, dense * scale)
    assert folded.weight.shape == bare.weight.shape


# The rule -----------------------------------------------------------------------------------------


def choice_of(*kl: list[float]) -> GainsChoice:
    """The rule on given KL rows: plain first, then settings named (n, 1)."""
    plan = Selection.from_pruned(UNITS, [0])
    table = PlanTable((plan,) * len(kl), np.array(kl))
    return GainsChoice(tuple((float(n), 1.0) for n in range(1, len(kl))), table, np.zeros(len(kl)))


def test_a_clear_gain_is_applied() -> None:
    assert choice_of([1.0, 2.0, 3.0], [0.8, 1.9, 2.7]).setting == (1.0, 1.0)


def test_a_gain_within_one_standard_error_is_not_applied() -> None:
    choice = choice_of([1.0, 1.0, 1.0], [1.3, 1.1, 0.5])  # -0.033 +- 0.24
    assert not choice.applied
    assert choice.rows()[1]["difference"] == pytest.approx(-0.1 / 3)


def test_ties_go_to_the_most_cautious_setting_that_helps_by_itself() -> None:
    plain = [1.0, 1.0, 1.0, 1.0]
    cautious, winner = [0.72, 0.78, 0.70, 0.80], [0.68, 0.80, 0.66, 0.82]
    helpless = [0.0, 1.4, 0.2, 1.4]  # ties with the winner, but not better than plain
    assert choice_of(plain, helpless, cautious, winner).setting == (2.0, 1.0)
    assert choice_of(plain, winner, cautious).setting == (1.0, 1.0)


def test_equal_plans_are_not_called_a_gain() -> None:
    assert not choice_of([1.0, 2.0], [1.0, 2.0]).applied


def test_settings_stand_in_order_of_caution() -> None:
    model, (calibration, held_out, _) = tiny_model(), texts()
    curvature = built(model, calibration)
    nothing = plan_of(curvature, [])
    choice = choose_gains(model, curvature, nothing, held_out, options=QUIET)
    expected = ((1.0, 1.0), (1.0, 2.0), (0.2, 1.0), (0.2, 2.0), (0.05, 1.0), (0.05, 2.0))
    assert choice.settings == expected
    assert not choice.applied  # gains of one on the dense model: KL 0 against KL 0
    assert (choice.table.kl == 0).all()


def test_shared_rows_too_few_rows_and_empty_grids_are_refused() -> None:
    model, (calibration, held_out, test) = tiny_model(), texts()
    curvature = built(model, calibration)
    plan = plan_of(curvature, [3])
    with pytest.raises(MismatchError, match="not held out"):
        choose_gains(model, curvature, plan, calibration)
    for shared in (held_out, calibration):
        with pytest.raises(MismatchError, match="not held out"):
            choose_gains(model, curvature, plan, held_out, report_on=shared)
    with pytest.raises(InputError, match="needs two"):
        choose_gains(model, curvature, plan, held_out.rows(0, 1), report_on=test)
    with pytest.raises(InputError, match="nothing to try"):
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
