"""The build monitor: progress of a build, and whether its plans have settled."""

from __future__ import annotations

import math
import time
from typing import Any

import anywidget
from traitlets import Int, List, Unicode

import cocurve_lab as cl
from cocurve_lab.estimator.build import Build
from cocurve_lab.solver.targets import require_ratio, require_strength

from .instrument import counted, front
from .still import Still

_PATIENCE = 0.5  # seconds between updates: an update solves three plans


class BuildMonitor(Still, anywidget.AnyWidget):
    """Progress of a build and the stability of its plans, while it runs.

    Use it as `cl.BuildOptions(on_sequence=BuildMonitor())`. The curve is the overlap of
    `cl.is_converged`: the groups of sequences are split in two halves, and each half's H gives a
    plan, without guards. While it is low, there is not enough text yet to decide.

    Args:
        ratio: share of removable cost that the plans remove, [0, 1).
        interaction_strength: lambda of the plans, at least 0.

    Attributes:
        done, total: sequences.
        overlap: list of [sequences done, overlap], overlap in [0, 1]: of the units that either plan
            removes, the share that both remove.
        status: the same as a sentence.
    """

    _esm = front("monitor.js", render="renderMonitor")
    _css = front("instrument.css")

    done = Int(0).tag(sync=True)
    total = Int(0).tag(sync=True)
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
        last = build.done == build.total or bool(build.stopped)
        if not last and time.monotonic() - self._looked < _PATIENCE:
            return
        with self.hold_sync():
            self.done, self.total = build.done, build.total
            overlap = cl.is_converged(build.so_far(), *self._plan).overlap
            if not math.isnan(overlap):  # else a half has no sequence yet
                self.overlap = [*self.overlap, [build.done, round(overlap, 4)]]
            self.status = self._sentence(bool(build.stopped))
        self._looked = time.monotonic()

    def table(self) -> list[dict[str, Any]]:
        """The curve: sequences done, and the overlap of the two plans, 0 to 1."""
        return [{"sequences": done, "overlap": overlap} for done, overlap in self.overlap]

    def _sentence(self, stopped: bool) -> str:
        text = f"{self.done} of {counted(self.total, 'sequence')}"
        if stopped:
            text = f"Stopped after {text}"
        if self.overlap:
            _, overlap = self.overlap[-1]
            text += f"; the plans of the two halves share {100 * overlap:.0f} % of their units"
        running = self.done < self.total and not stopped
        return text + (". Interrupt the kernel to pause." if running else ".")
