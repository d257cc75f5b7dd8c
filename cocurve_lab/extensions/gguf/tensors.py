"""The tensors of a GGUF file, and whether llama.cpp can compute the model.

Two of llama.cpp's architectures read the heads and channels of each layer. "deci" is a plain Llama
block, whose layers may have no attention. "openelm" also norms the queries and keys of each head,
as Qwen3 does, stacks query, key and value rows in one tensor, and always uses the embedding as the
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...base.errors import ArchitectureError, NumericalError
from ...models.architectures import Architecture
from ...models.unit import Kind
from ...models.weights import is_readable

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

GGUFDtype = Literal["f32", "f16", "q8_0"]
Place = Literal["deci", "openelm"]
_PAIRED = ("ernie4_5", "helium")  # rotate dimension 2i together with 2i + 1, as llama.cpp does
_DECI = (
    "llama",
    "mistral",
    "qwen2",
    "phi3",
    "ministral",
    "seed_oss",
    "cwm",
    "internlm3",
    "iquestcoder",
    *_PAIRED,
)
FAMILIES: dict[str, Place] = {**dict.fromkeys(_DECI, "deci"), "qwen3": "openelm"}
_AT_ONCE = 2**20  # numbers that are held in float32
BLOCK = 32  # weights that share one scale in q8_0
# the largest number of each type; in q8_0 a weight is a byte, up to 127, times a float16 scale
_LARGEST = {"F32": float(np.finfo(np.float32).max), "F16": 65504.0, "Q8_0": 127 * 65504.0}

# What llama.cpp can compute -----------------------------------------------------------------------


def require_expressible(architecture: Architecture) -> None:
    """Raise ArchitectureError, with the reason, unless llama.cpp can compute the model."""
    kind = architecture.model.config.model_type
    if kind not in FAMILIES:
        raise ArchitectureError(
            f"{kind} has a block that llama.cpp's architectures with widths per layer cannot "
            f"compute; they fit {', '.join(FAMILIES)}. Use save_pruned for this model."
        )
    architecture.require_unpacked()
    for fact in _obstacles(architecture):
        raise ArchitectureError(
            f"{fact}; llama.cpp's architecture {FAMILIES[kind]} cannot compute that. Use "
            "save_pruned for this model."
        )


def _obstacles(architecture: Architecture) -> Iterator[str]:
    """Properties that a model of a supported family may have and llama.cpp's block lacks."""
    config = architecture.model.config
    rope = config.rope_parameters
    head_dim = architecture.head_dim(0)
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        yield f"its {rope['rope_type']!r} rotary scaling depends on the length, or scales attention"
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
    if is_openelm(architecture):
        yield from _openelm_obstacles(architecture)
    if not is_readable(architecture.model):
        yield "some of its weights are not in memory (meta device)"


def _openelm_obstacles(architecture: Architecture) -> Iterator[str]:
    """Properties that Qwen3 may have, and `deci` would compute, but `openelm` does not."""
    if not _is_tied(architecture):
        yield "its output embedding is not its input embedding (tie_word_embeddings is false)"
    if rope_factors(architecture) is not None:
        yield "its rotary frequencies are scaled"
    for projection in architecture.all_projections:
        if projection.bias is not None:
            yield "its projections have biases"


def is_openelm(architecture: Architecture) -> bool:
    """Whether the file is of llama.cpp's architecture openelm; otherwise it is deci."""
    return FAMILIES[architecture.model.config.model_type] == "openelm"


def _is_tied(architecture: Architecture) -> bool:
    return architecture.head.weight is architecture.model.get_input_embeddings().weight


