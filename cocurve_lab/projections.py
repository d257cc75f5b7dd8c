"""One view of every linear layer: weights as [out, in], whatever class stores them and how.

`nn.Linear` stores [out, in]; GPT-2's `Conv1D` stores [in, out]; bitsandbytes' `Linear4bit` packs
4-bit numbers, which can be run but not cut. No torch import here, see architectures.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ArchitectureError

if TYPE_CHECKING:
    from torch import Tensor

_PACKED = ("Linear4bit",)  # layers that run although their stored weight has another shape


def weight_of(projection: Any) -> Tensor:
    """The weight [out, in], a view: writing into it changes the layer.

    Raises:
        ArchitectureError: the weight is quantised, so it has no rows and columns to read or cut.
    """
    if is_packed(projection):
        raise ArchitectureError(
            f"a {type(projection).__name__} holds packed {projection.weight.dtype} weights: they "
            "can be masked and measured, but not read or cut. Load the model unquantised, for "
            "example in bfloat16."
        )
    return projection.weight.T if is_transposed(projection) else projection.weight


def widths(projection: Any) -> tuple[int, int]:
    """(outputs, inputs) of a projection."""
    if is_transposed(projection):
        inputs, outputs = projection.weight.shape
        return int(outputs), int(inputs)
    return int(projection.out_features), int(projection.in_features)


def is_transposed(projection: Any) -> bool:
    """Whether the weight is stored [in, out], as transformers' Conv1D does."""
    return hasattr(projection, "nf")


def is_packed(projection: Any) -> bool:
    """Whether the weight is quantised in a form that runs but cannot be sliced."""
    return type(projection).__name__ in _PACKED


def require_supported(projection: Any, name: str, layer: int) -> None:
    """Raise ArchitectureError unless a projection is a plain, transposed or packed linear layer."""
    if hasattr(projection, "base_layer"):
        raise ArchitectureError(
            f"{name} of layer {layer} carries an adapter ({type(projection).__name__}). "
            "Merge adapters before pruning."
        )
    if is_packed(projection):
        return
    weight = weight_of(projection)
    if not weight.is_floating_point() or tuple(weight.shape) != widths(projection):
        raise ArchitectureError(
            f"{name} of layer {layer} holds {weight.dtype} of shape {tuple(weight.shape)}: "
            "quantised weights of this kind are not supported (bitsandbytes' 4-bit ones can be "
            "measured). Load the model unquantised."
        )
