"""FLAP: columns whose input hardly fluctuates go first, because a constant could replace them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..base.arguments import require_choice
from .base import Scored, Subject
from .filling import Block, blocks
from .inputs import InputStatistics, per_unit, weight_columns

if TYPE_CHECKING:
    from torch import Tensor

Metric = Literal["wifv", "ifv", "wifn"]


@dataclass(frozen=True)
class Flap(Scored):
    """m_j = Var(X_j) x ||W_:j||_2^2 (attention: squared again), standardised, ranked globally.

    W = W_O or W_down, X its input. Within every (layer, kind) the m_j are standardised over the
    columns (z-scores, population standard deviation); a unit's score is the mean over its columns,
    for heads as published, for KV groups and FFN groups alike. All units are ranked together and
    the lowest go, by their cost in parameters: structure "AL-AM" of the published code.

    In the published method pruned columns leave their mean behind as a bias of the output
    projection. Selection only: that bias is omitted.

    Differences from the published code: a unit has its true cost, where that code counts a head as
    512/3 columns, which holds for multi-head attention with 128 dimensions; the variance is that
    over all tokens about their mean (there the mean is updated in place, so the first sample counts
    0 and later ones are taken about the new mean); rows are as long as the calibration's, not 128
    tokens.

    A block that is one unit (multi-query attention) has a mean of z-scores of exactly 0: all such
    blocks tie.

    Attributes:
        metric: "wifv", the above and the published default; "ifv", Var(X_j) alone; "wifn",
            mean_i |W_ij| x ||X_j||_2.
    """

    metric: Metric = "wifv"

    name = "flap"
    title = "FLAP"
    ranks_globally = True

    def __post_init__(self) -> None:
        require_choice(self.metric, Metric, "metric")

    def scores(self, subject: Subject) -> np.ndarray:
        """Average the standardised metric over each unit's columns."""
        seen = subject.statistics(self.title)
        columns = {
            block: standardised(
                self._metric(seen, block, weight_columns(subject.architecture, block))
            )
            for block in seen.sums
        }
        scores = per_unit(subject.units, columns, reduce="mean")
        for ids in blocks(subject.units).values():
            if len(ids) == 1:  # the mean over a whole block: rounding must not break the tie
                scores[ids] = 0.0
        return scores

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


def standardised(values: np.ndarray) -> np.ndarray:
    """z-scores [W] of values [W]; all 0 where the values do not differ."""
    spread = values.std()
    if spread <= 1e-12 * np.abs(values).max():  # nothing but rounding; NaN goes on to be reported
        return np.zeros_like(values)
    return (values - values.mean()) / spread
