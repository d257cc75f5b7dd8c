"""The build monitor: progress of a build, time left, and whether its plans have settled."""

from __future__ import annotations

import time
from typing import Any

import anywidget
from traitlets import Float, Int, List, Unicode

import cocurve_lab as cl
from cocurve_lab.estimator.build import Build
from cocurve_lab.solver.guards import reachable_ratio
from cocurve_lab.solver.targets import require_ratio, require_strength

from .instrument import counted, front
from .still import Still

_PATIENCE = 0.5  # seconds between updates: an update solves two plans


class BuildMonitor(Still, anywidget.AnyWidget):
    """Progress of a build and the stability of its plans, while it runs.

    Use it as `cl.BuildOptions(on_sequence=BuildMonitor())`. It splits the groups of sequences in
    two halves, builds an H from each, and solves a plan on each under `opening_guards`. The curve
    is the overlap of the two plans. While it is low, there is not enough text yet to decide.

    Args:
        ratio: share of removable cost that the plans remove, [0, 1).
        interaction_strength: lambda of the plans, at least 0.

    Attributes:
        done, total: sequences.
        seconds_left: estimate of the time left, seconds; 0 once the build has ended or stopped.
        overlap: list of [sequences done, overlap], overlap in [0, 1]: of the units that either plan
            removes, the share that both remove.
        status: the same as a sentence.
    """

    _esm = front("monitor.js", render="renderMonitor")
    _css = front("instrument.css")

    done = Int(0).tag(sync=True)
    total = Int(0).tag(sync=True)
    seconds_left = Float(0.0).tag(sync=True)
    overlap: List[Any] = List().tag(sync=True)
    status = Unicode("Nothing built yet. If H is found on disk, it is loaded at once.").tag(
        sync=True
    )
    error = Unicode().tag(sync=True)

    def __init__(self, ratio: float = 0.2, interaction_strength: float = 1.0) -> None:
        require_ratio(ratio)
        require_strength(interaction_strength)
        self._plan = (ratio, interaction_strength)
        self._looked = 0.0
        super().__init__()

    def __call__(self, build: Build) -> None:
        """Update from a build, which calls this after each sequence and when it is stopped."""
        total = build.total
        last = build.done == total or bool(build.stopped)
        if not last and time.monotonic() - self._looked < _PATIENCE:
            return
        recent = build.seconds[-8:]  # of late: batch size and load change while a build runs
        with self.hold_sync():
            self.done, self.total = build.done, total
            self.seconds_left = 0.0 if last else (total - build.done) * sum(recent) / len(recent)
            overlap = _overlap(build, *self._plan)
            if overlap is not None:
                self.overlap = [*self.overlap, [build.done, round(overlap, 4)]]
            self.status = self._sentence(overlap, bool(build.stopped))
        self._looked = time.monotonic()

    def table(self) -> list[dict[str, Any]]:
        """The curve: sequences done, and the overlap of the two plans, 0 to 1."""
        return [{"sequences": done, "overlap": overlap} for done, overlap in self.overlap]

    def _sentence(self, overlap: float | None, stopped: bool) -> str:
        text = f"{self.done} of {counted(self.total, 'sequence')}"
        if stopped:
            text = f"Stopped after {text}"
        if overlap is not None:
            text += f"; the plans of the two halves share {100 * overlap:.0f} % of their units"
        running = self.done < self.total and not stopped
        return text + (". Interrupt the kernel to pause." if running else ".")


def _overlap(build: Build, ratio: float, strength: float) -> float | None:
    """Overlap of the plans of even and odd groups; None until each half has a sequence."""
    try:
        halves = [build.so_far(slice(start, None, 2)) for start in (0, 1)]
    except cl.InputError:
        return None
    units = halves[0].units
    guards = cl.opening_guards(units)
    if reachable_ratio(units, guards, ratio) < ratio:  # a build does not end for that
        guards = cl.Guards()
    one, two = (set(cl.solve_greedy(half, ratio, strength, guards).pruned) for half in halves)
    return len(one & two) / max(1, len(one | two))
