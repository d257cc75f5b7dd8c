"""Cutting projections: which rows and columns of a layer stay, and the modules they make.

The head dimension is never inferred again, layers keep their own widths, and a layer may lose all
its attention or all its FFN.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import KINDS, Architecture, Kind
from .selection import Selection


class EmptyAttention(nn.Module):
    """Stands in for an attention block that lost every head: writes only the output bias, if any.

    It still notes one number per token in the KV cache, because transformers reads the length of
    the past from the cache of a layer.
    """

    def __init__(self, attention: Any, output: nn.Linear) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        self.num_key_value_groups = attention.num_key_value_groups
        self.layer_idx = attention.layer_idx
        self.o_proj = output  # [hidden, 0]; holds the bias

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        rows, length, _hidden = hidden_states.shape
        if past_key_values is not None:
            note = hidden_states.new_zeros(rows, 1, length, 1)
            past_key_values.update(note, note, self.layer_idx)
        return self.o_proj(hidden_states[..., :0]), None


def sliced_modules(
    architecture: Architecture, selection: Selection
) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, new module) of every projection that loses rows or columns."""
    replacements: list[tuple[nn.Module, str, nn.Module]] = []
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            columns, gains = kept_columns(architecture, selection, layer, kind)
            if len(columns) == architecture.width(layer, kind) and gains is None:
                continue
            block = architecture.block(layer, kind)
            output = architecture.output_projection(layer, kind)
            sliced = slice_linear(output, columns=columns, gains=gains)
            if kind == "attention" and len(columns) == 0:
                empty = EmptyAttention(block, sliced)
                replacements.append(
                    (architecture.layers[layer], architecture.family.attention, empty)
                )
                continue
            replacements.append((block, architecture.output_name(kind), sliced))
            for projection, rows in kept_rows(architecture, layer, kind, columns).items():
                replacements.append(
                    (block, projection, slice_linear(getattr(block, projection), rows=rows))
                )
    return replacements


def kept_columns(
    architecture: Architecture, selection: Selection, layer: int, kind: Kind
) -> tuple[Tensor, Tensor | None]:
    """Kept input columns [W'] of an output projection, and their gains [W'] where any is not 1."""
    width = architecture.width(layer, kind)
    keep, gains = torch.ones(width, dtype=torch.bool), torch.ones(width, dtype=torch.float64)
    for index, unit in enumerate(selection.units):
        if (unit.layer, unit.kind) == (layer, kind):
            if selection.indicator[index]:
                keep[unit.start : unit.stop] = False
            gains[unit.start : unit.stop] = selection.gains.get(index, 1.0)
    kept = gains[keep]
    return keep.nonzero().flatten(), None if bool((kept == 1).all()) else kept


def kept_rows(
    architecture: Architecture, layer: int, kind: Kind, columns: Tensor
) -> dict[str, Tensor]:
    """Kept rows of each input projection, given the kept columns of the output projection."""
    block = architecture.block(layer, kind)
    keep = {
        name: torch.zeros(getattr(block, name).out_features, dtype=torch.bool)
        for name in architecture.input_projections(kind)
    }
    step = 1
    if kind == "attention":
        step = architecture.head_dim(layer) * architecture.queries_per_group(layer)
    for start in columns[::step].tolist():
        for rows in architecture.unit_rows(layer, kind, start, start + step):
            keep[rows.projection][rows.start : rows.stop] = True
    return {name: mask.nonzero().flatten() for name, mask in keep.items()}


def slice_linear(
    linear: nn.Linear,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    gains: Tensor | None = None,
) -> nn.Linear:
    """A new linear layer with some rows (outputs, with their biases) or columns (inputs)."""
    weight: Tensor = linear.weight.detach()
    bias: Tensor | None = linear.bias
    if rows is not None:
        rows = rows.to(weight.device)
        weight, bias = weight[rows], None if bias is None else bias.detach()[rows]
    if columns is not None:
        weight = weight[:, columns.to(weight.device)]
    if gains is not None:
        weight = fold_gains(weight, gains)
    return _linear(weight.clone(), None if bias is None else bias.detach().clone(), linear)


def fold_gains(weight: Tensor, gains: Tensor) -> Tensor:
    """Columns of W_down times their gains, rounded once to the weight's dtype."""
    return (weight.double() * gains.to(weight.device)).to(weight.dtype)


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    # made on the meta device: initialising weights that are replaced at once would be wasted work
    with torch.device("meta"):
        module = nn.Linear(1, 1, bias=bias is not None)
    module.out_features, module.in_features = weight.shape
    module.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=like.weight.requires_grad)
    return module.train(like.training)


def settle_heads(architecture: Architecture) -> None:
    """Tell each attention block its own head counts; head_dim stays what it was."""
    config = architecture.model.config
    config.head_dim = architecture.head_dim(0)  # else loaders infer it from hidden / heads
    for layer in range(len(architecture.layers)):
        block = architecture.block(layer, "attention")
        if isinstance(block, EmptyAttention):
            continue
        groups = architecture.num_groups(layer)
        heads = groups * architecture.queries_per_group(layer)
        if hasattr(block, "num_key_value_heads"):
            block.num_key_value_heads = groups
        if hasattr(block, "num_heads"):
            block.num_heads = heads
        if len(architecture.family.qkv) == 1 and block.config.num_attention_heads != heads:
            block.config = copy.copy(config)  # fused blocks cut q, k and v by the configured counts
            block.config.num_attention_heads = heads
            block.config.num_key_value_heads = groups
