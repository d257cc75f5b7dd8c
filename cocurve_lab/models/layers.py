"""Where the weights of a layer come from: the model itself, or a source that brings them.

A model whose layers stay on disk or on another device has a `WeightSource`; an extension finds it
(extensions/big_models/streaming.py). For all other models everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..base.seams import extension

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .architectures import Architecture


class WeightSource(Protocol):
    """Brings the weights of layers when they run, and takes them away again."""

    layers: dict[int, Any]  # the layers whose weights lie elsewhere, by number
    bytes_read: int

    @property
    def bytes_present(self) -> int:
        """The most bytes of weights in memory at a time."""

    def bytes_from(self, first: int) -> int:
        """Bytes of weights that a pass from layer `first` to the end reads."""

    def held(self, layer: int) -> AbstractContextManager[None]:
        """Keep the weights of a layer present inside the block."""

    def read(self, name: str) -> Tensor:
        """Read one weight by its name in the model, to the CPU."""


def source_of(model: PreTrainedModel) -> WeightSource | None:
    """Return the source of a model's weights, or None if all of them are present."""
    find = extension("layer weights")
    return None if find is None else find(model)


def held(architecture: Architecture, layer: int) -> AbstractContextManager[None]:
    """Keep the weights of a layer present inside the block, wherever they come from."""
    source = source_of(architecture.model)
    return nullcontext() if source is None else source.held(layer)


def bytes_of(weights: Iterable[Tensor]) -> int:
    """Return the size of weights in bytes."""
    return sum(weight.numel() * weight.element_size() for weight in weights)
