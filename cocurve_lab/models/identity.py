"""Getting a model: the embedded one by default, else a Hugging Face model by name or folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..storage import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MANIFEST = "cocurve_manifest.json"  # lies beside the weights of a pruned model


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """The input embedding [V, d]: its device is where inputs go, its dtype is the model's."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def model_device(model: PreTrainedModel) -> torch.device:
    """Where the model's inputs go."""
    return embedding_weight(model).device


def model_dtype(model: PreTrainedModel) -> str:
    """The weights' dtype, "float32" and so on."""
    return str(embedding_weight(model).dtype).removeprefix("torch.")


def model_name(model: PreTrainedModel) -> str:
    """A short name for files and titles: the last part of where the model came from."""
    source = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return Path(source.rstrip("/")).name or "model"


def fingerprint_model(model: PreTrainedModel, marks: list[list[str]] | None = None) -> str:
    """SHA-256 over the configuration and all weights; the same on every device.

    Of the configuration it takes what departs from its class's defaults, without what a loader
    adds (path, versions, dtype).

    Args:
        model: the model; marks: its `weight_marks`, where they were taken already.
    """
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _LOADER_KEYS}
    marks = weight_marks(model) if marks is None else marks
    return fingerprint(json.loads(json.dumps(config, default=str)), marks)


def weight_marks(model: PreTrainedModel) -> list[list[str]]:
    """[name, SHA-256] of every weight, by name; reads them all (about 10 s for an 8B)."""
    weights = sorted(model.state_dict().items())
    return [[name, fingerprint_tensor(tensor)] for name, tensor in weights]


def fingerprint_tensor(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's shape, dtype and bits."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return fingerprint(list(tensor.shape), str(tensor.dtype), bits.numpy())


_LOADER_KEYS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
