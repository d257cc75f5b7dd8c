"""The two formulas everything measures with: the whitened feature and the KL divergence.

Both work from the centred logit shift, never from differences of log-probabilities: a unit that
changes logits by 1e-4 has a KL near 1e-9, which float32 log-probabilities cannot resolve.
"""

from __future__ import annotations

import torch
from torch import Tensor

# above this shift exp() approaches float32 overflow; the log-sum-exp form takes over
_LARGE_SHIFT = 30.0


def center(probabilities: Tensor, shift: Tensor) -> Tensor:
    """shift - E_p[shift] over the last axis; softmax is blind to what is taken away."""
    return shift - (probabilities * shift).sum(dim=-1, keepdim=True)


def whiten(probabilities: Tensor, shift: Tensor) -> Tensor:
    """Whitened feature sqrt(p0) * (dz - E_p0[dz]) (Section "Estimating the edge matrix").

    Its dot products are Fisher inner products: w(a) . w(b) = a^T (diag(p0) - p0 p0^T) b
    (Proposition gram).

    Args:
        probabilities: p0 [..., r], summing to 1 over the last axis.
        shift: dz = z0 - z_u [..., r], in nats.
    """
    return probabilities.sqrt() * center(probabilities, shift)


def kl_divergence(probabilities: Tensor, shift: Tensor) -> Tensor:
    """KL(p0 || p_s) [...] in nats per token, from z_s - z_0 (either sign of centring is fine).

    With d the centred shift, KL = log E_p0[exp d], an identity; E_p0[d] = 0 lets expm1 keep every
    digit of a small one, and makes the value non-negative up to rounding.

    Args:
        probabilities: p0 [..., V], summing to 1 over the last axis.
        shift: z_s - z_0 [..., V].
    """
    centered = center(probabilities, shift)
    largest = centered.amax(dim=-1)
    moderate = centered.clamp(max=_LARGE_SHIFT)
    # subtracting d inside the mean removes the rounding of its (zero) expectation
    exact = torch.log1p((probabilities * (torch.expm1(moderate) - moderate)).sum(dim=-1))
    if not bool((largest > _LARGE_SHIFT).any()):
        return exact
    return torch.where(
        largest > _LARGE_SHIFT, torch.logsumexp(probabilities.log() + centered, dim=-1), exact
    )
