"""The runner of every study of plans: it measures them on one text, draws H again, keeps the table.

A study says which plans it makes and which columns a row has; all that is measured for it lies in
its folder, so that an interrupted one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.measuring.risk import PlanTable, measure_plans
from cocurve_lab.solver.selection import Selection

from .draws import Plans, Redrawn, draw_marks, redraw
from .lazy import DataFrame, PreTrainedModel
from .tables import Folder, Rows, kept_table


@dataclass(frozen=True, eq=False)
class Study:
    """One study of plans.

    Attributes:
        model, text: the dense model, and the rows that plans are measured on.
        curvature: the H that plans are made of; none of its rows may be in the text.
        draws, cache, progress: as in all studies.
    """

    model: PreTrainedModel
    text: CalibrationSet
    curvature: Curvature | None = None
    draws: int = 0
    cache: Folder = None
    progress: bool = True

    def table(
        self, name: str, settings: Mapping[str, Any], compute: Callable[[Study], Rows]
    ) -> DataFrame:
        """Read the table of these settings from the folder, or compute and keep it."""
        if self.curvature is not None:
            self.text.require_disjoint(self.curvature)
            settings = draw_marks(settings, self.draws, self.curvature)
        return kept_table(self.cache, name, settings, lambda: compute(self))

    def measure(self, plans: Sequence[Selection]) -> PlanTable:
        """Measure plans on the text; what was measured before is read from the folder."""
        return measure_plans(self.model, plans, self.text, **self._measuring)

    def redraw(self, solve: Callable[[Curvature], Plans]) -> Redrawn:
        """Measure plans of resampled H; see `redraw`."""
        assert self.curvature is not None  # of studies with draws
        h = self.curvature
        return redraw(self.model, h, solve, self.text, self.draws, **self._measuring)

    @property
    def _measuring(self) -> dict[str, Any]:
        path = plans_file(self.cache, self.model, self.text)
        return {"checkpoint": path, "progress": self.progress}
