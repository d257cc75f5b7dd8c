"""Where the weights of a model are: in memory, or at a source that brings them.

All weights of most models are in memory: `Resident`. An extension may know models whose weights are
in files or on another device (extensions/big_models); it is plugged in at `STORE`. torch is
imported for annotations only, so that an extension can plug itself in without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    from .unit import Scales


class WeightSource(Protocol):
    """Brings weights when they are needed, and takes them away again.

    What is given here is for a source that brings no layers: all weights stay where they are.
    """

    @property
    def devices(self) -> Mapping[int, torch.device]:
        """The device of each layer that it brings, by number."""
        return {}

    @property
    def bytes_present(self) -> int:
        """The most bytes of weights that it has in memory at a time."""
        return 0

    def present(self, layer: int) -> AbstractContextManager[None]:
        """Keep the weights of a layer in memory inside the block."""
        return nullcontext()

    def passes(self, architecture: Architecture, text: Any) -> Passes | None:
        """Return what runs many plans over a `CalibrationSet`, if it brings layers."""
        return None

    def tensor(self, name: str) -> Tensor:
        """Read one weight that is not in memory by its name in the model, to the CPU."""


class Passes(Protocol):
    """Passes of a model over one text, each for many plans, so that a layer is brought once."""

    def run(self, ids: Tensor, positions: Tensor, batches: Sequence[list[Scales]]) -> list[Tensor]:
        """Run the dense model and batches of masked copies to the end, layer by layer.

        Args:
            ids: [1, T] int64 on the model's device.
            positions: [P] int64 there, the scored positions.
            batches: the masks of B rows each.

        Returns:
            Final hidden states at the scored positions: of the dense model [1, P, d], then of each
            batch [B, P, d].
        """

    def most_together(self, batch: int, most: float) -> int:
        """Plans that advance together: at least one batch, and at most `most`."""


@dataclass
class Resident(WeightSource):
    """The source of a model whose weights are all in memory."""

    weights: Callable[[], Mapping[str, Tensor]]  # by name in the model

    def tensor(self, name: str) -> Tensor:
        return self.weights()[name].detach().cpu()


class WeightStore(Protocol):
    """Opens models whose weights are not, or not all, in memory."""

    def source(self, model: PreTrainedModel) -> WeightSource | None:
        """Return the source of weights that another library took out of memory, if any."""
        return None

    def load(
        self, place: str, shapes: PreTrainedModel, device: torch.device, options: dict[str, Any]
    ) -> PreTrainedModel:
        """Load a model as `from_pretrained`, but leave its layers in their files.

        Args:
            place: a folder or hub id.
            shapes: the model on the meta device.
            device: where embedding, final norm and head go, and where the layers run.
            options: of `from_pretrained`.
        """
        raise missing("stream=True")

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
        raise missing("stream=True")

    def folder(self, model: PreTrainedModel, folder: Path, *, mapped: bool) -> WeightSource:
        """Open the weights that `save_pruned` wrote, for a model of their shapes.

        The weights of the model's manifest have checksums there. `mapped` maps the files into
        memory instead of reading from them.
        """


class InMemory(WeightStore):
    """The core's own store: weights are read as a whole, and stay in memory."""

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


def attach(model: PreTrainedModel, source: WeightSource) -> None:
    """Let a source bring the weights of a model from here on."""
    _SOURCES[model] = source


def present(architecture: Architecture, layer: int) -> AbstractContextManager[None]:
    """Keep the weights of a layer in memory inside the block, wherever they come from."""
    return weights_of(architecture.model).present(layer)
