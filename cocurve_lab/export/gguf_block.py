"""What llama.cpp's architecture `deci` computes, and whether a model is that.

It is the one architecture that gives every layer its own head and channel counts: a Llama block
with optional biases, rotary pairs next to each other, and attention over the whole context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..architectures import Architecture
from ..errors import ArchitectureError

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
