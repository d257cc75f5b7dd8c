"""Wanda-sp: a column's score is its mean weight times the norm of its input."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..models.masking import ablate
from ..models.units import UnitSet
from ..solver.targets import require_ratio
from .base import Scored, Subject
from .filling import Block, blocks, floor_counts
from .inputs import collect_statistics, per_unit, weight_columns


@dataclass(frozen=True)
class WandaSp(Scored):
    """s_j = mean_i |W_ij| x sqrt(mean over rows of sum over tokens of X_j^2); uniform per block.

    W = W_O or W_down, X its input; a unit's score is the sum over its columns, as the published
    score of a head is. No weight changes, so it is selection only as published.

    Differences from the published code (FLAP's repository; Wanda's own has no width pruning):
    there the layers are pruned one after another, and a layer's inputs come from the pruned layers
    before it; here by default from the dense model, as for every other method, so that one
    measurement serves all ratios. FFN groups are summed like heads; published counts per block are
    int(ratio x n), which under-prunes at this granularity, so by default the budget is filled by
    cost.

    Attributes:
        as_published: take exactly int(ratio x n) units of every block.
        sequential_at: measure each layer with the layers before it pruned at this ratio, by the
            published counts; None: on the dense model. With `as_published`, the plan of this ratio
            is then the published one. Every layer runs all rows.

    Raises:
        InputError: `sequential_at` is not in [0, 1).
    """

    as_published: bool = False
    sequential_at: float | None = None

    name = "wanda-sp"
    title = "Wanda-sp"

    def __post_init__(self) -> None:
        if self.sequential_at is not None:
            object.__setattr__(self, "sequential_at", require_ratio(self.sequential_at))

    def scores(self, subject: Subject) -> np.ndarray:
        """Multiply input norms over all tokens by mean |W|."""
        units = subject.units
        if self.sequential_at is None:
            return per_unit(units, self._columns(subject, None))
        counts = floor_counts(units, self.sequential_at)
        scores, gone = np.zeros(len(units)), list[int]()
        for layer in sorted(set(units.layers.tolist())):
            mine = {block: ids for block, ids in blocks(units).items() if block[0] == layer}
            # masked, not cut: the same inputs, and the model stays as it was
            with ablate(subject.model, [units[u] for u in gone]):
                columns = self._columns(subject, mine)
            for block, ids in mine.items():
                scores[ids] = per_unit([units[u] for u in ids], columns)
                gone += ids[np.argsort(scores[ids], kind="stable")][: counts[block]].tolist()
        return scores

    def _columns(self, subject: Subject, only: Collection[Block] | None) -> dict[Block, np.ndarray]:
        """s_j [W] of the columns of every block, or of some."""
        seen = collect_statistics(
            subject.model,
            subject.calibration,
            only=only,
            progress=subject.progress,
            title=self.title,
        )
        columns = {}
        for block, squares in seen.squares.items():
            weight = weight_columns(subject.architecture, block).abs().double().mean(dim=0)
            columns[block] = weight.cpu().numpy() * np.sqrt(squares / seen.rows)
        return columns

    def counts(self, units: UnitSet, ratio: float) -> dict[Block, int] | None:
        """Take int(ratio x n) of each block, or None to fill the budget by cost."""
        return floor_counts(units, ratio) if self.as_published else None
