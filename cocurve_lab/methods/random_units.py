"""Random selection: the floor every method should clear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..calibration import CalibrationSet
from ..errors import InputError
from ..models.units import UnitSet, require_units
from ..solver.guards import Guards
from ..solver.selection import Selection
from .base import Evidence, Method
from .filling import Allocation, global_order, take_in_order, uniform_order
from .inputs import provenance_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Random(Method):
    """Units drawn uniformly: the score is U(0, 1), one draw per unit, by the seed of `measure`.

    No text is read and no weight changes, so there is nothing to reduce to selection only. One
    plan is one draw: report the mean and the spread over seeds.

    The paper's baseline "prunes structured units uniformly", read here as every unit of the model
    being as likely as any other. Published code (LLM-Pruner, AMP) draws per channel or head, with
    the same count in every layer; a head's score there is a sum over its channels, which only
    narrows the distribution of scores.

    Attributes:
        allocation: "global" ranks all units of the model together; "uniform" takes about the same
            share of every block.

    Raises:
        InputError: an unknown allocation.
    """

    allocation: Allocation = "global"

    name = "random"
    title = "Random"

    def __post_init__(self) -> None:
        if self.allocation not in ("global", "uniform"):
            raise InputError(f'allocation is {self.allocation!r}; it is "global" or "uniform".')

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """One draw per unit; the text is not read. See `Method.measure`."""
        require_units(model, units)
        scores = np.random.default_rng(seed).random(len(units))
        provenance = provenance_of(self, model, None, seed)
        return Evidence(self.name, units, {"scores": scores}, provenance)

    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """Lowest draws first. See `Method.select`."""
        self.require_own(evidence, units)
        order = global_order if self.allocation == "global" else uniform_order
        return take_in_order(units, order(units, evidence.scores), ratio, guards)
