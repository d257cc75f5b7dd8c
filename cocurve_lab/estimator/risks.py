"""What else a build hears while it makes H: the KL of each unit alone, and the dense model's loss.

The loss checks text, tokenizer and weights. No label enters H, so H of a model on a text that it
cannot read looks like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.errors import NumericalError
from ..models.architectures import Architecture
from ..models.identity import model_device
from ..models.logits import log_likelihood, pieces
from ..models.runtime import in_double
from ..models.units import Unit
from .fisher import centered_kl, kl_divergence
from .support import SupportHead, widen
from .teacher import AblationPass, Ablations

# Units removed alone ------------------------------------------------------------------------------


class Risks:
    """Sums the KL of each unit over the positions of a sequence, and measures the dense model.

    Args:
        units: M units.
        next_tokens: [P] int64, the tokens after the scored positions.
        full_kl: `FullVocabulary.kl`, for risks over the full vocabulary; None: on the support.

    Attributes:
        loss: of the dense model, nats per scored token.
        risk: [M] float64, the sum over positions of KL(p_0 || p_-u), in nats.
        sure_risk: [M] float64, the part of `risk` where the teacher is sure (`SURE`).
    """

    def __init__(
        self,
        units: Sequence[Unit],
        next_tokens: Tensor,
        full_kl: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.units, self.next_tokens, self.full_kl = units, next_tokens, full_kl

    def begin(self, start: AblationPass) -> None:
        replay = start.replay
        self.loss = mean_loss(replay.architecture, replay.scored_hidden[0], self.next_tokens)
        self.sure = start.teacher.sure
        self.risk, self.sure_risk = torch.zeros(2, len(self.units), dtype=torch.float64)

    def hear(self, batch: Ablations) -> None:
        start, rows = batch.start, batch.rows
        if self.full_kl is None:
            kl = centered_kl(start.teacher.probabilities, batch.shift)
        else:
            kl = self.full_kl(start.replay.scored_hidden, batch.hidden)
        kl = in_double(kl)
        self.risk[rows] = kl.sum(dim=-1).cpu()
        self.sure_risk[rows] = (kl * self.sure.to(kl.device)).sum(dim=-1).cpu()

    def sums(self, number: int) -> dict[str, Any]:
        """Return what the sequence adds to the arrays of `Groups`, by name."""
        unknown = (~torch.isfinite(self.risk)).nonzero()
        if len(unknown):
            raise NumericalError(
                f"removing {self.units[int(unknown[0])]} gives NaN or infinite logits on sequence "
                f"{number}. Half precision may overflow: try bfloat16 or float32."
            )
        return {
            "risks": self.risk.numpy(),
            "sure_positions": int(self.sure.sum()),
            "sure_risks": self.sure_risk.numpy(),
        }


class FullVocabulary:
    """KL(p_0 || p_-u) over the full vocabulary, from final hidden states.

    Args:
        architecture: the model. In half precision its head is copied once, to float32.
    """

    def __init__(self, architecture: Architecture) -> None:
        self.size = architecture.vocabulary
        # every token in order is a support that is the same at any positions
        every = torch.arange(self.size, device=model_device(architecture.model))[None]
        self.head = SupportHead(architecture, every)

    def kl(self, teacher: Tensor, ablated: Tensor) -> Tensor:
        """Return the KL [B, P] in nats; a few positions at a time, to bound the memory.

        Args:
            teacher: final hidden states of the teacher at the scored positions [1, P, d].
            ablated: those of B ablations [B, P, d].
        """
        found = []
        for part in pieces(ablated.shape[1], 4 * len(ablated) * self.size):
            z_0 = self.head(teacher[:, part])[0]
            shift = self.head(ablated[:, part]).sub_(z_0)
            found.append(kl_divergence(torch.softmax(z_0, dim=-1), shift))
        return torch.cat(found, dim=-1)


# The dense model's loss ---------------------------------------------------------------------------


@torch.no_grad()
def mean_loss(architecture: Architecture, hidden: Tensor, tokens: Tensor) -> float:
    """Return the nats per token of `tokens` [P] after final hidden states [P, d]."""
    total, tokens = 0.0, tokens.to(hidden.device)
    for part in pieces(len(tokens), 8 * architecture.vocabulary):
        logits = widen(architecture.logits(hidden[part]))
        total -= in_double(log_likelihood(logits, tokens[part])).sum().item()
    return total / len(tokens)


def told_fit(losses: Sequence[float], vocabulary: int) -> str:
    """Word the dense model's perplexity on rows; "" without losses, in nats per token of each."""
    if not losses:
        return ""
    rows = "the first row" if len(losses) == 1 else f"{len(losses)} rows"
    perplexity = math.exp(min(float(np.mean(losses)), 700))  # exp overflows above 709
    text = f"The dense model's perplexity on {rows} is {perplexity:,.4g}."
    if is_guess(losses, vocabulary):
        text += (
            f" That is near the {vocabulary:,} of a uniform guess: the model does not know this "
            "text. Check the tokenizer, the weights, and the token that begins a row (bos)."
        )
    return text


def is_guess(losses: Sequence[float], vocabulary: int) -> bool:
    """Whether the model predicts rows no better than a guess among a third of the vocabulary."""
    return bool(losses) and float(np.mean(losses)) > math.log(vocabulary / 3)
