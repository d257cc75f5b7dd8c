"""The teacher pass over a sequence: f_0 on its top-r support, where all its ablations start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..curvature.groups import SURE
from ..models.architectures import Architecture
from ..models.identity import model_device
from ..models.logits import require_numbers
from .fisher import center
from .replay import Replay
from .support import SupportHead, top_support


class Teacher:
    """The unpruned model on its own top-r support: one coordinate system for all units (Alg. 1).

    Args:
        hidden: final hidden states of the model at the scored positions [1, P, d].
        top_r: r, at most the vocabulary.
        number: of the sequence, for messages.

    Attributes:
        head: the language-model head on the support.
        logits: z_0 [P, r], float32 (float64 of a float64 model).
        probabilities: p_0 [P, r], which sum to 1 over the support.
        sure: [P] bool, whether the first choice has more than `SURE`.
    """

    @torch.no_grad()
    def __init__(self, architecture: Architecture, hidden: Tensor, top_r: int, number: int) -> None:
        self.head = SupportHead(architecture, top_support(architecture.head, hidden, top_r))
        self.logits = self.head(hidden)[0]
        require_numbers(bool(torch.isfinite(self.logits).all()), f"sequence {number}")
        self.probabilities = torch.softmax(self.logits, dim=-1)
        self.sure = self.probabilities.amax(dim=-1) > SURE


@dataclass(frozen=True)
class AblationPass:
    """The teacher pass over a sequence, ready for ablations.

    Attributes:
        teacher: z_0 and p_0 on the support V_r(x, t).
        replay: the pass, which ablations restart in.
    """

    teacher: Teacher
    replay: Replay

    def ablations(self, rows: slice, hidden: Tensor) -> Ablations:
        """Return a batch of ablations from their final hidden states [B, P, d]."""
        z_u = self.teacher.head(hidden)  # z_-u [B, P, r]
        # dz_u - E_{p_0}[dz_u] with the sign that the KL needs. It is the opposite of eq. (huv) for
        # all units alike, so no product of two of them sees it
        shift = center(self.teacher.probabilities, z_u.sub_(self.teacher.logits))
        return Ablations(self, rows, hidden, shift)


@dataclass(frozen=True)
class Ablations:
    """A batch of B ablations, as measured.

    Attributes:
        start: the pass they start from.
        rows: which of the units they are.
        hidden: final hidden states at the scored positions [B, P, d].
        shift: centred logit shifts [B, P, r], of mean 0 under p_0.
    """

    start: AblationPass
    rows: slice
    hidden: Tensor
    shift: Tensor


def begin(
    architecture: Architecture, top_r: int, calibration: CalibrationSet, number: int
) -> AblationPass:
    """Run the teacher f_0 on a sequence, inside `models.runtime.measuring`."""
    ids, positions = row(architecture, calibration, number)
    replay = Replay(architecture, ids, positions)
    return AblationPass(Teacher(architecture, replay.scored_hidden, top_r, number), replay)


def row(
    architecture: Architecture, calibration: CalibrationSet, number: int
) -> tuple[Tensor, Tensor]:
    """Return token ids [1, T] and scored positions [P] of a sequence, on the model's device."""
    device = model_device(architecture.model)
    ids = calibration.input_ids[number : number + 1]
    return ids.to(device), calibration.scored[number].to(device)
