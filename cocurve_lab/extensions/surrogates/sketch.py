"""Record a sketch of the shifts during a build: at a few positions, on the likeliest tokens.

Algorithm 1 holds all shifts of a batch between the head and the Gram. A sketch of 1,024 positions
and 64 tokens takes 101 MB for the 768 units of an 8B model. shifts.py explains its use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...base.schema import require_fields
from ...curvature.matrix import Curvature
from ...estimator.teacher import AblationPass, Ablations
from .shifts import SHIFTS, Shifts, share_of
from .sketched import with_shifts

_LARGEST = 60_000.0  # float16 ends at 65,504; exp() of such a shift is 0 or 1 alike


class Sketches:
    """The sketches of the sequences that a build has done.

    Args:
        size: (positions, tokens) of the whole sketch.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.size, self.parts = list(size), list[Shifts]()

    def add(self, part: Shifts) -> None:
        self.parts.append(part)

    def attached(self, curvature: Curvature) -> Curvature:
        """Return the H of a build with the sketch it kept."""
        return with_shifts(curvature, Shifts.joined(self.parts)) if self.parts else curvature

    def stored(self) -> dict[str, Any]:
        """Return the fields of a checkpoint."""
        return {"sketch": self.size, "shifts": Shifts.joined(self.parts).arrays()}

    def restore(self, content: dict[str, Any]) -> str:
        """Take over the sketch of a checkpoint, or return why it cannot."""
        found = content.get("sketch")
        if found == self.size:
            require_fields(content["shifts"], SHIFTS, inside="shifts")
            self.parts = [Shifts(**content["shifts"])]
            return ""
        return (
            f"no sketch of shifts: the checkpoint has {found or 'none'}, and {self.size} "
            "(positions, tokens) was asked for"
        )


class SequenceSketch:
    """A listener that records the shifts of one sequence as `sequence_gram` measures them.

    Args:
        number: of the sequence.
        sequences: number of sequences in the calibration.
        units: M.
        left: indices of the measured units; the others are removed, and have no shift.
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

    def begin(self, start: AblationPass) -> None:
        """Choose positions and tokens by the teacher p_0 [P, r]."""
        probabilities, base = start.teacher.probabilities, start.base
        (scored, support), device = probabilities.shape, probabilities.device
        self.chosen = torch.arange(scored, device=device)
        if self.share < scored:  # spread evenly, without the ends
            places = torch.linspace(0, scored - 1, self.share + 2, device=device)
            self.chosen = places[1:-1].round().long()
        top = probabilities[self.chosen].topk(min(self.tokens, support), dim=-1)
        self.ids = top.indices  # [S, K]
        self.probabilities = top.values / top.values.sum(dim=-1, keepdim=True)
        self.values = torch.zeros(self.units, *self.ids.shape, dtype=torch.float16, device=device)
        self.base = None if base is None else base[self.chosen].gather(-1, self.ids)

    def hear(self, batch: Ablations) -> None:
        """Keep a part of the shifts [B, P, r] of the units `left[batch.rows]`."""
        shift = batch.shift
        here = shift[:, self.chosen].gather(-1, self.ids.expand(len(shift), -1, -1))
        self.values[self.left[batch.rows]] = here.clamp_(-_LARGEST, _LARGEST).half()

    def kept(self) -> Shifts:
        """Return the shifts taken, on the CPU."""
        count = len(self.values[0])
        return Shifts(
            self.values.cpu().numpy(),
            self.probabilities.float().cpu().numpy(),
            np.full(count, self.number, np.int64),
            np.full(count, self.group, np.int64),
            None if self.base is None else self.base.float().cpu().numpy(),
        )
