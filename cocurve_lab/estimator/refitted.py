"""Ablations that the rest of their block makes up for: H of a model that will be refitted.

A repair refits W_O and W_down (`pruner/repair.py`), so of an ablation only that remains which the
other units of its block cannot make up for. This is a departure from the paper, whose ablations are
masks (`BuildOptions.refit_ratio`).

Let x [W] be the columns of a block, x_u those of unit u, and let each of its other units be gone
with probability rho. The least-squares prediction of x_u from the columns that stay needs the
moments E[x x^T], with products of different units weighted by 1 - rho. With a ridge they are M, and

    x_u - (expected prediction of x_u) = P_uu^-1 P_u x,   P = M^-1 and P_u its rows of unit u.

The ablation takes W_u times this from the block's write, instead of W_u x_u. At rho = 1 nothing is
left to predict from, and the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..errors import ArchitectureError, NumericalError
from ..models.architectures import Architecture, is_packed
from ..models.families import KINDS, Kind
from ..models.identity import model_device
from ..models.units import Unit
from .replay import wide_product

RIDGE = 0.01  # in units of the mean diagonal of E[x x^T], as in a repair
_TOKENS = 2048  # rows per forward = this // row length, at least one

Leftovers = Mapping[tuple[int, Kind], Tensor]


@torch.no_grad()
def leftovers(
    architecture: Architecture,
    units: Sequence[Unit],
    calibration: CalibrationSet,
    ratio: float,
) -> Leftovers:
    """For each block, what of each unit's columns the other units cannot make up for.

    Args:
        architecture: the model, inside `models.runtime.measuring`.
        units: U; each is what one ablation removes.
        calibration: rows; every token counts, whichever positions are scored.
        ratio: rho in (0, 1], the share of the other units that is expected to be gone.

    Returns:
        By (layer, kind) a matrix [W, W] in the dtype of the weights: its rows of unit u times the
        columns x give what remains of x_u. One block at a time is inverted in float64.

    Raises:
        ArchitectureError: weights are packed in 4 bits.
        NumericalError: the moments are not finite.
    """
    found = {}
    for key, moments in _moments(architecture, calibration).items():
        owner = torch.full((len(moments),), -1, device=moments.device)
        for number, unit in enumerate(units):
            if (unit.layer, unit.kind) == key:
                owner[unit.start : unit.stop] = number
        dtype = architecture.output_weight(*key).dtype
        found[key] = _leftover(moments, owner, ratio).to(dtype)
    return found


def _leftover(moments: Tensor, owner: Tensor, ratio: float) -> Tensor:
    """P_uu^-1 P_u of each unit [W, W] float64, from E[x x^T] and the unit of each column."""
    same = owner[:, None] == owner
    damped = torch.where(same, moments, (1 - ratio) * moments)
    level = float(moments.diagonal().mean())
    damped.diagonal().add_(RIDGE * level if level > 0 else 1.0)
    factor, status = torch.linalg.cholesky_ex(damped)
    if int(status) or not bool(torch.isfinite(factor).all()):
        raise NumericalError(
            f"the moments of {len(moments)} columns are not finite or not positive definite. Half "
            "precision may overflow: try bfloat16 or float32."
        )
    precision = torch.cholesky_inverse(factor)
    for number in owner.unique():
        mine = owner == number
        precision[mine] = torch.linalg.solve(precision[mine][:, mine], precision[mine])
    return precision


def _moments(
    architecture: Architecture, calibration: CalibrationSet
) -> dict[tuple[int, Kind], Tensor]:
    """The sums of x x^T [W, W] float64 of every block over all tokens."""
    sums: dict[tuple[int, Kind], Tensor] = {}
    with ExitStack() as stack:
        for layer, kind in product(range(len(architecture.layers)), KINDS):
            projection = architecture.output_projection(layer, kind)
            if is_packed(projection):
                raise ArchitectureError(
                    "refit_ratio needs the weights of output projections, and they are packed in 4 "
                    "bits. Load the model in bfloat16, or leave refit_ratio at 0."
                )

            def add(_: Any, args: tuple[Tensor, ...], __: Any, key: Any = (layer, kind)) -> None:
                x = args[0].reshape(-1, args[0].shape[-1])
                product_ = wide_product(x, x)
                sums[key] = sums[key] + product_ if key in sums else product_

            stack.callback(projection.register_forward_hook(add).remove)
        step = max(1, _TOKENS // calibration.seq_len)
        device = model_device(architecture.model)
        for ids in calibration.input_ids.split(step):
            architecture.decoder(input_ids=ids.to(device), use_cache=False)
    return sums
