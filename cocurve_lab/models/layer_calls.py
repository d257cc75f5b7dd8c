"""How the decoder calls its layers: recorded, wrapped, or stopped before the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .architectures import Architecture, here


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one layer in the teacher pass: its input [1, T, d] and all others."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Run the layer on hidden states [B, T, d] as it was called; what the next one gets."""
        return first_output(layer(hidden, *self.args, **self.kwargs))


Around = Callable[[int, LayerCall], AbstractContextManager[None]]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `module(...)` call `forward` inside the context; hooks, modules and threads stay."""
    own = module.__dict__.get("forward")  # accelerate puts one on the instance: restore it
    module.forward = here(forward, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def run_decoder(architecture: Architecture, input_ids: Tensor, around: Around) -> Tensor:
    """Run the decoder once, each layer inside `around(layer, call)`, which may run it again.

    Args:
        architecture: the model.
        input_ids: [B, T] int64 on the model's device.
        around: what is done before and after each layer.

    Returns:
        The hidden states [B, T, d] after the final norm.
    """
    with ExitStack() as stack:
        for layer, module in enumerate(architecture.layers):
            own = _within(module, partial(around, layer))
            stack.enter_context(replaced_forward(module, own))
        return first_output(architecture.decoder(input_ids=input_ids, use_cache=False))


def _within(
    module: nn.Module, around: Callable[[LayerCall], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """The forward of a layer, with something around it that the layer's own runs do not have."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        others = dict(kwargs)
        hidden = args[0] if args else others.pop("hidden_states")
        call = LayerCall(hidden, args[1:], others)
        with replaced_forward(module, forward), around(call):
            return forward(*args, **kwargs)

    return run


def capture_calls(architecture: Architecture, input_ids: Tensor) -> tuple[Tensor, list[LayerCall]]:
    """Run the decoder once and record how it calls each layer.

    Args and returns: as `run_decoder`, and the call of every layer.
    """
    calls: list[LayerCall] = []

    def remember(_: int, call: LayerCall) -> AbstractContextManager[None]:
        calls.append(call)
        return nullcontext()

    return run_decoder(architecture, input_ids, remember), calls


def run_from(
    architecture: Architecture, calls: Sequence[LayerCall], first: int, rows: int
) -> Tensor:
    """Run the layers from `first` on, as they were called, on B `rows` of its input [B, T, d].

    The model may be under masks by now; `calls` are those of the teacher pass (`capture_calls`).
    """
    hidden = calls[first].hidden.expand(rows, -1, -1)
    for layer, call in zip(architecture.layers[first:], calls[first:], strict=True):
        hidden = call.run(layer, hidden)
    return hidden


def first_output(output: Any) -> Tensor:
    """Return the tensor of a module's output; blocks return tuples, models output objects."""
    return output[0] if isinstance(output, (tuple, list)) or hasattr(output, "keys") else output
