"""Wanda-sp: a column's score is its mean weight times the norm of its input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Scored, Subject
from .inputs import per_unit, weight_columns


@dataclass(frozen=True)
class WandaSp(Scored):
    """s_j = mean_i |W_ij| x sqrt(mean over rows of sum over tokens of X_j^2); uniform per block.

    W = W_O or W_down, X its input; a unit's score is the sum over its columns, as the published
    score of a head is. No weight changes, so it is selection only as published.

    Differences from the published code (FLAP's repository; Wanda's own has no width pruning):
    there the layers are pruned one after another, and a layer's inputs come from the pruned layers
    before it; here from the dense model, as for every other method, so that one measurement serves
    all ratios. FFN groups are summed like heads; published counts per block are int(ratio x n),
    which under-prunes at this granularity, so the budget is filled by cost.
    """

    name = "wanda-sp"
    title = "Wanda-sp"

    def scores(self, subject: Subject) -> np.ndarray:
        """Multiply input norms over all tokens by mean |W|."""
        seen = subject.statistics(self.title)
        columns = {}
        for block, squares in seen.squares.items():
            weight = weight_columns(subject.architecture, block).abs().double().mean(dim=0)
            columns[block] = weight.cpu().numpy() * np.sqrt(squares / seen.rows)
        return per_unit(subject.units, columns)
