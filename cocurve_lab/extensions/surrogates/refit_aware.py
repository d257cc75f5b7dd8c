"""Refit-aware ablations: H of a model whose remaining columns will be refitted.

A repair refits W_O and W_down (`repair.py`), so the effect of an ablation is only the part that the
other units of its block cannot compensate. This departs from the paper, whose ablations are masks
(`BuildOptions.refit_ratio`).

Let x [W] be the columns of a block, x_u those of unit u, and let each other unit be removed with
probability rho. The least-squares prediction of x_u from the remaining columns needs the moments
E[x x^T], with products of different units weighted by 1 - rho. With a ridge they are M, and

    x_u - (expected prediction of x_u) = P_uu^-1 P_u x,   P = M^-1 and P_u its rows of unit u.

The ablation subtracts W_u times this from the block's write, instead of W_u x_u. At rho = 1 nothing
remains to predict from, and the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...base.errors import ArchitectureError
from ...calibration import CalibrationSet
from ...estimator.worker import Preparation
from ...models.architectures import Architecture, is_packed
from ...models.identity import embedding_weight
from ...models.layers import weights_of
from ...models.units import Unit
from ..repairing.least_squares import cholesky, ridge_of, wide_product
from ..repairing.projection_inputs import Block, present_blocks, rows_together, watch_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGE = 0.01  # in units of the mean diagonal of E[x x^T], as in a repair

Leftovers = Mapping[Block, Tensor]


@torch.no_grad()
def leftovers(
    architecture: Architecture,
    units: Sequence[Unit],
    calibration: CalibrationSet,
    ratio: float,
) -> Leftovers:
    """Compute the part of each unit's columns that the other units of its block cannot compensate.

    Args:
        architecture: the model, inside `models.runtime.measuring`.
        units: U; each is what one ablation removes.
        calibration: rows; every token counts, whichever positions are scored.
        ratio: rho in (0, 1], the share of the other units that is expected to be removed.

    Returns:
        By (layer, kind) a matrix [W, W] in the dtype of the weights: its rows of unit u times the
        columns x give the rest of x_u. One block at a time is inverted in float64.
    """
    architecture.require_columns("an H that knows of a refit")
    architecture.require_attention("an H that knows of a refit")
    found, sums = {}, _moments(architecture.model, calibration)
    for key in list(sums):
        moments = sums.pop(key)
        owner = torch.full((len(moments),), -1, device=moments.device)
        for number, unit in enumerate(units):
            if (unit.layer, unit.kind) == key:
                owner[unit.start : unit.stop] = number
        dtype = architecture.output_weight(*key).dtype
        found[key] = _leftover(moments, owner, ratio).to(dtype)
    return found


def preparation(architecture: Architecture, calibration: CalibrationSet) -> Preparation:
    """Return the memory and reading that `leftovers` need for a model on these rows."""
    blocks = present_blocks(architecture)
    if any(is_packed(architecture.output_projection(*block)) for block in blocks):
        raise ArchitectureError(
            "refit_ratio needs the weights of output projections, and they are packed in 4 bits. "
            "Load the model in bfloat16, or leave refit_ratio at 0."
        )
    source, rows = weights_of(architecture.model), rows_together(calibration)
    size = embedding_weight(architecture.model).element_size()
    widths = [architecture.width(*block) for block in blocks]
    widest, hidden = max(widths), architecture.config.hidden_size
    # activations of one layer, and the columns in float64; then a block's part of the sum
    tokens = rows * calibration.seq_len
    passing = tokens * (size * (6 * hidden + 3 * widest) + 8 * widest) + 8 * widest**2
    solving = 6 * 8 * widest**2  # scaled, damped, factor, inverse, and the copies of LAPACK
    present = source.bytes_present
    passes = -(-len(calibration) // rows)
    return Preparation(
        8 * sum(width**2 for width in widths) + max(passing + present, solving),
        size * sum(width**2 for width in widths),
        passes * source.bytes_from(0),
    )


def _leftover(moments: Tensor, owner: Tensor, ratio: float) -> Tensor:
    """P_uu^-1 P_u of each unit [W, W] float64, from E[x x^T] and the unit of each column."""
    same = owner[:, None] == owner
    damped = torch.where(same, moments, (1 - ratio) * moments)
    damped.diagonal().add_(ridge_of(moments, RIDGE))
    precision = torch.cholesky_inverse(cholesky(damped))
    for number in owner.unique():
        mine = owner == number
        precision[mine] = torch.linalg.solve(precision[mine][:, mine], precision[mine])
    return precision


def _moments(model: PreTrainedModel, calibration: CalibrationSet) -> dict[Block, Tensor]:
    """The sums of x x^T [W, W] float64 of every block over all tokens."""
    sums: dict[Block, Tensor] = {}

    def add(block: Block, inputs: Tensor) -> None:
        x = inputs.flatten(0, 1)
        part = wide_product(x, x)
        sums[block] = sums[block] + part if block in sums else part

    watch_inputs(model, calibration, add, progress=False)
    return sums
