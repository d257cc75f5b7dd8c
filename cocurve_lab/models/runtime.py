"""Running a model to measure it: its lock and state, checks beforehand, interruptions, bars."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..base.arguments import require_threads, require_type
from ..base.errors import ArchitectureError, InputError, MismatchError, NumericalError
from ..base.progress import Bar
from .architectures import describe, here
from .identity import embedding_weight, model_device, model_name, weights_state
from .layers import weights_of
from .weights import is_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet

# weak, so that a lock lives only as long as its model
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_REGISTRY = threading.Lock()  # guards _LOCKS
_FINITE: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # weights that were checked
_KNOWN_HEADS: WeakSet[nn.Module] = WeakSet()  # models that passed require_known_head


# State --------------------------------------------------------------------------------------------


def exclusive(model: nn.Module) -> threading.RLock:
    """Return the lock of a model. Hold it to mask, build, measure or generate.

    Widget callbacks run on other threads than the current cell. Without the lock, a slider could
    run a forward pass while units are switched off for a measurement.
    """
    # reentrant, because a measurement that holds it masks units, which takes it again
    with _REGISTRY:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def measuring(model: PreTrainedModel, threads: int) -> Iterator[None]:
    """Hold a model in the state for measuring, and restore it on leaving.

    The state: its lock is held, it is in eval mode, gradients and autocast are off, float32
    products have full precision, and torch uses `threads` CPU threads.
    """
    with exclusive(model):
        modes = [(module, module.training) for module in model.modules()]
        before = torch.get_num_threads()
        threads = require_threads(threads, "the number of threads")
        model.eval()
        torch.set_num_threads(threads)  # the number decides the order of sums, hence the last bits
        try:
            with full_precision(), torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(before)
            for module, training in modes:  # not model.train(): submodules may differ from the top
                module.training = training


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products in full: no autocast, and no TF32, which keeps 10 bits."""
    onednn: Any = torch.backends.mkldnn  # its matmul is not in the types
    matmuls = (torch.backends.cuda.matmul, onednn.matmul)
    newer = [matmul.fp32_precision for matmul in matmuls]
    older = None
    # torch has an older and a newer name for this setting, and refuses to read the older one where
    # only the newer was set. Writing the older one sets both.
    with suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for matmul, value in zip(matmuls, newer, strict=True):
            matmul.fp32_precision = value


# Requirements -------------------------------------------------------------------------------------


def require_measurable(model: PreTrainedModel, text: CalibrationSet) -> None:
    """Raise InputError or ArchitectureError unless the model can run on these rows."""
    input_ids = text.input_ids
    gone = any(weight.is_meta for weight in model.parameters())
    if gone and not weights_of(model).devices:
        raise InputError(
            "the model's weights are on the meta device: they were never loaded. Load the model "
            "with load_model; stream=True reads each layer when it runs."
        )
    state = weights_state(model)
    if _FINITE.get(model) != state:
        for name, weight in model.named_parameters():
            if not is_finite(weight):
                raise NumericalError(
                    f"the weight {name} holds NaN or infinity. Load the model again, or undo what "
                    "changed it."
                )
        _FINITE[model] = state
    require_known_ids(model, int(input_ids.max()), text.vocabulary)
    context = context_of(model)
    if input_ids.shape[1] > context:
        raise InputError(
            f"rows have {input_ids.shape[1]} tokens, but the model's context is {context}. Cut "
            f"rows of at most {context} tokens."
        )
    require_known_head(model, input_ids[:1, :8])


