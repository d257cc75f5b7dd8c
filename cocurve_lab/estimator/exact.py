"""The exact infinitesimal H*: what H becomes when whole removals are replaced by derivatives.

H*_uv is the Fisher inner product of dz/dm_u and dz/dm_v at the unpruned model, where the mask m_u
scales unit u (1 = on). It is the Gauss-Newton Hessian of the risk (eq. quadratic) in the masks, and
the limit of the features of eq. (gram) for removals by a share that goes to 0. Forward-mode
derivatives are exact: no step size, and no noise of probes.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..errors import ArchitectureError, InputError, NumericalError
from ..models.architectures import Architecture, describe, is_packed
from ..models.identity import model_device, model_name
from ..models.masking import Scales, column_scales, like_columns, scaled, stack_rows
from ..models.runtime import measuring
from ..models.units import Unit, UnitSet, enumerate_units
from ..progress import Progress
from .build import BuildOptions
from .estimate import build_settings
from .features import by_layer, gram_matrix, whiten
from .probing import GramSum, differentiable, teacher_on_support
from .replay import LayerCall, SupportHead, capture_calls, first_output, widen

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_BATCH_TOKENS = 2048  # tokens per forward, whose tangents and attention matrices are held at once


def exact_curvature(
    model: PreTrainedModel,
    units: UnitSet | None,
    calibration: CalibrationSet,
    top_r: int = 256,
    *,
    progress: Progress = True,
) -> Curvature:
    """H* [M, M] in nats per token by forward-mode differentiation in the masks (eq. huv, gram).

    Costs about six times a build over the same rows (one CPU core, embedded model): a reference for
    small models. Attention runs in its plain form, because fused kernels have no forward
    derivative; weights and layers in the model's dtype, head, whitening and Gram as in a build.

    Args:
        model: a supported causal language model; measured in eval mode, left as it was.
        units: from `enumerate_units(model)`; None does that.
        calibration: rows and scored positions.
        top_r: r, size of the teacher's support, at most the vocabulary.
        progress: show a bar; "lines" writes lines for a log file instead.

    Returns:
        A Curvature with provenance["method"] "infinitesimal", Grams in up to 16 groups, and no
        `group_risks`: no unit was removed. After Ctrl-C, over the sequences done.

    Raises:
        ArchitectureError: the family is unknown, or the weights are packed in 4 bits.
        InputError: top_r, token ids or row length outside the model; a sequence that does not fit
            in memory; or attention without a forward derivative.
        MismatchError: the units are not the model's.
        NumericalError: the model gives NaN or infinite logits or derivatives.
    """
    architecture = describe(model)
    if any(is_packed(projection) for projection in architecture.all_projections):
        raise ArchitectureError(
            "packed 4-bit weights have no forward derivative. Build H by ablations, preview it by "
            "probes, or load the model unquantised."
        )
    units = units or enumerate_units(model)
    options = BuildOptions()
    settings = build_settings(model, units, calibration, top_r, "infinitesimal", options)
    sums = GramSum(settings, units, calibration, calibration.positions_per_sequence)

    def gram(number: int) -> np.ndarray:
        return gram_matrix(derivatives(architecture, units, calibration, number, top_r))

    with measuring(model, torch.get_num_threads()), differentiable(model), torch.no_grad():
        complete = sums.run(gram, f"H* of {model_name(model)}", progress)
    return sums.curvature(model, complete=complete)


def derivatives(
    architecture: Architecture, units: UnitSet, calibration: CalibrationSet, number: int, top_r: int
) -> Tensor:
    """Whitened dz/dm_u of one sequence [M, P * r], float32 (float64 for a float64 model)."""
    device = model_device(architecture.model)
    ids = calibration.input_ids[number : number + 1].to(device)
    positions = calibration.scored[number].to(device)
    final, calls = capture_calls(architecture, ids)
    hidden = final[:, positions]
    head, logits, probabilities = teacher_on_support(architecture, hidden, top_r, number)
    features = probabilities.new_empty(len(units), probabilities.numel())
    step = max(1, _BATCH_TOKENS // calibration.seq_len)
    for first, layer_units in by_layer(units):
        for start in range(0, len(layer_units), step):
            batch = layer_units[start : start + step]
            tangent = hidden_tangents(architecture, calls, batch)[:, positions]
            shift = _through_head(head, logits, tangent)
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
