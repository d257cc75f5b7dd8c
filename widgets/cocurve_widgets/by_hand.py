"""By hand: a plan made by clicking units, and what an edge between two units really is.

A click on the map of the lambda explorer removes a unit or restores it, which makes plan A yours,
or adds it to a pair. A pair is measured three times: each unit alone, then both. Its edge is what
the two cost together less what they cost alone; H holds a prediction of it.
"""

from __future__ import annotations

from typing import Any

from traitlets import Enum, HasTraits, Int, List, TraitError, Unicode, validate

import cocurve_lab as cl

from .traits import PlanOfUnits, require_unit

MODES = ("remove", "pair", "mark")


class ByHand(HasTraits):
    """The part of the lambda explorer where units are clicked.

    Attributes:
        mode: what a click on the map does: "remove" removes the unit or restores it, which makes
            plan A "your plan"; "pair" adds it to `pair`; "mark" only marks it.
        pair: indices of at most two units, whose edge is shown and measured.
        prompt: sentence whose next word is predicted by the dense model, A and B; empty for none.
        pinned: plan A (a Selection), which the present plan B is compared with; None, as at first,
            compares with the diagonal plan (lambda 0) of the present ratio and guards.
    """

    mode = Enum(MODES, "remove").tag(sync=True)
    pair: List[int] = List(Int()).tag(sync=True)
    prompt = Unicode().tag(sync=True)
    pinned = PlanOfUnits()

    curvature: cl.Curvature
    selection: Any
    _own: cl.Selection | None = None  # the plan that was made by clicks

    @validate("pair")
    def _valid_pair(self, proposal: Any) -> list[int]:
        units = [require_unit(self.curvature, unit, "pair holds") for unit in proposal.value]
        if len(units) > 2 or len(set(units)) < len(units):
            raise TraitError(f"pair is {units}. Give at most two different units.")
        return units

    def _removing(self, pruned: list[int]) -> cl.Selection:
        return cl.Selection.from_pruned(self.curvature.units, pruned, self.curvature)

    def _pair_plans(self) -> list[cl.Selection]:
        """Either unit of the pair alone, then both; empty without two units."""
        if len(self.pair) < 2:
            return []
        u, v = self.pair
        return [self._removing(part) for part in ([u], [v], [u, v])]
