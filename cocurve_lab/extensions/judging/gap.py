"""Why predicted and measured risk diverge, position by position.

Two steps lead from H to a plan's KL, and each can fail. The KL is replaced by its second-order
expansion, a parabola, which is too low where the teacher is sure of its first choice. And the logit
shift of the plan is replaced by the sum of its units' own shifts, which breaks where much is
removed. Taking one step at a time gives four numbers at every position, with dz the shift of the
logits and F the Fisher metric diag(p_0) - p_0 p_0^T there:

                        shifts of the units, summed     true shift of the plan
    1/2 dz^T F dz       A, the prediction of H          C
    exact KL            B                               D, the measured risk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ...base.errors import InputError
from ...base.progress import Progress, open_bar
from ...calibration import CalibrationSet
from ...curvature.groups import SURE
from ...estimator.batches import Batches, Room
from ...estimator.fisher import center, centered_kl
from ...estimator.replay import Replay
from ...estimator.support import widen
from ...estimator.teacher import row
from ...measuring.results import Tabular, mean_and_error
from ...models.architectures import Architecture, describe
from ...models.logits import pieces, require_numbers
from ...models.masking import column_scales, resolve, scaled
from ...models.runtime import measuring, require_measurable
from ...models.units import Unit
from ...solver.selection import Selection

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

_BINS: dict[str, tuple[str, tuple[float, ...]]] = {  # by -> the values, and borders of the bins
    "p_max": ("p_max", (0.5, 0.9, SURE)),
    "shift": ("quadratic_of_sum", (1e-3, 1e-2, 1e-1, 1.0)),  # nats
}
_STEPS = ("quadratic_of_sum", "kl_of_sum", "quadratic_of_joint", "kl_of_joint")  # A, B, C, D
AGREE = 2.0  # within this factor, prediction and measurement are said to agree
_BATCH_TOKENS = 4096  # tokens per batch of ablations


@dataclass(frozen=True, eq=False, repr=False)
class RiskSplit(Tabular):
    """Predicted and measured risk of a plan at every position of a text; made by `split_risk`.

    All arrays are [sequences, positions] float64, over the full vocabulary, in nats; their means
    are nats per token.

    Attributes:
        selection: the plan.
        source: the source of the text.
        p_max: probability of the teacher's first choice, in [0, 1].
        quadratic_of_sum: A, 1/2 dz^T F dz of the summed shifts of the units, each removed alone.
            Its mean is 1/2 s^T H s of an H on these very rows and the full vocabulary.
        kl_of_sum: B, the exact KL of the summed shifts, over the full vocabulary.
        quadratic_of_joint: C, 1/2 dz^T F dz of the true shift of the plan.
        kl_of_joint: D, the KL of the plan, as `measure_plans` has it.
        units_predicted: sum over the units of 1/2 dz^T F dz of each alone: 1/2 sum of H_uu.
        units_measured: sum over the units of the KL of each alone.
    """

    selection: Selection
    source: str
    p_max: np.ndarray
    quadratic_of_sum: np.ndarray
    kl_of_sum: np.ndarray
    quadratic_of_joint: np.ndarray
    kl_of_joint: np.ndarray
    units_predicted: np.ndarray
    units_measured: np.ndarray

    @property
    def predicted(self) -> float:
        """The mean of A, nats per token: the prediction without its errors of text and support."""
        return float(self.quadratic_of_sum.mean())

    @property
    def measured(self) -> float:
        """The mean of D, nats per token."""
        return float(self.kl_of_joint.mean())

    @property
    def expansion(self) -> float:
        """The factor in measured / predicted that the expansion of the KL causes.

        The geometric mean of B / A and D / C: the step from parabola to KL, taken first and taken
        last. Times `adding_up` it is measured / predicted. NaN where a mean is 0.
        """
        a, b, c, d = self._means()
        return _root((b, d), (a, c))

    @property
    def adding_up(self) -> float:
        """The factor in measured / predicted that adding up the units' shifts causes.

        The geometric mean of C / A and D / B. NaN where a mean is 0.
        """
        a, b, c, d = self._means()
        return _root((c, d), (a, b))

    @property
    def cause(self) -> Literal["none", "expansion", "adding up", "both"]:
        """The step that fails on this text.

        "none" if measured and predicted differ by at most a factor of two. Else the step with at
        least two thirds of the deviation on a log scale, or "both".
        """
        steps = np.abs(np.log([self.expansion, self.adding_up]))
        if not np.isfinite(steps).all():
            return "none"
        if abs(np.log(self.measured / self.predicted)) <= np.log(AGREE):
            return "none"
        if steps.max() < 2 * steps.min():
            return "both"
        return "expansion" if steps[0] > steps[1] else "adding up"

    @property
    def table(self) -> DataFrame:
        """The risks by the teacher's confidence, see `bins`."""
        return self.bins()

    def bins(self, by: Literal["p_max", "shift"] = "p_max") -> DataFrame:
        """Split the risks into bins of positions.

        Args:
            by: "p_max", the teacher's confidence, with borders 0.5, 0.9 and 0.99; or "shift", the
                size A of the summed shift at the position, with borders 0.001, 0.01, 0.1 and 1
                nats.

        Returns:
            One row per bin: by, bin (in words), share (of the positions), and the part of each risk
            that falls into the bin, in nats per token of the whole text, so that bins add up to the
            whole: predicted (A), kl_of_sum (B), quadratic_of_joint (C), measured (D) with its
            standard error over sequences (measured_error), units_predicted, units_measured; and
            measured_over_predicted, NaN where nothing is predicted.
        """
        from pandas import DataFrame

        field, edges = _BINS[by]
        # a border belongs to the bin below it
        place = np.digitize(getattr(self, field), edges, right=True)
        inner = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
        names = [f"up to {edges[0]:g}", *inner, f"above {edges[-1]:g}"]
        return DataFrame([self._bin(by, name, place == i) for i, name in enumerate(names)])

    def _bin(self, by: str, name: str, inside: np.ndarray) -> dict[str, object]:
        def part(values: np.ndarray) -> float:
            return float((values * inside).mean())

        predicted, measured = part(self.quadratic_of_sum), part(self.kl_of_joint)
        by_sequence = (self.kl_of_joint * inside).mean(axis=1)
        others = ("kl_of_sum", "quadratic_of_joint", "units_predicted", "units_measured")
        return {
            "by": by,
            "bin": name,
            "share": float(inside.mean()),
            "predicted": predicted,
            "measured": measured,
            "measured_error": mean_and_error(by_sequence)[1],
            "measured_over_predicted": measured / predicted if predicted > 0 else np.nan,
            **{other: part(getattr(self, other)) for other in others},
        }

    @classmethod
    def join(cls, parts: Sequence[RiskSplit]) -> RiskSplit:
        """Concatenate splits of one plan on different rows of a text."""
        if len({part.selection.fingerprint for part in parts}) != 1:
            raise InputError(f"{len(parts)} parts are not those of one plan. Split one plan.")
        names = [field.name for field in fields(cls)][2:]
        arrays = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
        return cls(parts[0].selection, parts[0].source, *arrays)

    def _means(self) -> list[float]:
        return [float(getattr(self, name).mean()) for name in _STEPS]


