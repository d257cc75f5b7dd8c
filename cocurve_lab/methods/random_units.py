"""Random selection: the baseline every method should beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base.arguments import require_choice
from ..models.units import UnitSet
from .base import Scored, Subject
from .filling import Allocation, global_order, uniform_order


@dataclass(frozen=True)
class Random(Scored):
    """Units drawn at random: the score is U(0, 1), one draw per unit from the seed of `measure`.

    No text is read and no weight changes, so it is selection only as published. One plan is one
    draw: report the mean and the spread over seeds.

    The paper's baseline "prunes structured units uniformly", read here as every unit of the model
    being as likely as any other. Published code (LLM-Pruner, AMP) draws per channel or head, with
    the same count in every layer; a head's score there is a sum over its channels, which only
    narrows the distribution of scores.

    Attributes:
        allocation: "global" ranks all units of the model together; "uniform" takes about the same
            share of every block.
    """

    allocation: Allocation = "global"

    name = "random"
    title = "Random"
    reads_text = False
    draws = True
    knows_experts = True

    def __post_init__(self) -> None:
        require_choice(self.allocation, Allocation, "allocation")

    def scores(self, subject: Subject) -> np.ndarray:
        """Draw one number per unit; the text is not read."""
        return np.random.default_rng(subject.seed).random(len(subject.units))

    def order(self, units: UnitSet, scores: np.ndarray) -> list[int]:
        """Lowest draws first, of the whole model or evenly over blocks."""
        ranked = global_order if self.allocation == "global" else uniform_order
        return ranked(units, scores)
