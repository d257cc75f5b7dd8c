"""The tensors of a GGUF file: views of a model's weights, and how each is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ..architectures import Architecture, Kind
from ..errors import NumericalError
from .gguf_block import BLOCK, channels, heads_of, rope_factors

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
