"""Algorithm 1 on one sequence: ablate every unit, whiten its logit shifts, take their Gram.

`sequence_gram` is the algorithm. Below it: teacher.py (the teacher pass), fisher.py (centring, the
KL), replay.py (an ablation runs only what follows the unit) and batches.py (how many run together).
Around it: build.py (one sequence after the other, and the sum over all). The last
lines of Algorithm 1 are in curvature/: `Groups.matrix` divides by the number of positions, and
`Curvature` makes H symmetric and checks its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..models.architectures import Architecture
from ..models.runtime import sums_on
from ..models.units import Unit
from .batches import Batches
from .teacher import AblationPass, Ablations, begin

_GRAM_COLUMNS = 1 << 14  # float32 products are summed over this many features, then in float64


@runtime_checkable
class Listener(Protocol):
    """Measures something besides the Gram matrix while Algorithm 1 runs, such as each unit's KL."""

    def begin(self, start: AblationPass) -> object:
        """Start with a sequence, before its first ablation."""

    def hear(self, batch: Ablations) -> object:
        """Take a batch; its rows come again if a listener or the Gram ran out of memory."""


def sequence_gram(
    architecture: Architecture,
    top_r: int,
    units: Sequence[Unit],
    calibration: CalibrationSet,
    number: int,
    batches: Batches,
    listeners: Sequence[Listener] = (),
) -> np.ndarray:
    """Run Algorithm 1 on sequence x = `number`, and return its share of H.

    Args:
        architecture: the model f_0, inside `models.runtime.measuring`: in eval mode, no gradients.
        top_r: r, the size of the teacher's support V_r(x, t).
        units: U, M units; each is masked alone.
        calibration: C, with the scored positions T(x) of each sequence.
        number: which sequence.
        batches: how many units of one layer run together.
        listeners: what else hears of each batch of ablations.

    Returns:
        [M, M] float64, the sum over T(x) of the products of D_u and D_v. Summed over all sequences
        and divided by the total number of positions (the P of eq. gram) it is H.
    """
    start = begin(architecture, top_r, calibration, number)  # the teacher pass
    p_0 = start.teacher.probabilities  # [P, r] on V_r(x, t), renormalized
    D = p_0.new_empty(len(units), p_0.numel())  # whitened shifts of eq. (gram), a row per unit
    for listener in listeners:
        listener.begin(start)
    # for each unit u, mask only u; those of a layer run together: hidden is [B, P, d]
    for rows, hidden in batches.of(units, start.replay.ride):
        with batches.halved_when_too_large():
            batch = start.ablations(rows, hidden)  # z_-u - z_0 on the support, centred
            for listener in listeners:
                listener.hear(batch)
            # eq. (huv): sqrt(p_0) (dz_u - E_{p_0}[dz_u]). The dot products of such rows are Fisher
            # inner products, a^T (diag(p_0) - p_0 p_0^T) b (Proposition gram)
            torch.mul(batch.shift, p_0.sqrt(), out=D[rows].view(batch.shift.shape))
    return gram_matrix(D)


def gram_matrix(features: Tensor) -> np.ndarray:
    """Return features times their transpose [M, M]: float32 products, float64 between chunks."""
    place = sums_on(features.device)
    gram = torch.zeros(len(features), len(features), dtype=torch.float64, device=place)
    for chunk in features.split(_GRAM_COLUMNS, dim=1):
        gram += (chunk @ chunk.T).to(place)
    return gram.cpu().numpy()
