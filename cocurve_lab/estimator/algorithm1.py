"""Algorithm 1 on one sequence: ablate every unit, whiten its logit shifts, take their Gram.

`sequence_gram` is the algorithm. It stands on teacher.py (the teacher pass), fisher.py (centring,
the KL), replay.py (an ablation runs only what follows the unit) and batches.py (how many run
together). Around it stand worker.py
(one sequence after the other), sums.py and build.py (the sum over sequences, checkpoints). The last
lines of Algorithm 1 are in curvature/matrix.py: `Curvature.from_groups` divides by the number of
positions, and `Curvature` makes H symmetric and checks its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..base.errors import NumericalError
from ..calibration import CalibrationSet
from ..extensions.surrogates.sketch import SequenceSketch
from ..models.architectures import Architecture
from ..models.families import Kind
from ..models.runtime import in_double, sums_on
from ..models.units import Unit
from .batches import Batches
from .fisher import center, centered_kl
from .teacher import row, started

_GRAM_COLUMNS = 1 << 14  # float32 products are summed over this many features, then in float64


def sequence_gram(
    architecture: Architecture,
    units: Sequence[Unit],
    calibration: CalibrationSet,
    number: int,
    top_r: int,
    batches: Batches,
    full_kl: Callable[[Tensor, Tensor], Tensor] | None = None,
    sketch: SequenceSketch | None = None,
    temperature: float = 1.0,
    removed: Sequence[Unit] = (),
    leftovers: Mapping[tuple[int, Kind], Tensor] | None = None,
) -> tuple[np.ndarray, np.ndarray, tuple[int, np.ndarray]]:
    """Algorithm 1 for sequence x = `number`: its share of H, and the risk of each unit alone.

    Args:
        architecture: the model f_0, inside `models.runtime.measuring`: in eval mode, no gradients.
        units: U, M units; each is masked alone.
        calibration: C, with the scored positions T(x) of each sequence.
        number: which sequence.
        top_r: r, the size of the teacher's support V_r(x, t).
        batches: how many units of one layer run together.
        full_kl: `FullVocabulary.kl`, for risks over the full vocabulary; None: on the support.
        sketch: keeps some of the shifts, which are not part of the algorithm.
        temperature: by which logits are divided; 1 is the paper's.
        removed: units S that are gone already, none of them in `units`; the paper has none. Then
            shifts start from z_S and p_S (`teacher.Start`), not from the teacher.
        leftovers: what an ablation takes from each block's columns (refitted.py); None: the unit's
            own, as in the paper. Not with `removed`.

    Returns:
        gram: [M, M] float64, the sum over T(x) of the products of D_u and D_v. Summed over all
            sequences and divided by the total number of positions (the P of eq. gram) it is H.
            The diagonal also has twice the first-order term, which is 0 if none is removed.
        risk: [M] float64, the sum over T(x) of KL(p_0 || p_-u) - KL(p_0 || p_S), in nats.
        sure: the number of positions where the teacher is sure, and the part of `risk` there [M].

    Raises:
        InputError: one ablation alone does not fit in memory.
        NumericalError: NaN or infinite logits.
    """
    inputs = (architecture, *row(architecture, calibration, number), number, top_r)
    with started(*inputs, temperature, removed, leftovers, batches.first(units)) as start:
        replay, teacher = start.replay, start.teacher  # the teacher pass
        z_0, p_0 = start.logits, start.probabilities  # [P, r] on V_r(x, t), p_0 renormalized
        D = z_0.new_empty(len(units), z_0.numel())  # whitened shifts of eq. (gram), a row per unit
        slope, risk, sure_risk = torch.zeros(3, len(units), dtype=torch.float64)
        if sketch is not None:
            sketch.begin(teacher.probabilities, start.base)
        # for each unit u, mask only u; those of a layer run together: hidden is [B, P, d]
        for rows, hidden in batches.of(units, replay.ride):
            with batches.halved_when_too_large():
                z_u = teacher.head(hidden)  # z_-u [B, P, r]
                # dz_u - E_{p_0}[dz_u] with the sign that the KL needs. It is the opposite of eq.
                # (huv) for all units alike, so no product of two of them sees it
                shift = center(p_0, z_u.sub_(z_0))
                if sketch is not None:
                    sketch.take(rows, shift)
                kl = full_kl(replay.scored_hidden, hidden) if full_kl else centered_kl(p_0, shift)
                first = start.first_order(shift)  # [B, P]; 0 at the teacher, which is a minimum
                kl = in_double(kl) + first
                slope[rows], risk[rows] = first.sum(dim=-1).cpu(), kl.sum(dim=-1).cpu()
                sure_risk[rows] = (kl * teacher.sure.to(kl.device)).sum(dim=-1).cpu()
                torch.mul(shift, p_0.sqrt(), out=D[rows].view(shift.shape))  # eq. (huv)
    _require_finite(risk, units, number)
    gram = gram_matrix(D) + 2 * np.diag(slope)
    return gram, risk.numpy(), (int(teacher.sure.sum()), sure_risk.numpy())


def _require_finite(risk: Tensor, units: Sequence[Unit], number: int) -> None:
    unknown = (~torch.isfinite(risk)).nonzero()
    if len(unknown):
        raise NumericalError(
            f"removing {units[int(unknown[0])]} gives NaN or infinite logits on sequence {number}. "
            "Half precision may overflow: try bfloat16 or float32."
        )


def gram_matrix(features: Tensor) -> np.ndarray:
    """Features times their transpose [M, M] float64: float32 products, float64 between chunks."""
    place = sums_on(features.device)
    gram = torch.zeros(len(features), len(features), dtype=torch.float64, device=place)
    for chunk in features.split(_GRAM_COLUMNS, dim=1):
        gram += (chunk @ chunk.T).to(place)
    return gram.cpu().numpy()
