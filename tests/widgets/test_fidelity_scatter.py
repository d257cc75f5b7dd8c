"""The fidelity scatter without a browser: points, measuring, cancelling and linking."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

import cocurve_lab as cl
from cocurve_lab.measuring.risk import PlanTable
from cocurve_widgets import FidelityScatter, MeasuredPlan, Session
from cocurve_widgets.fidelity_figure import CHOSEN, MARKS, WAITING
from cocurve_widgets.fidelity_points import METHODS
from helpers.tiny_models import naive_risk, tiny_model, tiny_text, units_by_hand
from helpers.waiting import eventually

MODEL = tiny_model()
UNITS = cl.enumerate_units(MODEL, ffn_groups=8)
CALIBRATION, HELD_OUT = tiny_text(seed=0), tiny_text(rows=3, seed=9)
CURVATURE = cl.estimate_curvature(MODEL, UNITS, CALIBRATION, top_r=16, progress=False)


@pytest.fixture
def scatter() -> FidelityScatter:
    return FidelityScatter(CURVATURE, MODEL, HELD_OUT, session=Session(CURVATURE))


def settle(scatter: FidelityScatter) -> None:
    """Until the worker is idle and the last redraw has come."""
    assert scatter.session.worker.join(60)
    eventually(lambda: len(drawn(scatter)) == len(plans(scatter)))
    assert scatter._drawing.join(60)


def drawn(scatter: FidelityScatter) -> list[tuple[float, float]]:
    """The measured plans in the picture, as (predicted, measured)."""
    traces = [trace for trace in scatter.picture.data if trace.name in MARKS]
    # another thread draws: for a moment x is ahead of y
    return [place for trace in traces for place in zip(trace.x, trace.y, strict=False)]


def places(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(row["predicted_risk"], row["measured_risk"]) for row in rows]


def press(scatter: FidelityScatter, name: str) -> None:
    scatter._buttons[name].click()


def click(scatter: FidelityScatter, trace: Any, number: int) -> None:
    """A click on a point, as the page reports it."""
    points = {"trace_indexes": [scatter.picture.data.index(trace)], "point_indexes": [number]}
    points |= {"xs": [trace.x[number]], "ys": [trace.y[number]]}
    event = {"event_type": "plotly_click", "points": points, "device_state": None, "selector": None}
    scatter.picture._js2py_pointsCallback = event


def marked(scatter: FidelityScatter, trace: str) -> tuple[float, ...]:
    """The places to the right of a line or ring."""
    return tuple(next(t for t in scatter.picture.data if t.name == trace).x or ())


def plans(scatter: FidelityScatter) -> list[dict[str, Any]]:
    return [point for point in scatter.table() if point["kind"] == "plan"]


class Turns(threading.Semaphore):
    """Every chunk waits for a turn; release() gives one. `begun` chunks have asked for theirs."""

    begun = 0


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns, real = Turns(0), cl.measure_plans

    def measure(*args: Any, **kwargs: Any) -> PlanTable:
        turns.begun += 1
        assert turns.acquire(timeout=30)
        return real(*args, **kwargs)

    monkeypatch.setattr(cl, "measure_plans", measure)
    return turns


# Points -----------------------------------------------------------------------------------------


def test_a_point_holds_prediction_and_measurement(
    scatter: FidelityScatter, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = cl.solve_greedy(CURVATURE, 0.3, 0.5)
    (row,) = scatter.measure(plan)
    assert row in scatter.table()
    assert scatter.points["measured_risk"][0] == row["measured_risk"]
    s = plan.indicator.astype(float)
    assert row["predicted_risk"] == pytest.approx(0.5 * s @ CURVATURE.matrix @ s)
    by_hand = [units_by_hand(MODEL, groups=8)[u] for u in plan.pruned]
    risk = naive_risk(MODEL, by_hand, HELD_OUT).mean()
    assert row["measured_risk"] == pytest.approx(risk, rel=1e-4)
    table = cl.measure_plans(MODEL, [plan], HELD_OUT, progress=False)
    assert row["measured_risk_error"] == pytest.approx(table.standard_error[0])
    assert (row["kind"], row["method"]) == ("plan", "edge-aware greedy")
    assert (row["interaction_strength"], row["requested_ratio"]) == (0.5, 0.3)
    assert (row["realized_ratio"], row["units"]) == (plan.realized_ratio, len(plan))
    (record,) = scatter.session.measured
    assert (record.selection, record.text) == (plan, row["text"])
    monkeypatch.setattr(cl, "measure_plans", None)  # a known plan is not measured again
    assert scatter.measure([plan, plan]) == [row, row]


def test_single_units_are_the_builds(scatter: FidelityScatter) -> None:
    singles = [point for point in scatter.table() if point["kind"] == "single unit"]
    assert [point["name"] for point in singles] == [unit.name for unit in UNITS]
    predicted = [point["predicted_risk"] for point in singles]
    np.testing.assert_allclose(predicted, np.diagonal(CURVATURE.matrix) / 2)
    measured = [point["measured_risk"] for point in singles]
    np.testing.assert_allclose(measured, CURVATURE.single_unit_risk)
    (trace,) = [t for t in scatter.picture.data if t.name == "single unit"]
    assert list(trace.y) == measured


def test_the_statistics_are_scipys(scatter: FidelityScatter) -> None:
    scatter.measure_pool(0.3)
    scatter.measure_ratio_sweep(0.0, [0.1, 0.2])
    scores, rows = scatter.statistics(), plans(scatter)
    assert sorted(drawn(scatter)) == sorted(places(rows))
    x, y = (np.array([row[k] for row in rows]) for k in ("predicted_risk", "measured_risk"))
    assert scores["all plans"]["points"] == len(rows)
    assert scores["all plans"]["spearman"] == pytest.approx(spearmanr(x, y).statistic)
    assert scores["all plans"]["median_ratio"] == pytest.approx(np.median(y / x))
    worst = rows[int(np.abs(np.log(y / x)).argmax())]["name"]
    assert scores["all plans"]["worst"] == worst
    marks = {r.selection.fingerprint: r.selection for r in scatter.session.measured}
    alone = [sum(CURVATURE.single_unit_risk[i] for i in p.pruned) for p in marks.values()]
    rival = scores["all plans"]["spearman_single_units"]
    assert rival == pytest.approx(spearmanr(alone, y).statistic)
    assert np.isnan(scores["ratio sweep, lambda 0"]["spearman"])  # of two points
    pool = next(score for name, score in scores.items() if name.startswith("same-budget"))
    assert pool["points"] == 26
    assert scores["single units"]["points"] == len(UNITS)
    assert [row["method"] for row in rows].count("random") >= 14
    assert len({row["name"] for row in rows}) == len(rows)
    again = FidelityScatter(CURVATURE, MODEL, HELD_OUT, session=scatter.session)
    assert plans(again) == rows  # a cell that runs again finds its points, named


def test_filters_hide_points_and_texts_are_told_apart(scatter: FidelityScatter) -> None:
    scatter.measure_lambda_sweep(0.3, [0.0, 1.0])
    scatter.set_state({"methods": [name for name in METHODS if name != "diagonal greedy"]})
    settle(scatter)
    assert [row["method"] for row in plans(scatter)] == ["edge-aware greedy"]
    scatter.methods = list(METHODS)
    settle(scatter)
    groups = enumerate(trace.legendgroup for trace in scatter.picture.data)
    hidden = [number for number, group in groups if group not in (None, "diagonal greedy")]
    scatter.picture.plotly_restyle({"visible": "legendonly"}, hidden)  # as a click on the legend
    assert scatter.methods == ["diagonal greedy"]
    assert scatter.points["method"].tolist() == ["diagonal greedy"]
    scatter.methods = list(METHODS)
    plan, short = cl.solve_greedy(CURVATURE, 0.3), HELD_OUT.rows(0, 2)
    (row,) = FidelityScatter(CURVATURE, MODEL, short, session=scatter.session).measure(plan)
    risk = cl.pruning_risk(MODEL, plan, short)
    assert row["measured_risk"] == pytest.approx(risk, rel=1e-5)
    scatter.text = row["text"]
    assert plans(scatter) == [row]


# Measuring --------------------------------------------------------------------------------------


def test_points_appear_while_measuring_and_cancel_keeps_them(
    scatter: FidelityScatter, slowly: Turns
) -> None:
    press(scatter, "Same-budget pool")
    slowly.release()
    eventually(lambda: len(drawn(scatter)) == 4)
    eventually(lambda: slowly.begun == 2)
    press(scatter, "Cancel")
    slowly.release()
    settle(scatter)
    assert len(plans(scatter)) == 8  # those in the model still count
    eventually(lambda: "8 of 26 plans measured" in scatter.status)
    slowly.release(100)
    press(scatter, "Same-budget pool")  # and goes on where it stopped
    settle(scatter)
    assert len(plans(scatter)) == 26


def test_cancel_at_once_then_measure_again(scatter: FidelityScatter, slowly: Turns) -> None:
    press(scatter, "Same-budget pool")
    eventually(lambda: slowly.begun == 1)
    press(scatter, "Cancel")
    scatter.measure_ratio_sweep(1.0, [0.3, 0.4, 0.5], wait=False)  # the old chunk still runs
    slowly.release(10)
    settle(scatter)
    done = {row["requested_ratio"] for row in plans(scatter)}
    assert done == {0.2, 0.3, 0.4, 0.5}
    assert not scatter.measurer.active


def test_ctrl_c_keeps_what_is_measured(scatter: FidelityScatter, slowly: Turns) -> None:
    def interrupt() -> None:
        eventually(lambda: slowly.begun == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert scatter.measurer._token.wait(20)
        slowly.release(9)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        scatter.measure_pool(0.3)
    settle(scatter)  # those that were in the model still count
    assert len(plans(scatter)) == 4
    assert not scatter.measurer.active


def test_an_error_is_shown(scatter: FidelityScatter, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter.ratios = [0.2, 7.0]
    press(scatter, "Ratio sweep")
    assert "ratio is 7" in scatter.error
    assert plans(scatter) == []

    def fail(*_: Any, **__: Any) -> None:
        raise cl.NumericalError("sequence 0 gives NaN")

    monkeypatch.setattr(cl, "measure_plans", fail)
    press(scatter, "Lambda sweep")
    settle(scatter)
    assert scatter.error == "sequence 0 gives NaN"
    with pytest.raises(cl.NumericalError):
        scatter.measure(cl.solve_greedy(CURVATURE, 0.2))
    assert not scatter.measurer.active


def test_closing_stops_the_measurement(slowly: Turns) -> None:
    session = Session(CURVATURE)
    scatter = FidelityScatter(CURVATURE, MODEL, HELD_OUT, session=session)
    press(scatter, "Same-budget pool")
    eventually(lambda: slowly.begun == 1)
    scatter.close()
    slowly.release(30)
    assert session.worker.join(60)
    assert len(session.measured) == 4
    assert scatter.error == ""


# Linking ----------------------------------------------------------------------------------------


def test_a_click_chooses_a_point_everywhere(scatter: FidelityScatter) -> None:
    session = scatter.session
    scatter.measure_ratio_sweep(1.0, [0.1, 0.2])
    trace = next(t for t in scatter.picture.data if t.name == "edge-aware, λ ≥ 1")
    click(scatter, trace, 1)
    assert session.selection is session.measured[1].selection
    eventually(lambda: marked(scatter, CHOSEN) == (trace.x[1],))
    click(scatter, next(t for t in scatter.picture.data if t.name == "single unit"), 7)
    assert session.selected_unit == 7


def test_a_plan_of_another_view_is_marked_then_measured(scatter: FidelityScatter) -> None:
    plan = cl.solve_greedy(CURVATURE, 0.4, 0.3)
    scatter.session.selection = plan
    expected = pytest.approx((plan.predicted_risk, plan.predicted_risk), rel=1e-12)
    eventually(lambda: marked(scatter, WAITING) == expected)
    press(scatter, "Measure this plan")
    settle(scatter)
    eventually(lambda: not marked(scatter, WAITING))

    elsewhere = cl.Selection.from_pruned(UNITS, [1, 4])  # without a prediction of its own
    scatter.session.add_measured(MeasuredPlan(elsewhere, 0.25, 0.01, "another text"))
    settle(scatter)
    row = plans(scatter)[-1]
    assert (row["method"], row["text"]) == ("other plan", "another text")
    assert row["predicted_risk"] == pytest.approx(CURVATURE.risk([1, 4]))
    assert drawn(scatter)[-1][1] == 0.25


def test_without_a_model_it_shows_what_is_known() -> None:
    scatter = FidelityScatter(CURVATURE, calibration=HELD_OUT, session=Session(CURVATURE))
    assert len(scatter.points) == len(UNITS)
    press(scatter, "Ratio sweep")
    assert "no model" in scatter.error
    scatter.session.attach(MODEL)
    scatter.measure(cl.solve_greedy(CURVATURE, 0.2))
    assert len(plans(scatter)) == 1


def test_a_matrix_alone_has_no_gray_points_and_its_overlap_is_the_readers_word() -> None:
    bare = cl.Curvature(CURVATURE.matrix, UNITS)
    with pytest.raises(cl.MismatchError):
        FidelityScatter(bare, MODEL, HELD_OUT, session=Session(bare))
    unseen = HELD_OUT.assume_unseen()
    scatter = FidelityScatter(bare, MODEL, unseen, session=Session(bare))
    assert scatter.points.empty
    scatter.measure_lambda_sweep(0.3, [0.0, 1.0])
    assert len(drawn(scatter)) == scatter.points["measured_risk"].nunique()
