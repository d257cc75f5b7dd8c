"""The teacher of a sequence on its top-r support, and the pass that its ablations start from.

In the paper the two are one. In a build where a set S of units is removed already
(`BuildOptions.removed`) ablations start from the model without S, and the teacher stays the whole
model: with d_u = z_{S+u} - z_S and p_S = softmax(z_S), removing more units T adds to KL(p_0 || p_S)

    sum of E_{p_S - p_0}[d_u] over T + 1/2 Var_{p_S}[sum of d_u over T] + higher orders.

The first term is new, because p_S is no minimum of the KL. A unit is in T or it is not, so the term
can stand on the diagonal of H, doubled: 1/2 s^T H s has it because s_u^2 = s_u.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import NumericalError
from ..calibration import CalibrationSet
from ..curvature.saturation import SURE
from ..models.architectures import Architecture
from ..models.families import Kind
from ..models.identity import model_device
from ..models.masking import column_scales, scaled
from ..models.runtime import in_double, sums_on
from ..models.units import Unit
from .replay import Batched, Replay, SupportHead, top_support


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


@dataclass(frozen=True)
class Start:
    """Where the ablations of a sequence start: the teacher, or the model without some units.

    Attributes:
        teacher: the whole model on its support.
        replay: the pass that ablations restart in.
        logits, probabilities: z_S and p_S [P, r] on the teacher's support; z_0 and p_0 if nothing
            is removed.
    """

    teacher: Teacher
    replay: Replay
    logits: Tensor
    probabilities: Tensor

    @property
    def is_teacher(self) -> bool:
        """Whether nothing is removed."""
        return self.logits is self.teacher.logits

    @property
    def base(self) -> Tensor | None:
        """z_S - z_0 [P, r]; None if nothing is removed."""
        return None if self.is_teacher else self.logits - self.teacher.logits

    def first_order(self, shift: Tensor) -> Tensor:
        """E_{p_S - p_0}[d] [B, P] float64 of shifts d [B, P, r]; exactly 0 if nothing is removed.

        It is also KL(p_0 || p_u) - KL(p_0 || p_S) less KL(p_S || p_u), to all orders.
        """
        if self.is_teacher:
            place = sums_on(shift.device)
            return torch.zeros(shift.shape[:-1], dtype=torch.float64, device=place)
        return in_double(((self.probabilities - self.teacher.probabilities) * shift).sum(dim=-1))


@contextmanager
def started(
    architecture: Architecture,
    ids: Tensor,
    positions: Tensor,
    number: int,
    top_r: int,
    temperature: float = 1.0,
    removed: Sequence[Unit] = (),
    leftovers: Mapping[tuple[int, Kind], Tensor] | None = None,
    along: Batched = (),
) -> Iterator[Start]:
    """Run the teacher on a sequence, and mask `removed` inside the block.

    Args:
        architecture, ids, positions, leftovers, along: as for `Replay`.
        number, top_r, temperature: as for `Teacher`.
        removed: units masked throughout.

    Raises:
        NumericalError: NaN or infinite logits.
    """
    # ablations, and so what rides along, start from the model without `removed`
    replay = Replay(architecture, ids, positions, leftovers, () if removed else along)
    teacher = Teacher(architecture, replay.scored_hidden, top_r, number, temperature)
    if not removed:
        yield Start(teacher, replay, teacher.logits, teacher.probabilities)
        return
    with scaled(architecture, column_scales(architecture, removed)):
        replay = Replay(architecture, ids, positions, along=along)
        logits = teacher.head(replay.scored_hidden)[0]
        yield Start(teacher, replay, logits, torch.softmax(logits, dim=-1))


def row(
    architecture: Architecture, calibration: CalibrationSet, number: int
) -> tuple[Tensor, Tensor]:
    """Token ids [1, T] and scored positions [P] of a sequence, on the model's device."""
    device = model_device(architecture.model)
    ids = calibration.input_ids[number : number + 1]
    return ids.to(device), calibration.scored[number].to(device)
