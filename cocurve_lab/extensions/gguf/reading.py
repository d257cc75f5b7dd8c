"""A GGUF file as input: a stock model, dequantized, and the tokenizer in the file.

transformers reads it. What it would leave out of the file in silence is an error here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...base.errors import InputError
from ...base.files import require_regular
from ..opening.errors import explain

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# llama.cpp's architectures of which transformers reads every setting; of others it leaves out some
WHOLE = ("llama", "qwen2", "qwen3")
# what transformers notes in the configuration of a model that it read from a GGUF
_OF_THE_GGUF = (
    "quantization_config",
    "_name_or_path",
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",
)


class Gguf:
    """Files of llama.cpp's form; a `FileSource`."""

    def config(self, file: Path) -> PreTrainedConfig:
        """Read the configuration, without weights; raises as `model`."""
        from transformers import AutoConfig

        _reader(file)
        try:
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            known = {k: v for k, v in config.to_dict().items() if k not in _OF_THE_GGUF}
            config = type(config)(**known)
        except Exception as error:  # a damaged file can raise nearly anything
            raise explain(file, error, part="the configuration of ") from error
        config._name_or_path = str(file)
        return config

    def model(
        self, file: Path, dtype: torch.dtype | Literal["float32"] = "float32"
    ) -> PreTrainedModel:
        """Read the model as a stock model on the CPU, in eval mode.

        The object that transformers makes of it claims to be quantized and cannot be saved; a fresh
        model with its configuration and its weights can.

        Raises:
            InputError: transformers cannot read the whole file.
        """
        from transformers import AutoModelForCausalLM

        reader = _reader(file)
        config = self.config(file)
        try:
            read: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, config=config, gguf_file=file.name, dtype=dtype
            )
            model: Any = type(read)(config)
            model.load_state_dict(read.state_dict(), assign=True)
        except Exception as error:  # a damaged file can raise nearly anything
            raise explain(file, error) from error
        model.tie_weights()
        _require_whole(file, reader, model)
        return model.eval()

    def tokenizer(self, file: Path) -> PreTrainedTokenizerBase:
        """Read the tokenizer; raises as `model`."""
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
        from transformers import AutoTokenizer

        reader = _reader(file)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as error:  # a damaged file can raise nearly anything
            raise explain(file, error, part="the tokenizer of ") from error
        if _text(reader, "tokenizer.ggml.pre") == "smollm":
            # transformers drops the first rule, each digit by itself, which also decides how the
            # white space before a digit is split
            parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
        return tokenizer


def _reader(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **others: Any) -> Any:
            """Read `count` numbers; past the end, gguf would read nothing, without end."""
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise EOFError("the file ends before its header does")
            return super()._get(offset, dtype, count, *more, **others)

    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name):
        raise InputError(
            f"{file} is one part of a model. Join the parts: llama-gguf-split --merge FIRST WHOLE."
        )
    try:
        require_regular(file)
        reader = Bounded(file)
    except Exception as error:  # a damaged file can raise nearly anything
        raise explain(file, error) from error
    kind = _text(reader, "general.architecture")
    if kind not in WHOLE:
        raise InputError(
            f"{file} is of llama.cpp's architecture {kind}, and transformers reads only "
            f"{', '.join(WHOLE)} whole. Give the folder that it was made from."
        )
    if not reader.tensors:  # transformers would make a model of its default size
        raise InputError(f"{file} holds no weights. Give a file with a whole model.")
    return reader


def _text(reader: GGUFReader, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


def _require_whole(file: Path, reader: GGUFReader, model: PreTrainedModel) -> None:
    """Raise InputError if the file holds numbers or a scaling that the model did not get."""
    held = sum(int(tensor.n_elements) for tensor in reader.tensors)
    kind = _text(reader, "general.architecture")
    scaling = _text(reader, f"{kind}.rope.scaling.type") or "none"
    if scaling != "none":
        fact = f"scales positions by {scaling!r}"
    elif held != model.num_parameters():
        fact = f"holds {held:,} numbers, and the model {model.num_parameters():,}"
    else:
        return
    raise InputError(
        f"{file} {fact}, which transformers leaves out, so the model would be another. Give the "
        "original folder with safetensors files."
    )
