"""The paper's choices for each plan: guards, lambda and compensation, on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cocurve_lab.base.storage import fingerprint
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.extensions.choosing.settings import choose_guards, choose_interaction_strength
from cocurve_lab.methods.base import Method
from cocurve_lab.solver.guards import FREE, Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from cocurve_lab.solver.targets import Target

from ..lazy import PreTrainedModel
from ..shared import marks
from ..tables import kept_rows
from . import GuardsRule
from .published import Published

LAMBDAS = (0.0, 0.5, 1.0)  # the paper's sweep


@dataclass(frozen=True, eq=False)
class Protocol:
    """The rules by which plans are made. Every plan is kept in the folder.

    Attributes:
        folder: keeps the plans.
        model, curvature: the dense model and its H.
        rows: the calibration rows, for other methods.
        held_out: rows that choices are made on.
        paper: what the paper says of the model, for its guards.
        guards: "search" takes, for each method and ratio alike, those of lowest perplexity on the
            held-out rows; "paper" the published ones; "none" none.
        progress: show progress bars.
        costs: [M], what CoCurve's ratios are shares of; None counts parameters, as the paper does
            and other methods do.
    """

    folder: Path
    model: PreTrainedModel
    curvature: Curvature
    rows: CalibrationSet
    held_out: CalibrationSet
    paper: Published
    guards: GuardsRule = "search"
    progress: bool = True
    costs: np.ndarray | None = None

    def solved(self, ratio: float, strength: float) -> Selection:
        """Solve CoCurve's plan of one lambda."""

        def solve(guards: Guards) -> Selection:
            return solve_greedy(self.curvature, self._budget(ratio), strength, guards)

        return self._kept(lambda: self._guarded(ratio, solve), plan="lambda", of=[ratio, strength])

    def chosen(self, ratio: float) -> Selection:
        """Solve CoCurve's plan: guards at lambda 1, then the lambda of lowest held-out KL."""

        def choose() -> Selection:
            guards = self.solved(ratio, 1.0).guards
            return choose_interaction_strength(
                self.model,
                self.curvature,
                self._budget(ratio),
                self.held_out,
                guards,
                candidates=LAMBDAS,
                options=ChoiceOptions(progress=self.progress),
            ).best

        return self._kept(choose, plan="CoCurve", of=[ratio])

    def compensated(self, ratio: float) -> Selection:
        """Return CoCurve's plan with gains where they help on the held-out rows, else without."""

        def choose() -> Selection:
            return choose_gains(
                self.model,
                self.curvature,
                self.chosen(ratio),
                self.held_out,
                options=ChoiceOptions(progress=self.progress),
            ).best

        return self._kept(choose, plan="CoCurve+", of=[ratio])

    def of(self, method: Method) -> Callable[[float], Selection]:
        """Return what makes another method's plan of a ratio; its evidence is measured once."""
        units = self.curvature.units
        evidence = cache(
            lambda: method.measure(self.model, units, self.rows, progress=self.progress)
        )

        def plan(ratio: float) -> Selection:
            def select(guards: Guards) -> Selection:
                return method.select(evidence(), units, ratio, guards)

            free = not method.honours_guards
            return self._kept(
                lambda: select(FREE) if free else self._guarded(ratio, select),
                plan=method.name,
                of=[ratio],
            )

        return plan

    def _budget(self, ratio: float) -> float | Target:
        return ratio if self.costs is None else Target(ratio=ratio, costs=self.costs)

    def _guarded(self, ratio: float, make: Callable[[Guards], Selection]) -> Selection:
        """Return the plan of the loosest guards that tie with the best on the held-out rows."""
        if self.guards != "search":
            return make(self.paper.guards_at(ratio) if self.guards == "paper" else FREE)
        return choose_guards(
            self.model,
            self.curvature,
            ratio,
            self.held_out,
            make=make,
            options=ChoiceOptions(judge="nll", progress=self.progress),
        ).best

    def _kept(self, make: Callable[[], Selection], **settings: Any) -> Selection:
        """Make a plan, or read it from the folder."""
        settings |= {"guards": self.guards, "paper": self.paper.name, "rows": self.rows.fingerprint}
        if self.costs is not None:
            settings["costs"] = fingerprint(self.costs)
        mark = marks(self.model, self.curvature, self.held_out, **settings)
        (row,) = kept_rows(self.folder, "plan", mark, lambda: [{"plan": make().to_json()}])
        return Selection.from_json(row["plan"])
