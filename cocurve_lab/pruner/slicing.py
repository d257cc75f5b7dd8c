"""Slicing projections: which rows and columns of a layer stay, and the modules made of them.

Each layer keeps its own widths, and may lose all its attention or all its FFN. The head dimension
stays what it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models.architectures import UNIT_KINDS, Architecture, describe, is_transposed, weight_of
from ..models.unit import Cut, Kind
from ..models.weights import settle_ties
from ..solver.selection import Selection

Replacement = tuple[nn.Module, str, Any]  # parent, attribute, new module


def cut_model(architecture: Architecture, selection: Selection, *, inplace: bool) -> Architecture:
    """Replace every projection that loses units or has a gain, in the model or in a copy of it.

    A model on the meta device stays there.
    """
    model = architecture.model
    replacements = [
        replacement
        for layer, kind, cuts in _plan_cuts(architecture, selection)
        for replacement in block_modules(architecture, layer, kind, cuts)
    ]
    if inplace:
        for parent, name, module in replacements:
            setattr(parent, name, module)
    else:
        # deepcopy takes a module in its memo as copied already, so dense weights that are cut are
        # never duplicated
        memo = {id(getattr(parent, name)): module for parent, name, module in replacements}
        model = copy.deepcopy(model, memo)
        own = model.config.get_text_config()
        part: Any
        for part in model.modules():  # new modules still have the configuration of the dense one
            if vars(part).get("config") is architecture.config:
                vars(part)["config"] = own
    pruned = describe(model)
    settle_heads(pruned)
    settle_ties(model)
    vars(model).pop("cocurve_manifest", None)  # that of an earlier round has other widths
    return pruned


def tensor_cuts(
    architecture: Architecture, selection: Selection
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what `cut_model` does to each weight and bias, as functions by the tensor's name.

    A tensor without an entry stays as it is, or belongs to a block that is removed.
    """
    model = architecture.model
    names = {id(part): name for name, part in [*model.named_modules(), *model.named_parameters()]}
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for layer, kind, cuts in _plan_cuts(architecture, selection):
        for name, cut in cuts.items():
            projection = architecture.projection(layer, kind, name)
            place = names[id(projection)]
            if isinstance(projection, nn.Parameter):
                found[place] = cut.bias
                continue
            if not UNIT_KINDS[kind].columns:  # rows alone, of each of its tensors
                found |= {f"{place}.{own}": cut.bias for own in projection.state_dict()}
                continue
            found[f"{place}.weight"] = cut.transposed if is_transposed(projection) else cut.weight
            found[f"{place}.bias"] = cut.bias
    return found


def _plan_cuts(
    architecture: Architecture, selection: Selection
) -> Iterator[tuple[int, Kind, Mapping[str, Cut]]]:
    for layer in range(len(architecture.layers)):
        for kind in architecture.kinds(layer):
            columns, gains = kept_columns(architecture, selection, layer, kind)
            yield layer, kind, block_cuts(architecture, layer, kind, columns, gains)


def kept_columns(
    architecture: Architecture, selection: Selection, layer: int, kind: Kind
) -> tuple[Tensor, Tensor | None]:
    """Return the kept input columns [W'] int64 of an output projection, and their gains [W'].

    The gains are float64 factors, or None if all are 1.
    """
    width = architecture.width(layer, kind)
    keep, gains = torch.ones(width, dtype=torch.bool), torch.ones(width, dtype=torch.float64)
    for index, unit in enumerate(selection.units):
        if (unit.layer, unit.kind) == (layer, kind):
            if selection.indicator[index]:
                keep[unit.start : unit.stop] = False
            gains[unit.start : unit.stop] = selection.gains.get(index, 1.0)
    kept = gains[keep]
    return keep.nonzero().flatten(), None if bool((kept == 1).all()) else kept


