"""The tensors of a GGUF file: views of a model's weights, and how each is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ArchitectureError, NumericalError
from ..models.architectures import Architecture
from ..models.families import Kind

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

GGUFDtype = Literal["f32", "f16", "q8_0"]
# q8_0: bytes up to 127 times a float16
_LARGEST = {"F32": float(np.finfo(np.float32).max), "F16": 65504.0, "Q8_0": 127 * 65504.0}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: a view of the model's, and whose heads' rows are to be interleaved."""

    name: str
    weight: Tensor
    heads: int = 0

    def kind(self, dtype: GGUFDtype) -> GGMLQuantizationType:
        """How it is stored: norms and biases in float32, rows of broken blocks in float16."""
        from gguf import GGMLQuantizationType

        if self.weight.dim() == 1 or dtype == "f32":
            return GGMLQuantizationType.F32
        whole = self.weight.shape[-1] % BLOCK == 0
        return GGMLQuantizationType.Q8_0 if dtype == "q8_0" and whole else GGMLQuantizationType.F16

    def values(self, dtype: GGUFDtype) -> np.ndarray:
        """Its numbers as they are stored.

        Raises:
            NumericalError: one is not finite, or too large for float16.
        """
        from gguf.quants import quantize

        kind, weight = self.kind(dtype), self.weight.detach().to("cpu", torch.float32)
        if self.heads:
            weight = interleave(weight, self.heads)
        values = np.ascontiguousarray(weight.numpy())
        largest = float(np.abs(values).max(initial=0))
        if not largest <= _LARGEST[kind.name]:  # also if it is not a number
            raise NumericalError(
                f"{self.name} holds {largest}, which {kind.name} cannot. If it is only large, use "
                "dtype='f32'; if it is not finite, the model is damaged."
            )
        return np.asarray(quantize(values, kind))


def file_tensors(architecture: Architecture) -> Iterator[FileTensor]:
    """Every tensor of the file, as views of the model's weights."""
    embedding = architecture.model.get_input_embeddings().weight
    yield FileTensor("token_embd.weight", embedding)
    yield FileTensor("output_norm.weight", architecture.decoder.norm.weight)
    if architecture.head.weight is not embedding:
        yield FileTensor("output.weight", architecture.head.weight)
    factors = rope_factors(architecture)
    if factors is not None:
        yield FileTensor("rope_freqs.weight", factors)
    for layer in range(len(architecture.layers)):
        yield from _attention(architecture, layer)
        yield from _ffn(architecture, layer)


def _attention(architecture: Architecture, layer: int) -> Iterator[FileTensor]:
    """blk.i.attn_*: rows of queries and keys go from half-rotation to neighbouring pairs."""
    heads, groups = heads_of(architecture, layer)
    if heads == 0:
        return
    prefix, norm = f"blk.{layer}.attn", architecture.layers[layer].input_layernorm.weight
    yield FileTensor(f"{prefix}_norm.weight", norm)
    if architecture.width(layer, "attention") == 0:
        zeros = torch.zeros(architecture.head_dim(layer), norm.numel())
        for name in "qkv":
            yield FileTensor(f"{prefix}_{name}.weight", zeros)
        yield FileTensor(f"{prefix}_output.weight", zeros.T)
    else:
        parts = _rows(architecture, layer, "attention")
        for name, count, (weight, bias) in zip("qkv", (heads, groups, 0), parts, strict=True):
            yield FileTensor(f"{prefix}_{name}.weight", weight, count)
            if bias is not None:
                yield FileTensor(f"{prefix}_{name}.bias", bias, count)
        yield FileTensor(f"{prefix}_output.weight", architecture.output_weight(layer, "attention"))
    bias = architecture.output_projection(layer, "attention").bias
    if bias is not None:
        yield FileTensor(f"{prefix}_output.bias", bias)


def _ffn(architecture: Architecture, layer: int) -> Iterator[FileTensor]:
    prefix, norm = f"blk.{layer}.ffn", architecture.layers[layer].post_attention_layernorm.weight
    yield FileTensor(f"{prefix}_norm.weight", norm)
    if architecture.width(layer, "ffn") == 0:
        zeros = torch.zeros(channels(architecture, layer), norm.numel())
        for name in ("gate", "up"):
            yield FileTensor(f"{prefix}_{name}.weight", zeros)
        yield FileTensor(f"{prefix}_down.weight", zeros.T)
    else:
        parts = _rows(architecture, layer, "ffn")
        for name, (weight, bias) in zip(("gate", "up"), parts, strict=True):
            yield FileTensor(f"{prefix}_{name}.weight", weight)
            if bias is not None:
                yield FileTensor(f"{prefix}_{name}.bias", bias)
        yield FileTensor(f"{prefix}_down.weight", architecture.output_weight(layer, "ffn"))
    bias = architecture.output_projection(layer, "ffn").bias
    if bias is not None:
        yield FileTensor(f"{prefix}_down.bias", bias)


