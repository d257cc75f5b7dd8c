"""The pair KL Q: the joint cost of every pair of units, from the sketch of their shifts.

With F the additive KL (shifts.py),

    Q_uu = 2 F({u}),    Q_uv = F({u, v}) - F({u}) - F({v}),

so 1/2 s^T Q s is F itself for one unit and for two. Written with the likelihood ratios
r_u = p_u / p_0 of the models without u, the edge is Q_uv = E log E_{p_0}[r_u r_v]. To second order
in the shifts Q is H. Q need not be a Gram matrix: it may have negative eigenvalues.

If the build started where a set S was removed (`Shifts.base`), Q is that of F(S + T) - F(S), the
cost of u, or of u and v, next. Q_uu is then negative if removing u repairs damage of S.

This departs from the paper, whose edges are those of H.
"""

from __future__ import annotations

import numpy as np

from .shifts import Shifts

PAIR_KL = "pair KL"  # the `surrogate` in the provenance of such a matrix

_AT_ONCE = 8
_RANGE = (1e-38, 1e38)  # of E[r_u r_v] at a position, so that the product of eight is a float64


def pair_kl_sums(shifts: Shifts, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum the pair KL over the positions of each group.

    Args:
        shifts: of M units at S positions.
        groups: G.

    Returns:
        [G, M, M] float64, sums of Q over positions, nats; [G] int64, positions; [G, M] float64,
        sums of F({u}).
    """
    units, start, teacher = len(shifts.values), shifts.start, shifts.teacher
    sums = np.zeros((groups, units, units))
    risks = np.zeros((groups, units))
    for group in range(groups):
        places = np.flatnonzero(shifts.groups == group)
        for few in np.array_split(places, -(-len(places) // _AT_ONCE) or 1):
            product = np.ones((units, units))
            for place in few:
                p, p_0 = start[place], None if teacher is None else teacher[place]
                ratios, single = likelihood_ratios(shifts.values[:, place], p, p_0)
                roots = ratios * np.sqrt(p)
                product *= np.clip(roots @ roots.T, *_RANGE)
                risks[group] += single
            sums[group] += np.log(product)  # one logarithm for several positions: it is what takes
        np.fill_diagonal(sums[group], 2 * risks[group])
    return sums, np.bincount(shifts.groups, minlength=groups).astype(np.int64), risks


def likelihood_ratios(
    values: np.ndarray, probabilities: np.ndarray, teacher: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """p_u / p [..., K] float64 of each unit on the tokens of the sketch, and its KL [...], nats.

    Args:
        values: d [..., K].
        probabilities: p [K], or [..., K] to go with the shifts: where they start.
        teacher: p_0, in the same shape, if that is another; the KL is then KL(p_0 || p_u) less
            KL(p_0 || p), which may be negative.
    """
    d = values.astype(np.float64)
    p = _normalized(probabilities)
    d -= (p * d).sum(axis=-1, keepdims=True)  # E_{p_0}[d] = 0, so the KL is log E_{p_0}[exp d]
    top = d.max(axis=-1, keepdims=True)
    ratios = np.exp(d - top)
    mean = (p * ratios).sum(axis=-1, keepdims=True)
    # a KL is never negative; log of almost 1 may be, by rounding
    kl = np.maximum(np.log(mean[..., 0]) + top[..., 0], 0.0)
    if teacher is not None:
        kl = kl + ((p - _normalized(teacher)) * d).sum(axis=-1)
    return ratios / mean, kl


def _normalized(probabilities: np.ndarray) -> np.ndarray:
    p = probabilities.astype(np.float64)
    p /= p.sum(axis=-1, keepdims=True)  # float32 sums to 1 to seven digits only
    return p
