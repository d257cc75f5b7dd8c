"""One sequence of a build: the teacher on its support, the whitened features, their Gram."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..errors import NumericalError
from ..models.architectures import Architecture
from ..models.identity import embedding_weight, model_device
from ..models.runtime import is_out_of_memory
from ..models.units import Unit, UnitSet
from .replay import GATHER_BYTES, TRACE_BYTES, Replay, SupportHead, top_support, trace_bytes

_GRAM_COLUMNS = 1 << 14  # float32 products are summed over this many features, then in float64


_LARGEST_CPU_BATCH = 24  # rows beyond this only leave the cache


class AblatedSequence:
    """One sequence's teacher on its support, and the features of ablations against it."""

    def __init__(
        self, architecture: Architecture, ids: Tensor, positions: Tensor, top_r: int, number: int
    ) -> None:
        device = model_device(architecture.model)
        self.number = number
        self.replay = Replay(architecture, ids.to(device), positions.to(device))
        hidden = self.replay.scored_hidden
        support = top_support(architecture.head, hidden, top_r)
        self.head = SupportHead(architecture.head, support, architecture.logit_cap)
        self.logits = self.head(hidden)  # [1, P, r] float32, or float64 like the model
        if not bool(torch.isfinite(self.logits).all()):
            raise NumericalError(
                f"the model gives NaN or infinite logits on sequence {number}. Check the weights; "
                "half precision may overflow: try bfloat16 or float32."
            )
        self.probabilities = torch.softmax(self.logits, dim=-1)
        self.roots = self.probabilities.sqrt()

    def new_features(self, rows: int) -> Tensor:
        """Room for whitened features [rows, P * r], dtype of the logits."""
        return self.logits.new_empty(rows, self.logits[0].numel())

    def try_ablate(self, batch: list[Unit], features: Tensor) -> Tensor | None:
        """`ablate`, or None where memory runs out (outside the exception, so it can be freed)."""
        try:
            return self.ablate(batch, features)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None

    def ablate(self, batch: list[Unit], features: Tensor) -> Tensor:
        """Fill `features` [B, P * r] for units of one layer; return their summed KL [B] float64."""
        shift = self.head(self.replay.ablated_hidden(batch)).sub_(self.logits)  # z_u - z_0
        centered = center(self.probabilities, shift)
        risk = centered_kl(self.probabilities, centered).double().sum(dim=-1)
        if not bool(torch.isfinite(risk).all()):
            bad = batch[int((~torch.isfinite(risk)).nonzero()[0])]
            raise NumericalError(
                f"removing {bad} gives NaN or infinite logits on sequence {self.number}. Half "
                "precision may overflow: try bfloat16 or float32."
            )
        # whitened z_0 - z_u; its sign is common to all units, so the Gram does not see it
        torch.mul(centered, self.roots, out=features.view(shift.shape))
        return risk.cpu()


def gram_matrix(features: Tensor) -> np.ndarray:
    """Features times their transpose [M, M] float64: float32 products, float64 between chunks."""
    gram = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for chunk in features.split(_GRAM_COLUMNS, dim=1):
        gram += chunk @ chunk.T
    return gram.cpu().numpy()


