"""The traits of instruments and sessions that have bounds; a value is refused by the trait's name.

Units and plans are those of the owner's `curvature`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from traitlets import Float, Instance, Int, List, TraitError, Unicode

import cocurve_lab as cl


class Within(Float):
    """A number from `min` to `max`, both included."""

    def validate(self, obj: Any, value: Any) -> float:
        """The number; TraitError outside the bounds, and for NaN."""
        number = float(super().validate(obj, value))
        if math.isnan(number):
            raise TraitError(f"{self.name} is NaN. Set it between {self.min:g} and {self.max:g}.")
        return number


class Some(List):
    """Some of a few names, in the order of these; at first all."""

    def __init__(self, names: Sequence[str], least: int = 0) -> None:
        super().__init__(Unicode(), list(names))
        self.names, self.least = tuple(names), least

    def validate(self, obj: Any, value: Any) -> list[str]:
        """The names; TraitError for others, and for fewer than `least`."""
        given = super().validate(obj, value) or []
        found = [name for name in self.names if name in given]
        if not set(given) <= set(self.names) or len(found) < self.least:
            raise TraitError(f"{self.name} is {given}. Choose from {', '.join(self.names)}.")
        return found


class UnitIndex(Int):
    """The index of a unit."""

    def validate(self, obj: Any, value: Any) -> int:
        """The index; TraitError where there is no such unit."""
        return require_unit(obj.curvature, value, f"{self.name} is")


class UnitIndices(List):
    """Indices of units, ascending and once each; at first none."""

    def validate(self, obj: Any, value: Any) -> list[int]:
        """The indices; TraitError where there is no such unit."""
        given = super().validate(obj, value) or []
        return sorted({require_unit(obj.curvature, unit, f"{self.name} holds") for unit in given})


class PlanOfUnits(Instance):
    """A plan (`cl.Selection`)."""

    def validate(self, obj: Any, value: Any) -> Any:
        """The plan; MismatchError if it is of other units."""
        plan: Any = super().validate(obj, value)
        plan.units.require_same(obj.curvature.units, mine="the plan", theirs="the curvature")
        return plan


def require_unit(curvature: cl.Curvature, unit: Any, where: str) -> int:
    """The index of a unit of H; TraitError for anything else."""
    size = len(curvature.units)
    if not (isinstance(unit, (int, np.integer)) and 0 <= unit < size):
        raise TraitError(f"{where} {unit!r}. Use an index from 0 to {size - 1}.")
    return int(unit)
