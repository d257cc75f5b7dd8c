"""The identity of a model: its name, device and dtype, a fingerprint of its weights, the demo."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..base.errors import InputError
from ..base.storage import fingerprint
from .weights import reader_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEMO = "demo"  # the name of the embedded model
MANIFEST = "cocurve_manifest.json"  # lies beside the weights of a pruned model
# configuration keys that depend on how a model was loaded, not on what it computes
_LOADER_KEYS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


def demo_folder() -> Path:
    """Return the folder of the embedded model: in an installed wheel, else beside the package."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "data" / "demo", here.parent / "data" / "demo"):
        if (folder / "config.json").exists():
            return folder
    raise InputError(
        f"the embedded model is not at {here.parent / 'data' / 'demo'}. Clone the whole "
        "repository, or train the model again with `python data/train_demo.py`."
    )


def is_demo(model_id: str | os.PathLike[str]) -> bool:
    """Whether a model id means the embedded model, by name or by folder."""
    if str(model_id) == DEMO:
        return True
    try:
        return Path(model_id).is_dir() and Path(model_id).resolve() == demo_folder().resolve()
    except InputError:  # no embedded model here, so this is another one
        return False


def is_pruned(place: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a pruned model; one that a trainer saved has no manifest."""
    if (Path(place) / MANIFEST).exists():
        return True
    try:
        content = json.loads((Path(place) / "config.json").read_text(encoding="utf-8"))
        classes = str([content.get("architectures"), content.get("auto_map")])
        return "per_layer_config" in content and "Cocurve" in classes
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the input embedding [V, d]; its device and dtype count as the model's.

    It is never packed, so its dtype is also that of the activations.
    """
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def model_device(model: PreTrainedModel) -> torch.device:
    """Return the device that inputs go to."""
    return embedding_weight(model).device


def model_dtype(model: PreTrainedModel) -> str:
    """Return the model's dtype by name, such as "float32"."""
    return str(embedding_weight(model).dtype).removeprefix("torch.")


def model_name(model: PreTrainedModel) -> str:
    """Return a short name for files and titles: the last part of the model's path or hub id."""
    source = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return short_name(source)


def short_name(source: str) -> str:
    """Return the last part of a path or hub id, cut to 100 bytes so that file names can hold it."""
    # what ends a path on any system; file systems take 255 bytes, and shards and checkpoints add
    name = re.split(r"[/\\\0]", source.rstrip("/"))[-1].encode("utf-8", "replace")
    return name[:100].decode("utf-8", "ignore") or "model"


def fingerprint_model(model: PreTrainedModel, marks: list[list[str]] | None = None) -> str:
    """Return the SHA-256 of a model's configuration and all its weights, on any device the same.

    Of the configuration, values count that differ from the class's defaults and that no loader
    adds (path, versions, dtype). `marks` are the model's `weight_marks` if they are known already.
    """
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _LOADER_KEYS}
    marks = weight_marks(model) if marks is None else marks
    # through JSON, so that a configuration just made and one read from a file are equal
    return fingerprint(json.loads(json.dumps(config, default=str)), marks)


def weight_marks(model: PreTrainedModel) -> list[list[str]]:
    """Return [name, SHA-256] of every weight, sorted by name. Reads all: about 10 s for an 8B."""
    read = reader_of(model)
    return [[name, fingerprint_tensor(read(name))] for name in sorted(model.state_dict())]


def fingerprint_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's shape, dtype and bits."""
    # as bytes, because numpy has no bfloat16
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return fingerprint(list(tensor.shape), str(tensor.dtype), bits.numpy())
