"""The KL of ablations over the full vocabulary, for builds that are asked for it.

A build needs the logits of the teacher's top-r support alone. This runs the head on all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.architectures import Architecture
from ..models.identity import model_device
from .batches import LOGIT_BYTES
from .fisher import kl_divergence
from .replay import SupportHead


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
        self.head = SupportHead(architecture.head, every, architecture.logit_cap, temperature)

    def kl(self, teacher: Tensor, ablated: Tensor) -> Tensor:
        """KL [B, P] in nats, float32 or better; a few positions at a time, to bound the memory.

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
