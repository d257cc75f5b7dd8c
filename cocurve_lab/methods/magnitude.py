"""Magnitude: weak columns of the output projections go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..calibration import CalibrationSet
from ..models.architectures import describe
from ..models.units import UnitSet, require_units
from ..solver.guards import Guards
from ..solver.selection import Selection
from .base import Evidence, Method
from .filling import blocks, take_counts, take_in_order, uniform_order
from .inputs import per_unit, present_blocks, provenance_of, weight_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Magnitude(Method):
    """s_u = sum over the unit's columns j of ||W_:j||_2, W = W_O or W_down; uniform per block.

    The paper says "weight norm"; this is the form of FLAP's baseline, which looks at the output
    projection alone. LLM-Pruner's sums |w|^p over every coupled matrix, which can rank otherwise.
    No text is read and no weight changes: it is selection only as it stands.

    A unit's score is the sum over its columns, as the published score of a head is; FFN groups, of
    which the published code knows none, are summed alike. Published counts per block are
    int(ratio x n), which under-prunes at this granularity (17.5 % of an 8B at 20 %); by default
    the budget is filled by cost instead.

    Attributes:
        as_published: take int(ratio x n) units of every block and no more.
    """

    as_published: bool = False

    name = "magnitude"
    title = "Magnitude"

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Column norms; the text is not read. See `Method.measure`."""
        require_units(model, units)
        architecture = describe(model)
        norms = {
            block: torch.linalg.vector_norm(
                weight_columns(architecture, block), dim=0, dtype=torch.float64
            )
            for block in present_blocks(architecture)
        }
        scores = per_unit(units, {block: norm.cpu().numpy() for block, norm in norms.items()})
        return Evidence(self.name, units, {"scores": scores}, provenance_of(self, model, None))

    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """The weakest units of every block, evenly. See `Method.select`."""
        self.require_own(evidence, units)
        return fill_uniformly(units, evidence.scores, ratio, guards, self.as_published)


def fill_uniformly(
    units: UnitSet, scores: np.ndarray, ratio: float, guards: Guards, as_published: bool
) -> Selection:
    """The lowest scores of every block: by cost to the ratio, or int(ratio x n) of each block."""
    if as_published:
        counts = {
            (int(units.layers[block[0]]), units[block[0]].kind): int(ratio * len(block))
            for block in blocks(units)
        }
        return take_counts(units, scores, counts, ratio, guards)
    return take_in_order(units, uniform_order(units, scores), ratio, guards)
