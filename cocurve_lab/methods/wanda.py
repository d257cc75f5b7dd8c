"""Wanda-sp: column magnitude weighted by the norm of what flows into the column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..calibration import CalibrationSet
from ..models.architectures import describe
from ..models.units import UnitSet, require_units
from ..solver.guards import Guards
from ..solver.selection import Selection
from .base import Evidence, Method
from .inputs import collect_statistics, per_unit, provenance_of, weight_columns
from .magnitude import fill_uniformly

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class WandaSp(Method):
    """s_j = mean_i |W_ij| x sqrt(mean over rows of sum over tokens of X_j^2); uniform per block.

    W = W_O or W_down, X its input; a unit's score is the sum over its columns, as the published
    score of a head is. No weight changes: it is selection only as it stands.

    Differences from the published code (FLAP's repository; Wanda's own has no width pruning):
    there the inputs of a layer come from the layers already pruned before it, here from the dense
    model, like those of every other method; FFN groups are summed like heads; published counts per
    block are int(ratio x n), which under-prunes at this granularity, so by default the budget is
    filled by cost.

    Attributes:
        as_published: take int(ratio x n) units of every block and no more.
    """

    as_published: bool = False

    name = "wanda-sp"
    title = "Wanda-sp"

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Input norms over all tokens, times mean |W|. See `Method.measure`."""
        require_units(model, units)
        seen = collect_statistics(model, calibration, progress=progress, title=self.title)
        architecture = describe(model)
        columns = {}
        for block, squares in seen.squares.items():
            weight = weight_columns(architecture, block).abs().double().mean(dim=0).cpu().numpy()
            columns[block] = weight * np.sqrt(squares / seen.rows)
        provenance = provenance_of(self, model, calibration)
        return Evidence(self.name, units, {"scores": per_unit(units, columns)}, provenance)

    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """The lowest scores of every block, evenly. See `Method.select`."""
        self.require_own(evidence, units)
        return fill_uniformly(units, evidence.scores, ratio, guards, self.as_published)
