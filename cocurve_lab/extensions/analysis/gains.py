"""Coupling-aware compensation: gains on kept FFN groups that make up for the pruned units.

The gains solve one small ridge system in blocks of H (Section "Edge-derived coupling-aware
compensation"). They need no text and no model. What H predicts for them is `compensated_risk`.
"""

from __future__ import annotations

import numpy as np

from ...base.arguments import as_float, require_type
from ...base.errors import InputError, NumericalError
from ...curvature.matrix import Curvature
from ...solver.selection import GAINED, Selection

# the values the paper tries: gamma / mean diagonal, and tau (appendix "Models and Configuration")
RIDGES, CLIPS = (0.05, 0.2, 1.0), (1.0, 2.0)


def solve_gains(
    curvature: Curvature,
    selection: Selection,
    ridge: float = 0.2,
    clip: float = 1.0,
) -> dict[int, float]:
    """Solve for gains of kept FFN groups that cancel the loss of the pruned units (eq. comp).

    Solves (H_KK + gamma I) alpha = H_KS 1_S, then gain_v = clip(1 + alpha_v, 1 - tau, 1 + tau). K
    is every kept FFN group, including those in protected layers and of kinds that may not be
    pruned. H is the full signed H, whatever lambda or edge structure made the plan.

    Sign: delta z_u = z_0 - z_{-u} is the contribution of u. Scaling a kept v by 1 + alpha_v adds
    alpha_v delta z_v, so a v that writes what the pruned units wrote gets a gain above 1.

    Where a model normalizes the write of a block (Gemma 2 and 3, OLMo2), the norm divides out a
    gain common to all kept groups of a layer.

    Args:
        selection: the plan; gains it already has are ignored.
        ridge: gamma >= 0, in units of the mean diagonal of H_KK. At 0 the solution of least norm is
            taken, which has no part in directions where H_KK vanishes.
        clip: tau > 0; inf leaves the gains as solved. With tau > 1 a gain may be negative.

    Returns:
        {unit index: gain} for every unit of K, ascending: all 1 if nothing is pruned, empty if no
        FFN group is kept. Pass it to `selection.with_gains`.
    """
    require_type(curvature, Curvature, "curvature")
    require_type(selection, Selection, "selection")
    ridge, clip = as_float(ridge, "ridge"), as_float(clip, "clip")
    if not 0 <= ridge < np.inf:
        raise InputError(f"ridge is {ridge}. Give a finite number of at least 0, such as 0.2.")
    if not clip > 0:
        raise InputError(f"clip is {clip}. Give 1 or 2, as the paper does, or inf for no clipping.")
    curvature.require_gram("the gains of eq. (comp)")
    selection.require_own_terms(curvature)
    kept = np.flatnonzero(np.isin(selection.units.kinds, GAINED) & ~selection.indicator)
    block = curvature.matrix[np.ix_(kept, kept)]
    lost = curvature.matrix[np.ix_(kept, np.flatnonzero(selection.indicator))].sum(axis=1)
    alpha = _solve_ridge(block, lost, ridge)
    gains = np.clip(1 + alpha, 1 - clip, 1 + clip)
    return dict(zip(kept.tolist(), gains.tolist(), strict=True))


def compensated_risk(curvature: Curvature, selection: Selection) -> float:
    """Predict the risk of a plan with its gains: 1/2 d^T H d, nats per token (eq. quadratic).

    d_u is the share of unit u's contribution that is removed: 1 for a pruned unit, 1 - gain =
    -alpha for a unit with a gain, 0 otherwise. Without gains this equals
    `selection.predicted_risk`, which never includes them.
    """
    curvature.units.require_same(selection.units, mine="the curvature", theirs="the selection")
    gone = selection.indicator.astype(np.float64)
    for unit, gain in selection.gains.items():
        gone[unit] = 1 - gain
    return 0.5 * float(gone @ curvature.matrix @ gone)


def _solve_ridge(block: np.ndarray, lost: np.ndarray, ridge: float) -> np.ndarray:
    """Solve (H_KK + gamma I) alpha = lost for alpha [K]; of least norm where that is singular."""
    if not len(lost):
        return np.zeros(0)
    # by eigenvalues, because H_KK may be singular: directions of eigenvalue 0 then get no part
    values, vectors = np.linalg.eigh(block)
    damped = values + ridge * np.diagonal(block).mean()
    rounding = 1e-12 * float(np.abs(damped).max())
    # a matrix stored in float32 has eigenvalues down to about -1e-7 of the largest; those count as
    # zero, and only clearly negative ones are an error
    if damped.min() < -1e-5 * float(np.abs(damped).max()):
        raise NumericalError(
            f"H_KK + gamma I has an eigenvalue of {damped.min():.3g} (largest {damped.max():.3g}), "
            "so the least squares of eq. (comp) has no minimum. Use the full H of a build, not an "
            "edge variant, or a larger ridge."
        )
    inverse = np.divide(1.0, damped, out=np.zeros_like(damped), where=damped > rounding)
    solution: np.ndarray = vectors @ (inverse * (vectors.T @ lost))
    return solution
