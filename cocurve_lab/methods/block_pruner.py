"""BlockPruner: attention and FFN blocks go one after the other, each time the one missed least.

Zhong et al. 2024, "BlockPruner: Fine-grained Pruning for Large Language Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ..base.arguments import as_int
from ..base.progress import Bar
from ..calibration import CalibrationSet
from ..measuring.risk import Meter
from ..models.units import UnitSet
from ..solver.selection import Selection
from .base import Arrays, Scored, Subject
from .filling import blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Column = Literal["kl", "nll"]  # of `Meter`: KL(dense || pruned), and nll of the actual tokens


@dataclass(frozen=True)
class BlockPruner(Scored):
    """Remove the block without which the perplexity is lowest; repeat with what is left.

    A block is all attention or all FFN units of a layer. B blocks take B (B + 1) / 2 passes over
    each row, so only the first rows are read.

    Differences from the published method: the last block of a plan goes in part, its first units,
    so that all methods remove the same cost; and the published method reads 256 rows.

    Attributes:
        rows: rows to read, at least 1.
    """

    rows: int = 2
    column: ClassVar[Column] = "nll"

    name = "blockpruner"
    title = "BlockPruner"
    ranks_globally = True  # the units of a block tie

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", as_int(self.rows, "rows", 1))

    def scores(self, subject: Subject) -> Arrays:
        """Give every unit the step at which its block goes.

        "scores" [M]: the step, from 0; `column` [B]: nats per token after each removal.
        """
        units, ids = subject.units, subject.calibration.input_ids[: self.rows]
        rows = CalibrationSet(ids, source=f"the first {len(ids)} rows")
        parts = list(blocks(units).values())
        inputs = (subject.model, units, parts, rows, subject.progress, self.title)
        order, values = least_missed(*inputs, self.column)
        scores = np.zeros(len(units))
        for step, place in enumerate(order):
            scores[parts[place]] = step
        return {"scores": scores, self.column: np.array(values)}


def least_missed(
    model: PreTrainedModel,
    units: UnitSet,
    parts: Sequence[np.ndarray],
    rows: CalibrationSet,
    progress: bool,
    title: str,
    column: Column = "nll",
) -> tuple[list[int], list[float]]:
    """Remove parts of a model one by one, each time the one without which `column` is lowest.

    Returns the places of the parts in order, and the mean of the column over the rows after each
    removal, in nats per token.
    """
    meter, at = Meter(model, rows, keep_teacher=True, replay=True), ("kl", "nll").index(column)
    left, order, reached = list(range(len(parts))), list[int](), list[float]()
    for _ in Bar(range(len(parts)), desc=title, unit="block", disable=not progress):
        gone = [parts[place] for place in order]
        plans = [
            Selection.from_pruned(units, np.concatenate([*gone, parts[place]]).tolist())
            for place in left
        ]
        means = meter.measure(plans)[..., at].mean(axis=1)
        best = int(means.argmin())
        order.append(left.pop(best))
        reached.append(float(means[best]))
    return order, reached
