"""Slicing projections: which rows and columns of a layer stay, and the modules made of them.

The head dimension is never inferred again. Each layer keeps its own widths, and may lose all its
attention or all its FFN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..models.architectures import Architecture, is_transposed, weight_of, widths
from ..models.families import KINDS, Kind
from ..solver.selection import Selection

# Empty blocks -------------------------------------------------------------------------------------


class EmptyAttention(nn.Module):
    """Replaces an attention block that lost every head. It returns the output bias, if any.

    Weights that belong to no unit stay: the bias, and norms whose weights all heads share.

    Args:
        architecture: the model.
        layer: the layer of the attention block.
        output: the output projection without columns, weight [d, 0].
    """

    def __init__(self, architecture: Architecture, layer: int, output: nn.Module) -> None:
        super().__init__()
        attention = architecture.block(layer, "attention")
        self.head_dim = architecture.head_dim(layer)
        self.num_key_value_groups = architecture.queries_per_group(layer)
        self.layer_idx = attention.layer_idx
        self.output_name = architecture.output_name("attention")
        family = architecture.family
        gone = {self.output_name, *family.qkv, *family.shared_norms}
        for name, module in attention.named_children():
            if name not in gone and any(True for _ in module.parameters()):
                self.add_module(name, module)
        self.add_module(self.output_name, output)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        layer_past: Any = None,  # the cache, in GPT-NeoX
        **_: Any,
    ) -> tuple[Tensor, None]:
        rows, length, _hidden = hidden_states.shape
        cache = layer_past if past_key_values is None else past_key_values
        if cache is not None:
            # transformers reads the length of the past from a layer's cache, which may be this one,
            # so it holds one number per token
            note = hidden_states.new_zeros(rows, 1, length, 1)
            cache.update(note, note, self.layer_idx)
        return getattr(self, self.output_name)(hidden_states[..., :0]), None


class EmptyConv1D(nn.Module):
    """A Conv1D without inputs: returns the bias. (transformers' own cannot run on none.)"""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias  # [0, out], [out]
        self.nx, self.nf = weight.shape

    def forward(self, columns: Tensor) -> Tensor:
        return self.bias.expand(*columns.shape[:-1], -1)


# Blocks -------------------------------------------------------------------------------------------

Replacement = tuple[nn.Module, str, nn.Module]  # parent, attribute, new module


def sliced_modules(architecture: Architecture, selection: Selection) -> list[Replacement]:
    """Make a new module for every projection that loses rows or columns, or has a gain.

    The model is not changed.
    """
    replacements: list[Replacement] = []
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            columns, gains = kept_columns(architecture, selection, layer, kind)
            replacements += block_modules(architecture, layer, kind, columns, gains)
    return replacements


def block_modules(
    architecture: Architecture,
    layer: int,
    kind: Kind,
    columns: Tensor,
    gains: Tensor | None = None,
) -> list[Replacement]:
    """Make the new modules of one block; none if it keeps everything as it is.

    They are on the device of the old ones, which may be the meta device. The model is not changed.

    Args:
        architecture: the model.
        layer, kind: the block.
        columns: [W'] int64, kept input columns of the output projection, in whole units.
        gains: [W'] float64, factors of these columns; None if all are 1.
    """
    if len(columns) == architecture.width(layer, kind) and gains is None:
        return []
    output = architecture.output_projection(layer, kind)
    sliced = slice_linear(output, columns=columns, gains=gains)
    if kind == "attention" and len(columns) == 0:
        empty = EmptyAttention(architecture, layer, sliced)
        return [(architecture.layers[layer], architecture.family.attention, empty)]
    block = architecture.block(layer, kind)
    replacements: list[Replacement] = [(block, architecture.output_name(kind), sliced)]
    for name, rows in kept_rows(architecture, layer, kind, columns).items():
        replacements.append((block, name, slice_linear(getattr(block, name), rows=rows)))
    return replacements


def kept_columns(
    architecture: Architecture, selection: Selection, layer: int, kind: Kind
) -> tuple[Tensor, Tensor | None]:
    """Kept input columns [W'] int64 of an output projection; their gains [W'], None if all 1."""
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
    """Kept rows of each input projection, by name, for kept columns of the output projection."""
    keep = {
        name: torch.zeros(widths(architecture.projection(layer, kind, name))[0], dtype=torch.bool)
        for name in architecture.input_projections(kind)
    }
    # columns come in whole units, so every step-th one starts a piece with rows of its own
    step = architecture.step(layer, kind)
    for start in columns[::step].tolist():
        for rows in architecture.unit_rows(layer, kind, start, start + step):
            keep[rows.projection][rows.start : rows.stop] = True
    return {name: mask.nonzero().flatten() for name, mask in keep.items()}


# Projections --------------------------------------------------------------------------------------


def slice_linear(
    linear: Any,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    gains: Tensor | None = None,
) -> nn.Module:
    """Make a linear layer of the same class from some rows or columns of another.

    Args:
        linear: a Linear or Conv1D, weight [out, in].
        rows: int64, outputs to keep, with their biases; None keeps all.
        columns: int64, inputs to keep; None keeps all.
        gains: float64, factors of the kept columns; None if all are 1.

    Raises:
        ArchitectureError: the weight is packed.
    """
    weight: Tensor = weight_of(linear).detach()
    bias: Tensor | None = linear.bias
    if rows is not None:
        rows = rows.to(weight.device)
        weight, bias = weight[rows], None if bias is None else bias.detach()[rows]
    if columns is not None:
        weight = weight[:, columns.to(weight.device)]
    if gains is not None:
        weight = fold_gains(weight, gains)
    make = _conv1d if is_transposed(linear) else _linear
    # clones share nothing with the dense model, not even an output projection's unsliced bias
    return make(weight.clone(), None if bias is None else bias.detach().clone(), linear)


def fold_gains(weight: Tensor, gains: Tensor) -> Tensor:
    """Multiply columns [d, W'] of W_down by their gains [W'], rounded once to its dtype."""
    return (weight.double() * gains.to(weight.device)).to(weight.dtype)


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    # on the meta device, because weights initialised here would be replaced at once
    with torch.device("meta"):
        module = nn.Linear(1, 1, bias=bias is not None)
    module.out_features, module.in_features = weight.shape
    module.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=like.weight.requires_grad)
    return module.train(like.training)


