"""Running a model while measuring: a fixed state, fitting text, memory that runs out, Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..errors import ArchitectureError, InputError
from .architectures import describe
from .identity import embedding_weight, model_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_REGISTRY = threading.Lock()
_KNOWN_HEADS: WeakSet[nn.Module] = WeakSet()


def exclusive(model: nn.Module) -> threading.RLock:
    """The one lock of a model: whoever masks, builds, measures or generates holds it.

    Widget callbacks arrive on other threads than the cell that is running; without it a slider
    could run a forward pass through a model whose units are switched off for a measurement.
    """
    with _REGISTRY:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def measuring(model: PreTrainedModel, threads: int) -> Iterator[None]:
    """The model's lock, eval mode, no gradients, true float32 products, a fixed number of threads.

    All is put back on leaving.
    """
    with exclusive(model), _fixed_state(model, threads):
        yield


@contextmanager
def _fixed_state(model: PreTrainedModel, threads: int) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    precision = torch.get_float32_matmul_precision()
    before = torch.get_num_threads()
    model.eval()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)
        for module, training in modes:  # not model.train(): submodules may differ from the top
            module.training = training


@contextmanager
def differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Gradients inside `measuring`, of activations alone: no weight asks for one in the block."""
    asking = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in asking:
            weight.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for weight in asking:
            weight.requires_grad_(True)


def require_measurable(model: PreTrainedModel, input_ids: Tensor) -> None:
    """Raise InputError if the model cannot be run on rows of token ids [N, T].

    Its weights must be on one device (see `require_one_device`); token ids and row length must be
    such as it was made for; its logits must be those of its head (see `require_known_head`).
    """
    require_one_device(model)
    largest, rows = int(input_ids.max()), embedding_weight(model).shape[0]
    if largest >= rows:
        raise InputError(
            f"the text holds token id {largest}, the model's embedding has {rows} rows. "
            "Use the tokenizer that belongs to the model."
        )
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and input_ids.shape[1] > context:
        raise InputError(
            f"rows have {input_ids.shape[1]} tokens, the model's context is {context}. Cut "
            f"rows of at most {context} tokens."
        )
    require_known_head(model, input_ids[:1, :8])


def require_known_head(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise ArchitectureError where logits are not what `Architecture.logits` says they are.

    Some families scale or shift their logits after the head; everything measured would then be
    wrong by a factor, and nothing else would show it. Checked once per model, on a few tokens.

    Args:
        ids: [1, T] token ids.
    """
    if model in _KNOWN_HEADS:
        return
    architecture, seen = describe(model), []
    keep = architecture.decoder.register_forward_hook(lambda _, __, out: seen.append(out))
    try:
        with exclusive(model), torch.inference_mode():
            logits = model(input_ids=ids.to(model_device(model)), use_cache=False).logits
            expected = architecture.logits(seen[-1][0])
    finally:
        keep.remove()
    size = float(expected.abs().max())
    gap = float((logits.float() - expected.float()).abs().max())
    if gap > 0.01 * size:
        raise ArchitectureError(
            f"the logits of {type(model).__name__} differ by up to {gap:.3g} from what its head "
            f"makes of its last hidden states (up to {size:.3g}): this family does something to "
            "them afterwards, such as scaling. Teach Architecture.logits about it first."
        )
    _KNOWN_HEADS.add(model)


def require_one_device(model: PreTrainedModel) -> None:
    """Raise InputError unless all weights are on one device, and none on the meta device.

    A map of all modules to one device is fine. A model spread over several, or offloaded, is not:
    a replay joins activations of different layers, and an offloaded weight is not there to be read.
    """
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise InputError(
            f"the model's weights are on {', '.join(devices)} (meta: offloaded, or never loaded); "
            "measuring and pruning need all of them on one device. Load the model with "
            'device_map={"": 0} or without a device_map; if it does not fit, in bfloat16, or in 4 '
            "bits to measure it."
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out; the CPU allocator and cuBLAS say so by a plain RuntimeError."""
    signs = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C for a few lines (main thread only; elsewhere it cannot arrive)."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in background jobs of a shell
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[bool] = []
    old = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
    if came:
        raise KeyboardInterrupt


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def software_versions() -> dict[str, str]:
    """What a result was made with."""
    import transformers

    from .. import __version__

    return {
        "cocurve_lab": __version__,
        "torch": str(torch.__version__),  # a str subclass, which is not plain
        "transformers": transformers.__version__,
    }