def _rows(
    architecture: Architecture, layer: int, kind: Kind
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of query, key, value, or of gate, up, also where one projection holds all."""
    for rows in architecture.unit_rows(layer, kind, 0, architecture.width(layer, kind)):
        weight = architecture.weight(layer, kind, rows.projection)[rows.start : rows.stop]
        bias = architecture.projection(layer, kind, rows.projection).bias
        yield weight, None if bias is None else bias[rows.start : rows.stop]


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads x head_dim, ...] of each head from (first half, second half) to pairs.

    transformers rotates dimension i with i + head_dim / 2, llama.cpp's deci 2i with 2i + 1.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


FAMILIES = ("llama", "mistral", "qwen2", "phi3")
BLOCK = 32  # numbers that share one scale in q8_0
_REASONS = {
    "qwen3": "norms on queries and keys",
    "gemma": "scaled embeddings and a GELU",
    "gemma2": "norms behind its blocks and capped logits",
    "gemma3_text": "norms behind its blocks and on queries and keys",
    "olmo2": "norms behind its blocks and on queries and keys",
    "gpt_neox": "attention and FFN side by side, and layer norms with biases",
    "gpt2": "learned positions and layer norms with biases",
    "opt": "learned positions and layer norms with biases",
}


def require_expressible(architecture: Architecture) -> None:
    """Raise ArchitectureError, with the reason, unless `deci` computes what this model computes."""
    kind = architecture.model.config.model_type
    if kind not in FAMILIES:
        reason = _REASONS.get(kind, "a block of its own")
        raise ArchitectureError(
            f"{kind} has {reason}; llama.cpp's only architecture with widths per layer is a plain "
            f"Llama block. GGUF works for {', '.join(FAMILIES)}; keep this model with save_pruned."
        )
    architecture.require_unpacked()
    for fact in _obstacles(architecture):
        raise ArchitectureError(
            f"{fact}; llama.cpp's architecture deci cannot compute that. Keep this model with "
            "save_pruned."
        )


def _obstacles(architecture: Architecture) -> Iterator[str]:
    """What a model of a supported family may have that the block does not."""
    model, config = architecture.model, architecture.model.config
    rope, head_dim = config.rope_parameters, architecture.head_dim(0)
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        yield f"its {rope['rope_type']!r} rotary scaling follows the length or rescales attention"
    elif 2 * len(_rotary(architecture).inv_freq) != head_dim:
        yield f"only {2 * len(_rotary(architecture).inv_freq)} of {head_dim} dimensions are rotated"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act!r}, not SiLU"
    if architecture.head.bias is not None:
        yield "its output embedding has a bias"
    for layer in range(len(architecture.layers)):
        scale = getattr(architecture.block(layer, "attention"), "scaling", head_dim**-0.5)
        if abs(scale * head_dim**0.5 - 1) > 1e-6:
            yield f"layer {layer} scales attention by {scale}, not by 1 / sqrt({head_dim})"
    if any(parameter.is_meta for parameter in model.parameters()):
        yield "some of its weights are not in memory (meta device)"


def window_of(config: Any) -> int | None:
    """Tokens back that attention reaches, None where that is the whole context."""
    window = getattr(config, "sliding_window", None)
    return None if window is None or window >= config.max_position_embeddings else int(window)


def _rotary(architecture: Architecture) -> Any:
    """The rotary embedding made anew: a model cast to bfloat16 has rounded frequencies."""
    return type(architecture.decoder.rotary_emb)(config=architecture.model.config)


def heads_of(architecture: Architecture, layer: int) -> tuple[int, int]:
    """(query heads, key/value heads) in the file; one of zeros where llama.cpp must see one.

    It takes the head dimension to be 0 if layer 0 has no heads, and reads the output bias of a
    layer only with its attention.
    """
    groups = architecture.num_groups(layer)
    if groups > 0:
        return groups * architecture.queries_per_group(layer), groups
    bias = architecture.output_projection(layer, "attention").bias
    return (1, 1) if layer == 0 or bias is not None else (0, 0)


def channels(architecture: Architecture, layer: int) -> int:
    """FFN channels in the file: one block of zeros where there are none."""
    return architecture.width(layer, "ffn") or BLOCK


def rope_factors(architecture: Architecture) -> Tensor | None:
    """What llama.cpp divides each rotary frequency by, [head_dim / 2]; None if by nothing."""
    frequencies = _rotary(architecture).inv_freq.float().cpu()
    theta, pairs = architecture.model.config.rope_parameters["rope_theta"], len(frequencies)
    plain = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    factors = (plain / frequencies.double()).float()
    return None if torch.allclose(factors, torch.ones(pairs), rtol=0, atol=1e-4) else factors
