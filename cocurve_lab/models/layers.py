"""Where the weights of a model are: in memory, or at a source that brings them.

All weights of most models are in memory: `Resident`. An extension may know models whose weights are
in files or on another device (extensions/big_models); it is plugged in at `STORE`. torch is
imported for annotations only, so that an extension can plug itself in without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from ..base.plugs import Plug, missing

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from .architectures import Architecture


class WeightSource(Protocol):
    """Brings weights when they are needed, and takes them away again.

    Attributes:
        bytes_read: bytes of weights that were read for layers so far.
    """

    bytes_read: int

    @property
    def devices(self) -> Mapping[int, torch.device]:
        """The device of each layer that it brings, by number; none if all stay where they are."""

    @property
    def bytes_present(self) -> int:
        """The most bytes of weights that it has in memory at a time."""

    def present(self, layer: int) -> AbstractContextManager[None]:
        """Keep the weights of a layer in memory inside the block."""

    def tensor(self, name: str) -> Tensor:
        """Read one weight that is not in memory by its name in the model, to the CPU."""


class Still:
    """A source that brings no layers: all weights stay where they are."""

    bytes_read = 0
    bytes_present = 0

    @property
    def devices(self) -> Mapping[int, torch.device]:
        return {}

    def present(self, layer: int) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class Resident(Still):
    """The source of a model whose weights are all in memory."""

    weights: Callable[[], Mapping[str, Tensor]]  # by name in the model

    def tensor(self, name: str) -> Tensor:
        return self.weights()[name].detach().cpu()


class WeightStore(Protocol):
    """Opens models whose weights are not, or not all, in memory."""

    def source(self, model: PreTrainedModel) -> WeightSource | None:
        """Return the source of weights that another library took out of memory, if any."""

    def load(
        self, place: str, shapes: PreTrainedModel, device: torch.device, options: dict[str, Any]
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Load a model as `from_pretrained`, but leave its layers in their files.

        Args:
            place: a folder or hub id.
            shapes: the model on the meta device.
            device: where embedding, final norm and head go, and where the layers run.
            options: of `from_pretrained`.

        Returns:
            The model, and what `from_pretrained` says of the loading.
        """

    def leave(
        self, model: PreTrainedModel, read: Callable[[str], Tensor], device: torch.device
    ) -> list[str]:
        """Let the layers of a model on the meta device be read when they run.

        Args:
            model: the model. The caller loads what is not in its layers.
            read: gives a weight by its name, on the CPU.
            device: where the layers run.

        Returns:
            The names of the weights that stay in the files.
        """

    def folder(self, model: PreTrainedModel, folder: Path, *, mapped: bool) -> WeightSource:
        """Open the weights that `save_pruned` wrote, for a model of their shapes.

        The weights of the model's manifest have checksums there. `mapped` maps the files into
        memory instead of reading from them.
        """


class InMemory:
    """The core's own store: weights are read as a whole, and stay in memory."""

    def source(self, model: PreTrainedModel) -> WeightSource | None:
        return None

    def load(self, place: Any, shapes: Any, device: Any, options: Any) -> Any:
        raise missing("stream=True")

    def leave(self, model: Any, read: Any, device: Any) -> list[str]:
        raise missing("stream=True")

    def folder(self, model: PreTrainedModel, folder: Path, *, mapped: bool) -> WeightSource:
        from safetensors.torch import load_file

        from .architectures import describe

        found: dict[str, Tensor] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            for name, weight in load_file(file).items():
                for saved, inside in describe(model).family.saved_names:
                    name = name.replace(saved, inside)
                found[name] = weight
        return Resident(lambda: found)


STORE: Plug[WeightStore] = Plug(InMemory)
_SOURCES: WeakKeyDictionary[Any, WeightSource] = WeakKeyDictionary()  # by model


def weights_of(model: PreTrainedModel) -> WeightSource:
    """Return the source of a model's weights: `Resident`, if all of them are in memory."""
    if model not in _SOURCES:
        found = STORE().source(model)
        if found is None:
            return Resident(model.state_dict)
        attach(model, found)
    return _SOURCES[model]


def is_attached(model: PreTrainedModel) -> bool:
    """Return whether a source brings weights of a model that are not in memory."""
    return not isinstance(weights_of(model), Resident)


def attach(model: PreTrainedModel, source: WeightSource) -> None:
    """Let a source bring the weights of a model from here on."""
    _SOURCES[model] = source


def present(architecture: Architecture, layer: int) -> AbstractContextManager[None]:
    """Keep the weights of a layer in memory inside the block, wherever they come from."""
    return weights_of(architecture.model).present(layer)


def bytes_of(weights: Iterable[Tensor]) -> int:
    """Return the size of weights in bytes."""
    return sum(weight.numel() * weight.element_size() for weight in weights)