# Tensors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name: its name in the file.
        weight: a view of the model's weight, which may be on the meta device.
        heads: heads whose rows are interleaved when it is written (`interleave`); 0 for none.
        below: views whose rows follow those of `weight`.
    """

    name: str
    weight: Tensor
    heads: int = 0
    below: tuple[Tensor, ...] = ()

    def kind(self, dtype: GGUFDtype) -> GGMLQuantizationType:
        """The type it is stored in."""
        from gguf import GGMLQuantizationType

        if self.weight.dim() == 1 or dtype == "f32":  # llama.cpp reads norms and biases in float32
            return GGMLQuantizationType.F32
        # q8_0 quantizes whole blocks along a row; rows of another length stay in float16
        whole = self.weight.shape[-1] % BLOCK == 0
        return GGMLQuantizationType.Q8_0 if dtype == "q8_0" and whole else GGMLQuantizationType.F16

    def stored(self, dtype: GGUFDtype) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of the array it is stored as; blocks of q8_0 are bytes."""
        from gguf import quant_shape_to_byte_shape

        rows = sum(len(part) for part in (self.weight, *self.below))
        kind = self.kind(dtype)
        shape = (rows, *self.weight.shape[1:])
        if kind.name == "Q8_0":
            return tuple(quant_shape_to_byte_shape(shape, kind)), np.dtype(np.uint8)
        return shape, np.dtype({"F32": np.float32, "F16": np.float16}[kind.name])

    def values(
        self, dtype: GGUFDtype, numbers: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> np.ndarray:
        """Its numbers in the stored type; NumericalError if one does not fit.

        `numbers` gives the numbers of a weight that may be on disk (`gguf.numbers_of`).
        """
        from gguf.quants import quantize

        kind = self.kind(dtype)
        weight = numbers(self.weight).cpu()
        if self.below:
            weight = torch.cat([weight, *(numbers(part).cpu() for part in self.below)])
        if self.heads:
            weight = interleave(weight, self.heads)
        shape, unit = self.stored(dtype)
        found = np.empty(shape, unit)
        # some rows at a time: in float32, the whole takes twice what it takes in half precision
        rows = max(1, _AT_ONCE // max(1, weight[:1].numel()))
        for start in range(0, len(weight), rows):
            part = np.ascontiguousarray(weight[start : start + rows].float().numpy())
            largest = float(np.abs(part).max(initial=0))
            if not largest <= _LARGEST[kind.name]:  # the negation also catches NaN
                raise NumericalError(
                    f"{self.name} holds {largest}, which {kind.name} cannot store. If that is "
                    "finite, use dtype='f32'; otherwise the model is damaged: load it again."
                )
            found[start : start + rows] = quantize(part, kind)
        return found


def file_tensors(architecture: Architecture) -> Iterator[FileTensor]:
    """Yield every tensor of the file, as views of the model's weights."""
    embedding = architecture.model.get_input_embeddings().weight
    yield FileTensor("token_embd.weight", embedding)
    yield FileTensor("output_norm.weight", architecture.decoder.norm.weight)
    if not _is_tied(architecture):  # llama.cpp uses the embedding for a tied head
        yield FileTensor("output.weight", architecture.head.weight)
    factors = rope_factors(architecture)
    if factors is not None:
        yield FileTensor("rope_freqs.weight", factors)
    for layer in range(len(architecture.layers)):
        yield from _attention(architecture, layer)
        yield from _ffn(architecture, layer)


def _attention(architecture: Architecture, layer: int) -> Iterator[FileTensor]:
    """The tensors blk.i.attn_*; none where the file has no attention."""
    heads, groups = heads_of(architecture, layer)
    if heads == 0:
        return
    prefix = f"blk.{layer}.attn"
    norm = architecture.layers[layer].input_layernorm.weight
    yield FileTensor(f"{prefix}_norm.weight", norm)
    head = architecture.head_dim(layer)
    parts, output = _parts(architecture, layer, "attention", head, 3)  # see heads_of
    if is_openelm(architecture):  # it rotates as transformers does
        (query, _), *others = parts
        below = tuple(weight for weight, _ in others)
        yield FileTensor(f"{prefix}_qkv.weight", query, below=below)
        for name in "qk":
            norm = getattr(architecture.block(layer, "attention"), f"{name}_norm").weight
            yield FileTensor(f"{prefix}_{name}_norm.weight", norm)
    else:
        # values are not rotated, so their rows keep their order
        paired = architecture.model.config.model_type in _PAIRED
        counts = (0, 0, 0) if paired else (heads, groups, 0)
        for name, count, (weight, bias) in zip("qkv", counts, parts, strict=True):
            yield from _linear(f"{prefix}_{name}", weight, bias, count)
    yield from _linear(f"{prefix}_output", output[0], output[1])


def _ffn(architecture: Architecture, layer: int) -> Iterator[FileTensor]:
    prefix = f"blk.{layer}.ffn"
    norm = architecture.layers[layer].post_attention_layernorm.weight
    yield FileTensor(f"{prefix}_norm.weight", norm)
    parts, output = _parts(architecture, layer, "ffn", BLOCK, 2)  # see channels
    for name, (weight, bias) in zip(("gate", "up"), parts, strict=True):
        yield from _linear(f"{prefix}_{name}", weight, bias)
    yield from _linear(f"{prefix}_down", output[0], output[1])


def _linear(name: str, weight: Tensor, bias: Tensor | None, heads: int = 0) -> Iterator[FileTensor]:
    yield FileTensor(f"{name}.weight", weight, heads)
    if bias is not None:
        yield FileTensor(f"{name}.bias", bias, heads)


Linear = tuple[Tensor, Tensor | None]  # weight and bias


def _parts(
    architecture: Architecture, layer: int, kind: Kind, width: int, count: int
) -> tuple[list[Linear], Linear]:
    """Query, key, value, or gate, up, and the output of a block; a fused projection is split.

    Of a block without units, they are `count` matrices of zeros and an output, `width` wide.
    """
    output = architecture.output_projection(layer, kind)
    whole = architecture.width(layer, kind)
    if whole == 0:
        zeros = torch.zeros(width, len(architecture.decoder.norm.weight))
        return [(zeros, None)] * count, (zeros.T, output.bias)
    parts: list[Linear] = []
    for rows in architecture.unit_rows(layer, kind, 0, whole):
        own = slice(rows.start, rows.stop)
        bias = architecture.projection(layer, kind, rows.projection).bias
        weight = architecture.weight(layer, kind, rows.projection)[own]
        parts.append((weight, None if bias is None else bias[own]))
    return parts, (architecture.output_weight(layer, kind), output.bias)


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows [heads x head_dim, ...] of each head from two halves to neighboring pairs.

    transformers rotates dimension i together with i + head_dim / 2; llama.cpp's deci rotates 2i
    together with 2i + 1.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


# Sizes and positions ------------------------------------------------------------------------------


def heads_of(architecture: Architecture, layer: int) -> tuple[int, int]:
    """(query heads, key/value heads) of a layer in the file.

    A layer without heads gets one head of zeros in three cases, because of llama.cpp: without heads
    in layer 0 it takes the head dimension to be 0, it reads the output bias of a layer only if that
    layer has attention, and every layer of openelm has attention.
    """
    groups = architecture.num_groups(layer)
    if groups > 0:
        return groups * architecture.queries_per_group(layer), groups
    bias = architecture.output_projection(layer, "attention").bias
    return (1, 1) if layer == 0 or bias is not None or is_openelm(architecture) else (0, 0)


def channels(architecture: Architecture, layer: int) -> int:
    """FFN channels of a layer in the file; one block of zeros if it has none.

    llama.cpp would otherwise skip the attention of a layer without FFN too.
    """
    return architecture.width(layer, "ffn") or BLOCK


def window_of(config: Any) -> int | None:
    """Number of last tokens that attention reaches; None if that is the whole context."""
    window = getattr(config, "sliding_window", None)
    return None if window is None or window >= config.max_position_embeddings else int(window)


def rope_factors(architecture: Architecture) -> Tensor | None:
    """Factors [head_dim / 2], float32, by which llama.cpp divides the rotary frequencies.

    None if all are 1. They express the scaling of "linear" and "llama3".
    """
    frequencies = _rotary(architecture).inv_freq.float().cpu()
    theta = architecture.model.config.rope_parameters["rope_theta"]
    pairs = len(frequencies)
    plain = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    factors = (plain / frequencies.double()).float()
    # within 1e-4 of 1 is the rounding of float32 frequencies, and no scaling
    return None if torch.allclose(factors, torch.ones(pairs), rtol=0, atol=1e-4) else factors


def _rotary(architecture: Architecture) -> Any:
    """The rotary embedding, made anew from the configuration."""
    # the model's own is rounded if the model was cast to bfloat16
    return type(architecture.decoder.rotary_emb)(config=architecture.model.config)
