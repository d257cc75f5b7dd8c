"""Size, speed and memory of a dense and a pruned model, in one run (appendix "Efficiency").

Times on one machine differ from run to run more than models do. So the two models are timed in
turn, and the ratio within each repeat is reported, with its quartiles. Absolute numbers are there
too; on a CPU they say little. A pruned model has as many operations as the dense one, each only
narrower: time spent on weights can shrink by the ratio of parameters at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import timer

from ..base.errors import InputError, MismatchError
from ..base.progress import Bar
from ..extensions.judging.generation import last_logits
from ..models.identity import embedding_weight, model_device
from ..models.runtime import context_of, device_name, measuring, require_one_device

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from transformers import PreTrainedModel


_PROMPT = 2048  # tokens of the paper's prefill


@dataclass(frozen=True)
class EfficiencyOptions:
    """Options of `measure_efficiency`.

    Attributes:
        batch_sizes: numbers of prompts in one batch.
        prompt_tokens: tokens of the prefill; None takes the context less `new_tokens`, at most
            2,048 as in the paper.
        new_tokens: tokens decoded one by one after the prefill.
        repeats: repeats of each timing, dense and pruned in turn (which goes first alternates).
        threads: torch's threads on a CPU; None keeps the present number.
        progress: show a progress bar.
    """

    batch_sizes: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int | None = None
    new_tokens: int = 32
    repeats: int = 5
    threads: int | None = None
    progress: bool = True


@dataclass(frozen=True)
class Efficiency:
    """Measured sizes and speeds of two models, as a tidy table.

    Attributes:
        rows: dicts of quantity, batch_size (None where it does not matter), unit, dense, pruned,
            ratio (pruned over dense), low and high (its lower and upper quartile over repeats),
            repeats. Speeds are medians in tokens per second; sizes are exact, with
            ratio = low = high.
        protocol: how it was timed, in one sentence.
    """

    rows: tuple[dict[str, Any], ...]
    protocol: str

    def __repr__(self) -> str:
        from pandas import DataFrame

        table = DataFrame(self.rows).drop(columns="repeats")
        return f"{table.to_string(index=False, float_format='{:,.2f}'.format)}\n{self.protocol}"


def measure_efficiency(
    dense: PreTrainedModel, pruned: PreTrainedModel, options: EfficiencyOptions | None = None
) -> Efficiency:
    """Measure parameters, bytes, speed and memory of two models (appendix "Efficiency").

    Sizes: parameters; bytes of weights; bytes of KV cache per token, read from a filled cache.
    Speed: prompt tokens per second of prefill, and tokens per second of decoding one by one after
    it. Peak memory, on a GPU: bytes of weights plus the most that one prefill and decode held at a
    time besides, by its allocator.

    Args:
        dense: the model before pruning.
        pruned: the result of `prune`, on the same device and of the same dtype.
        options: batch sizes, lengths, repeats.

    Raises:
        MismatchError: the models are on different devices, or of different dtype.
        InputError: prompt and reply do not fit the context, or weights are streamed or offloaded.
    """
    options = options or EfficiencyOptions()
    device = model_device(dense)
    kinds = [(model_device(m), embedding_weight(m).dtype) for m in (dense, pruned)]
    if kinds[0] != kinds[1]:
        raise MismatchError(
            f"the dense model is {kinds[0]}, the pruned one {kinds[1]}. Put both on one device, in "
            "one dtype."
        )
    for model in (dense, pruned):  # else the disk would be timed
        require_one_device(model)
    context = context_of(dense)
    length = options.prompt_tokens or max(1, int(min(_PROMPT, context - options.new_tokens)))
    if length + options.new_tokens > context:
        raise InputError(
            f"{length} prompt tokens and {options.new_tokens} new ones do not fit the context of "
            f"{context}. Set fewer of either."
        )
    models = (dense, pruned)
    rows = [
        _row("parameters", "parameters", [[model.num_parameters() for model in models]]),
        _row("weights", "bytes", [[m.get_memory_footprint(return_buffers=False) for m in models]]),
    ]
    threads = options.threads or torch.get_num_threads()
    with measuring(dense, threads), measuring(pruned, threads):
        rows.append(_row("KV cache per token", "bytes", [[_cache_bytes(m) for m in models]]))
        for batch in options.batch_sizes:
            rows += _measured(models, _prompt(dense, batch, length), options)
    protocol = (
        f"{device_name(device)}, {kinds[0][1]}, {threads} threads, {length} prompt tokens, "
        f"{options.new_tokens} decoded; medians of {options.repeats} repeats, dense and pruned in "
        "turn; ratios within a repeat, with quartiles."
    )
    return Efficiency(tuple(rows), protocol)


def _prompt(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random token ids [batch, length]: dense arithmetic takes as long for any."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = embedding_weight(model).shape[0]
    return torch.randint(vocabulary, (batch, length), generator=generator).to(model_device(model))


# Rows ---------------------------------------------------------------------------------------------
def _measured(
    models: Sequence[PreTrainedModel], prompt: Tensor, options: EfficiencyOptions
) -> list[dict[str, Any]]:
    """Rows of prefill and decode throughput on a prompt [batch, length], and of peak memory."""
    batch, length = prompt.shape
    new = options.new_tokens
    for model in models:
        _run(model, prompt, new)  # kernels are chosen and memory is taken here
    seconds = np.zeros((options.repeats, 2, 2))  # repeat, model, prefill or decode
    for repeat in Bar(range(options.repeats), desc=f"batch {batch}", disable=not options.progress):
        for which in (0, 1) if repeat % 2 == 0 else (1, 0):
            seconds[repeat, which] = _run(models[which], prompt, new)
    rows = [
        _row("prefill", "tokens per second", batch * length / seconds[:, :, 0], batch),
        _row("decode", "tokens per second", batch * new / seconds[:, :, 1], batch),
    ]
    if prompt.device.type == "cuda":
        peaks = [
            model.get_memory_footprint(return_buffers=False)
            + most_held(prompt.device, partial(_run, model, prompt, new))
            for model in models
        ]
        rows.append(_row("peak memory", "bytes", [peaks], batch))
    return rows


def _row(quantity: str, unit: str, values: ArrayLike, batch: int | None = None) -> dict[str, Any]:
    """A row of values [repeats, 2], dense and pruned: medians, and quartiles of the ratios."""
    found = np.asarray(values)
    low, ratio, high = np.quantile(found[:, 1] / found[:, 0], [0.25, 0.5, 0.75])
    dense, pruned = np.median(found, axis=0)
    return {
        "quantity": quantity,
        "batch_size": batch,
        "unit": unit,
        "dense": float(dense),
        "pruned": float(pruned),
        "ratio": float(ratio),
        "low": float(low),
        "high": float(high),
        "repeats": len(found),
    }


def _run(model: Any, prompt: Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of one prefill, and of the greedy tokens after it."""
    with torch.cuda.device_of(prompt):  # the timer waits for what this GPU has begun
        start = timer()
        logits, cache = last_logits(model, prompt, {})
        middle = timer()
        for _ in range(new_tokens):
            logits, cache = last_logits(model, logits.argmax(dim=-1, keepdim=True), cache)
        return middle - start, timer() - middle


# Size and memory ----------------------------------------------------------------------------------
def _cache_bytes(model: Any) -> int:
    """Bytes per token of all layers' keys and values, from a cache of two tokens."""
    _, cache = last_logits(model, _prompt(model, 1, 2), {})
    (layers,) = (held.layers for held in cache.values())
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held) // 2


def most_held(device: torch.device, call: Callable[[], Any]) -> int:
    """Return the most bytes allocated on a GPU at a time in a call, beyond those before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before
