"""Files of llama.cpp's form as a source of models: what the core asks of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class Gguf:
    """Files of llama.cpp's form; a `FileSource`, whose code is imported when it is used."""

    def config(self, file: Path) -> PreTrainedConfig:
        """Read the configuration, without weights."""
        from .reading import gguf_config

        return gguf_config(file)

    def model(self, file: Path, dtype: torch.dtype | Literal["float32"]) -> PreTrainedModel:
        """Read the model, on the CPU and in eval mode."""
        from .reading import gguf_model

        return gguf_model(file, dtype)

    def tokenizer(self, file: Path) -> PreTrainedTokenizerBase:
        """Read the tokenizer."""
        from .reading import gguf_tokenizer

        return gguf_tokenizer(file)
