"""A model seen through its family: the modules the lab reads, masks and slices.

No torch import here, so that units can be described without a model and models can be described on
the meta device. The declarations of the families are in families.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ArchitectureError
from .families import FAMILIES, KINDS, Family, Kind, find_family

if TYPE_CHECKING:
    from torch import Tensor, nn


__all__ = ["FAMILIES", "KINDS", "Architecture", "Family", "Kind", "RowBlock", "describe"]


@dataclass(frozen=True)
class RowBlock:
    """Rows `start:stop` of one linear layer that belong to a unit."""

    projection: str
    start: int
    stop: int


@dataclass(frozen=True)
class Architecture:
    """A model seen through its family: the modules the lab reads, masks and slices.

    Widths are read from the weights, layer by layer, never from the configuration, so an already
    pruned model is described as truthfully as a stock one.
    """

    model: Any
    family: Family

    @property
    def decoder(self) -> Any:
        """The stack without its head; returns what the head reads."""
        return _find(self.model, self.family.decoder)

    @property
    def layers(self) -> Sequence[Any]:
        return getattr(self.decoder, self.family.layers)

    def final(self, hidden: Tensor) -> Tensor:
        """From the last layer's output to what the head reads: final norm, output embedding."""
        decoder = self.decoder
        for name in self.family.final:
            module = getattr(decoder, name)
            hidden = hidden if module is None else module(hidden)
        return hidden

    @property
    def head(self) -> nn.Linear:
        """The linear part of the head; logits are `logits(hidden)`."""
        return self.model.get_output_embeddings()

    @property
    def logit_cap(self) -> float | None:
        """c where the model's logits are c tanh(z / c) of the head's z (Gemma 2), else None."""
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return None if cap is None else float(cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits [..., V] of final hidden states [..., d], in the model's dtype."""
        logits, cap = self.head(hidden), self.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    @property
    def vocabulary(self) -> int:
        """Number of logits V."""
        return int(self.head.weight.shape[0])

    def block(self, layer: int, kind: Kind) -> Any:
        """The attention or FFN module of a layer; the layer itself where projections lie there."""
        name = self.family.attention if kind == "attention" else self.family.ffn
        return _find(self.layers[layer], name)

    def projection(self, layer: int, kind: Kind, name: str) -> Any:
        """A projection of a block by its name there."""
        return getattr(self.block(layer, kind), name)

    def weight(self, layer: int, kind: Kind, name: str) -> Tensor:
        """A projection's weight as [out, in], a view; ArchitectureError where it is packed."""
        return weight_of(self.projection(layer, kind, name))

    def output_projection(self, layer: int, kind: Kind) -> Any:
        """The linear layer whose input columns are the units (W_O or W_down)."""
        return self.projection(layer, kind, self.output_name(kind))

    def output_weight(self, layer: int, kind: Kind) -> Tensor:
        """W_O or W_down as [d, W], a view; ArchitectureError where it is packed."""
        return weight_of(self.output_projection(layer, kind))

    def output_name(self, kind: Kind) -> str:
        return self.family.attention_output if kind == "attention" else self.family.ffn_output

    def input_projections(self, kind: Kind) -> tuple[str, ...]:
        return self.family.qkv if kind == "attention" else self.family.gate_up

    def projection_names(self, layer: int, kind: Kind) -> tuple[str, ...]:
        """The output projection, and the inputs: an attention that lost all its units has none."""
        inputs = self.input_projections(kind) if self.width(layer, kind) > 0 else ()
        return (self.output_name(kind), *inputs)

    def width(self, layer: int, kind: Kind) -> int:
        """Input columns of the output projection: query heads x head_dim, or FFN channels."""
        return widths(self.output_projection(layer, kind))[1]

    def head_dim(self, layer: int) -> int:
        block = self.block(layer, "attention")
        return int(block.head_dim if hasattr(block, "head_dim") else block.head_size)

    def queries_per_group(self, layer: int) -> int:
        """Query heads that share one key/value head: 1 for MHA, all of them for MQA."""
        return int(getattr(self.block(layer, "attention"), "num_key_value_groups", 1))

    def num_groups(self, layer: int) -> int:
        """Key/value heads of the layer; each is one attention unit unless heads share a norm."""
        return self.width(layer, "attention") // (
            self.head_dim(layer) * self.queries_per_group(layer)
        )

    def step(self, layer: int, kind: Kind) -> int:
        """Fewest columns a cut takes: a channel; a query group, or all where heads share a norm."""
        if kind == "ffn":
            return 1
        if self.family.shared_norms:
            return max(1, self.width(layer, kind))  # 1 where pruning took them
        return self.head_dim(layer) * self.queries_per_group(layer)

    def unit_rows(self, layer: int, kind: Kind, start: int, stop: int) -> list[RowBlock]:
        """Rows of the input projections behind columns `start:stop` of the output projection.

        The columns must be whole units: for attention, whole query groups.
        """
        stacked = kind in self.family.stacked
        if kind == "ffn":
            names = self.family.gate_up
            if len(names) == 1 and stacked:
                return _stacked(names[0], self.width(layer, kind), (start, stop), (start, stop))
            return [RowBlock(name, start, stop) for name in names]
        ratio, names = self.queries_per_group(layer), self.family.qkv
        key_value = start // ratio, stop // ratio
        if len(names) == 1 and stacked:
            width = self.width(layer, kind)
            return _stacked(names[0], width, (start, stop), key_value, key_value, ratio=ratio)
        if len(names) == 1:  # head by head, without key/value groups
            return [RowBlock(names[0], 3 * start, 3 * stop)]
        query, key, value = names
        return [
            RowBlock(query, start, stop),
            RowBlock(key, *key_value),
            RowBlock(value, *key_value),
        ]

    @property
    def all_projections(self) -> Iterator[Any]:
        """Every projection of every block."""
        for layer in range(len(self.layers)):
            for kind in KINDS:
                for name in self.projection_names(layer, kind):
                    yield self.projection(layer, kind, name)

    def require_unpacked(self) -> None:
        """Raise ArchitectureError if a projection's weights are packed, so that none can be cut."""
        for projection in self.all_projections:
            weight_of(projection)


