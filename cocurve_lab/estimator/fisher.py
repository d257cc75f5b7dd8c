"""The formulas everything measures with: centring and the KL divergence.

Both work from the centred logit shift, never from differences of log-probabilities: a unit that
changes logits by 1e-4 has a KL near 1e-9, which float32 log-probabilities cannot resolve.
"""

from __future__ import annotations

import torch
from torch import Tensor

# above this shift exp() approaches float32 overflow; the log-sum-exp form takes over
_LARGE_SHIFT = 30.0
_SMALL_SHIFT = 0.02  # below it four terms of the series are exact to float32


def center(probabilities: Tensor, shift: Tensor) -> Tensor:
    """shift - E_p[shift] over the last axis; the softmax does not see what is subtracted."""
    return shift - (probabilities * shift).sum(dim=-1, keepdim=True)


def kl_divergence(probabilities: Tensor, shift: Tensor) -> Tensor:
    """KL(p0 || p_s) [...] in nats per token, from z_s - z_0 (centred or not).

    With d the centred shift, KL = log E_p0[exp d] = log1p E_p0[exp d - 1 - d], since E_p0[d] = 0.
    Where all of d is small, exp d - 1 - d is summed as a series, which keeps the digits that the
    subtraction loses (at d = 1e-5, all but two in float32).

    Args:
        probabilities: p0 [..., V], summing to 1 over the last axis.
        shift: z_s - z_0 [..., V].
    """
    return centered_kl(probabilities, center(probabilities, shift))


def centered_kl(probabilities: Tensor, centered: Tensor) -> Tensor:
    """`kl_divergence` of a shift that `center` has already been applied to."""
    low, high = centered.aminmax(dim=-1)
    edge = _SMALL_SHIFT if centered.dtype == torch.float32 else _SMALL_SHIFT / 200
    small, large = torch.maximum(high, -low) < edge, high > _LARGE_SHIFT
    # one form at a time where one serves every position: the usual case, and the fast one
    if bool(small.all()):
        return torch.log1p((probabilities * _series(centered)).sum(dim=-1))
    any_large = bool(large.any())
    moderate = centered.clamp(max=_LARGE_SHIFT) if any_large else centered
    value = torch.log1p(torch.expm1(moderate).sub_(moderate).mul_(probabilities).sum(dim=-1))
    if bool(small.any()):
        weights = probabilities.expand_as(centered)[small]
        value[small] = torch.log1p((weights * _series(centered[small])).sum(dim=-1))
    if any_large:
        weights = probabilities.expand_as(centered)[large]
        value[large] = torch.logsumexp(weights.log() + centered[large], dim=-1)
    return value


def _series(d: Tensor) -> Tensor:
    """exp d - 1 - d for small d: d^2 (1/2 + d/6 + d^2/24 + d^3/120)."""
    return d * d * (0.5 + d * (1 / 6 + d * (1 / 24 + d / 120)))
