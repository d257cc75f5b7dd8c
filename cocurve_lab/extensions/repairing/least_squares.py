"""Least squares with a ridge, from sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...base.errors import NumericalError


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float64 of [n, a] and [n, b]; on a GPU, where float64 is slow, in float32."""
    if left.is_cuda and left.dtype != torch.float64:
        return (left.float().T @ right.float()).double()
    return left.double().T @ right.double()


def ridge_update(gram: Tensor, cross: Tensor, gamma: Tensor) -> Tensor:
    """Return D [d, R] of least ||x D^T - e||^2 + ||D gamma^1/2||^2; gram: x^T x, cross: e^T x.

    `gamma` [R] is what `ridge_of` gives.
    """
    if not bool(torch.isfinite(cross).all()):
        raise NumericalError(
            "the model gives NaN or infinite values on this text. Half precision may overflow: try "
            "bfloat16."
        )
    damped = gram.diagonal_scatter(gram.diagonal() + gamma)
    return torch.cholesky_solve(cross.T, cholesky(damped)).T


def ridge_of(moments: Tensor, ridge: float, *, own: bool = False) -> Tensor:
    """ridge x mean(diagonal) for every column [R], or with `own` ridge x its own place there.

    With its own, a column that is rare in these rows moves little. It is 1 for inputs that are
    always zero.
    """
    level = moments.diagonal().clamp(min=0)
    level = level if own else level.mean().expand_as(level)
    return torch.where(level > 0, ridge * level, 1.0)


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower factor, or raise NumericalError if the matrix is not positive definite."""
    factor, status = torch.linalg.cholesky_ex(matrix)
    if int(status) or not bool(torch.isfinite(factor).all()):
        raise NumericalError(
            f"the second moments of {len(matrix)} columns are singular or not finite. Use a "
            "damping or ridge above 0 (0.01 is usual), or more calibration text than columns."
        )
    return factor
