"""Getting a model: the embedded one by default, any supported Hugging Face model by name or folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .architectures import describe
from .errors import InputError
from .storage import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO = "demo"
_CHUNK = 1 << 22  # weights hashed at a time; int64 copies of a whole layer would not fit


def demo_folder() -> Path:
    """Folder of the embedded model: inside an installed wheel, else beside the package.

    Raises:
        InputError: the data folder is not there (a partial checkout).
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "data" / "demo", here.parent / "data" / "demo"):
        if (folder / "config.json").exists():
            return folder
    raise InputError(
        f"the embedded model is not at {here.parent / 'data' / 'demo'}. Clone the repository whole, or "
        "train it again with `python data/train_demo.py`."
    )


def is_demo(model_id: str | os.PathLike[str]) -> bool:
    """Whether a model id means the embedded model."""
    return str(model_id) == DEMO or (
        Path(model_id).is_dir() and Path(model_id).resolve() == demo_folder().resolve()
    )


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The device to use: the given one, else CUDA where torch can use it, else CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    model_id: str | os.PathLike[str] = DEMO,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to measure (eval mode, no gradients).

    Args:
        model_id: "demo" for the embedded model, a hub id, or a folder.
        device: default CUDA if usable, else CPU.
        dtype: default float32 on CPU and for the embedded model, else the checkpoint's own.
        **options: passed to `from_pretrained` (revision, token, attn_implementation, ...);
            `trust_remote_code` is off unless given.

    Raises:
        ArchitectureError: the family is not supported.
        InputError: the model cannot be found or reached, or its dtype is unknown.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = pick_device(device)
    source = str(demo_folder() if str(model_id) == DEMO else model_id)
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise InputError(f"dtype is {dtype!r}; use float32, bfloat16, float16 or float64.")
    if dtype is None:
        dtype = torch.float32 if target.type == "cpu" or is_demo(source) else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_tokenizer_options(options))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(model_id)!r} cannot be loaded: {error}\nGive a folder with a Hugging Face model, or a "
            "hub id you can reach (a gated one needs `hf auth login`)."
        ) from error
    describe(model)  # an unsupported family fails here, before minutes of work
    if "device_map" not in options:
        model.to(target)
    return model.eval().requires_grad_(False), tokenizer


def model_device(model: PreTrainedModel) -> torch.device:
    """Where the model's inputs go."""
    return model.get_input_embeddings().weight.device


def model_dtype(model: PreTrainedModel) -> str:
    """The weights' dtype, "float32" and so on."""
    return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")


def model_name(model: PreTrainedModel) -> str:
    """A short name for files and titles: the last part of where the model came from."""
    source = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return Path(source.rstrip("/")).name or "model"


@torch.inference_mode()
def fingerprint_model(model: PreTrainedModel) -> str:
    """SHA-256 over names, shapes, dtypes and exact integer checksums of all weights.

    Integer sums of the bit patterns do not depend on the device or on the order of addition; the
    position-weighted one notices swapped values.
    """
    weights = sorted(model.state_dict().items())
    return fingerprint([[name, *tensor_checksum(tensor)] for name, tensor in weights])


def tensor_checksum(tensor: torch.Tensor) -> list[Any]:
    """Shape, dtype and two exact integer checksums of a tensor's bits, equal on every device."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    plain = weighted = 0
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=chunk.device) % 65_521 + 1
        plain += int(chunk.sum())
        weighted += int((chunk % 65_537 * places).sum())
    return [list(tensor.shape), str(tensor.dtype), plain, weighted]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOKENIZER_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code")


def _tokenizer_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _TOKENIZER_OPTIONS if name in options}
