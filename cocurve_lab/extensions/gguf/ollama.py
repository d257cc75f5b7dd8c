"""A Modelfile beside a GGUF file, for `ollama create`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.atomic import write_atomically
from ...base.errors import InputError
from .gguf import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # those that mean the same in Ollama


def modelfile_of(path: str | os.PathLike[str]) -> Path:
    """The place of the Modelfile of a GGUF file: smaller.Modelfile for smaller.gguf."""
    return Path(os.path.expanduser(path)).with_suffix(".Modelfile")


def write_modelfile(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the Modelfile of a GGUF file beside it, with what carries over exactly.

    These are the file, the special tokens that end generation, and the sampling of the model's
    generation configuration. A chat template does not carry over, because Ollama's templates are
    in another language; the GGUF file has the tokenizer's own.

    Args:
        path: the GGUF file.
        model: what was exported.
        tokenizer: the dense model's, or None.
        overwrite: replace an existing Modelfile.

    Returns:
        Its path, for `ollama create NAME -f PATH`.

    Raises:
        InputError: there is no GGUF file, or there is a Modelfile.
    """
    source, target = Path(os.path.expanduser(path)), modelfile_of(path)
    if not source.is_file():
        raise InputError(f"there is no file {source}. Write one: cl.export_gguf(model, ...).")
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists. Move it away, or pass overwrite=True to replace it.")
    lines = [f"FROM ./{source.name}", *_parameters(model, tokenizer)]
    write_atomically(target, ("\n".join(lines) + "\n").encode())
    return target


def _parameters(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    sampling = model.generation_config
    if sampling is not None and sampling.do_sample:
        for name in _SAMPLING:
            value = getattr(sampling, name, None)
            if value is not None:
                yield f"PARAMETER {name} {value}"
    special = {} if tokenizer is None else tokenizer.added_tokens_decoder
    for index in stop_tokens(model):
        token = special.get(index)
        # ordinary text that happens to end a text must not be cut wherever it appears
        if token is None or not token.special:
            continue
        # Ollama reads no escapes, and drops what is not printable
        if token.content.isprintable() and not set(token.content) & set('"\\'):
            yield f'PARAMETER stop "{token.content}"'
