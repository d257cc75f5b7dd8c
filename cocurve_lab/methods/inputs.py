"""Statistics of the output projections' inputs, gathered in one pass over the rows.

X is the input of W_O or W_down, [tokens, W]: column j belongs to the unit whose `start:stop` holds
j. Sums are kept and rows are dropped, so memory does not grow with the calibration. Every token of
a row counts, whichever positions the calibration scores. Where a norm follows the output of a block
(Gemma 2 and 3, OLMo2), methods that score a unit's output see it before that norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ..base.errors import InputError
from ..calibration import CalibrationSet
from ..extensions.repairing.least_squares import wide_product
from ..extensions.repairing.projection_inputs import watch_inputs
from ..models.architectures import Architecture
from ..models.layers import present
from ..models.units import Unit
from .filling import Block

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Sums over rows and tokens of the inputs X of every block, by (layer, kind).

    Blocks that pruning left without columns are absent.

    Attributes:
        rows: N, rows seen.
        tokens: N x T, tokens seen.
        sums: sum of X_j over tokens, [W] float64.
        squares: sum of X_j^2, [W] float64.
        row_norms: sum over rows of the L2 norm of X_j over that row's tokens, [W] float64.
        moments: sum of x x^T over tokens (X^T X), [W, W] float64; empty unless asked for.
    """

    rows: int
    tokens: int
    sums: dict[Block, np.ndarray] = field(default_factory=dict)
    squares: dict[Block, np.ndarray] = field(default_factory=dict)
    row_norms: dict[Block, np.ndarray] = field(default_factory=dict)
    moments: dict[Block, np.ndarray] = field(default_factory=dict)

    def mean(self, block: Block) -> np.ndarray:
        """Mean of X_j over tokens [W]."""
        return self.sums[block] / self.tokens

    def variance(self, block: Block) -> np.ndarray:
        """Variance of X_j over tokens [W], divided by the number of tokens; never below 0."""
        return np.maximum(self.squares[block] / self.tokens - self.mean(block) ** 2, 0.0)


def collect_statistics(
    model: PreTrainedModel,
    calibration: CalibrationSet,
    *,
    moments: bool = False,
    only: Collection[Block] | None = None,
    progress: bool = True,
    title: str = "Inputs",
) -> InputStatistics:
    """Run all rows once and sum up the inputs of all output projections.

    Args:
        model: dense or pruned; measured in eval mode, left as it was.
        moments: also X^T X of each block: 8 W^2 bytes each, on the model's device while running.
            Products are float64 on a CPU, float32 on a GPU (float64 for a float64 model).
        only: blocks to gather, to bound the memory of moments; None gathers all.
        title: what the progress bar says.
    """
    totals: dict[str, dict[Block, Tensor]] = {
        name: {} for name in ("sums", "squares", "row_norms", "moments")
    }

    def observe(block: Block, inputs: Tensor) -> None:
        x = inputs.double()
        squares = x.square().sum(dim=1)
        _add(totals["sums"], block, x.sum(dim=(0, 1)))
        _add(totals["squares"], block, squares.sum(dim=0))
        _add(totals["row_norms"], block, squares.sqrt().sum(dim=0))
        if moments:
            _add(totals["moments"], block, wide_product(inputs.flatten(0, 1), inputs.flatten(0, 1)))

    watch_inputs(model, calibration, observe, only=only, progress=progress, title=title)
    arrays = {
        name: {block: total.cpu().numpy() for block, total in blocks.items()}
        for name, blocks in totals.items()
    }
    return InputStatistics(len(calibration), calibration.input_ids.numel(), **arrays)


def per_unit(
    units: Iterable[Unit],
    columns: Mapping[Block, np.ndarray],
    reduce: Literal["sum", "mean"] = "sum",
) -> np.ndarray:
    """Reduce scores of columns [W] of each block to scores of units [M] float64.

    "sum" is the lab's rule for scores that add up; "mean" is for standardised ones.
    """
    parts = [columns[unit.layer, unit.kind][unit.start : unit.stop] for unit in units]
    return np.array([part.sum() if reduce == "sum" else part.mean() for part in parts])


def weight_columns(architecture: Architecture, block: Block) -> Tensor:
    """The output projection's weight [d, W] in float32 or better, detached, on its device."""
    with present(architecture, block[0]):
        weight = architecture.output_weight(*block).detach()
    return weight if weight.dtype == torch.float64 else weight.float()


def layer_passes(architecture: Architecture, layers_per_pass: int) -> list[range]:
    """Split the layers into runs of neighbors that are measured together."""
    count = len(architecture.layers)
    starts = range(0, count, layers_per_pass)
    return [range(start, min(start + layers_per_pass, count)) for start in starts]


def require_passes(layers_per_pass: int) -> None:
    """Raise InputError unless a pass has at least one layer."""
    if layers_per_pass < 1:
        raise InputError(f"layers_per_pass is {layers_per_pass}. Give at least one layer.")


def _add(totals: dict[Block, Tensor], block: Block, part: Tensor) -> None:
    if block in totals:
        totals[block] += part
    else:
        totals[block] = part
