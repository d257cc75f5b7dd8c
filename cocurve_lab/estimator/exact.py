"""The exact infinitesimal H*: what H becomes when whole removals are replaced by derivatives.

H*_uv is the Fisher inner product of dz/dm_u and dz/dm_v at the unpruned model, where the mask m_u
scales unit u (1 = on). It is the Gauss-Newton Hessian of the risk (eq. quadratic) in the masks, and
the limit of the features of eq. (gram) for removals by a share that goes to 0. Forward-mode
derivatives are exact: no step size, and no noise of probes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..errors import ArchitectureError, InputError, NumericalError
from ..models.architectures import Architecture, describe, is_packed
from ..models.identity import model_name
from ..models.masking import Scales, column_scales, like_columns, scaled, stack_rows
from ..models.runtime import differentiable, measuring
from ..models.units import Unit, UnitSet
from ..progress import Progress
from .batches import by_layer
from .features import Teacher, gram_matrix, row
from .fisher import whiten
from .replay import LayerCall, SupportHead, capture_calls, first_output, widen
from .sums import sum_derivatives

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BATCH_TOKENS = 2048  # tokens per forward, whose tangents and attention matrices are held at once


@dataclass(frozen=True)
class ExactOptions:
    """Knobs of the exact infinitesimal H* (`estimate_curvature(..., method="exact")`).

    Attributes:
        groups: groups of sequences whose Grams are kept apart, as in `BuildOptions`.

    Raises:
        InputError: no group.
    """

    groups: int = 16

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise InputError(f"groups is {self.groups}; it must be at least 1.")


def differentiate(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    settings: dict[str, Any],
    progress: Progress,
) -> Curvature:
    """H* [M, M] in nats per token by forward-mode differentiation in the masks (eq. huv, gram).

    `estimate_curvature` is the way in. Costs about six times a build over the same rows (one CPU
    core, embedded model): a reference for small models. Attention runs in its plain form, because
    fused kernels have no forward derivative; weights and layers in the model's dtype, head,
    whitening and Gram as in a build.

    Args:
        settings: from `estimate.build_settings`.

    Returns:
        A Curvature with provenance["method"] "infinitesimal", Grams in groups, and no
        `group_risks`: no unit was removed. After Ctrl-C, over the sequences done.

    Raises:
        ArchitectureError: the weights are packed in 4 bits.
        InputError: a sequence does not fit in memory, or attention has no forward derivative.
        NumericalError: the model gives NaN or infinite logits or derivatives.
    """
    architecture = describe(model)

    def gram(number: int) -> np.ndarray:
        return gram_matrix(derivatives(architecture, units, calibration, number, settings["top_r"]))

    with measuring(model, torch.get_num_threads()), differentiable(model), torch.no_grad():
        return sum_derivatives(
            model,
            units,
            calibration,
            settings,
            gram,
            weight=calibration.positions_per_sequence,
            label=f"H* of {model_name(model)}",
            progress=progress,
        )


def require_unpacked(model: PreTrainedModel) -> None:
    """Raise ArchitectureError if weights are packed in 4 bits: they have no forward derivative."""
    if any(is_packed(projection) for projection in describe(model).all_projections):
        raise ArchitectureError(
            "packed 4-bit weights have no forward derivative. Build H by ablations, preview it by "
            "probes, or load the model unquantised."
        )


def derivatives(
    architecture: Architecture, units: UnitSet, calibration: CalibrationSet, number: int, top_r: int
) -> Tensor:
    """Whitened dz/dm_u of one sequence [M, P * r], float32 (float64 for a float64 model)."""
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
    """d(final hidden states)/dm_u [B, T, d] of B units of one layer: a row of a batch per unit.

    Rows of a batch do not see each other, so B masks with one moving unit each give B derivatives
    at once. Nothing below the units' layer moves, so the pass starts there (see replay.py).

    Raises:
        InputError: the attention implementation has no forward derivative.
    """
    first = units[0].layer
    hidden = calls[first].hidden.expand(len(units), -1, -1)
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        with scaled(architecture, _dual_masks(architecture, units)):
            try:
                for layer, call in zip(architecture.layers[first:], calls[first:], strict=True):
                    hidden = first_output(layer(hidden, *call.args, **call.kwargs))
            except NotImplementedError as error:
                raise InputError(
                    f"this model's attention has no forward derivative ({error}). Load it with "
                    'attn_implementation="eager" or "sdpa".'
                ) from error
        return forward_ad.unpack_dual(architecture.final(hidden)).tangent


def _dual_masks(architecture: Architecture, units: list[Unit]) -> Scales:
    """Masks of all ones [B, 1, W] whose derivative is 1 on the columns of row b's unit."""
    cut = stack_rows(architecture, [column_scales(architecture, [unit]) for unit in units])
    masks = {}
    for key, scales in cut.items():
        scales = like_columns(architecture, scales, *key)
        with warnings.catch_warnings():  # torch's own, when it first loads forward mode
            warnings.simplefilter("ignore", DeprecationWarning)
            masks[key] = forward_ad.make_dual(torch.ones_like(scales), 1 - scales)
    return masks


def _through_head(head: SupportHead, logits: Tensor, tangent: Tensor) -> Tensor:
    """dz/dm [B, P, r] from d(hidden)/dm [B, P, d]: the head without its bias, and the cap's slope
    at the teacher's logits [P, r]."""
    shift, slope = head.linear(tangent), head.slope(logits)
    if head.bias is not None:
        shift = shift - widen(head.bias[head.support])
    return shift if slope is None else shift * slope
