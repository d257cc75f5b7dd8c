"""FLAP: columns whose input hardly fluctuates can go, a constant could stand in for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from ..calibration import CalibrationSet
from ..errors import InputError
from ..models.architectures import describe
from ..models.units import UnitSet, require_units
from ..solver.guards import Guards
from ..solver.selection import Selection
from .base import Evidence, Method
from .filling import blocks, global_order, take_in_order
from .inputs import (
    Block,
    InputStatistics,
    collect_statistics,
    per_unit,
    provenance_of,
    weight_columns,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


Metric = Literal["wifv", "ifv", "wifn"]


@dataclass(frozen=True)
class Flap(Method):
    """m_j = Var(X_j) x ||W_:j||_2^2 (attention: squared again), standardised, ranked globally.

    W = W_O or W_down, X its input. Within every (layer, kind) the m_j are standardised over the
    columns (z-scores, population standard deviation); a unit's score is the mean over its columns,
    for heads as published, for KV groups and FFN groups alike. All units are ranked together and
    the lowest go, by their cost in parameters: structure "AL-AM" of the published code.

    Published, pruned columns leave their mean behind as a bias of the output projection; the
    reduction to selection only is to drop that bias.

    Differences from the published code: the true cost of a unit replaces its ratio of 512/3 columns
    a head, which holds for multi-head attention with 128 dimensions; the variance is that over all
    tokens about their mean (there the mean is updated in place, so the first sample counts 0 and
    later ones are taken about the new mean); rows are as long as the calibration's, not 128.

    A block that is one unit (multi-query attention) has a mean of z-scores of exactly 0: all such
    blocks tie.

    Attributes:
        metric: "wifv", the above and the published default; "ifv", Var(X_j) alone; "wifn",
            mean_i |W_ij| x ||X_j||_2.

    Raises:
        InputError: an unknown metric.
    """

    metric: Metric = "wifv"

    name = "flap"
    title = "FLAP"

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise InputError(f"metric is {self.metric!r}; choose one of {get_args(Metric)}.")

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Fluctuation of the inputs over all tokens. See `Method.measure`."""
        require_units(model, units)
        seen = collect_statistics(model, calibration, progress=progress, title=self.title)
        architecture = describe(model)
        columns = {
            block: _standardise(self._metric(seen, block, weight_columns(architecture, block)))
            for block in seen.sums
        }
        scores = per_unit(units, columns, reduce="mean")
        for block in blocks(units):
            if len(block) == 1:  # the mean over a whole block: rounding must not break the tie
                scores[block] = 0.0
        provenance = provenance_of(self, model, calibration)
        return Evidence(self.name, units, {"scores": scores}, provenance)

    def _metric(self, seen: InputStatistics, block: Block, weight: Tensor) -> np.ndarray:
        """m_j of a block's columns [W], before standardising."""
        if self.metric == "wifn":
            mean = weight.abs().double().mean(dim=0).cpu().numpy()
            found = mean * np.sqrt(seen.squares[block])
        else:
            found = seen.variance(block)
            if self.metric == "wifv":
                found = found * weight.double().square().sum(dim=0).cpu().numpy()
        return found**2 if block[1] == "attention" else found

    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """The lowest scores of the whole model. See `Method.select`."""
        self.require_own(evidence, units)
        return take_in_order(units, global_order(units, evidence.scores), ratio, guards)


def _standardise(values: np.ndarray) -> np.ndarray:
    """z-scores [W]; all 0 where the values do not differ."""
    spread = values.std()
    if spread <= 1e-12 * np.abs(values).max():  # nothing but rounding; NaN goes on to be reported
        return np.zeros_like(values)
    return (values - values.mean()) / spread
