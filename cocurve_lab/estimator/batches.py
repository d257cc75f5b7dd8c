"""How many ablations run together: as many units of one layer as memory holds.

The number is estimated from the free memory before a build, and halved when memory runs out after
all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch

from ..calibration import CalibrationSet
from ..errors import InputError
from ..models.architectures import Architecture
from ..models.identity import embedding_weight, model_device
from ..models.runtime import is_out_of_memory
from ..models.units import Unit, UnitSet
from .replay import GATHER_BYTES, TRACE_BYTES, trace_bytes

SMALLER = "Use shorter rows, fewer positions, bfloat16 weights, or a larger device."
Tick = Callable[[int], object]  # told the number of ablations that are done

LOGIT_BYTES = 256 << 20  # bytes of full-vocabulary logits held at a time, here and in measuring/
_LARGEST_CPU_BATCH = 24  # rows beyond this only leave the cache


class Batches:
    """Batches of units of one layer, each tried again by halves when memory runs out.

    Args:
        size: ablations per batch to begin with.
        tick: told of each batch that is done.

    Attributes:
        size: ablations per batch from here on.
        notes: what should be kept with the result: each time the size was halved.
    """

    def __init__(self, size: int, tick: Tick) -> None:
        self.size = size
        self.notes: list[str] = []
        self._tick, self._fitted = tick, True

    def of(self, units: Sequence[Unit]) -> Iterator[tuple[slice, list[Unit]]]:
        """The rows and units of each batch; one that did not fit comes again, smaller.

        Raises:
            InputError: one ablation alone does not fit.
        """
        for first, layer_units in by_layer(units):
            start = 0
            while start < len(layer_units):
                batch = layer_units[start : start + self.size]
                yield slice(first + start, first + start + len(batch)), batch
                if not self._fitted:
                    self._halve()
                    continue
                start += len(batch)
                self._tick(len(batch))

    @contextmanager
    def halved_when_too_large(self) -> Iterator[None]:
        """Let the work on a batch run out of memory: `of` then yields its units again."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._fitted = False  # halved later: while this error lives, so do its tensors

    def _halve(self) -> None:
        if self.size == 1:
            raise InputError(f"memory runs out with one ablation per batch. {SMALLER}")
        self.size //= 2
        self._fitted = True
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.notes.append(f"out of memory, {self.size} units per batch from here on")


def by_layer(units: Sequence[Unit]) -> Iterator[tuple[int, list[Unit]]]:
    """Units of each layer with the index of its first one."""
    first = 0
    for _, members in groupby(units, key=lambda unit: unit.layer):
        layer_units = list(members)
        yield first, layer_units
        first += len(layer_units)


def choose_batch(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    full_vocabulary: bool = False,
) -> int:
    """Ablations per batch: as many of a layer's units as half of the free memory holds."""
    largest = max(len(layer_units) for _, layer_units in by_layer(units))
    needed = partial(memory_needed, architecture, units, calibration, top_r)
    fixed = needed(0, full_vocabulary)
    per_row = needed(1, full_vocabulary) - fixed
    device = model_device(architecture.model)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # what torch holds back from earlier work is free to us as well
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        import psutil

        free, largest = psutil.virtual_memory().available, min(largest, _LARGEST_CPU_BATCH)
    return int(max(1, min(largest, (free / 2 - fixed) // per_row)))


def memory_needed(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    units_per_batch: int,
    full_vocabulary: bool = False,
) -> float:
    """Bytes a build takes beside the model, roughly: features, activations, group Grams."""
    config, length = architecture.model.config, calibration.seq_len
    size = embedding_weight(architecture.model).element_size()
    vocabulary, hidden = architecture.vocabulary, config.hidden_size
    scored = calibration.positions_per_sequence * top_r * 4
    whole_head = calibration.positions_per_sequence * vocabulary * 4
    features = len(units) * scored
    head = min(scored * hidden, GATHER_BYTES)
    teacher = length * hidden * size * (len(architecture.layers) + 8) + whole_head
    traces = min(trace_bytes(architecture, length), TRACE_BYTES)
    grams = 8 * len(units) ** 2 * 18
    # residual, normed, queries/keys/values, three FFN activations; then support logits and shifts
    width = max(architecture.width(layer, "ffn") for layer in range(len(architecture.layers)))
    row = (
        length * size * (6 * hidden + 3 * width)
        + 4 * scored
        + calibration.positions_per_sequence * hidden * 8
    )
    if getattr(config, "_attn_implementation", "") == "eager":
        row += config.num_attention_heads * length**2 * (size + 4)
    if full_vocabulary:  # the head in float32; logits of a few positions, and what KL makes of them
        head += 4 * vocabulary * hidden + 4 * LOGIT_BYTES
    return features + teacher + traces + head + grams + units_per_batch * row
