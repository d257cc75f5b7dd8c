"""Where each model family keeps its projections.

The lab never copies a model's forward: it needs to know only which linear layers a unit lives in.
Supporting a family is one `Family` entry. No torch import here, so that units can be described
without a model and models can be described on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .errors import ArchitectureError

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["attention", "ffn"]
KINDS: tuple[Kind, Kind] = ("attention", "ffn")


@dataclass(frozen=True)
class Family:
    """One architecture family: names of the projections inside a decoder layer.

    `qkv` is (query, key, value), or one fused projection whose rows are all queries, then all keys,
    then all values. `gate_up` is (gate, up), or one fused projection with the gate rows first.
    """

    model_types: tuple[str, ...]
    qkv: tuple[str, ...]
    gate_up: tuple[str, ...]
    attention: str = "self_attn"
    ffn: str = "mlp"
    attention_output: str = "o_proj"
    ffn_output: str = "down_proj"


FAMILIES = (
    # Llama covers Falcon3 and Yi; Mistral covers Nemo and Small (head_dim != hidden / heads)
    Family(("llama", "mistral", "qwen2"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    Family(("phi3",), ("qkv_proj",), ("gate_up_proj",)),  # Phi-3, Phi-4
)


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
        """The stack without its head; returns hidden states after the final norm."""
        return self.model.model

    @property
    def layers(self) -> Sequence[Any]:
        return self.decoder.layers

    @property
    def final_norm(self) -> nn.Module:
        return self.decoder.norm

    @property
    def head(self) -> nn.Linear:
        return self.model.lm_head

    def block(self, layer: int, kind: Kind) -> Any:
        """The attention or FFN module of a layer."""
        name = self.family.attention if kind == "attention" else self.family.ffn
        return getattr(self.layers[layer], name)

    def output_projection(self, layer: int, kind: Kind) -> nn.Linear:
        """The linear layer whose input columns are the units (W_O or W_down)."""
        return getattr(self.block(layer, kind), self.output_name(kind))

    def output_name(self, kind: Kind) -> str:
        return self.family.attention_output if kind == "attention" else self.family.ffn_output

    def input_projections(self, kind: Kind) -> tuple[str, ...]:
        return self.family.qkv if kind == "attention" else self.family.gate_up

    def width(self, layer: int, kind: Kind) -> int:
        """Input columns of the output projection: query heads x head_dim, or FFN channels."""
        return int(self.output_projection(layer, kind).in_features)

    def head_dim(self, layer: int) -> int:
        return int(self.block(layer, "attention").head_dim)

    def queries_per_group(self, layer: int) -> int:
        """Query heads that share one key/value head: 1 for MHA, all of them for MQA."""
        return int(self.block(layer, "attention").num_key_value_groups)

    def num_groups(self, layer: int) -> int:
        """Key/value heads, the number of attention units of the layer."""
        return self.width(layer, "attention") // (
            self.head_dim(layer) * self.queries_per_group(layer)
        )

    def unit_rows(self, layer: int, kind: Kind, start: int, stop: int) -> list[RowBlock]:
        """Rows of the input projections behind columns `start:stop` of the output projection.

        The columns must be whole units: for attention, whole query groups.
        """
        width = self.width(layer, kind)
        if kind == "ffn":
            if len(self.family.gate_up) == 1:
                fused = self.family.gate_up[0]
                return [RowBlock(fused, start, stop), RowBlock(fused, width + start, width + stop)]
            return [RowBlock(name, start, stop) for name in self.family.gate_up]
        ratio = self.queries_per_group(layer)
        first, last, kv_width = start // ratio, stop // ratio, width // ratio
        if len(self.family.qkv) == 1:
            fused = self.family.qkv[0]
            return [
                RowBlock(fused, start, stop),
                RowBlock(fused, width + first, width + last),
                RowBlock(fused, width + kv_width + first, width + kv_width + last),
            ]
        query, key, value = self.family.qkv
        return [
            RowBlock(query, start, stop),
            RowBlock(key, first, last),
            RowBlock(value, first, last),
        ]


def describe(model: Any) -> Architecture:
    """Find the family of a Hugging Face causal language model.

    Args:
        model: a `PreTrainedModel` for causal language modelling; may live on the meta device.

    Raises:
        ArchitectureError: the family is unknown, the layers lack the expected projections, or the
            weights are quantised.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is None:
        supported = ", ".join(sorted(t for f in FAMILIES for t in f.model_types))
        raise ArchitectureError(
            f"{type(model).__name__} has model_type {model_type!r}, which the lab does not know. "
            f"Supported: {supported}. A new family is one entry in cocurve_lab/architectures.py."
        )
    architecture = Architecture(model, family)
    if getattr(model, "lm_head", None) is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no lm_head. Load it with AutoModelForCausalLM."
        )
    if not hasattr(getattr(model, "model", None), "layers"):
        raise ArchitectureError(
            f"{type(model).__name__} keeps its layers somewhere else than model.model.layers. "
            "Is it wrapped (an adapter, a trainer)? Unwrap it, merge adapters, and try again."
        )
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            _require_linear(architecture, layer, kind)
    return architecture


def _require_linear(architecture: Architecture, layer: int, kind: Kind) -> None:
    """Raise ArchitectureError unless a block's projections are plain floating-point layers."""
    names = [architecture.output_name(kind)]
    try:
        if architecture.width(layer, kind) > 0:  # a block that lost all its units keeps no inputs
            names += architecture.input_projections(kind)
        for name in names:
            projection = getattr(architecture.block(layer, kind), name)
            if hasattr(projection, "base_layer"):
                raise ArchitectureError(
                    f"{name} of layer {layer} carries an adapter ({type(projection).__name__}). "
                    "Merge adapters before pruning."
                )
            weight, expected = projection.weight, (projection.out_features, projection.in_features)
            if not weight.is_floating_point() or tuple(weight.shape) != expected:
                raise ArchitectureError(
                    f"{name} of layer {layer} holds {weight.dtype} of shape {tuple(weight.shape)}: "
                    "quantised weights cannot be sliced. Load the model unquantised."
                )
    except AttributeError as error:
        raise ArchitectureError(
            f"layer {layer} of {type(architecture.model).__name__} lacks the {kind} projection the "
            f"family {architecture.family.model_types[0]!r} should have ({error}). Is it a variant "
            "(mixture of experts, an adapter)? Merge adapters before pruning."
        ) from None
