"""The session: its mailbox keeps the newest job, its lock keeps the model to one at a time."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained import kept
from cocurve_lab.extensions.pretrained.kept import write_plans
from cocurve_lab.models.runtime import exclusive
from cocurve_widgets import (
    BridgeExplorer,
    FidelityScatter,
    LambdaExplorer,
    MeasuredPlan,
    Session,
)
from cocurve_widgets.session import MOST_KEPT, Cancelled, CancelToken, Mailbox
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model

CURVATURE = random_curvature(make_units(3, 2, 4))


def fail(error: Exception) -> None:
    raise AssertionError(error)


def test_only_the_newest_waiting_job_of_a_kind_runs_and_none_that_is_cancelled() -> None:
    mailbox, gate, ran = Mailbox(), threading.Event(), []
    mailbox.submit("other", lambda token: gate.wait(10) and None, fail)
    for number in range(50):
        mailbox.submit("slider", lambda token, n=number: ran.append(n), fail)
    token = mailbox.submit("dropped", lambda token: ran.append(-1), fail)
    mailbox.cancel("dropped")
    assert mailbox.busy("slider")
    gate.set()
    assert mailbox.join(10)
    assert ran == [49]
    assert token.cancelled
    assert not mailbox.busy("slider")


def test_a_running_job_is_asked_to_stop_by_a_newer_one() -> None:
    mailbox, started, seen = Mailbox(), threading.Event(), []

    def slow(token: CancelToken) -> None:
        started.set()
        while not token.cancelled:
            pass
        seen.append("stopped")
        token.check()
        seen.append("never")

    mailbox.submit("measure", slow, fail)
    assert started.wait(10)
    mailbox.submit("measure", lambda token: seen.append("new"), fail)
    assert mailbox.join(10)
    assert seen == ["stopped", "new"]


def test_its_thread_ends_with_the_work_and_no_kernel_waits_for_it() -> None:
    mailbox, threads = Mailbox(), []
    mailbox.submit("a", lambda token: threads.append(threading.current_thread()), fail)
    assert mailbox.join(10)
    assert threads[0].daemon
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_an_error_that_cannot_be_told_ends_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, gate, ran = Mailbox(), threading.Event(), []
    died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: died.set())

    def broken(token: CancelToken) -> None:
        gate.wait(10)
        raise ValueError("no")

    mailbox.submit("a", broken, fail)  # `fail` raises, too
    mailbox.submit("b", lambda token: ran.append(1), fail)
    gate.set()
    assert mailbox.join(10)
    assert not mailbox.busy("a")
    assert ran == [1]
    assert died.wait(10)


def test_a_plan_is_that_of_its_controls_whoever_asks_and_in_any_order() -> None:
    session = Session(CURVATURE)
    guards = [cl.Guards(), cl.Guards(layer_cap_factor=1.5), cl.Guards(kinds=("ffn",))]
    asked = [(r, s, g) for r in (0.0, 0.2, 0.37, 0.6, 0.7) for s in (0.0, 0.4, 1.0) for g in guards]

    def found(solve: Any, controls: Any) -> str:
        try:
            return solve(*controls).to_json()
        except cl.InfeasibleError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:  # twice: what is remembered is the same
        plans = list(threads.map(lambda controls: found(session.solve, controls), asked * 2))
    expected = [found(lambda *c: cl.solve_greedy(CURVATURE, *c), controls) for controls in asked]
    assert plans == expected * 2
    for strength in np.linspace(0, 1, 100):
        session.solve(0.2, float(strength), cl.Guards())
    assert session._longest.cache_info().currsize == MOST_KEPT


def test_the_model_has_one_lock_for_cells_and_callbacks() -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, 4)
    session, token = Session(random_curvature(units), model), CancelToken()

    def measure(token: CancelToken | None = None) -> None:
        with session.exclusive(token):
            pass

    with ThreadPoolExecutor(2) as threads:
        with cl.ablate(model, [units[0]]):
            waiting, stopped = threads.submit(measure), threads.submit(measure, token)
            token.cancel()
            assert isinstance(stopped.exception(10), Cancelled)
            with pytest.raises(TimeoutError):  # not while the units are switched off
                waiting.result(0.3)
        waiting.result(10)
    assert exclusive(model).acquire(blocking=False)
    exclusive(model).release()


def test_one_session_per_curvature_as_long_as_somebody_holds_it() -> None:
    curvature = random_curvature(make_units(3, 2, 4), seed=77)
    session = Session.of(curvature)
    again = cl.Curvature(curvature.matrix, curvature.units)
    assert Session.of(again) is session
    assert Session.of(again.with_provenance(surrogate="measured KL")) is not session
    assert Session.of(again.with_provenance(model_name="another")) is not session
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["H.npz", "H.pkl"])
def test_an_instrument_opens_on_the_file_of_an_h(name: str, tmp_path: Path) -> None:
    file = CURVATURE.save(tmp_path / name)
    for make in (LambdaExplorer, BridgeExplorer, FidelityScatter):
        instruments = make(str(file)), make(file)  # type: ignore[operator]
        assert instruments[0].session is instruments[1].session
        np.testing.assert_array_equal(instruments[0].curvature.matrix, CURVATURE.matrix)


def test_a_plan_measured_again_replaces_the_old_record() -> None:
    session = Session(CURVATURE)
    plan = cl.solve_greedy(CURVATURE, 0.3)
    session.add_measured(
        MeasuredPlan(plan, 0.1, 0.01, "text"), MeasuredPlan(plan, 0.2, 0.01, "other")
    )
    seen = []
    session.observe(lambda change: seen.append(len(change.new)), "measured")
    session.add_measured(MeasuredPlan(plan, 0.3, 0.01, "text"))
    assert sorted(record.risk for record in session.measured) == [0.2, 0.3]
    assert seen == [2]


def test_what_ships_with_a_model_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curvature = CURVATURE.with_provenance(kept="smollm2", model_fingerprint="f")
    plans = [
        {"name": "x", "requested_ratio": None, "interaction_strength": None, "pruned": pruned}
        | {"kl": {"c4": kl}, "nll": {}, "right": {"sums": [1, 2]}}
        for pruned, kl in (([1], [0.25, 0.5]), ([2], [0.5, 0.5]), ([1, 2], [1.0, 2.0]))
    ]
    write_plans(tmp_path / "plans.json", "f", {"c4": {"source": "C4", "rows": 2}}, plans)
    monkeypatch.setattr(kept, "kept_folder", lambda: tmp_path)
    one, _, both = Session(curvature).measured
    assert (one.risk, one.standard_error, one.rows) == (0.375, 0.125, 2)
    assert one.abilities == {"sums": (1, 2)}
    assert both.edge == pytest.approx((0.625, 0.375))
    assert Session(CURVATURE).measured == ()
