"""Blocks of a pruned layer: those that lost everything, and how many heads each has.

The head dimension is never inferred again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..models.architectures import Architecture

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