def describe(model: Any) -> Architecture:
    """Find the family of a Hugging Face causal language model.

    Args:
        model: a `PreTrainedModel` for causal language modelling; may live on the meta device.

    Raises:
        ArchitectureError: the family is unknown (or a mixture of experts, or has a vision tower),
            the layers lack the expected projections, or the weights are quantised in a way that
            cannot be measured.
    """
    architecture = Architecture(model, find_family(model))
    family = architecture.family
    stack = _find(model, family.decoder)
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))
    if head() is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no lm_head. Load it with AutoModelForCausalLM."
        )
    if not hasattr(stack, family.layers):
        raise ArchitectureError(
            f"{type(model).__name__} keeps its layers somewhere else than "
            f"model.{family.decoder}.{family.layers}. Is it wrapped (an adapter, a trainer)? "
            "Unwrap it, merge adapters, and try again."
        )
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            _require_linear(architecture, layer, kind)
    return architecture


def _require_linear(architecture: Architecture, layer: int, kind: Kind) -> None:
    """Raise ArchitectureError unless a block has its projections, all of a supported kind."""
    try:
        for name in architecture.projection_names(layer, kind):
            require_supported(architecture.projection(layer, kind, name), name, layer)
    except AttributeError as error:
        raise ArchitectureError(
            f"layer {layer} of {type(architecture.model).__name__} lacks the {kind} projection the "
            f"family {architecture.family.model_types[0]!r} should have ({error}). Is it a variant "
            "(mixture of experts, an adapter)? Merge adapters before pruning."
        ) from None


def _stacked(
    name: str, width: int, first: tuple[int, int], *rest: tuple[int, int], ratio: int = 1
) -> list[RowBlock]:
    """Row blocks of a projection that holds `width` rows, then some of width / ratio each."""
    blocks, offset = [RowBlock(name, *first)], width
    for start, stop in rest:
        blocks.append(RowBlock(name, offset + start, offset + stop))
        offset += width // ratio
    return blocks


def _find(module: Any, path: str) -> Any:
    """The submodule at a dotted path, None where there is none; "" is the module itself."""
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


_PACKED = ("Linear4bit",)  # layers that run although their stored weight has another shape


def weight_of(projection: Any) -> Tensor:
    """The weight [out, in], a view: writing into it changes the layer.

    Raises:
        ArchitectureError: the weight is quantised, so it has no rows and columns to read or cut.
    """
    if is_packed(projection):
        raise ArchitectureError(
            f"a {type(projection).__name__} holds packed {projection.weight.dtype} weights: they "
            "can be masked and measured, but not read or cut. Load the model unquantised, for "
            "example in bfloat16."
        )
    return projection.weight.T if is_transposed(projection) else projection.weight


def widths(projection: Any) -> tuple[int, int]:
    """(outputs, inputs) of a projection."""
    if is_transposed(projection):
        inputs, outputs = projection.weight.shape
        return int(outputs), int(inputs)
    return int(projection.out_features), int(projection.in_features)


def is_transposed(projection: Any) -> bool:
    """Whether the weight is stored [in, out], as transformers' Conv1D does."""
    return hasattr(projection, "nf")


def is_packed(projection: Any) -> bool:
    """Whether the weight is quantised in a form that runs but cannot be sliced."""
    return type(projection).__name__ in _PACKED


def require_supported(projection: Any, name: str, layer: int) -> None:
    """Raise ArchitectureError unless a projection is a plain, transposed or packed linear layer."""
    if hasattr(projection, "base_layer"):
        raise ArchitectureError(
            f"{name} of layer {layer} carries an adapter ({type(projection).__name__}). "
            "Merge adapters before pruning."
        )
    if is_packed(projection):
        return
    weight = weight_of(projection)
    if not weight.is_floating_point() or tuple(weight.shape) != widths(projection):
        raise ArchitectureError(
            f"{name} of layer {layer} holds {weight.dtype} of shape {tuple(weight.shape)}: "
            "quantised weights of this kind are not supported (bitsandbytes' 4-bit ones can be "
            "measured). Load the model unquantised."
        )
