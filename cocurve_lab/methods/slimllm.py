"""SlimLLM (Guo et al., 2025): Pearson similarity for heads, a PCA-weighted score for the FFN.

Attention, with o = sum_g o_g the output and o_g that of KV group g (the sum of its query heads):

    s_g = sum over output dimensions of (1 - |Pearson over tokens (o - o_g, o)|), lowest goes first.

A layer that loses k groups starts from the k lowest. It then swaps one removed and one kept group
as long as that raises sum |Pearson(kept sum, o)|, the best swap first (`swaps`). The published code
makes one pass: each of the k, the lowest first, takes the best kept group's place if that helps.

FFN channel j, with n the root mean square of the FFN's input channels, (V, l) the eigenvectors and
eigenvalues of the covariance of its output, w = sigmoid(|l| / mean |l|) and rms(X_j) that of input
channel j of W_down:

    s_j = ||W_gate[j] n|| + ||W_up[j] n|| + ||(W_down[:, j]^T V) w|| rms(X_j), lowest goes first,

without the first term where the FFN has no gate (GPT-2, GPT-NeoX, OPT).

Units: a KV group's output is that of all its query heads (published: single heads, MHA only); an
FFN group's score is the sum over its channels (published: single channels). The published norms
over tokens are root mean squares here, a common factor.

Allocation: a layer's share is proportional to softmax(alpha cos), where cos is the mean cosine
between the layer's input and output over tokens, so layers that change little lose more. The
published code prunes only the layers of largest share (26 of 32 at 20 %), rounds counts of units in
each block, which misses the ratio, and keeps the lowest 1 % of FFN channels, as no text mentions.

Selection only: the linear regression folded into weights and biases is omitted (A = 1, B = 0).

Differences: every layer's statistics are those of the dense model (published: of the model with all
earlier layers pruned).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..base.errors import InputError, NumericalError
from ..extensions.repairing.projection_inputs import present_blocks
from ..models.architectures import Architecture
from ..models.layer_calls import first_output, here
from ..models.layers import present
from ..models.runtime import exclusive
from ..models.units import Unit, UnitSet
from ..solver.guards import FREE, Guards
from ..solver.selection import Selection
from .base import Arrays, Evidence, Scored, Subject
from .filling import Block, blocks, take_in_order, uniform_order
from .inputs import (
    InputStatistics,
    layer_passes,
    require_passes,
    weight_columns,
)


@dataclass(frozen=True)
class SlimLlm(Scored):
    """SlimLLM; formula, units, allocation and differences are in the module's docstring.

    Attributes:
        swaps: improve each layer's set of groups by swaps; such a plan has no removal order.
        alpha: sharpness of the allocation, >= 0 (published: 10 at 20 %, 7 at 50 %).
        layers_per_pass: layers whose second moments are held at a time (8 of an 8B: 2 GB); each
            pass runs all rows. The scores do not depend on it.
    """

    swaps: bool = True
    alpha: float = 10.0
    layers_per_pass: int = 8

    name = "slimllm"
    title = "SlimLLM"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise InputError(f"alpha is {self.alpha}. Give a finite number of at least 0.")
        require_passes(self.layers_per_pass)

    def scores(self, subject: Subject) -> Arrays:
        """Score the units, search the swapped sets and average the cosines.

        "scores" [M]; "swapped" [K + 1, M] bool, row k the attention units that go when every layer
        loses k of them (K the most any layer has); "cosine" [layers].
        """
        architecture, units = subject.architecture, subject.units
        members = blocks(units)
        groups = [len(ids) for (_, kind), ids in members.items() if kind == "attention"]
        arrays = {
            "scores": np.zeros(len(units)),
            "swapped": np.zeros((1 + max(groups, default=0), len(units)), dtype=bool),
            "cosine": np.zeros(len(architecture.layers)),
        }
        for layers in layer_passes(architecture, self.layers_per_pass):
            with exclusive(subject.model), watching(architecture, layers) as sums:
                title = f"Outputs, layers {layers[0]}-{layers[-1]}"
                attention = [(layer, "attention") for layer in layers]
                inputs = subject.statistics(title, moments=True, only=attention)
            for layer in layers:
                arrays["cosine"][layer] = sums[layer].cosine / inputs.tokens
            for (layer, kind), ids in members.items():
                if layer not in layers:
                    continue
                mine = [units[u] for u in ids]
                if kind == "attention":
                    products = group_products(architecture, layer, mine, inputs)
                    _score_groups(arrays, ids, products)
                else:
                    channels = ffn_scores(architecture, layer, sums[layer], inputs.tokens)
                    arrays["scores"][ids] = [channels[u.start : u.stop].sum() for u in mine]
        return arrays

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Take more of the layers that change little. See `Method.select`."""
        self.require_own(evidence, units)
        shares = layer_shares(evidence.arrays["cosine"], self.alpha)
        order = uniform_order(units, evidence.scores, shares[units.layers])
        plan = take_in_order(units, order, ratio, guards, **evidence.source)
        return _swapped(plan, evidence.arrays["swapped"]) if self.swaps else plan


