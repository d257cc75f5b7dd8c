"""The weights of a model by name: in memory, or read by its `WeightSource`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import FileFormatError
from ..base.storage import fingerprint
from .layers import Resident, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def fingerprint_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's shape, dtype and bits."""
    # as bytes, because numpy has no bfloat16
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return fingerprint(list(tensor.shape), str(tensor.dtype), bits.numpy())


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the weights that equal another by tying, such as a head: {name: the other name}."""
    first: dict[int, str] = {}
    tied = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    return tied


def settle_ties(model: PreTrainedModel) -> None:
    """Let the configuration say whether the head is the embedding, as it is in this model.

    A checkpoint may hold two weights although its configuration ties them; transformers loads both.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the meta device."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        for weight in model.parameters()
    }
    twin = copy.deepcopy(model, memo)
    vars(twin).pop("hf_device_map", None)  # nothing of it is on a device
    return twin


def is_readable(model: PreTrainedModel) -> bool:
    """Return whether `reader_of` can read all weights, also those on the meta device."""
    attached = not isinstance(weights_of(model), Resident)
    return attached or not any(weight.is_meta for weight in model.parameters())


def reader_of(model: PreTrainedModel) -> Callable[[str], Tensor]:
    """Return a function from a weight's name in the model to the weight, wherever it is.

    The tensor is on the CPU, in the model's dtype, and for reading only.
    """
    weights, source = model.state_dict(), weights_of(model)

    def read(name: str) -> Tensor:
        weight: Tensor = weights[name]
        if weight.is_meta:
            return source.tensor(name).to(weight.dtype)
        return weight.detach().cpu()

    return read


def is_finite(weight: Tensor) -> bool:
    """Whether no number of a weight is NaN or infinite, as far as it is here and not packed.

    Attention can hide such weights: its logits may stay finite, and their removal costs nothing.
    """
    known = weight.dtype in DTYPES.values() and not weight.is_meta and weight.numel() > 0
    return not known or bool(torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all())


def require_finite(weight: Tensor, name: str, place: Any) -> None:
    """Raise FileFormatError if a number of a weight is NaN or infinite."""
    if not is_finite(weight):
        raise FileFormatError(
            f"{name} of {place} holds NaN or infinity. Download or save the model again."
        )
