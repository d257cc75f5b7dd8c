"""The tour of an instrument: its page side is front/tour.js, which moves the controls."""

from __future__ import annotations

from typing import Any

from traitlets import HasTraits, Int, TraitError, validate

STEPS = 5


class Tour(HasTraits):
    """An instrument with a tour of five steps, twelve seconds each.

    Attributes:
        tour_step: the present step, 1 to 5; None while there is no tour. Setting it goes to that
            step; None ends the tour and puts the controls back. Any input in the page ends it too.
    """

    tour_step = Int(None, allow_none=True).tag(sync=True)

    @validate("tour_step")
    def _known_step(self, proposal: Any) -> int | None:
        value: int | None = proposal.value
        if value is not None and not 1 <= value <= STEPS:
            raise TraitError(f"tour_step is {value}. Choose 1 to {STEPS}, or None for no tour.")
        return value
