"""The exact infinitesimal H*: H with derivatives in place of whole removals.

H*_uv is the Fisher inner product of dz/dm_u and dz/dm_v at the unpruned model, where the mask m_u
scales unit u (1 = on). It is the Gauss-Newton Hessian of the risk (eq. quadratic, Remark "What is
exact"), and the limit of eq. (gram) as the removed share of a unit goes to 0. Forward-mode
derivatives are exact: they have no step size, and no noise of probes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...base.arguments import as_int
from ...base.errors import ArchitectureError, InputError, NumericalError
from ...base.progress import Progress
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...estimator.algorithm1 import gram_matrix
from ...estimator.batches import by_layer
from ...estimator.fisher import whiten
from ...estimator.sums import sum_derivatives
from ...estimator.support import SupportHead, widen
from ...estimator.teacher import Teacher, row
from ...models.architectures import Architecture, describe, is_packed
from ...models.identity import model_name
from ...models.layer_calls import LayerCall, capture_calls, run_from
from ...models.masking import Scales, column_scales, like_columns, scaled, stack_rows
from ...models.runtime import differentiable, measuring
from ...models.units import Unit, UnitSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BATCH_TOKENS = 2048  # tokens per forward pass; tangents and attention matrices are held for all


@dataclass(frozen=True)
class ExactOptions:
    """Options of the exact infinitesimal H* (`estimate_curvature(..., method="exact")`).

    Attributes:
        groups: number of groups of sequences whose Grams are kept separately, as in `BuildOptions`.
    """

    method: ClassVar[str] = "infinitesimal"
    name: ClassVar[str] = "the exact H*"
    groups: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", as_int(self.groups, "groups", 1))

    def marks(self, units: UnitSet) -> dict[str, Any]:
        """Return the options that decide H*, beside its groups: none."""
        return {}

    def estimate(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        settings: dict[str, Any],
        progress: Progress,
    ) -> Curvature:
        """Compute H* [M, M] in nats per token by forward-mode differentiation (eq. huv, eq. gram).

        It takes about six times as long as a build over the same rows (one CPU core, embedded
        model), so it is a reference for small models. Attention runs in its plain form, because
        fused kernels have no forward derivative. There are no `group_risks`, because no unit was
        removed. After Ctrl-C it is over the sequences done.
        """
        architecture = describe(model)
        architecture.require_columns("the infinitesimal H*")
        if any(is_packed(projection) for projection in architecture.all_projections):
            raise ArchitectureError(
                "packed 4-bit weights have no forward derivative. Build H by ablations, preview it "
                "by probes, or load the model unquantized."
            )
        inputs = (architecture, units, calibration)

        def gram(number: int) -> np.ndarray:
            return gram_matrix(derivatives(*inputs, number, settings["top_r"]))

        with measuring(model, torch.get_num_threads()), differentiable(model), torch.no_grad():
            return sum_derivatives(
                *(model, units, calibration, settings, gram),
                weight=calibration.positions_per_sequence,
                label=f"H* of {model_name(model)}",
                progress=progress,
            )


def derivatives(
    architecture: Architecture, units: UnitSet, calibration: CalibrationSet, number: int, top_r: int
) -> Tensor:
    """Compute the whitened dz/dm_u of one sequence [M, P * r], float32 or better."""
    ids, positions = row(architecture, calibration, number)
    final, calls = capture_calls(architecture, ids)
    teacher = Teacher(architecture, final[:, positions], top_r, number)
    probabilities = teacher.probabilities
    features = probabilities.new_empty(len(units), probabilities.numel())
    step = max(1, _BATCH_TOKENS // calibration.seq_len)
    for first, layer_units in by_layer(units):
        for start in range(0, len(layer_units), step):
            batch = layer_units[start : start + step]
            tangent = hidden_tangents(architecture, calls, batch)[:, positions]
            shift = _through_head(teacher.head, teacher.logits, tangent)
            rows = slice(first + start, first + start + len(batch))
            features[rows] = whiten(probabilities, shift).flatten(1)
            if not bool(torch.isfinite(features[rows]).all()):
                raise NumericalError(
                    f"the derivative of a unit of layer {batch[0].layer} is NaN or infinite on "
                    f"sequence {number}. Half precision may overflow: try bfloat16 or float32."
                )
    return features


def hidden_tangents(
    architecture: Architecture, calls: list[LayerCall], units: list[Unit]
) -> Tensor:
    """Compute d(final hidden states)/dm_u [B, T, d] of B units of one layer, in one pass.

    `calls` are the calls of each layer in the teacher pass.
    """
    # rows of a batch do not see each other, so B masks with one moving unit each give B derivatives
    # at once; nothing below the units' layer moves, so the pass starts there (see replay.py)
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        with scaled(architecture, _dual_masks(architecture, units)):
            try:
                hidden = run_from(architecture, calls, units[0].layer, len(units))
            except NotImplementedError as error:
                raise InputError(
                    f"this model's attention has no forward derivative ({error}). Load it with "
                    'attn_implementation="eager" or "sdpa".'
                ) from error
        return forward_ad.unpack_dual(architecture.final(hidden)).tangent


def _dual_masks(architecture: Architecture, units: list[Unit]) -> Scales:
    """Masks of ones [B, 1, W] whose tangent is 1 on the columns of row b's unit, else 0."""
    cut = stack_rows(architecture, [column_scales(architecture, [unit]) for unit in units])
    masks = {}
    for key, scales in cut.items():
        scales = like_columns(architecture, scales, *key)
        with warnings.catch_warnings():  # torch warns of itself when it first loads forward mode
            warnings.simplefilter("ignore", DeprecationWarning)
            masks[key] = forward_ad.make_dual(torch.ones_like(scales), 1 - scales)
    return masks


def _through_head(head: SupportHead, logits: Tensor, tangent: Tensor) -> Tensor:
    """Compute dz/dm [B, P, r] from d(hidden)/dm [B, P, d]."""
    shift, slope = head.linear(tangent), head.slope(logits)
    # the bias is constant, but `linear` adds it
    if head.bias is not None:
        shift = shift - widen(head.bias[head.support])
    return shift if slope is None else shift * slope
