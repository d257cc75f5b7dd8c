"""The build monitor: what it says about a build, and that watching changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.estimator.build import Build
from cocurve_widgets import BuildMonitor
from helpers.tiny_models import tiny_model, tiny_text

TEXT = tiny_text(6, 16)


def build(watch: object, layers: int = 3) -> cl.Curvature:
    model = tiny_model(layers=layers)
    options = cl.BuildOptions(on_sequence=watch, groups=2)
    units = cl.enumerate_units(model, 4)
    return cl.estimate_curvature(model, units, TEXT, 16, progress=False, options=options)


@pytest.mark.parametrize(
    ("patience", "looks"),
    [
        (0.0, [2, 3, 4, 5, 6]),  # both halves have a sequence
        (float("inf"), [6]),  # looks are rare, but the last is never missed
    ],
)
def test_monitor_follows_a_build_and_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, patience: float, looks: list[int]
) -> None:
    monkeypatch.setattr("cocurve_widgets.build_monitor._PATIENCE", patience)
    monitor = BuildMonitor(ratio=0.3)
    plain, seen = build(None, layers=5), build(monitor, layers=5)
    np.testing.assert_allclose(seen.matrix, plain.matrix, rtol=1e-12)
    assert (monitor.done, monitor.total) == (6, 6)
    assert [done for done, _ in monitor.overlap] == looks
    halves = [cl.Curvature(gram, seen.units) for gram in seen.group_grams]
    one, two = (set(cl.solve_greedy(half, 0.3).pruned) for half in halves)
    assert monitor.overlap[-1][1] == pytest.approx(len(one & two) / len(one | two), abs=1e-4)


def test_a_build_that_is_stopped_is_told_as_stopped() -> None:
    monitor = BuildMonitor()
    calls = []

    def watch(build: Build) -> str | None:
        calls.append((build.done, build.stopped))
        monitor(build)
        return "Enough." if build.done == 3 else None  # also when told of the stop

    assert not build(watch).provenance["complete"]
    assert calls == [(1, ""), (2, ""), (3, ""), (3, "Enough.")]
    assert (monitor.done, monitor.total) == (3, 6)
    assert monitor.status.startswith("Stopped after 3 of 6 sequences")
