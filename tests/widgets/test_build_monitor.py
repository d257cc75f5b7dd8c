"""The build monitor: what it says about a build, and that watching changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.estimator.build import Build
from cocurve_widgets import BuildMonitor
from helpers.tiny_models import tiny_model, tiny_text


def test_monitor_follows_a_build_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocurve_widgets.build_monitor._PATIENCE", 0.0)
    model, text = tiny_model(), tiny_text(6, 16)
    units = cl.enumerate_units(model, 4)
    plain = cl.estimate_curvature(model, units, text, 16, progress=False)
    monitor = BuildMonitor(ratio=0.3)
    options = cl.BuildOptions(on_sequence=monitor, groups=4)
    seen = cl.estimate_curvature(model, units, text, 16, progress=False, options=options)
    np.testing.assert_allclose(seen.matrix, plain.matrix, rtol=1e-12)
    assert (monitor.done, monitor.total, monitor.seconds_left) == (6, 6, 0.0)
    assert [done for done, _ in monitor.overlap] == [2, 3, 4, 5, 6]  # both halves have a sequence
    grams, positions = seen.group_grams, seen.group_positions
    one, two = (
        set(
            cl.solve_greedy(
                cl.Curvature(grams[s::2].sum(axis=0) / positions[s::2].sum(), units), 0.3
            ).pruned
        )
        for s in (0, 1)
    )
    assert monitor.overlap[-1][1] == pytest.approx(len(one & two) / len(one | two), abs=1e-4)
    assert "6 of 6 sequences" in monitor.status


@pytest.mark.parametrize("ratio", [0.3, 0.9], ids=["within reach", "beyond the guards"])
def test_its_plans_have_the_opening_guards_where_these_reach_the_ratio(ratio: float) -> None:
    model, text, monitor = tiny_model(layers=5), tiny_text(4, 12), BuildMonitor(ratio)
    units = cl.enumerate_units(model, 4)
    options = cl.BuildOptions(on_sequence=monitor, groups=2)
    seen = cl.estimate_curvature(model, units, text, 16, progress=False, options=options)
    guards = cl.opening_guards(units) if ratio < 0.6 else cl.Guards()
    halves = [cl.Curvature(gram, units) for gram in seen.group_grams]
    one, two = (set(cl.solve_greedy(half, ratio, guards=guards).pruned) for half in halves)
    assert monitor.overlap[-1][1] == pytest.approx(len(one & two) / len(one | two), abs=1e-4)


def test_looks_are_rare_but_the_last_is_never_missed() -> None:
    model, text = tiny_model(), tiny_text(5, 12)
    monitor = BuildMonitor()
    monitor._looked = float("inf")  # it has only just looked
    cl.estimate_curvature(
        model, None, text, 16, progress=False, options=cl.BuildOptions(on_sequence=monitor)
    )
    assert monitor.done == 5
    assert len(monitor.overlap) == 1


def test_a_build_that_is_stopped_is_told_as_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = BuildMonitor()
    calls = []

    def watch(build: Build) -> str | None:
        calls.append((build.done, build.stopped))
        monitor(build)
        return "Enough." if build.done == 3 else None  # also when told of the stop

    found = cl.estimate_curvature(
        tiny_model(),
        None,
        tiny_text(5, 12),
        16,
        progress=False,
        options=cl.BuildOptions(on_sequence=watch),
    )
    assert calls == [(1, ""), (2, ""), (3, ""), (3, "Enough.")]
    assert not found.provenance["complete"]
    assert (monitor.done, monitor.total, monitor.seconds_left) == (3, 5, 0.0)
    assert monitor.status.startswith("Stopped after 3 of 5 sequences")
    assert "left" not in monitor.status
    assert "Interrupt" not in monitor.status
    assert "Enough. H is over 3 of 5 sequences." in capsys.readouterr().out


def test_bad_settings_are_refused() -> None:
    with pytest.raises(cl.InputError, match="ratio"):
        BuildMonitor(ratio=1.0)
    with pytest.raises(cl.InputError, match="interaction_strength"):
        BuildMonitor(interaction_strength=-1)


def test_what_a_watcher_raises_ends_the_build_with_its_work_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, text = tiny_model(), tiny_text(4, 12)

    def watch(build) -> None:  # type: ignore[no-untyped-def]
        if build.done == 2:
            raise RuntimeError("enough")

    path = tmp_path / "c.ckpt"
    options = cl.BuildOptions(on_sequence=watch, checkpoint_seconds=0)
    with pytest.raises(RuntimeError, match="enough"):
        cl.estimate_curvature(
            model, None, text, 16, checkpoint=path, progress=False, options=options
        )
    whole = cl.estimate_curvature(model, None, text, 16, checkpoint=path, progress=False)
    plain = cl.estimate_curvature(model, None, text, 16, progress=False)
    np.testing.assert_array_equal(whole.matrix, plain.matrix)
