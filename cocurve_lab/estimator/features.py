"""Algorithm 1 on one sequence: ablate every unit, whiten its logit shifts, take their Gram.

`sequence_gram` is the algorithm. It stands on fisher.py (centring, the KL), replay.py (an ablation
runs only what follows the unit) and batches.py (how many run together). Around it stand worker.py
(one sequence after the other), sums.py and build.py (the sum over sequences, checkpoints). The last
lines of Algorithm 1 are in curvature/matrix.py: `Curvature.from_groups` divides by the number of
positions, and `Curvature` makes H symmetric and checks its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..curvature.saturation import SURE
from ..errors import NumericalError
from ..models.architectures import Architecture
from ..models.identity import model_device
from ..models.masking import column_scales, scaled
from ..models.units import Unit
from .batches import Batches
from .fisher import center, centered_kl
from .replay import Replay, SupportHead, top_support
from .sketch import SequenceSketch

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
        removed: units S that are gone already, none of them in `units`; the paper has none. The
            teacher stays the whole model. All below is then about what goes next.

    Returns:
        gram: [M, M] float64, the sum over T(x) of the products of D_u and D_v. Summed over all
            sequences and divided by the total number of positions (the P of eq. gram) it is H.
            With `removed`, the diagonal also has twice the first-order term, E_{p_S - p_0}[dz_u]:
            1/2 s^T H s is then what s adds to the KL, to second order, because s_u^2 = s_u.
        risk: [M] float64, the sum over T(x) of KL(p_0 || p_-u), in nats; less KL(p_0 || p_S).
        sure: the number of positions where the teacher is sure, and the part of `risk` there [M].

    Raises:
        InputError: one ablation alone does not fit in memory.
        NumericalError: NaN or infinite logits.
    """
    ids, positions = row(architecture, calibration, number)
    replay = Replay(architecture, ids, positions)  # the teacher pass
    teacher = Teacher(architecture, replay.scored_hidden, top_r, number, temperature)
    z_0, p_0 = teacher.logits, teacher.probabilities  # [P, r] on V_r(x, t), p_0 renormalised
    D = z_0.new_empty(len(units), z_0.numel())  # whitened shifts of eq. (gram), a row per unit
    risk = torch.zeros(len(units), dtype=torch.float64)
    slope, sure_risk = torch.zeros_like(risk), torch.zeros_like(risk)
    with scaled(architecture, column_scales(architecture, removed)):
        z, p = z_0, p_0
        if removed:  # ablations start from z_S; with none removed this is the teacher
            replay = Replay(architecture, ids, positions)
            z = teacher.head(replay.scored_hidden)[0]
            p = torch.softmax(z, dim=-1)
        if sketch is not None:
            sketch.begin(p_0, z - z_0 if removed else None)
        for rows, batch in batches.of(units):  # for each unit u; those of a layer run together
            with batches.halved_when_too_large():
                hidden = replay.ablated_hidden(batch)  # mask only u; [B, P, d]
                z_u = teacher.head(hidden)  # z_-u [B, P, r]
                # dz_u - E_p[dz_u] with the sign that the KL needs. It is the opposite of eq. (huv)
                # for all units alike, so no product of two of them sees it
                shift = center(p, z_u.sub_(z))
                if sketch is not None:
                    sketch.take(rows, shift)
                kl = full_kl(replay.scored_hidden, hidden) if full_kl else centered_kl(p, shift)
                kl = kl.double()  # [B, P]
                if removed:  # KL(p_0 || p_u) - KL(p_0 || p) = KL(p || p_u) + E_{p - p_0}[dz_u]
                    first = ((p - p_0) * shift).sum(dim=-1).double()
                    slope[rows] = first.sum(dim=-1).cpu()
                    kl += first
                risk[rows] = kl.sum(dim=-1).cpu()
                sure_risk[rows] = (kl * teacher.sure).sum(dim=-1).cpu()
                torch.mul(shift, p.sqrt(), out=D[rows].view(shift.shape))  # eq. (huv)
    unknown = (~torch.isfinite(risk)).nonzero()
    if len(unknown):
        raise NumericalError(
            f"removing {units[int(unknown[0])]} gives NaN or infinite logits on sequence {number}. "
            "Half precision may overflow: try bfloat16 or float32."
        )
    gram = gram_matrix(D)
    gram[np.diag_indices_from(gram)] += 2 * slope.numpy()
    return gram, risk.numpy(), (int(teacher.sure.sum()), sure_risk.numpy())


class Teacher:
    """The unpruned model on its own top-r support: one coordinate system for all units (Alg. 1).

    Args:
        architecture: the model.
        hidden: its final hidden states at the scored positions [1, P, d].
        top_r: r, at most the vocabulary.
        number: of the sequence, for messages.
        temperature: by which logits are divided.

    Attributes:
        head: the language-model head on the support.
        logits: z_0 [P, r], float32 (float64 of a float64 model).
        probabilities: p_0 [P, r], which sum to 1 over the support.
        sure: [P] bool, whether the first choice has more than `saturation.SURE`.

    Raises:
        NumericalError: NaN or infinite logits.
    """

    @torch.no_grad()  # the teacher is held constant, also where ablations are differentiated
    def __init__(
        self,
        architecture: Architecture,
        hidden: Tensor,
        top_r: int,
        number: int,
        temperature: float = 1.0,
    ) -> None:
        support = top_support(architecture.head, hidden, top_r)
        self.head = SupportHead(architecture.head, support, architecture.logit_cap, temperature)
        self.logits = self.head(hidden)[0]
        if not bool(torch.isfinite(self.logits).all()):
            raise NumericalError(
                f"the model gives NaN or infinite logits on sequence {number}. Check the weights; "
                "half precision may overflow: try bfloat16 or float32."
            )
        self.probabilities = torch.softmax(self.logits, dim=-1)
        self.sure = self.probabilities.amax(dim=-1) > SURE


def row(
    architecture: Architecture, calibration: CalibrationSet, number: int
) -> tuple[Tensor, Tensor]:
    """Token ids [1, T] and scored positions [P] of a sequence, on the model's device."""
    device = model_device(architecture.model)
    ids = calibration.input_ids[number : number + 1]
    return ids.to(device), calibration.scored[number].to(device)


def gram_matrix(features: Tensor) -> np.ndarray:
    """Features times their transpose [M, M] float64: float32 products, float64 between chunks."""
    gram = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for chunk in features.split(_GRAM_COLUMNS, dim=1):
        gram += chunk @ chunk.T
    return gram.cpu().numpy()
