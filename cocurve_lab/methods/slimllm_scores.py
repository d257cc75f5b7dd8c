"""What SlimLLM scores units with: Pearson similarity of heads, a PCA-weighted score of channels.

The formulas are in the docstring of slimllm.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..architectures import Architecture
from ..errors import NumericalError
from ..replay import first_output
from ..units import UnitSet
from .statistics import InputStatistics, present_blocks, weight_columns

_GAIN = 1e-9  # per output dimension; a swap must raise the similarity by more than rounding


# Attention ----------------------------------------------------------------------------------------


def group_products(
    architecture: Architecture, units: UnitSet, ids: np.ndarray, inputs: InputStatistics
) -> Tensor:
    """Covariance over tokens of o_g and o_h in each output dimension [G, G, d] float64.

    Taken from the covariance C of the inputs: entry (g, h, i) is W[i, g] C_gh W[i, h]^T.
    """
    block = (int(units.layers[ids[0]]), units.units[ids[0]].kind)
    weight = weight_columns(architecture, block).double()
    mean = torch.from_numpy(inputs.mean(block))
    covariance = torch.from_numpy(inputs.moments[block]) / inputs.tokens - torch.outer(mean, mean)
    covariance = covariance.to(weight)
    columns = [slice(units.units[u].start, units.units[u].stop) for u in ids]
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
    """Which `count` groups of a layer go: the lowest scores, improved by swaps.

    Args:
        products: [G, G, d] of `group_products`.
        scores: s_g [G].
        count: groups that go.

    Returns:
        Indices [count], ascending.
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
        best, (g, k) = float(found[winner]), pairs[winner]
        gone, kept = gone - {g} | {k}, kept - {k} | {g}
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
    """Sums of these layers, which grow while the model runs inside the block."""
    sums = {layer: LayerSums() for layer in layers}
    present = set(present_blocks(architecture))
    with ExitStack() as stack:
        for layer, own in sums.items():
            module = architecture.layers[layer]
            hooks = [module.register_forward_hook(own.see_layer, with_kwargs=True)]
            if (layer, "ffn") in present:
                first = architecture.projection(layer, "ffn", architecture.family.gate_up[0])
                hooks.append(first.register_forward_pre_hook(own.see_inputs))
                projection = architecture.output_projection(layer, "ffn")
                hooks.append(projection.register_forward_hook(own.see_outputs))
            for handle in hooks:
                stack.callback(handle.remove)
        yield sums


def ffn_scores(architecture: Architecture, layer: int, sums: LayerSums, tokens: int) -> np.ndarray:
    """s_j of every channel of a layer's FFN [f] float64."""
    scores = torch.zeros_like(sums.columns)
    for rows in architecture.unit_rows(layer, "ffn", 0, architecture.width(layer, "ffn")):
        weight = architecture.weight(layer, "ffn", rows.projection)[rows.start : rows.stop]
        scores += (weight.detach().double().square() @ (sums.inputs / tokens)).sqrt()
    mean = sums.outputs / tokens
    covariance = sums.products / tokens - torch.outer(mean, mean)
    if not bool(torch.isfinite(covariance).all()):
        raise NumericalError(
            f"the FFN of layer {layer} writes NaN or infinite values. Half precision may overflow: "
            "try bfloat16 or float32."
        )
    values, vectors = torch.linalg.eigh(covariance)
    level = values.abs().mean()
    importance = torch.sigmoid(values.abs() / level) if level > 0 else torch.ones_like(values)
    directions = weight_columns(architecture, (layer, "ffn")).double().T @ (vectors * importance)
    scores += directions.norm(dim=1) * (sums.columns / tokens).sqrt()
    return scores.cpu().numpy()
