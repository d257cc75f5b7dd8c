"""How sure the teacher is on the calibration text, and how much of the KL that hides from H.

Where the teacher's first choice has nearly all the probability, the Fisher metric p_0 (1 - p_0) is
nearly 0, so H has nearly no entry for the position. The KL is not small there: a removal can make
another token many times likelier.
"""

from __future__ import annotations

from dataclasses import dataclass

SURE = 0.99  # a position is sure where the first choice has more than this
SATURATED = 0.5  # the share of positions, or of the KL, above which a teacher is called saturated


@dataclass(frozen=True)
class Saturation:
    """Shares of the sure positions in a build; made by `Curvature.saturation`.

    Attributes:
        positions: share of the scored positions that are sure, in [0, 1].
        risk: share of the measured KL of all units, each removed alone, that falls on them, in
            [0, 1]; NaN where no removal changes anything.
    """

    positions: float
    risk: float

    @property
    def saturated(self) -> bool:
        """Whether either share is above one half."""
        return self.positions > SATURATED or self.risk > SATURATED

    @property
    def warning(self) -> str:
        """The two shares and what to do, in a few sentences; empty for an unsaturated teacher."""
        if not self.saturated:
            return ""
        return (
            f"The teacher is saturated on the calibration text: at {self.positions:.0%} of its "
            f"positions the first choice has more than {SURE:.0%}, and these carry "
            f"{self.risk:.0%} of the measured KL of single units. H hardly sees them, and what it "
            "predicts there is too small. Calibrate on a text that leaves the model a choice, and "
            "judge plans by measured KL (measure_plans)."
        )
