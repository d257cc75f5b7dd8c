"""Plans of one budget by the scale of what is removed: units, blocks or layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import Interactions

if TYPE_CHECKING:
    from cocurve_lab import Curvature, Selection


def plans_by_scale(
    curvature: Curvature,
    scales: Mapping[str, Interactions],
    ratio: float,
    strengths: Sequence[float] = (0.0, 0.5, 1.0),
    scale_strengths: Sequence[float] = (0.0, 0.5, 1.0),
) -> dict[str, Selection]:
    """Solve for H, for each unit's own KL, and for measured scales, by name and without guards.

    Args:
        scales: name ("layers", "blocks") -> measured interactions.
        strengths, scale_strengths: lambdas of H, and of the scales; what cannot be solved at a
            scale is left out.
    """
    found = {f"H, lambda {s:g}": solve_greedy(curvature, ratio, s) for s in strengths}
    found["units by their own KL"] = solve_greedy(measured_diagonal(curvature), ratio, 0.0)
    for name, parts in scales.items():
        for strength in scale_strengths:
            with suppress(InputError, InfeasibleError):
                found[f"measured {name}, lambda {strength:g}"] = parts.solve(ratio, strength)
    return found
