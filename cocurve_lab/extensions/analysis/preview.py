"""A preview of H from random probes: the infinitesimal H* at the cost of a few passes.

H* replaces the removals of H by derivatives: mask variables m_u (1 = on) scale the units, and H*_uv
is the Fisher inner product of dz/dm_u and dz/dm_v (eq. huv with derivatives in place of shifts).
Draw a random sign e for each whitened feature of a sequence. Then g = d/dm <e, w(z(m))> satisfies
E[g g^T] = the Gram of that sequence. One backward pass gives g for all units, so a probe costs
about three forward passes, whatever M is. A preview does not show the effect of whole removals;
exact.py computes H* without the noise of probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...base.arguments import as_int
from ...base.errors import NumericalError
from ...base.progress import Progress
from ...base.storage import fingerprint
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...estimator.sums import sum_derivatives
from ...estimator.support import GATHER_BYTES, SupportHead, widen
from ...estimator.teacher import Teacher, row
from ...models.architectures import Architecture, describe
from ...models.identity import model_name
from ...models.layer_calls import first_output
from ...models.masking import column_scales, like_columns, scaled
from ...models.runtime import differentiable, measuring
from ...models.units import UnitSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ProbeOptions:
    """Options of a preview (`estimate_curvature(..., method="probe")`).

    Attributes:
        probes: probes per sequence. More sequences are worth more than more probes on each.
        seed: seed of the signs. A sign depends only on the seed, the tokens of the row, the number
            of the probe, the position and the token, not on the order of rows or the device.
        groups: number of groups of sequences whose Grams are kept separately, as in `BuildOptions`.
    """

    method: ClassVar[str] = "probe"
    name: ClassVar[str] = "a preview takes seconds and"
    probes: int = 1
    seed: int = 0
    groups: int = 16

    def __post_init__(self) -> None:
        for name, least in (("probes", 1), ("seed", 0), ("groups", 1)):
            object.__setattr__(self, name, as_int(getattr(self, name), name, least))

    def marks(self, units: UnitSet) -> dict[str, Any]:
        """Return the options that decide the preview, beside its groups."""
        return {"probes_per_sequence": self.probes, "probe_seed": self.seed}

    def estimate(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        settings: dict[str, Any],
        progress: Progress,
    ) -> Curvature:
        """Estimate H* [M, M] from random probes, nats per token.

        It needs memory for all activations of one sequence beside the model. The provenance has
        "probes" (their total number), "rank" (min(M, probes), an upper bound on the rank) and
        "noise_floor", sqrt(2 / (pi probes)): about the mean |correlation| that uncorrelated units
        would show if sequences weigh equally. `group_positions` counts a position once per probe.
        There are no `group_risks`, because no unit was removed.
        """
        architecture = describe(model)
        architecture.require_columns("the infinitesimal H*")

        def gram(number: int) -> np.ndarray:
            gradients = probe_gradients(architecture, units, calibration, number, self, settings)
            return gradients.T @ gradients

        with measuring(model, torch.get_num_threads()), differentiable(model):
            curvature = sum_derivatives(
                *(model, units, calibration, settings, gram),
                weight=calibration.positions_per_sequence * self.probes,
                label=f"Preview of H of {model_name(model)}",
                progress=progress,
            )
        probes = curvature.provenance["sequences_done"] * self.probes
        return curvature.with_provenance(
            probes=probes,
            rank=min(len(units), probes),
            noise_floor=float(np.sqrt(2 / (np.pi * probes))),
        )


def probe_gradients(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    number: int,
    options: ProbeOptions,
    settings: dict[str, Any],
) -> np.ndarray:
    """Compute g for each probe of one sequence [probes, M] float64.

    E[g g^T] is the Gram of the sequence, a sum over its positions.
    """
    ids, positions = row(architecture, calibration, number)
    ones = column_scales(architecture, [], dict.fromkeys(units.units, 1.0))
    masks = {  # float32 at least, so that half precision rounds a column's sum only once
        key: widen(like_columns(architecture, scale, *key)).requires_grad_()
        for key, scale in ones.items()
    }
    with scaled(architecture, masks):
        final = first_output(architecture.decoder(input_ids=ids, use_cache=False))
    hidden = final[:, positions]
    teacher = Teacher(architecture, hidden, settings["top_r"], number)
    head, slope = teacher.head, teacher.head.slope(teacher.logits)
    rows = []
    for probe in range(options.probes):
        key = fingerprint(calibration.row_fingerprints[number], options.seed, probe)
        signs = _signs(key, positions, head.support).to(teacher.probabilities)
        direction = _whitening_transpose(teacher.probabilities, signs)
        direction = _pull_back(head, direction if slope is None else direction * slope)
        again = probe + 1 < options.probes  # the graph is kept until the last probe has used it
        direction = direction[None].to(hidden.dtype)
        columns = torch.autograd.grad(hidden, list(masks.values()), direction, retain_graph=again)
        rows.append(torch.cat(columns).double().cpu().numpy())
    return _sum_columns(np.stack(rows), units, number)


def _signs(key: str, positions: Tensor, support: Tensor) -> Tensor:
    """Signs [P, r] int64: one bit of a hash (splitmix64) of key, position and token id."""
    # signs drawn in the order of the support would change with that order, which rounding decides
    # between nearly equal logits: another dtype or number of threads would be another draw
    place = positions.cpu().numpy()[:, None] * (1 << 32) + support.cpu().numpy()
    bits = place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int(key[:16], 16))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(1 - 2 * (bits >> np.uint64(63)).astype(np.int64))


def _whitening_transpose(probabilities: Tensor, signs: Tensor) -> Tensor:
    """d/dz <e, sqrt(p0) (z - E_p0 z)> [P, r] for signs e: the transpose of `fisher.whiten`."""
    weighted = probabilities.sqrt() * signs
    return weighted - probabilities * weighted.sum(dim=-1, keepdim=True)


def _pull_back(head: SupportHead, direction: Tensor) -> Tensor:
    """Turn d/d(the head's z on the support) [P, r] into d/d(final hidden states) [P, d]."""
    # by hand, since the head is linear: autograd would keep all gathered rows in memory
    if head.columns is not None:
        return torch.bmm(head.columns, direction.unsqueeze(-1)).squeeze(-1)
    if head.whole:
        if not head.identity:
            vocabulary = direction.new_zeros(len(direction), len(head.weight))
            direction = vocabulary.scatter_(1, head.support, direction)
        return direction @ head.weight
    (positions, top), size = direction.shape, head.weight.shape[1]
    step = max(1, GATHER_BYTES // (top * size * 4))
    result = direction.new_empty(positions, size)
    for start in range(0, positions, step):
        part = slice(start, start + step)
        rows = widen(head.weight[head.support[part]])  # [p, r, d]
        result[part] = torch.bmm(direction[part].unsqueeze(1), rows).squeeze(1)
    return result


def _sum_columns(columns: np.ndarray, units: UnitSet, number: int) -> np.ndarray:
    """Sum gradients of columns over the columns of each unit [probes, M]; units tile them."""
    widths = [unit.stop - unit.start for unit in units.units]
    gradients = np.add.reduceat(columns, np.cumsum([0, *widths[:-1]]), axis=1)
    if not np.isfinite(gradients).all():
        raise NumericalError(
            f"a gradient is NaN or infinite on sequence {number}. Half precision may overflow: try "
            "bfloat16 or float32."
        )
    return gradients
