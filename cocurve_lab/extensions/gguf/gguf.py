"""Export of a model as one GGUF file for stock llama.cpp, with layers of different widths."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...base.arguments import require_choice
from ...base.atomic import replacing
from ...base.errors import InputError
from ...models.architectures import Architecture, describe
from ...models.identity import model_name
from ...models.weights import reader_of
from .tensors import (
    BLOCK,
    FAMILIES,
    FileTensor,
    GGUFDtype,
    channels,
    file_tensors,
    heads_of,
    require_expressible,
    window_of,
)
from .tokenizer import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GGUFFile:
    """The result of `export_gguf`.

    Attributes:
        path: the file.
        bytes: its size.
        dtype: the dtype that was requested.
        tensors: number of tensors by stored type; norms and biases are always F32.
        tokenizer: `tokenizer.ggml.model` and `tokenizer.ggml.pre`, as "model/pre".
        notes: sentences on how the file differs from the model; also in the file, under
            `cocurve.notes`.
    """

    path: Path
    bytes: int
    dtype: str
    tensors: dict[str, int]
    tokenizer: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        stored = ", ".join(f"{count} {kind}" for kind, count in self.tensors.items())
        head = f"{self.path}: {self.bytes / 1e6:.1f} MB, {stored}; tokenizer {self.tokenizer}"
        return "\n".join((head, *(f"- {note}" for note in self.notes)))


def export_gguf(
    pruned: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | os.PathLike[str],
    *,
    dtype: GGUFDtype = "f16",
    overwrite: bool = False,
) -> GGUFFile:
    """Write a model as one GGUF file for llama.cpp.

    The file computes what the model computes, up to the rounding of `dtype`. It is written as a
    whole or not at all, one tensor after the other. Space on the disk is checked first.

    Args:
        pruned: what `prune` returned, or a dense model: Llama, Mistral, Qwen2, Phi3, or Qwen3
            with tied embeddings. Its weights may be on disk (`pruner.saving.open_pruned`).
        tokenizer: the dense model's; None writes a file that takes token ids only.
        path: the file to write.
        dtype: of the weight matrices. "q8_0" takes 8.5 bits per weight; a matrix stays in float16
            if its row length is not a multiple of 32.
        overwrite: replace an existing file.

    Returns:
        The size, types and tokenizer of the file, and notes on how it differs from the model. A
        UserWarning says if llama.cpp may split text into other tokens.

    Raises:
        ArchitectureError: llama.cpp has no architecture that computes what this model computes.
        InputError: the file exists, or llama.cpp has no such tokenizer.
        NumericalError: a weight is not finite, or too large for the stored type.
    """
    require_choice(dtype, GGUFDtype, "dtype")
    target = require_target(path, overwrite)
    architecture = describe(pruned)
    architecture.require_columns("export_gguf", "Convert a stock folder with llama.cpp's own.")
    require_expressible(architecture)
    size = architecture.vocabulary
    vocabulary = read_vocabulary(tokenizer, size, stop_tokens(pruned))
    if not vocabulary.exact:
        warnings.warn(" ".join(vocabulary.notes), UserWarning, stacklevel=2)
    tensors = list(file_tensors(architecture))
    counts = dict(Counter(tensor.kind(dtype).name for tensor in tensors))
    notes = _notes(architecture, counts, dtype) + vocabulary.notes
    needed = sum(_bytes(tensor, dtype) for tensor in tensors)
    with replacing(target, size=needed) as temporary:
        _write(temporary, architecture, vocabulary, tensors, dtype, notes)
    named = f"{vocabulary.model}/{vocabulary.pretokenizer}"
    return GGUFFile(target, target.stat().st_size, dtype, counts, named, notes)


def require_target(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Check, before any work is done, that the file can be written; return its path."""
    target = Path(os.path.expanduser(path))
    if target.is_dir():
        raise InputError(f"{target} is a folder. Give a file, for example {target}/model.gguf.")
    if target.exists() and not overwrite:
        raise InputError(
            f"{target} exists. Choose another file, or pass overwrite=True to replace it."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """The token ids that end generation, those of the generation configuration first."""
    found: list[int] = []
    for config in (model.generation_config, model.config):
        stops = getattr(config, "eos_token_id", None)
        found += [stops] if isinstance(stops, int) else list(stops or ())
    return list(dict.fromkeys(found))


def _notes(architecture: Architecture, counts: dict[str, int], dtype: GGUFDtype) -> tuple[str, ...]:
    notes = []
    window = window_of(architecture.model.config)
    if window is not None:
        notes.append(
            f"The model attends to the last {window} tokens, but llama.cpp to all. Up to {window} "
            f"tokens this is the same, so the file gives {window} as the context length."
        )
    for layer in range(len(architecture.layers)):
        if architecture.width(layer, "ffn") == 0:
            notes.append(f"Layer {layer} has no FFN: written as {BLOCK} channels of zeros.")
        if architecture.width(layer, "attention") == 0 and heads_of(architecture, layer) != (0, 0):
            notes.append(f"Layer {layer} has no attention: written as one head of zeros.")
    if dtype == "q8_0" and "F16" in counts:
        notes.append(
            f"{counts['F16']} matrices stay in F16: their rows are not multiples of {BLOCK} long."
        )
    return tuple(notes)


def _write(
    path: Path,
    architecture: Architecture,
    vocabulary: Vocabulary,
    tensors: Sequence[FileTensor],
    dtype: GGUFDtype,
    notes: tuple[str, ...],
) -> None:
    from gguf import GGUFWriter

    # the architectures of Nvidia's pruned Llamas and Apple's OpenELM: those with widths per layer
    writer = GGUFWriter(path, FAMILIES[architecture.model.config.model_type])
    try:
        _describe(writer, architecture, dtype)
        _describe_origin(writer, architecture.model, vocabulary, notes)
        vocabulary.write(writer)
        for tensor in tensors:
            shape, unit = tensor.stored(dtype)
            size = _bytes(tensor, dtype)
            writer.add_tensor_info(tensor.name, shape, unit, size, raw_dtype=tensor.kind(dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # all tensors were announced above, so that their numbers need not be in memory together
        numbers = numbers_of(architecture.model)
        for tensor in tensors:
            writer.write_tensor_data(tensor.values(dtype, numbers).view(_Whole))
    finally:
        writer.close()


class _Whole(np.ndarray):
    """An array that is written as a whole: numpy ignores if its last buffer meets a full disk."""

    def tofile(self, file: Any, *_: Any) -> None:
        """Write the numbers to an open file."""
        file.write(np.ascontiguousarray(self).data)


def _bytes(tensor: FileTensor, dtype: GGUFDtype) -> int:
    shape, unit = tensor.stored(dtype)
    return math.prod(shape) * unit.itemsize


def _describe(writer: GGUFWriter, architecture: Architecture, dtype: GGUFDtype) -> None:
    """Add the keys that describe the model."""
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    config = architecture.model.config
    layers = range(len(architecture.layers))
    heads = [heads_of(architecture, layer) for layer in layers]
    head_dim = architecture.head_dim(0)
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}[dtype]
    writer.add_type("model")
    writer.add_file_type(LlamaFileType[file_type])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(architecture.vocabulary)
    writer.add_context_length(window_of(config) or config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(layers))
    writer.add_head_count([queries for queries, _ in heads])
    writer.add_head_count_kv([groups for _, groups in heads])
    writer.add_feed_forward_length([channels(architecture, layer) for layer in layers])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _safe_name(name: str, like_phi3: bool) -> str:
    """A name that makes llama.cpp treat special tokens as the tokenizer does.

    llama.cpp drops the spaces after special tokens where the name contains "phi-3" or "phi3", and
    rejects the file if the tokenizer has not Phi-3's tokens.
    """
    named = re.search("phi-?3", name, re.IGNORECASE)
    if like_phi3:
        return name if named else f"{name} (Phi-3 tokenizer)"
    return re.sub("(phi)-?(3)", r"\1 \2", name, flags=re.IGNORECASE)


def _describe_origin(
    writer: GGUFWriter, model: PreTrainedModel, vocabulary: Vocabulary, notes: tuple[str, ...]
) -> None:
    """Add the keys on where the model comes from: its name, dense model, plan and notes."""
    manifest = getattr(model, "cocurve_manifest", None) or {}
    base = manifest.get("base_model") or model_name(model)
    name = _safe_name(Path(base).name, vocabulary.like_phi3)
    if manifest.get("realized_ratio"):
        name += f" pruned by {manifest['realized_ratio']:.1%}"
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base)
    writer.add_name(name)
    for key in ("realized_ratio", "params_removed_fraction"):
        if manifest.get(key) is not None:
            writer.add_float32(f"cocurve.{key}", manifest[key])
    for key in ("selection_fingerprint", "curvature_fingerprint"):
        if manifest.get(key):
            writer.add_string(f"cocurve.{key}", manifest[key])
    if notes:
        writer.add_array("cocurve.notes", list(notes))


def numbers_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function from a weight of the model, or a view of one, to its numbers.

    The tensor is for reading only; it is on the CPU if it was on the meta device.
    """
    names, read = {id(weight): name for name, weight in model.named_parameters()}, reader_of(model)

    def numbers(view: Tensor) -> Tensor:
        if not view.is_meta:
            return view.detach()
        # a view on the meta device knows its weight, and which numbers of it it has
        whole = read(names[id(view if view._base is None else view._base)])
        return whole.as_strided(view.shape, view.stride(), view.storage_offset())

    return numbers