def split_risk(
    model: PreTrainedModel,
    selection: Selection,
    text: CalibrationSet,
    *,
    progress: Progress = True,
) -> RiskSplit:
    """Measure why the predicted and the measured risk of a plan diverge (appendix "Surrogate").

    Every removed unit is ablated alone on every row, and the plan as a whole once. So a row costs
    as many replays as the plan has units. A plan of one unit has A = C and B = D; a plan of all
    units gives in `units_predicted` and `units_measured` the split of H's whole diagonal.

    Args:
        model: the dense model.
        selection: a plan over the model's units, without gains.
        text: rows and scored positions; held out, or the calibration's own to take the text out of
            the comparison.
        progress: show a bar over ablations; "lines" writes lines for a log file instead.
    """
    if selection.gains:
        raise InputError(
            f"the plan has gains for {len(selection.gains)} units, which H does not predict. Split "
            "the plan without them: selection.with_gains({})."
        )
    architecture = describe(model)
    require_measurable(model, text)
    units, _ = resolve(architecture, selection)
    bar = open_bar(
        progress, total=len(text) * len(units), desc="Splitting the risk", unit="ablation"
    )
    with measuring(model, torch.get_num_threads()), bar:
        size = max(1, _BATCH_TOKENS // text.seq_len)
        room = Room.of(architecture, units, text, 0, full_vocabulary=True)
        batches = Batches(size, bar.update, room.block(units, size))
        found = [_split_row(architecture, units, text, n, batches) for n in range(len(text))]
    return RiskSplit(
        selection, text.source, *(np.stack(parts) for parts in zip(*found, strict=True))
    )


def _split_row(
    architecture: Architecture,
    units: list[Unit],
    text: CalibrationSet,
    number: int,
    batches: Batches,
) -> list[np.ndarray]:
    """The arrays of `RiskSplit` on one row, each [P], in the order of its fields."""
    ids, positions = row(architecture, text, number)
    ordered = sorted(units, key=lambda unit: (unit.layer, unit.kind))
    replay = Replay(architecture, ids, positions)
    z_0 = widen(architecture.logits(replay.scored_hidden[0]))  # [P, V]
    p_0 = torch.softmax(z_0, dim=-1)
    summed = torch.zeros_like(z_0)
    alone = torch.zeros(2, len(z_0), dtype=torch.float64, device=z_0.device)
    for _, hidden in batches.of(ordered, replay.ride):
        with batches.halved_when_too_large():
            shift, risks = _alone(architecture, hidden, z_0, p_0)
            # only now, so that a batch tried again by halves is counted once
            summed += shift
            alone += risks
    with scaled(architecture, column_scales(architecture, units)):
        hidden = architecture.last_hidden(ids)[:, positions]
    joint = widen(architecture.logits(hidden[0])).sub_(z_0)
    values = [p_0.amax(dim=-1), *_both(p_0, summed), *_both(p_0, joint), *alone]
    arrays = [value.double().cpu().numpy() for value in values]
    require_numbers(all(np.isfinite(array).all() for array in arrays), f"sequence {number}")
    return arrays


def _alone(
    architecture: Architecture, hidden: Tensor, z_0: Tensor, p_0: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over a batch of ablations: of the shifts [P, V], and of both risks [2, P] float64."""
    summed, risks = torch.empty_like(z_0), []
    for part in pieces(len(z_0), 4 * (len(hidden) + 2) * z_0.shape[-1]):
        shift = widen(architecture.logits(hidden[:, part])).sub_(z_0[part])
        torch.sum(shift, dim=0, out=summed[part])
        risks.append(torch.stack(_both(p_0[part], shift)).sum(dim=1))
    return summed, torch.cat(risks, dim=1)


def _both(p_0: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 dz^T F dz and the exact KL [...] float64 of a shift of the logits [..., V]."""
    centered = center(p_0, shift)
    quadratic = (p_0 * centered.square()).sum(dim=-1, dtype=torch.float64) / 2
    return quadratic, centered_kl(p_0, centered).double()


def _root(above: tuple[float, float], below: tuple[float, float]) -> float:
    """Geometric mean of two quotients; NaN unless all four are above 0."""
    if min(*above, *below) <= 0:
        return float("nan")
    return float(np.sqrt(above[0] * above[1] / below[0] / below[1]))