def block_cuts(
    architecture: Architecture,
    layer: int,
    kind: Kind,
    columns: Tensor,
    gains: Tensor | None = None,
) -> Mapping[str, Cut]:
    """Return the cut of each projection of a block, by name; none if the block stays as it is.

    `columns` and `gains` are those of `kept_columns`; columns come in whole units.
    """
    if len(columns) == architecture.width(layer, kind) and gains is None:
        return {}
    return UNIT_KINDS[kind].cuts(architecture, layer, columns, gains)


def block_modules(
    architecture: Architecture, layer: int, kind: Kind, cuts: Mapping[str, Cut]
) -> list[Replacement]:
    """Make the new modules of one block; the model is not changed."""
    block, new = architecture.block(layer, kind), {}
    for name, cut in cuts.items():
        part, declared = getattr(block, name), UNIT_KINDS[kind]
        new[name] = slice_linear(part, cut) if declared.columns else declared.narrowed(part, cut)
    if kind == "attention" and cuts and architecture.output_name(kind) in new:
        output = new[architecture.output_name(kind)]
        if output.weight.numel() == 0:
            empty = EmptyAttention(architecture, layer, output)
            return [(architecture.layers[layer], architecture.family.attention, empty)]
    return [(block, name, module) for name, module in new.items()]


def slice_linear(linear: Any, cut: Cut) -> Any:
    """Make a Linear or Conv1D from what stays of one; ArchitectureError if it is packed."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(linear, nn.Parameter):  # one number per head
        return nn.Parameter(cut.bias(linear.detach()).clone(), requires_grad=linear.requires_grad)
    transposed, given = is_transposed(linear), linear.weight.requires_grad
    kept = cut.weight(weight_of(linear).detach())
    # clones share nothing with the dense model, not even an output projection's unsliced bias
    weight = nn.Parameter(
        (kept.T if transposed else kept).contiguous().clone(), requires_grad=given
    )
    bias = linear.bias
    if bias is not None:
        bias = nn.Parameter(cut.bias(bias.detach()).clone(), requires_grad=given)
    if transposed and len(weight) == 0:
        return EmptyConv1D(weight, bias).train(linear.training)
    # on the meta device, because weights initialized here would be replaced at once
    with torch.device("meta"):
        module: Any = Conv1D(1, 1) if transposed else nn.Linear(1, 1, bias=bias is not None)
    if transposed:
        module.nx, module.nf = weight.shape
    else:
        module.out_features, module.in_features = weight.shape
    module.weight, module.bias = weight, bias
    return module.train(linear.training)


# Head counts --------------------------------------------------------------------------------------


class OwnCounts:
    """A layer's view of the model's configuration with its own head counts.

    A copy would miss later changes, for example of the attention implementation.
    """

    def __init__(self, config: Any, heads: int, groups: int) -> None:
        self.whole = config
        self.num_attention_heads, self.num_key_value_heads = heads, groups

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # not set yet while deepcopy rebuilds the object: no recursion
            raise AttributeError(name)
        return getattr(self.whole, name)


def settle_heads(architecture: Architecture) -> None:
    """Set each attention block's head counts to its own; head_dim stays as it was."""
    config, attention = architecture.config, architecture.attention_layers
    if attention and not architecture.family.latent:  # there, it is the width of the rotation
        # loaders would infer it from hidden / heads
        config.head_dim = architecture.head_dim(attention[0])
    for layer in range(len(architecture.layers)):
        block = architecture.block(layer, "attention")
        if block is None or isinstance(block, EmptyAttention):
            continue
        groups = architecture.num_groups(layer)
        heads = groups * architecture.queries_per_group(layer)
        columns = heads * architecture.head_dim(layer)
        # the last two: the width of the queries, in GPT-2 and OPT
        counts = {"num_key_value_heads": groups, "num_heads": heads}
        for name, count in (counts | {"split_size": columns, "embed_dim": columns}).items():
            if hasattr(block, name):
                setattr(block, name, count)
        if architecture.family.counts_in_config and block.config.num_attention_heads != heads:
            block.config = OwnCounts(config, heads, groups)


# Blocks without heads, projections without inputs -------------------------------------------------


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
