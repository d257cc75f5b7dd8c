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
from ..models.identity import model_device
from ..models.masking import column_scales, scaled
from ..models.runtime import in_double, sums_on
from ..models.unit import Kind
from ..models.units import Unit
from .fisher import center
from .replay import Batched, Replay
from .support import SupportHead, top_support


class Teacher:
    """The unpruned model on its own top-r support: one coordinate system for all units (Alg. 1).

    Args:
        hidden: final hidden states of the model at the scored positions [1, P, d].
        top_r: r, at most the vocabulary.
        number: of the sequence, for messages.
        temperature: by which logits are divided.

    Attributes:
        head: the language-model head on the support.
        logits: z_0 [P, r], float32 (float64 of a float64 model).
        probabilities: p_0 [P, r], which sum to 1 over the support.
        sure: [P] bool, whether the first choice has more than `saturation.SURE`.
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
        self.head = SupportHead(architecture, support, temperature)
        self.logits = self.head(hidden)[0]
        if not bool(torch.isfinite(self.logits).all()):
            raise NumericalError(
                f"the model gives NaN or infinite logits on sequence {number}. Check the weights; "
                "half precision may overflow: try bfloat16 or float32."
            )
        self.probabilities = torch.softmax(self.logits, dim=-1)
        self.sure = self.probabilities.amax(dim=-1) > SURE


@dataclass(frozen=True)
class AblationPass:
    """The pass that ablations of a sequence start from: the teacher's, or one without some units.

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
    def base(self) -> Tensor | None:
        """z_S - z_0 [P, r]; None if nothing is removed."""
        return None if self.logits is self.teacher.logits else self.logits - self.teacher.logits

    def ablations(self, rows: slice, hidden: Tensor) -> Ablations:
        """Return a batch of ablations from their final hidden states [B, P, d]."""
        z_u = self.teacher.head(hidden)  # z_-u [B, P, r]
        # dz_u - E_{p_0}[dz_u] with the sign that the KL needs. It is the opposite of eq. (huv) for
        # all units alike, so no product of two of them sees it
        shift = center(self.probabilities, z_u.sub_(self.logits))
        return Ablations(self, rows, hidden, shift, self._first_order(shift))

    def _first_order(self, shift: Tensor) -> Tensor:
        if self.logits is self.teacher.logits:  # a minimum of the KL
            place = sums_on(shift.device)
            return torch.zeros(shift.shape[:-1], dtype=torch.float64, device=place)
        return in_double(((self.probabilities - self.teacher.probabilities) * shift).sum(dim=-1))


@dataclass(frozen=True)
class Ablations:
    """A batch of B ablations, as measured.

    Attributes:
        start: the pass they start from.
        rows: which of the ablated units they are.
        hidden: final hidden states at the scored positions [B, P, d].
        shift: centred logit shifts [B, P, r], of mean 0 under p_S.
        first_order: E_{p_S - p_0}[d] [B, P] float64, exactly 0 if nothing is removed. It is also
            KL(p_0 || p_u) - KL(p_0 || p_S) less KL(p_S || p_u), to all orders.
    """

    start: AblationPass
    rows: slice
    hidden: Tensor
    shift: Tensor
    first_order: Tensor


@dataclass(frozen=True)
class TeacherSetup:
    """The model f_0 and its support, and how a build departs from the paper.

    Attributes:
        architecture: the model, inside `models.runtime.measuring`: in eval mode, no gradients.
        top_r: r, the size of the support V_r(x, t).
        temperature: by which logits are divided; 1 is the paper's.
        removed: units S that are gone already; the paper has none.
        refit_scales: what an ablation takes from each block's columns; None: the unit's own, as in
            the paper. Not with `removed`.
    """

    architecture: Architecture
    top_r: int
    temperature: float = 1.0
    removed: Sequence[Unit] = ()
    refit_scales: Mapping[tuple[int, Kind], Tensor] | None = None

    @contextmanager
    def begin(
        self, calibration: CalibrationSet, number: int, along: Batched = ()
    ) -> Iterator[AblationPass]:
        """Run the teacher on a sequence, and mask `removed` inside the block.

        The batches of ablations in `along` may ride along in the pass (`Replay`).
        """
        inputs = (self.architecture, *row(self.architecture, calibration, number))
        # ablations, and so what rides along, start from the model without `removed`
        replay = Replay(*inputs, self.refit_scales, () if self.removed else along)
        hidden = replay.scored_hidden
        teacher = Teacher(self.architecture, hidden, self.top_r, number, self.temperature)
        if not self.removed:
            yield AblationPass(teacher, replay, teacher.logits, teacher.probabilities)
            return
        with scaled(self.architecture, column_scales(self.architecture, self.removed)):
            replay = Replay(*inputs, along=along)
            logits = teacher.head(replay.scored_hidden)[0]
            yield AblationPass(teacher, replay, logits, torch.softmax(logits, dim=-1))


def row(
    architecture: Architecture, calibration: CalibrationSet, number: int
) -> tuple[Tensor, Tensor]:
    """Return token ids [1, T] and scored positions [P] of a sequence, on the model's device."""
    device = model_device(architecture.model)
    ids = calibration.input_ids[number : number + 1]
    return ids.to(device), calibration.scored[number].to(device)