# Allocation ---------------------------------------------------------------------------------------
def layer_shares(cosine: np.ndarray, alpha: float) -> np.ndarray:
    """L softmax(alpha cos) [L]; mean 1."""
    powers = np.exp(alpha * (cosine - cosine.max()))
    shares: np.ndarray = len(cosine) * powers / powers.sum()
    return shares


def _swapped(plan: Selection, swapped: np.ndarray) -> Selection:
    """Replace each layer's attention units in a plan by its best set of the same number.

    Attention units of a layer cost the same, so budget and guards stay as they were.
    """
    units = plan.units
    pruned = plan.indicator.copy()
    for (_, kind), ids in blocks(units).items():
        if kind == "attention":
            pruned[ids] = swapped[int(pruned[ids].sum()), ids]
    chosen = tuple(np.flatnonzero(pruned).tolist())
    return replace(plan.with_made(ordered=False), pruned=chosen)


# Attention ----------------------------------------------------------------------------------------
_GAIN = 1e-9  # per output dimension; a swap must raise the similarity by more than rounding


def _score_groups(arrays: Arrays, ids: np.ndarray, products: Tensor) -> None:
    """Fill in the scores of one layer's attention units and its best set of every size."""
    scores = arrays["scores"][ids] = pearson_scores(products)
    for count, row in enumerate(arrays["swapped"]):
        row[ids[swap_search(products, scores, min(count, len(ids)))]] = True


def group_products(
    architecture: Architecture, layer: int, units: Sequence[Unit], inputs: InputStatistics
) -> Tensor:
    """Covariance over tokens of o_g and o_h in each output dimension [G, G, d] float64.

    Taken from the covariance C of the inputs: entry (g, h, i) is W[i, g] C_gh W[i, h]^T.
    """
    block: Block = (layer, "attention")
    weight = weight_columns(architecture, block).double()
    mean = torch.from_numpy(inputs.mean(block))
    covariance = torch.from_numpy(inputs.moments[block]) / inputs.tokens - torch.outer(mean, mean)
    covariance = covariance.to(weight)
    columns = [slice(unit.start, unit.stop) for unit in units]
    rows = []
    for g in columns:
        spread = weight[:, g] @ covariance[g]  # [d, W]
        rows.append(torch.stack([(spread[:, h] * weight[:, h]).sum(dim=1) for h in columns]))
    return torch.stack(rows).cpu()


def pearson_scores(products: Tensor) -> np.ndarray:
    """s_g of every group [G]: how much of the output's direction is lost without it."""
    groups, _, width = products.shape
    without = 1 - torch.eye(groups, dtype=products.dtype)
    return (width - _similarity(products, without)).numpy()


def swap_search(products: Tensor, scores: np.ndarray, count: int) -> np.ndarray:
    """Choose the `count` groups of a layer that go: the lowest scores, improved by swaps.

    Returns indices [count], ascending, from the products [G, G, d] of `group_products`.
    """
    gone = set(np.argsort(scores, kind="stable")[:count].tolist())
    kept = set(range(len(scores))) - gone
    best = float(_similarity(products, _indicator(kept, len(scores)))[0])
    while gone and kept:
        pairs = [(g, k) for g in sorted(gone) for k in sorted(kept)]
        tried = torch.cat([_indicator(kept - {k} | {g}, len(scores)) for g, k in pairs])
        found = _similarity(products, tried)
        winner = int(found.argmax())
        if float(found[winner]) <= best + _GAIN * products.shape[-1]:
            break
        best = float(found[winner])
        gone ^= set(pairs[winner])
        kept ^= set(pairs[winner])
    return np.array(sorted(gone), dtype=np.int64)


