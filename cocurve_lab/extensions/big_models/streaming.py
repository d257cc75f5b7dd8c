"""Weight streaming: a layer's weights are loaded when it runs and released afterwards.

They are in the model's files (`load_model(..., stream=True)`) or where accelerate offloaded them:
on disk, or in the CPU's memory beside a GPU. accelerate loads the weights of each module anew for
every call. Here a whole layer is loaded at once, stays while it is held, and the next one is
fetched meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...base.errors import InputError, one_line, shown
from ...calibration import CalibrationSet
from ...models.architectures import Architecture, describe
from ...models.layers import attach, weights_of
from ...models.loading import PLACE_OPTIONS
from ...pruner.saving import bring_weights
from ..opening.files import require_floats
from .layerwise import LayerwisePasses
from .on_disk import stored_model
from .stored import folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Stream", "folder", "leave", "load", "source"]
Read = Callable[[], Tensor]
_FIXED: WeakSet[nn.Module] = WeakSet()  # what holds weights that come; copies of it are not in here


@dataclass
class _Place:
    """A weight of a layer: its name in the model, its place, and the meta parameter there."""

    name: str
    module: nn.Module
    attribute: str
    read: Read

    def __post_init__(self) -> None:
        self.absent: nn.Parameter = getattr(self.module, self.attribute)

    def put(self, weight: nn.Parameter) -> None:
        """Let the module have this weight."""
        setattr(self.module, self.attribute, weight)


class _Layer:
    """The device of a layer, its weights, and their bytes."""

    def __init__(self, device: torch.device, places: Sequence[_Place]) -> None:
        self.device, self.places = device, places
        self.bytes = sum(place.absent.nbytes for place in places)


class Stream:
    """Brings the weights of layers, and takes them away again.

    At most two layers are in memory: the one that runs, and the next one, which a thread fetches.

    Attributes:
        layers: the layers whose weights are elsewhere, by number.
        places: these weights, by name.
        bytes_read: bytes of weights fetched so far.
    """

    def __init__(self, layers: dict[int, _Layer]) -> None:
        self.layers, self.bytes_read = layers, 0
        self.places = {place.name: place for layer in layers.values() for place in layer.places}
        self._held: Counter[int] = Counter()
        self._present: set[int] = set()
        self._coming: dict[int, Future[list[nn.Parameter]]] = {}
        self._thread = ThreadPoolExecutor(1, "cocurve-weights")
        self._side: dict[torch.device, Any] = {}  # a CUDA stream for copies, by device

    @property
    def devices(self) -> Mapping[int, torch.device]:
        """The device of each layer, by number."""
        return {number: layer.device for number, layer in self.layers.items()}

    @property
    def bytes_present(self) -> int:
        """The most bytes of them that are in memory at a time."""
        return 2 * max(layer.bytes for layer in self.layers.values())

    def passes(self, architecture: Architecture, text: CalibrationSet) -> LayerwisePasses | None:
        """Return passes that read each layer once for many plans; None if it brings no layers."""
        return LayerwisePasses(architecture, self, text) if self.devices else None

    @contextmanager
    def present(self, layer: int) -> Iterator[None]:
        """Keep the weights of a layer present inside the block; no-op if they always are."""
        if layer not in self.layers:
            yield
            return
        running = layer in self._present  # in a call of the layer, which still needs them
        self.bring(layer)
        self._held[layer] += 1
        try:
            yield
        finally:
            self._held[layer] -= 1
            if not running:
                self.release(layer)

    def bring(self, layer: int) -> None:
        """Put the weights of a layer into its modules, and begin to fetch the next one."""
        if layer in self._present:
            return
        for other in list(self._present):  # left behind by an interrupt
            self.release(other)
        coming = self._coming.pop(layer, None)
        # a layer that was expected and is not wanted must not stay in memory, nor arrive later
        wait([each for each in self._coming.values() if not each.cancel()])
        self._coming.clear()
        found = coming.result() if coming is not None else self._fetch(layer)
        for place, weight in zip(self.layers[layer].places, found, strict=True):
            if weight.is_cuda:  # copied on another stream: not to be reused while this one reads it
                weight.record_stream(torch.cuda.current_stream(weight.device))
            place.put(weight)
        self._present.add(layer)
        if layer + 1 in self.layers:
            self._coming[layer + 1] = self._thread.submit(self._fetch, layer + 1)

    def release(self, layer: int) -> None:
        """Take the weights of a layer away, unless it is held."""
        if self._held[layer] or layer not in self._present:
            return
        for place in self.layers[layer].places:
            place.put(place.absent)
        self._present.discard(layer)

    def _fetch(self, layer: int) -> list[nn.Parameter]:
        stored = self.layers[layer]
        try:
            if stored.device.type == "cuda":
                weights = self._copied(stored)
            else:
                weights = [place.read().to(stored.device) for place in stored.places]
        except InputError:  # it changed: its message says so
            raise
        except Exception as error:  # a file that vanished can raise nearly anything
            raise _unreadable(f"the weights of layer {layer}", error) from error
        self.bytes_read += stored.bytes
        return [nn.Parameter(weight, requires_grad=False) for weight in weights]

    def _copied(self, stored: _Layer) -> list[Tensor]:
        device = stored.device
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)
        side = self._side[device]
        with torch.cuda.device(device), torch.cuda.stream(side):
            pinned = [place.read().pin_memory() for place in stored.places]
            weights = [weight.to(device, non_blocking=True) for weight in pinned]
        side.synchronize()  # in this thread; pinned memory may go afterwards
        return weights

    def tensor(self, name: str) -> Tensor:
        """Read one weight by its name in the model, to the CPU."""
        try:
            return self.places[name].read().cpu()
        except InputError:
            raise
        except Exception as error:
            raise _unreadable(name, error) from error


def _unreadable(what: str, error: Exception) -> InputError:
    return InputError(
        f"{what} cannot be read ({type(error).__name__}: {one_line(error)}). Check that the "
        "model's files are where and what they were when it was loaded, and load it again."
    )


# Finding the weights ------------------------------------------------------------------------------


# What this file does for `WeightStore`: source, load, leave, and folder of stored.py


def source(model: PreTrainedModel) -> Stream | None:
    """Take over what accelerate offloaded.

    Its hooks inside an offloaded layer are replaced by one on the layer. Embedding, final norm
    and head are brought to their device for good if they were offloaded too.
    """
    if any(_offloading(module) for module in model.modules()):
        return _take_over(describe(model))
    return None


def load(
    place: str, shapes: PreTrainedModel, device: torch.device, options: dict[str, Any]
) -> PreTrainedModel:
    """Load what stands around the layers, and leave these in their files."""
    require_floats(place, shapes)
    describe(shapes).require_columns(
        "stream=True", "Leave it out.", "which files keep apart and layers need whole"
    )
    if "device_map" in options:
        raise InputError(
            f"device_map is {shown(options['device_map'])}, but stream=True decides where "
            "weights are. Give one of the two."
        )
    dtype = None if options["dtype"] == "auto" else options["dtype"]
    where = {name: options[name] for name in PLACE_OPTIONS if name in options}
    model = stored_model(shapes, place, dtype, **where)
    return bring_weights(model, weights_of(model), device, stream=True)


def leave(model: PreTrainedModel, read: Callable[[str], Tensor], device: torch.device) -> list[str]:
    """Let the layers of a model on the meta device be loaded when they run."""
    architecture = describe(model)
    layers: dict[int, _Layer] = {}
    for number, layer in enumerate(architecture.layers):
        prefix = f"{architecture.stack}.{number}."
        places = [
            _Place(prefix + key, owner, attribute, partial(read, prefix + key))
            for key, owner, attribute in _weights(layer, True)
        ]
        layers[number] = _Layer(device, places)
    stream = Stream(layers)
    _connect(architecture, stream)
    attach(model, stream)
    return list(stream.places)


def _offloading(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", (hook,)) if getattr(each, "offload", False)]


def _take_over(architecture: Architecture) -> Stream:
    """Replace accelerate's hooks on the modules of offloaded layers."""
    model = architecture.model
    names = {module: name for name, module in model.named_modules()}
    layers: dict[int, _Layer] = {}
    for number, layer in enumerate(architecture.layers):
        hooks = [hook for module in layer.modules() for hook in _offloading(module)]
        if not hooks:
            continue
        places = []
        for module in layer.modules():
            for hook in _offloading(module):
                for key, owner, attribute in _weights(module, hook.place_submodules):
                    name = f"{names[owner]}.{attribute}"
                    source = _source(hook, key, name, getattr(owner, attribute).dtype)
                    places.append(_Place(name, owner, attribute, source))
        layers[number] = _Layer(torch.device(hooks[0].execution_device), places)
    inside = {module for layer in architecture.layers for module in layer.modules()}
    for module in model.modules():
        for hook in _offloading(module):
            if module not in inside:
                hook.pre_forward(module)  # embedding, norm or head: from here on they stay
            hook.offload = False  # else accelerate would load what it lets go of
    stream = Stream(layers)
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    missing = [name for name in missing if name not in stream.places]
    missing += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if missing:
        raise InputError(
            f"{missing[0]} is on the meta device, and no hook of accelerate brings it. Load the "
            "model with load_model(..., stream=True), or with a device_map but no offload_buffers."
        )
    _connect(architecture, stream)
    return stream