def choose_batch(
    architecture: Architecture, units: UnitSet, calibration: CalibrationSet, top_r: int
) -> int:
    """Ablations per batch: as many of a layer's units as half of the free memory holds."""
    largest = max(len(layer_units) for _, layer_units in by_layer(units))
    fixed = memory_needed(architecture, units, calibration, top_r, 0)
    per_row = memory_needed(architecture, units, calibration, top_r, 1) - fixed
    device = model_device(architecture.model)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # what torch holds back from earlier work is free to us as well
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        import psutil

        free, largest = psutil.virtual_memory().available, min(largest, _LARGEST_CPU_BATCH)
    return int(max(1, min(largest, (free / 2 - fixed) // per_row)))


def memory_needed(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    units_per_batch: int,
) -> float:
    """Bytes a build takes beside the model, roughly: features, activations, group Grams."""
    config, length = architecture.model.config, calibration.seq_len
    size = embedding_weight(architecture.model).element_size()
    vocabulary, hidden = architecture.vocabulary, config.hidden_size
    scored = calibration.positions_per_sequence * top_r * 4
    whole_head = calibration.positions_per_sequence * vocabulary * 4
    features = len(units) * scored
    head = min(scored * hidden, GATHER_BYTES)
    teacher = length * hidden * size * (len(architecture.layers) + 8) + whole_head
    traces = min(trace_bytes(architecture, length), TRACE_BYTES)
    grams = 8 * len(units) ** 2 * 18
    # residual, normed, queries/keys/values, three FFN activations; then support logits and shifts
    width = max(architecture.width(layer, "ffn") for layer in range(len(architecture.layers)))
    row = (
        length * size * (6 * hidden + 3 * width)
        + 4 * scored
        + calibration.positions_per_sequence * hidden * 8
    )
    if getattr(config, "_attn_implementation", "") == "eager":
        row += config.num_attention_heads * length**2 * (size + 4)
    return features + teacher + traces + head + grams + units_per_batch * row


def by_layer(units: UnitSet) -> Iterator[tuple[int, list[Unit]]]:
    """Units of each layer with the index of its first one."""
    first = 0
    while first < len(units):
        layer = units.units[first].layer
        stop = first + int((units.layers == layer).sum())
        yield first, list(units.units[first:stop])
        first = stop


# above this shift exp() approaches float32 overflow; the log-sum-exp form takes over
_LARGE_SHIFT = 30.0


_SMALL_SHIFT = 0.02  # below it four terms of the series are exact to float32


def center(probabilities: Tensor, shift: Tensor) -> Tensor:
    """shift - E_p[shift] over the last axis; softmax is blind to what is taken away."""
    return shift - (probabilities * shift).sum(dim=-1, keepdim=True)


def whiten(probabilities: Tensor, shift: Tensor) -> Tensor:
    """Whitened feature sqrt(p0) * (dz - E_p0[dz]) (Section "Estimating the edge matrix").

    Its dot products are Fisher inner products: w(a) . w(b) = a^T (diag(p0) - p0 p0^T) b
    (Proposition gram).

    Args:
        probabilities: p0 [..., r], summing to 1 over the last axis.
        shift: dz = z0 - z_u [..., r], in nats.
    """
    return probabilities.sqrt() * center(probabilities, shift)


def kl_divergence(probabilities: Tensor, shift: Tensor) -> Tensor:
    """KL(p0 || p_s) [...] in nats per token, from z_s - z_0 (either sign of centring is fine).

    With d the centred shift, KL = log E_p0[exp d] = log1p E_p0[exp d - 1 - d], since E_p0[d] = 0.
    Where all of d is small, exp d - 1 - d is summed as a series, which keeps the digits that the
    subtraction loses (at d = 1e-5, all but two in float32).

    Args:
        probabilities: p0 [..., V], summing to 1 over the last axis.
        shift: z_s - z_0 [..., V].
    """
    return centered_kl(probabilities, center(probabilities, shift))


def centered_kl(probabilities: Tensor, centered: Tensor) -> Tensor:
    """`kl_divergence` of a shift that `center` has already been applied to."""
    low, high = centered.aminmax(dim=-1)
    edge = _SMALL_SHIFT if centered.dtype == torch.float32 else _SMALL_SHIFT / 200
    small, large = torch.maximum(high, -low) < edge, high > _LARGE_SHIFT
    if bool(small.all()):
        return torch.log1p((probabilities * _series(centered)).sum(dim=-1))
    any_large = bool(large.any())
    moderate = centered.clamp(max=_LARGE_SHIFT) if any_large else centered
    value = torch.log1p(torch.expm1(moderate).sub_(moderate).mul_(probabilities).sum(dim=-1))
    if bool(small.any()):
        weights = probabilities.expand_as(centered)[small]
        value[small] = torch.log1p((weights * _series(centered[small])).sum(dim=-1))
    if any_large:
        exact = torch.logsumexp(probabilities.log() + centered, dim=-1)
        value = torch.where(large, exact, value)
    return value


def _series(d: Tensor) -> Tensor:
    """exp d - 1 - d for small d: d^2 (1/2 + d/6 + d^2/24 + d^3/120)."""
    return d * d * (0.5 + d * (1 / 6 + d * (1 / 24 + d / 120)))
