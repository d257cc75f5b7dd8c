"""A GGUF file in fewer bits, by llama.cpp's own quantizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...base.atomic import replacing
from ...base.errors import FileFormatError, InputError
from ...models.architectures import describe
from ...models.weights import loaded_copy
from .gguf import GGUFFile, export_gguf, require_target
from .tensors import file_tensors, from_interleaved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q3_K_M", "Q2_K")
SUPER_BLOCK = 256  # weights of a row that llama.cpp's K types quantize together
# in a process of its own: llama.cpp writes to stderr, and ends the process where it gives up
_CYLLAMA = """
import sys
from cyllama.llama import llama_cpp
settings = llama_cpp.LlamaModelQuantizeParams()
settings.ftype = int(sys.argv[3])
llama_cpp.model_quantize(sys.argv[1], sys.argv[2], settings)
"""


def quantize_gguf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    kind: str = "Q4_K_M",
    *,
    overwrite: bool = False,
) -> GGUFFile:
    """Quantize a GGUF file with llama.cpp's quantizer, and say what became of each matrix.

    It runs the program `llama-quantize` if it is on the PATH, else the Python package cyllama. Both
    are llama.cpp. For Q8_0 use `export_gguf(..., dtype="q8_0")`, which needs neither, and leaves
    rows in float16 for which llama.cpp's quantizer rejects the whole file.

    Args:
        source: a file from `export_gguf` in "f32" or "f16".
        path: the file to write.
        kind: llama.cpp's name of a type: one of KINDS.
        overwrite: replace an existing file.

    Returns:
        The size and types of the file. A note counts the matrices in another type because their
        rows are no multiple of 256 weights long.

    Raises:
        FileFormatError: `source` is not a GGUF file, or llama.cpp cannot quantize it.
        InputError: `kind` is unknown, a file exists or is missing, or there is no quantizer.
    """
    require_kind(kind)
    source, target = Path(os.path.expanduser(source)), require_target(path, overwrite)
    if not source.is_file():
        raise InputError(f"there is no file {source}. Write one: cl.export_gguf(model, ...).")
    if target.exists() and target.samefile(source):
        raise InputError(f"{target} is the file to quantize. Choose another file to write.")
    with replacing(target) as temporary:
        command = [*_quantizer(kind), str(source), str(temporary), *_type_of(kind)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise FileFormatError(
                f"llama.cpp cannot quantize {source} to {kind}: {_reason(done.stdout, done.stderr)}"
            )
        fields, counts, others = _content(temporary)
    notes = tuple(fields.get("cocurve.notes", ())) + _notes(counts, others)
    model = fields.get("tokenizer.ggml.model", "no_vocab")
    named = f"{model}/{fields.get('tokenizer.ggml.pre', 'default')}"
    return GGUFFile(target, target.stat().st_size, kind, counts, named, notes)


def require_kind(kind: str) -> None:
    """Raise InputError unless llama.cpp's quantizer has the type, and some quantizer is here."""
    if kind.upper() == "Q8_0":
        raise InputError('kind is Q8_0, which export_gguf writes itself. Use dtype="q8_0" there.')
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}. Use one of {', '.join(KINDS)}.")
    _quantizer(kind)


def _quantizer(kind: str) -> list[str]:
    """The start of the command that quantizes."""
    program = shutil.which("llama-quantize")
    if program is not None:
        return [program]
    if find_spec("cyllama") is not None:
        return [sys.executable, "-c", _CYLLAMA]
    raise InputError(
        f"{kind} is made by llama.cpp's quantizer, which is not here. Install llama.cpp, so that "
        "llama-quantize is on the PATH, or run `pip install cyllama`."
    )


def _type_of(kind: str) -> list[str]:
    """The end of the command: the program takes names, the package numbers."""
    from gguf import LlamaFileType

    return [kind if shutil.which("llama-quantize") else str(LlamaFileType[f"MOSTLY_{kind}"].value)]


def _reason(said: str, errors: str) -> str:
    """The line of llama.cpp's output that says why it failed."""
    lines = [line for line in f"{said}\n{errors}".splitlines() if line.strip()]
    telling = [line for line in lines if re.search("error|fail|not divisible", line, re.IGNORECASE)]
    return (telling or lines or ["it gave no reason"])[0].strip()


def _content(path: Path) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
    """(fields, number of tensors by type, the same for matrices with rows that K types lack)."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    # GGUF counts the weights of a row first
    others = Counter(
        tensor.tensor_type.name
        for tensor in reader.tensors
        if len(tensor.shape) > 1 and tensor.shape[0] % SUPER_BLOCK
    )
    return fields, dict(counts), dict(others)


def _notes(counts: dict[str, int], others: dict[str, int]) -> tuple[str, ...]:
    if not others:
        return ()
    stored = ", ".join(f"{count} {kind}" for kind, count in others.items())
    return (
        f"{sum(others.values())} of {sum(counts.values())} tensors have rows that are no multiple "
        f"of {SUPER_BLOCK} weights long, so llama.cpp took other types: {stored}.",
    )


# The rounding, in transformers --------------------------------------------------------------------


def with_gguf_weights(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Copy a model, with its weights rounded as a GGUF file of this kind stores them.

    The copy runs in transformers, in the model's dtype. So it has the error of the weights alone:
    llama.cpp also rounds the inputs of its matrix products.

    Args:
        model: in memory; a model that `export_gguf` takes.
        kind: "Q8_0", or one of KINDS (which needs llama.cpp's quantizer).

    Raises: as `export_gguf` and `quantize_gguf`.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    if kind != "Q8_0":
        require_kind(kind)
    rounded = loaded_copy(model)
    with tempfile.TemporaryDirectory() as folder:
        path = export_gguf(
            model, None, Path(folder, "model.gguf"), dtype="q8_0" if kind == "Q8_0" else "f32"
        ).path
        if kind != "Q8_0":
            path = quantize_gguf(path, Path(folder, "quantized.gguf"), kind).path
        stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        for tensor in file_tensors(describe(rounded)):
            found = stored[tensor.name]
            # a copy: the file is mapped for reading only
            values = torch.from_numpy(np.array(dequantize(found.data, found.tensor_type)))
            if tensor.heads:
                values = from_interleaved(values, tensor.heads)
            parts = (tensor.weight, *tensor.below)
            with torch.no_grad():
                for part, rows in zip(parts, values.split([len(p) for p in parts]), strict=True):
                    part.copy_(rows)  # a view of the copy's weight
        del stored, found  # they map the file
    return rounded