def _conv1d(weight: Tensor, bias: Tensor | None, like: Any) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    assert bias is not None
    requires_grad = like.weight.requires_grad
    stored = nn.Parameter(weight.T.contiguous(), requires_grad=requires_grad)
    kept_bias = nn.Parameter(bias, requires_grad=requires_grad)
    if weight.shape[1] == 0:
        return EmptyConv1D(stored, kept_bias).train(like.training)
    with torch.device("meta"):
        module = Conv1D(1, 1)
    module.nx, module.nf = stored.shape
    module.weight, module.bias = stored, kept_bias
    return module.train(like.training)


# Head counts --------------------------------------------------------------------------------------


class OwnCounts:
    """A layer's view of the model's configuration with its own head counts.

    Everything else is looked up in the whole configuration when it is asked for. A copy would miss
    later changes, for example of the attention implementation.
    """

    def __init__(self, config: Any, heads: int, groups: int) -> None:
        self.whole = config
        self.num_attention_heads, self.num_key_value_heads = heads, groups

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # not set yet while deepcopy rebuilds the object: avoid a recursion
            raise AttributeError(name)
        return getattr(self.whole, name)


def settle_heads(architecture: Architecture) -> None:
    """Set each attention block's head counts to its own; head_dim stays as it was."""
    config = architecture.model.config
    config.head_dim = architecture.head_dim(0)  # loaders would infer it from hidden / heads
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
        for name in ("split_size", "embed_dim"):  # GPT-2 and OPT: width of the queries
            if hasattr(block, name):
                setattr(block, name, heads * architecture.head_dim(layer))
        if architecture.family.counts_in_config and block.config.num_attention_heads != heads:
            block.config = OwnCounts(config, heads, groups)