def require_known_ids(
    model: PreTrainedModel, largest: int, vocabulary: str | None, text: str = "text"
) -> None:
    """Require that the token ids of a text, up to `largest`, are those of the model's tokenizer.

    Raises:
        InputError: the model's embedding has no row for the largest.
        MismatchError: the text's `vocabulary_mark` is not that of the tokenizer that was loaded
            with the model.
    """
    rows = embedding_weight(model).shape[0]
    if largest >= rows:
        raise InputError(
            f"the {text} has token id {largest}, the model's embedding has {rows} rows. Use the "
            "tokenizer that belongs to the model."
        )
    if vocabulary and getattr(model, "cocurve_vocabulary", vocabulary) != vocabulary:
        raise MismatchError(
            f"the {text} was made with another tokenizer than that of {model_name(model)}. Use the "
            "tokenizer that load_model returned with the model."
        )


def context_of(model: PreTrainedModel) -> float:
    """Return the longest text that the model reads, in tokens; inf if its config names none."""
    require_type(model, nn.Module, "the model")
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def require_known_head(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise ArchitectureError unless the model's logits are those of `Architecture.logits`.

    Some families scale or shift their logits after the head. Everything measured would then be
    wrong by a factor, and nothing else would show it. Each model is checked once, on ids [1, T].
    """
    if model in _KNOWN_HEADS:
        return
    architecture, seen = describe(model), []
    keep = architecture.decoder.register_forward_hook(here(lambda _, __, out: seen.append(out)))
    try:
        with exclusive(model), torch.inference_mode():
            logits = model(input_ids=ids.to(model_device(model)), use_cache=False).logits
            expected = architecture.logits(seen[-1][0]).to(logits.device)
    finally:
        keep.remove()
    # one head on the same hidden states: a gap beyond rounding means a further operation
    size = float(expected.abs().max())
    gap = float((logits.float() - expected.float()).abs().max())
    if gap > 0.01 * size:
        raise ArchitectureError(
            f"the logits of {type(model).__name__} differ by up to {gap:.3g} from the output of "
            f"its head (up to {size:.3g}): this family changes them afterwards, by an operation "
            "such as scaling. Add that operation to Architecture.logits first."
        )
    _KNOWN_HEADS.add(model)


def require_one_device(model: PreTrainedModel) -> None:
    """Raise InputError unless all weights are on one device, and none on the meta device."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise InputError(
            f"the model's weights are on {', '.join(devices)} (meta: offloaded or streamed), but "
            "this needs all of them on one device. Load the model without stream and device_map, "
            "in bfloat16 if it does not fit. Builds of H by ablations, measured plans, and prune "
            "and repair into a folder (out=) also take it as it is."
        )


# Devices ------------------------------------------------------------------------------------------


def sums_on(device: torch.device) -> torch.device:
    """Return the device for float64 sums: the same, or the CPU for one without float64 (mps)."""
    return torch.device("cpu") if device.type == "mps" else device


def in_double(values: Tensor) -> Tensor:
    """Convert values to float64, on `sums_on` of their device."""
    return values.to(sums_on(values.device)).double()


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the type of another device, such as "cpu"."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if name is None else str(name(device))


# Memory and provenance ----------------------------------------------------------------------------


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, on the GPU or the CPU."""
    # the CPU allocator and cuBLAS report it as a plain RuntimeError
    signs = "DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|(CUDA error:|MPS backend) out of memory"
    return isinstance(error, torch.OutOfMemoryError) or re.search(signs, str(error)) is not None


def software_versions() -> dict[str, str]:
    """Return the versions of this library, torch and transformers, for provenance."""
    import transformers

    from .. import __version__

    return {
        "cocurve_lab": __version__,
        "torch": str(torch.__version__),  # TorchVersion is a str subclass, not plain data
        "transformers": transformers.__version__,
    }


@contextmanager
def transient_bars(hidden: bool = False) -> Iterator[None]:
    """Replace transformers' progress bars with ours; in notebooks, theirs would stay on screen.

    They are hidden if `hidden`, or where transformers is told to show none.
    """
    from transformers.utils import logging

    hidden = hidden or not logging.is_progress_bar_enabled()

    def bar(_: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Bar:
        return Bar(*args, **settings | {"disable": hidden or settings.get("disable", False)})

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
