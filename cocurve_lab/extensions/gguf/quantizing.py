"""Quantization of a GGUF file by llama.cpp's own quantizer."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from ...base.atomic import replacing
from ...base.errors import FileFormatError, InputError
from ...base.interrupts import run_child
from .gguf import GGUFFile, require_target

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
    """Quantize a GGUF file with the program `llama-quantize`, or else the Python package cyllama.

    For Q8_0 use `export_gguf(..., dtype="q8_0")`: it needs neither, and leaves rows in float16 for
    which llama.cpp's quantizer rejects the whole file.

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
    with replacing(target, size=source.stat().st_size) as temporary:
        command = _command(kind, str(source), str(temporary))
        done = run_child(command)
        if done.returncode:
            lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
            told = [line for line in lines if re.search("error|fail|not divisible", line, re.I)]
            reason = (told or lines or ["it gave no reason"])[0].strip()
            raise FileFormatError(f"llama.cpp cannot quantize {source} to {kind}: {reason}")
        return _describe(temporary, target, kind)


def require_kind(kind: str) -> None:
    """Raise InputError unless llama.cpp has the type, and a quantizer is installed."""
    if kind.upper() == "Q8_0":
        raise InputError('kind is Q8_0, which export_gguf writes itself. Use dtype="q8_0" there.')
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}. Use one of {', '.join(KINDS)}.")
    if shutil.which("llama-quantize") is None and find_spec("cyllama") is None:
        raise InputError(
            f"{kind} is made by llama.cpp's quantizer, which is not here. Install llama.cpp, so "
            "that llama-quantize is on the PATH, or run `pip install cyllama`."
        )


def _command(kind: str, source: str, target: str) -> list[str]:
    from gguf import LlamaFileType

    program = shutil.which("llama-quantize")
    if program is not None:
        return [program, source, target, kind]
    number = str(LlamaFileType[f"MOSTLY_{kind}"].value)
    return [sys.executable, "-c", _CYLLAMA, source, target, number]


def _describe(path: Path, target: Path, kind: str) -> GGUFFile:
    """What the quantizer wrote to `path`, which becomes `target`."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    others = Counter(  # GGUF counts the weights of a row first
        tensor.tensor_type.name
        for tensor in reader.tensors
        if len(tensor.shape) > 1 and tensor.shape[0] % SUPER_BLOCK
    )
    fields = {key: field.contents() for key, field in reader.fields.items()}
    notes = tuple(fields.get("cocurve.notes", ()))
    if others:
        stored = ", ".join(f"{count} {kind}" for kind, count in others.items())
        notes += (
            f"{others.total()} of {counts.total()} tensors have rows that are no multiple of "
            f"{SUPER_BLOCK} weights long, so llama.cpp took other types: {stored}.",
        )
    model = fields.get("tokenizer.ggml.model", "no_vocab")
    tokenizer = f"{model}/{fields.get('tokenizer.ggml.pre', 'default')}"
    return GGUFFile(target, path.stat().st_size, kind, dict(counts), tokenizer, notes)
