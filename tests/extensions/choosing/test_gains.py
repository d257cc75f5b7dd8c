"""Gains on models that really run them, and the rule that applies them or does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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


def built(model: Any) -> cl.Curvature:
    """H by the slow definition, with the rows it was built on."""
    matrix, _ = naive_build(model, BUILT, 97)
    units = cl.enumerate_units(model, 4)
    return cl.Curvature(matrix, units, {"row_fingerprints": BUILT.row_fingerprints})


BUILT, HELD_OUT, TEST = tiny_text(10, 20).split(held_out=3, test=3)


def test_a_twin_on_a_real_model_takes_over_exactly() -> None:
    """The sign of the whole chain: masks, features, H, alpha, gain. With it wrong the KL grows."""
    model = twin_model()
    curvature = built(model)
    plan = plan_of(curvature, [curvature.units.index("L1.ffn[0]")])
    gains = cl.solve_gains(curvature, plan, 1e-7)
    assert gains.pop(curvature.units.index("L1.ffn[1]")) == pytest.approx(2, abs=1e-4)
    assert list(gains.values()) == pytest.approx([1] * len(gains), abs=1e-4)
    choice = choose_gains(
        model, curvature, plan, HELD_OUT, (1e-7, 1.0), (1.0,), TEST, options=QUIET
    )
    assert choice.setting == (1e-7, 1.0)
    plain, chosen = choice.report.mean
    assert chosen < 1e-6 * plain < 1e-6
    row = choice.curve[choice.curve["chosen"]].iloc[0]
    assert (row["ridge"], row["clip"]) == (1e-7, 1.0)


def test_gains_that_hurt_are_not_applied() -> None:
    """H of a model whose twin writes the opposite sign: its gains push the wrong way."""
    wrong = built(twin_model(-1.0))
    given = (twin_model(), wrong, plan_of(wrong, [8]), HELD_OUT, (1e-7,))
    choice = choose_gains(*given, report_on=TEST, options=QUIET)
    assert (choice.applied, choice.setting, choice.best.gains) == (False, None, {})
    assert choice.curve["difference"][1] > 0
    assert choice.curve["chosen"].tolist() == [True, False, False]
    assert choice.report.mean[0] == choice.report.mean[1]


def test_the_table_is_what_the_plans_really_cost_and_is_kept(tmp_path: Path) -> None:
    model = tiny_model()
    curvature = built(model)
    plan, units = cl.solve_greedy(curvature, 0.3), curvature.units
    given = (model, curvature, plan, HELD_OUT, (0.2,), (1.0,), TEST)
    choice, again = (
        choose_gains(*given, options=replace(QUIET, checkpoint=tmp_path / "gains"))
        for _ in range(2)
    )
    gains = {units[u]: gain for u, gain in cl.solve_gains(curvature, plan, 0.2, 1.0).items()}
    by_hand = naive_risk(model, [units[u] for u in plan.pruned], HELD_OUT, gains)
    np.testing.assert_allclose(choice.measured.kl[1], by_hand, rtol=1e-4)
    assert choice.measured.selections[0].gains == {}
    assert choice.predicted[1] < choice.predicted[0] == pytest.approx(plan.predicted_risk)
    assert {path.name for path in tmp_path.iterdir()} == {"gains.held_out", "gains.report"}
    np.testing.assert_array_equal(choice.measured.kl, again.measured.kl)


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
    # ties go to the most cautious setting that helps by itself
    plain = [1.0, 1.0, 1.0, 1.0]
    cautious, winner = [0.72, 0.78, 0.70, 0.80], [0.68, 0.80, 0.66, 0.82]
    helpless = [0.0, 1.4, 0.2, 1.4]  # ties with the winner, but not better than plain
    assert choice_of(plain, helpless, cautious, winner).setting == (2.0, 1.0)
    assert choice_of(plain, winner, cautious).setting == (1.0, 1.0)


def test_settings_stand_in_order_of_caution() -> None:
    model = tiny_model()
    curvature = built(model)
    choice = choose_gains(model, curvature, plan_of(curvature, []), HELD_OUT, options=QUIET)
    assert choice.settings == tuple((r, c) for r in (1.0, 0.2, 0.05) for c in (1.0, 2.0))
    assert not choice.applied  # gains of one on the dense model: KL 0 against KL 0
    assert (choice.measured.kl == 0).all()


@pytest.mark.parametrize(
    ("rows", "report_on", "ridges", "error"),
    [
        (BUILT, None, (0.2,), cl.MismatchError),
        (HELD_OUT, HELD_OUT, (0.2,), cl.MismatchError),
        (HELD_OUT, BUILT, (0.2,), cl.MismatchError),
        (HELD_OUT.rows(0, 1), TEST, (0.2,), cl.InputError),
        (HELD_OUT, TEST, (), cl.InputError),
    ],
)
def test_shared_rows_too_few_rows_and_empty_grids_are_refused(
    rows: Any, report_on: Any, ridges: Any, error: type[Exception]
) -> None:
    model = tiny_model()
    units, marks = cl.enumerate_units(model, 4), {"row_fingerprints": BUILT.row_fingerprints}
    curvature = cl.Curvature(np.eye(len(units)), units, marks)
    with pytest.raises(error):
        choose_gains(
            model, curvature, plan_of(curvature, [3]), rows, ridges=ridges, report_on=report_on
        )
