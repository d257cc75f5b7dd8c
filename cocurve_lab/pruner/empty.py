"""Blocks that lost every head, and projections from nothing: what answers in their place."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..models.architectures import Architecture


class EmptyAttention(nn.Module):
    """Replaces an attention block that lost every head. It returns the output bias, if any.

    Weights that belong to no unit stay: the bias, and norms that all heads share.
    """

    def __init__(self, architecture: Architecture, layer: int, output: nn.Module) -> None:
        super().__init__()
        attention = architecture.block(layer, "attention")
        self.head_dim = architecture.head_dim(layer)
        self.num_key_value_groups = architecture.queries_per_group(layer)
        self.layer_idx = attention.layer_idx
        self.output_name = architecture.output_name("attention")
        family = architecture.family
        gone = {self.output_name, *family.qkv, *family.shared}
        for name, module in attention.named_children():
            if name not in gone and next(module.parameters(), None) is not None:
                self.add_module(name, module)
        self.add_module(self.output_name, output)

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        # transformers' names for the cache: from 5.24 on, before it, and GPT-NeoX's
        for name in ("cache", "past_key_values", "layer_past"):
            if options.get(name) is not None:
                # transformers may read the length of the past from this layer's cache, so the
                # cache holds one number per token
                rows, length, _ = hidden_states.shape
                note = hidden_states.new_zeros(rows, 1, length, 1)
                options[name].update(note, note, self.layer_idx)
        return getattr(self, self.output_name)(hidden_states[..., :0]), None


class EmptyConv1D(nn.Module):
    """A Conv1D without inputs: returns the bias. (transformers' own cannot run on none.)"""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias  # [0, out], [out]
        self.nx, self.nf = weight.shape

    def forward(self, columns: Tensor) -> Tensor:
        return self.bias.expand(*columns.shape[:-1], -1)
