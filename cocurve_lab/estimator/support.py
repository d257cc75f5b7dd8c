"""The language-model head on the teacher's support, and which tokens that is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.architectures import Architecture

# up to this many times the support, the whole head is cheaper than gathering rows of it
_WHOLE_HEAD_FACTOR = 8
GATHER_BYTES = 256 << 20  # bytes of head rows gathered at a time


class SupportHead:
    """The language-model head on the teacher's top-r support, in float32 (float64 models: float64).

    Its rows are gathered once if they fit in 256 MB. Otherwise the whole head runs if it is not
    much larger than the support. If it is, the rows are gathered piece by piece in each call.

    Args:
        architecture: the model, whose logits are the head's own z, scaled and capped if it says so.
        support: [P, r] int64 token ids, the same for every unit (Alg. 1: one coordinate system).
    """

    def __init__(self, architecture: Architecture, support: Tensor) -> None:
        self.weight: Tensor = architecture.head.weight
        self.bias = architecture.head.bias
        self.settled = architecture.settled
        self.support = support = support.to(self.weight.device)
        vocabulary, size = self.weight.shape
        self.identity = support.shape[1] == vocabulary  # then the support is every token, in order
        self.columns: Tensor | None = None  # [P, d, r]
        if not self.identity and support.numel() * size * 4 <= GATHER_BYTES:
            self.columns = self._gathered(support)
        self.whole = self.columns is None and vocabulary <= _WHOLE_HEAD_FACTOR * support.shape[1]
        if self.whole:
            self.weight = widen(self.weight)

    def _gathered(self, support: Tensor) -> Tensor:
        """The head's rows of a support [P, r] as columns [P, d, r], float32 or better."""
        return widen(F.embedding(support, self.weight)).transpose(1, 2)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the logits [B, P, r], float32 or better, of hidden states [B, P, d]."""
        return self.settled(self._linear(widen(hidden).to(self.weight.device)).to(hidden.device))

    def _linear(self, hidden: Tensor) -> Tensor:
        """Compute the head's own z [B, P, r], before a scale and a cap, on its device."""
        if self.whole:
            bias = None if self.bias is None else widen(self.bias)
            logits = F.linear(hidden, self.weight, bias)
            if self.identity:
                return logits
            return logits.gather(-1, self.support.expand(len(hidden), -1, -1))
        positions, top = self.support.shape
        step = positions  # where the rows are not kept, they are gathered for a few positions
        if self.columns is None:
            step = max(1, GATHER_BYTES // (top * hidden.shape[-1] * 4))
        parts = []
        for support, part in zip(self.support.split(step), hidden.split(step, dim=1), strict=True):
            columns = self._gathered(support) if self.columns is None else self.columns
            logits = torch.bmm(part.transpose(0, 1), columns).transpose(0, 1)
            parts.append(logits if self.bias is None else logits + widen(self.bias[support]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def top_support(head: nn.Linear, hidden: Tensor, top_r: int) -> Tensor:
    """Find the token ids [P, r] of the teacher's r largest logits; all tokens in order if r = V.

    The logits are in the model's own dtype. In half precision near-ties at place r may fall either
    way, which decides between two equally unlikely tokens. `hidden` is the teacher's [1, P, d].
    """
    vocabulary = head.weight.shape[0]
    if top_r == vocabulary:
        return torch.arange(vocabulary, device=hidden.device).expand(hidden.shape[1], -1)
    # a scale and a cap keep the order of logits, so the head's own z is sorted
    step = max(1, GATHER_BYTES // (vocabulary * 4))
    parts = [widen(head(part)).topk(top_r, dim=-1).indices for part in hidden[0].split(step)]
    return torch.cat(parts).to(hidden.device)


def widen(values: Tensor) -> Tensor:
    """Return half precision as float32, and float32 and float64 as they are."""
    return values if values.dtype == torch.float64 else values.float()