def _connect(architecture: Architecture, stream: Stream) -> None:
    """Let a stream bring the weights of a model, which can no longer be moved or saved."""
    for number, stored in stream.layers.items():
        _let_stream(architecture.layers[number], stream, number, stored.device)
    model = architecture.model
    vars(model)["save_pretrained"] = MethodType(_save_pretrained, model)
    for name in ("to", "cuda", "xpu"):  # accelerate's own, which refuse without the next step
        vars(model).pop(name, None)
    for module in model.modules():
        if any(weight.is_meta for weight in module.parameters()):
            _FIXED.add(module)
            vars(module)["_apply"] = MethodType(_apply, module)


def _save_pretrained(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` of a streamed model, which has no weights of layers to write."""
    if kwargs.get("state_dict") is None:
        raise InputError(
            "save_pretrained needs all weights in memory, but the layers of this model stay where "
            "they were loaded from. Copy these files; or write a smaller model: prune(model, "
            "selection, out=folder)."
        )
    type(model).save_pretrained(model, *args, **kwargs)


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    if module in _FIXED:
        raise InputError(
            "the layers of this model come from where they were loaded, as they are there, so it "
            "cannot be moved or converted. Load it again with the device= and dtype= you want."
        )
    return type(module)._apply(module, change, recurse)


def _let_stream(layer: nn.Module, stream: Stream, number: int, device: torch.device) -> None:
    """Let a layer bring its weights when it is called, instead of accelerate's hooks inside it."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import send_to_device

    skipped = getattr(getattr(layer, "_hf_hook", None), "skip_keys", None)
    remove_hook_from_module(layer, recurse=True)

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        stream.bring(number)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=skipped)

    def after(*_: Any) -> None:
        stream.release(number)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, always_call=True)


def _weights(module: nn.Module, deep: bool) -> Iterator[tuple[str, nn.Module, str]]:
    for key, _ in module.named_parameters(recurse=deep):
        path, _, attribute = key.rpartition(".")
        yield key, module.get_submodule(path), attribute


def _source(hook: Any, key: str, name: str, dtype: torch.dtype) -> Read:
    """How to read a weight that accelerate offloaded, in the dtype of its place."""
    weights = hook.weights_map
    held, stored = getattr(weights, "dataset", weights), getattr(weights, "prefix", "") + key
    if stored not in iter(held):  # asked of a mapping itself, it would read the weight
        raise InputError(
            f"the model's files hold no {name}. Get the whole model, and load it again."
        )
    if hasattr(held, "device"):
        held.device = None  # read on the CPU: a layer goes to its device as a whole
    # copied: accelerate maps files into memory, which is not reading
    return lambda: held[stored].to(dtype, copy=True)
