"""The measured KL of removing each unit alone, which a build hears of while it makes H."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..base.errors import NumericalError
from ..models.architectures import Architecture
from ..models.identity import model_device
from ..models.runtime import in_double
from ..models.units import Unit
from .batches import LOGIT_BYTES
from .fisher import centered_kl, kl_divergence
from .replay import SupportHead
from .teacher import AblationPass, Ablations


class UnitRisks:
    """Sums the KL of each unit over the positions of a sequence, and over those that are sure.

    Args:
        units: M units.
        full_kl: `FullVocabulary.kl`, for risks over the full vocabulary; None: on the support.

    Attributes:
        risk: [M] float64, the sum over positions of KL(p_0 || p_-u) - KL(p_0 || p_S), in nats.
        sure_risk: [M] float64, the part of `risk` where the teacher is sure (`saturation.SURE`).
    """

    def __init__(
        self, units: Sequence[Unit], full_kl: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        self.units, self.full_kl = units, full_kl

    def begin(self, start: AblationPass) -> None:
        self.sure = start.teacher.sure
        self.risk, self.sure_risk = torch.zeros(2, len(self.units), dtype=torch.float64)

    def hear(self, batch: Ablations) -> None:
        start, rows = batch.start, batch.rows
        if self.full_kl is None:
            kl = centered_kl(start.probabilities, batch.shift)
        else:
            kl = self.full_kl(start.replay.scored_hidden, batch.hidden)
        kl = in_double(kl) + batch.first_order
        self.risk[rows] = kl.sum(dim=-1).cpu()
        self.sure_risk[rows] = (kl * self.sure.to(kl.device)).sum(dim=-1).cpu()

    def of(self, number: int) -> tuple[np.ndarray, int, np.ndarray]:
        """Return `risk`, the number of sure positions, and `sure_risk` of a finished sequence."""
        unknown = (~torch.isfinite(self.risk)).nonzero()
        if len(unknown):
            raise NumericalError(
                f"removing {self.units[int(unknown[0])]} gives NaN or infinite logits on sequence "
                f"{number}. Half precision may overflow: try bfloat16 or float32."
            )
        return self.risk.numpy(), int(self.sure.sum()), self.sure_risk.numpy()


class FullVocabulary:
    """KL(p_0 || p_-u) over the full vocabulary, from final hidden states.

    Args:
        architecture: the model. In half precision its head is copied once, to float32.
        temperature: by which all logits are divided.
    """

    def __init__(self, architecture: Architecture, temperature: float = 1.0) -> None:
        self.size = architecture.vocabulary
        # every token in order is a support that is the same at any positions
        every = torch.arange(self.size, device=model_device(architecture.model))[None]
        self.head = SupportHead(architecture, every, temperature)

    def kl(self, teacher: Tensor, ablated: Tensor) -> Tensor:
        """Return the KL [B, P] in nats; a few positions at a time, to bound the memory.

        Args:
            teacher: final hidden states of the teacher at the scored positions [1, P, d].
            ablated: those of B ablations [B, P, d].
        """
        step = max(1, LOGIT_BYTES // (4 * len(ablated) * self.size))
        found = []
        for part in (slice(start, start + step) for start in range(0, ablated.shape[1], step)):
            z_0 = self.head(teacher[:, part])[0]
            shift = self.head(ablated[:, part]).sub_(z_0)
            found.append(kl_divergence(torch.softmax(z_0, dim=-1), shift))
        return torch.cat(found, dim=-1)
