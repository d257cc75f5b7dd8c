"""A tiny GGUF file, as llama.cpp's converter writes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .bpe import SIZE, byte_level


def write_gguf(path: Path, change: Callable[[Any], Any] = lambda _: None) -> None:
    """A tiny Llama in Q4_1, with a tokenizer of the kind of SmolLM2's; `change` adds to it."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer, rng = GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name, number in {
        "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": SIZE,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", number)
    writer.add_layer_norm_rms_eps(1e-5)
    bpe = json.loads(byte_level("smollm").backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    blocks = {f"blk.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    for name, shape in {"token_embd": (SIZE, 64), **blocks}.items():
        kind = GGMLQuantizationType.Q4_1
        weight = quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", weight, raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{i}.{n}_norm" for i in range(2) for n in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", rng.normal(size=64).astype(np.float32))
    change(writer)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
