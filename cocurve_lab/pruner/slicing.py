"""Slicing projections: which rows and columns of a layer stay, and the modules made of them.

Each layer keeps its own widths, and may lose all its attention or all its FFN (blocks.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..models.architectures import Architecture, describe, is_transposed, weight_of, widths
from ..models.families import KINDS, Kind
from ..solver.selection import Selection
from .blocks import EmptyAttention, EmptyConv1D, settle_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def cut_model(model: PreTrainedModel, selection: Selection, *, inplace: bool) -> PreTrainedModel:
    """Put the sliced modules in place, in the model itself or in a copy.

    The model may live on the meta device: then so does the result.
    """
    replacements = sliced_modules(describe(model), selection)
    if inplace:
        for parent, name, module in replacements:
            setattr(parent, name, module)
    else:
        # deepcopy takes a module in its memo as copied already, so dense weights that are cut are
        # never duplicated
        memo = {id(getattr(parent, name)): module for parent, name, module in replacements}
        model = copy.deepcopy(model, memo)
    settle_heads(describe(model))
    vars(model).pop("cocurve_manifest", None)  # that of an earlier round has other widths
    return model


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
    cuts = block_cuts(architecture, layer, kind, columns, gains)
    if not cuts:
        return []
    block = architecture.block(layer, kind)
    if kind == "attention" and len(columns) == 0:
        name = architecture.output_name(kind)
        output = slice_linear(getattr(block, name), cuts[name])
        empty = EmptyAttention(architecture, layer, output)
        return [(architecture.layers[layer], architecture.family.attention, empty)]
    return [(block, name, slice_linear(getattr(block, name), cut)) for name, cut in cuts.items()]


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


@dataclass(frozen=True)
class Cut:
    """What stays of a projection with weight [out, in].

    Attributes:
        rows: int64, outputs that stay, with their biases; None for all.
        columns: int64, inputs that stay; None for all.
        gains: float64, factors of the columns that stay; None if all are 1.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    gains: Tensor | None = None

    def weight(self, weight: Tensor) -> Tensor:
        """What stays of the weight [out, in]; it may be a view of it."""
        if self.rows is not None:
            weight = weight[self.rows.to(weight.device)]
        if self.columns is not None:
            weight = weight[:, self.columns.to(weight.device)]
        return weight if self.gains is None else fold_gains(weight, self.gains)

    def transposed(self, weight: Tensor) -> Tensor:
        """The same for a weight that is stored as [in, out]."""
        return self.weight(weight.T).T.contiguous()

    def bias(self, bias: Tensor) -> Tensor:
        """What stays of the bias [out]; it may be the bias itself."""
        return bias if self.rows is None else bias[self.rows.to(bias.device)]


def block_cuts(
    architecture: Architecture, layer: int, kind: Kind, columns: Tensor, gains: Tensor | None
) -> dict[str, Cut]:
    """What stays of each projection of a block, by name; none if the block stays as it is.

    Args:
        architecture: the model; only shapes are read.
        layer, kind: the block.
        columns, gains: as for `block_modules`.
    """
    if len(columns) == architecture.width(layer, kind) and gains is None:
        return {}
    rows = kept_rows(architecture, layer, kind, columns)
    inputs = {name: Cut(rows=kept) for name, kept in rows.items()}
    return {architecture.output_name(kind): Cut(columns=columns, gains=gains), **inputs}


def tensor_cuts(
    architecture: Architecture, selection: Selection
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What `sliced_modules` does to each weight and bias, as functions by the tensor's name.

    The model may live on the meta device. A tensor without an entry stays as it is, or goes with a
    block that is gone.
    """
    names = {id(module): name for name, module in architecture.model.named_modules()}
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            kept = kept_columns(architecture, selection, layer, kind)
            for name, cut in block_cuts(architecture, layer, kind, *kept).items():
                projection = architecture.projection(layer, kind, name)
                place = names[id(projection)]
                found[f"{place}.weight"] = (
                    cut.transposed if is_transposed(projection) else cut.weight
                )
                found[f"{place}.bias"] = cut.bias
    return found


def slice_linear(linear: Any, cut: Cut) -> nn.Module:
    """Make a linear layer of the same class, a Linear or Conv1D, from what stays of one.

    Raises:
        ArchitectureError: the weight is packed.
    """
    weight = cut.weight(weight_of(linear).detach())
    bias = None if linear.bias is None else cut.bias(linear.bias.detach())
    make = _conv1d if is_transposed(linear) else _linear
    # clones share nothing with the dense model, not even an output projection's unsliced bias
    return make(weight.clone(), None if bias is None else bias.clone(), linear)


def fold_gains(weight: Tensor, gains: Tensor) -> Tensor:
    """Multiply columns [d, W'] of W_down by their gains [W'], rounded once to its dtype."""
    folded, gains = torch.empty_like(weight), gains.to(weight.device)
    # some rows at a time: in float64, the whole would take four times a half-precision weight
    for rows, into in zip(weight.split(256), folded.split(256), strict=True):
        into.copy_(rows.double() * gains)
    return folded


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    # on the meta device, because weights initialized here would be replaced at once
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
