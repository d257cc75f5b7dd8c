"""The shifts of one sequence that a build keeps: at a few positions, on the likeliest tokens.

Algorithm 1 has them all for a moment, between the head and the Gram. A sketch of 1,024 positions
and 64 tokens takes 101 MB for the 768 units of an 8B model. curvature/shifts.py says what it is
for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .shifts import Shifts, share_of

_LARGEST = 60_000.0  # float16 ends at 65,504; exp() of such a shift is 0 or 1 alike


class SequenceSketch:
    """Takes the shifts of one sequence as `sequence_gram` measures them, batch by batch.

    Args:
        number: of the sequence.
        sequences: how many the calibration has.
        units: M.
        left: indices of the units that are measured; the others are removed, and have no shift.
        size: (positions, tokens) of the whole sketch. Each sequence has its share of the positions,
            spread over its own, and K tokens are at most its support.
        groups: G, of the build.
    """

    def __init__(
        self,
        number: int,
        sequences: int,
        units: int,
        left: Sequence[int],
        size: tuple[int, int],
        groups: int,
    ) -> None:
        self.number, self.group, self.units = number, number % groups, units
        self.share, self.tokens = share_of(number, sequences, size[0]), size[1]
        self.left = list(left)

    def take(self, rows: slice, shift: Tensor) -> None:
        """Keep the part of the shifts [B, P, r] of the units `left[rows]`."""
        here = shift[:, self.chosen].gather(-1, self.ids.expand(len(shift), -1, -1))
        self.values[self.left[rows]] = here.clamp_(-_LARGEST, _LARGEST).half()

    def begin(self, probabilities: Tensor, base: Tensor | None) -> None:
        """Choose positions and tokens by the teacher p_0 [P, r].

        `base` is the shift [P, r] of the units removed already.
        """
        (scored, support), device = probabilities.shape, probabilities.device
        count = min(self.share, scored)
        chosen = torch.linspace(0, scored - 1, count + 2, device=device)[1:-1].round().long()
        if count == scored:
            chosen = torch.arange(scored, device=device)
        top = probabilities[chosen].topk(min(self.tokens, support), dim=-1)
        self.ids = top.indices  # [S, K]
        self.probabilities = top.values / top.values.sum(dim=-1, keepdim=True)
        self.values = torch.zeros(self.units, *self.ids.shape, dtype=torch.float16, device=device)
        self.base = None if base is None else base[chosen].gather(-1, self.ids)
        self.chosen = chosen

    def kept(self) -> Shifts:
        """The shifts taken, on the CPU."""
        count = len(self.values[0])
        return Shifts(
            self.values.cpu().numpy(),
            self.probabilities.float().cpu().numpy(),
            np.full(count, self.number, np.int64),
            np.full(count, self.group, np.int64),
            None if self.base is None else self.base.float().cpu().numpy(),
        )