def _similarity(products: Tensor, kept: Tensor) -> Tensor:
    """Sum over output dimensions of |Pearson(sum of kept o_g, o)| for sets kept [B, G]: [B]."""
    with_all = products.sum(dim=1)  # covariance of o_g with o [G, d]
    covariance = kept @ with_all
    variance = torch.einsum("bg,ghd,bh->bd", kept, products, kept).clamp(min=0)
    scale = (variance * with_all.sum(dim=0).clamp(min=0)).sqrt()
    ratio = torch.where(scale > 0, covariance / scale.clamp(min=1e-300), 0.0)
    return ratio.abs().clamp(max=1).sum(dim=1)


def _indicator(members: set[int], size: int) -> Tensor:
    mask = torch.zeros(1, size, dtype=torch.float64)
    mask[0, sorted(members)] = 1
    return mask


# FFN and layers -----------------------------------------------------------------------------------
@dataclass
class LayerSums:
    """Sums over tokens of one layer, float64.

    Attributes:
        cosine: cosine between the layer's input and output.
        inputs: square of the FFN's input channels [d].
        columns: square of the input channels of W_down [f].
        outputs: FFN output y [d].
        products: y y^T [d, d].
    """

    cosine: float = 0.0
    inputs: Any = 0.0
    columns: Any = 0.0
    outputs: Any = 0.0
    products: Any = 0.0

    def see_layer(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        before, after = hidden.double(), first_output(output).double()
        self.cosine += float(torch.cosine_similarity(before, after, dim=-1).sum())

    def see_inputs(self, _: nn.Module, args: Any) -> None:
        self.inputs = self.inputs + _squares(args[0])

    def see_outputs(self, _: nn.Module, args: Any, output: Tensor) -> None:
        flat = output.double().flatten(0, -2)
        self.columns = self.columns + _squares(args[0])
        self.outputs = self.outputs + flat.sum(dim=0)
        self.products = self.products + flat.T @ flat


def _squares(values: Tensor) -> Tensor:
    """Sum over tokens of the square of each channel, float64."""
    return values.double().square().sum(dim=tuple(range(values.dim() - 1)))


@contextmanager
def watching(architecture: Architecture, layers: Sequence[int]) -> Iterator[dict[int, LayerSums]]:
    """Collect sums of these layers while the model runs inside the block."""
    sums = {layer: LayerSums() for layer in layers}
    present = set(present_blocks(architecture))
    with ExitStack() as stack:
        for layer, own in sums.items():
            module = architecture.layers[layer]
            hooks = [module.register_forward_hook(here(own.see_layer), with_kwargs=True)]
            if (layer, "ffn") in present:
                first = architecture.projection(layer, "ffn", architecture.family.gate_up[0])
                hooks.append(first.register_forward_pre_hook(here(own.see_inputs)))
                projection = architecture.output_projection(layer, "ffn")
                hooks.append(projection.register_forward_hook(here(own.see_outputs)))
            for handle in hooks:
                stack.callback(handle.remove)
        yield sums


def ffn_scores(architecture: Architecture, layer: int, sums: LayerSums, tokens: int) -> np.ndarray:
    """s_j of every channel of a layer's FFN [f] float64."""
    scores = torch.zeros_like(sums.columns)
    for rows in architecture.unit_rows(layer, "ffn", 0, architecture.width(layer, "ffn")):
        with present(architecture, layer):
            weight = architecture.weight(layer, "ffn", rows.projection)[rows.start : rows.stop]
        scores += (weight.detach().double().square() @ (sums.inputs / tokens)).sqrt()
    mean = sums.outputs / tokens
    covariance = sums.products / tokens - torch.outer(mean, mean)
    if not bool(torch.isfinite(covariance).all()):
        raise NumericalError(
            f"the FFN of layer {layer} writes NaN or infinite values. Half precision may overflow: "
            "load the model in bfloat16 or float32."
        )
    values, vectors = torch.linalg.eigh(covariance)
    level = values.abs().mean()
    importance = torch.sigmoid(values.abs() / level) if level > 0 else torch.ones_like(values)
    directions = weight_columns(architecture, (layer, "ffn")).double().T @ (vectors * importance)
    scores += directions.norm(dim=1) * (sums.columns / tokens).sqrt()
    return scores.cpu().numpy()
