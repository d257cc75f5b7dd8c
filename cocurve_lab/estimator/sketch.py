"""The shifts of one sequence that a build keeps: at a few positions, on the likeliest tokens.

Algorithm 1 has them all for a moment, between the head and the Gram. A sketch of 1,024 positions
and 64 tokens takes 101 MB for the 768 units of an 8B model. curvature/shifts.py says what it is
for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..curvature.shifts import Shifts, share_of

_LARGEST = 60_000.0  # float16 ends at 65,504; exp() of such a shift is 0 or 1 alike


class SequenceSketch:
    """Takes the shifts of one sequence as `sequence_gram` measures them, batch by batch.

    Args:
        number: of the sequence.
        sequences: how many the calibration has.
        positions: of the whole sketch; each sequence has its share, spread over its positions.
        tokens: K, at most the support.
        groups: G, of the build.
    """

    def __init__(
        self, number: int, sequences: int, positions: int, tokens: int, groups: int
    ) -> None:
        self.number, self.group = number, number % groups
        self.share, self.tokens = share_of(number, sequences, positions), tokens

    def begin(self, probabilities: Tensor, units: int) -> None:
        """Choose positions and tokens by the teacher p_0 [P, r]."""
        scored, support = probabilities.shape
        count, device = min(self.share, scored), probabilities.device
        spread = torch.linspace(0, scored - 1, count + 2, device=device)[1:-1].round().long()
        self.chosen = spread if count < scored else torch.arange(scored, device=device)
        top = probabilities[self.chosen].topk(min(self.tokens, support), dim=-1)
        self.ids = top.indices  # [S, K]
        self.probabilities = top.values / top.values.sum(dim=-1, keepdim=True)
        self.values = torch.empty(units, *self.ids.shape, dtype=torch.float16, device=device)

    def take(self, rows: slice, shift: Tensor) -> None:
        """Keep the part of the shifts [B, P, r] of the units `rows`, centred or not."""
        here = shift[:, self.chosen].gather(-1, self.ids.expand(len(shift), -1, -1))
        self.values[rows] = here.clamp_(-_LARGEST, _LARGEST).half()

    def kept(self) -> Shifts:
        """The shifts taken, on the CPU."""
        count = len(self.chosen)
        return Shifts(
            self.values.cpu().numpy(),
            self.probabilities.float().cpu().numpy(),
            np.full(count, self.number, np.int64),
            np.full(count, self.group, np.int64),
        )
