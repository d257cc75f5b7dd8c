"""How many ablations run together: as many units of one layer as memory holds.

The number is estimated from the free memory before a build, and halved when memory runs out after
all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.errors import InputError
from ..calibration import CalibrationSet
from ..models.architectures import Architecture
from ..models.identity import embedding_weight, model_device
from ..models.layers import weights_of
from ..models.runtime import is_out_of_memory
from ..models.units import Unit, UnitSet
from .replay import TRACE_BYTES, Batched, trace_bytes
from .support import GATHER_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLER = "Use shorter rows, fewer positions, bfloat16 weights, or a larger device."
Tick = Callable[[int], object]  # told the number of ablations that are done
Ride = Callable[[Batched], Iterator[Tensor]]  # `Replay.ride`

LOGIT_BYTES = 256 << 20  # bytes of full-vocabulary logits held at a time, here and in measuring/
_LARGEST_CPU_BATCH = 24  # rows beyond this only leave the cache


class Batches:
    """Batches of units of one layer, each tried again by halves when memory runs out.

    Args:
        size: ablations per batch to begin with.
        tick: told of each batch that is done.
        block: ablations that advance together through the layers (`Replay.ride`); 1 is one batch.

    Attributes:
        size, block: ablations per batch and per block from here on.
        notes: what should be kept with the result: each time the size was halved.
    """

    def __init__(self, size: int, tick: Tick, block: int = 1) -> None:
        self.size, self.block = size, block
        self.notes: list[str] = []
        self._tick, self._fitted = tick, True

    def first(self, units: Sequence[Unit]) -> Batched:
        """The batches of the first block, which may ride along in the teacher pass."""
        return [batch for _, batch in block_from(units, 0, self.size, self.block)]

    def of(self, units: Sequence[Unit], ride: Ride) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and result of each batch; a batch that ran out of memory is retried."""
        start = 0
        while start < len(units):
            block = block_from(units, start, self.size, self.block)
            with self.halved_when_too_large():
                riding = ride([batch for _, batch in block])
                for rows, batch in block:
                    yield rows, next(riding)
                    if not self._fitted:
                        break
                    start = rows.stop
                    self._tick(len(batch))
            del riding  # and with it the states of the batches that have not come to their end
            if not self._fitted:
                self._halve()

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
        self.size, self.block = halved(self.size, self.block)
        self._fitted = True
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        self.notes.append(f"out of memory, {self.size} units per batch from here on")


def halved(size: int, block: int) -> tuple[int, int]:
    """Halve the ablations per batch and per block, down to 1."""
    if size == block == 1:
        raise InputError(f"memory runs out with one ablation per batch. {SMALLER}")
    return max(1, size // 2), max(1, block // 2)


def by_layer(units: Sequence[Unit]) -> Iterator[tuple[int, list[Unit]]]:
    """Yield the units of each layer with the index of the first one."""
    first = 0
    for _, members in groupby(units, key=lambda unit: unit.layer):
        layer_units = list(members)
        yield first, layer_units
        first += len(layer_units)


def block_from(
    units: Sequence[Unit], start: int, size: int, block: int
) -> list[tuple[slice, Sequence[Unit]]]:
    """Batches from unit `start` on: at least one, and as many more as a block of units takes."""
    found: list[tuple[slice, Sequence[Unit]]] = []
    for first, layer_units in by_layer(units):
        stop = first + len(layer_units)
        for at in range(max(first, start), stop, size):
            rows = slice(at, min(at + size, stop))
            if found and rows.stop - start > block:
                return found
            found.append((rows, units[rows]))
    return found


@dataclass(frozen=True)
class Room:
    """The memory that a build may take on its device.

    Attributes:
        free: bytes that can still be taken.
        coming: the most bytes of weights that come from elsewhere and are in memory at a time; 0 if
            all are present.
        device: type of the device, such as "cuda".
    """

    free: float
    coming: int = 0
    device: str = "cuda"

    @classmethod
    def of(cls, model: PreTrainedModel) -> Room:
        """The room beside a model where it is."""
        device = model_device(model)
        return cls(free_memory(device), weights_of(model).bytes_present, device.type)

    def beside(self, fixed: float) -> float:
        """Bytes for ablations where `fixed` bytes are needed anyway, weights that come included."""
        # half of what is left: with half of all, a large model on a small GPU would have none for
        # its block, and read all weights for every unit
        if self.coming:
            return (self.free - fixed) / 2
        return self.free / 2 - fixed  # as ever, since the batch decides the last bits of H


def choose_batch(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    full_vocabulary: bool = False,
    room: Room | None = None,
) -> int:
    """Choose ablations per batch: as many of a layer's units as fit in half of the free memory.

    Arguments are those of `memory_needed`; `room` None is that where the model is.
    """
    room = room or Room.of(architecture.model)
    largest = max(len(layer_units) for _, layer_units in by_layer(units))
    needed = partial(memory_needed, architecture, units, calibration, top_r, coming=room.coming)
    fixed = needed(0, full_vocabulary)
    per_row = needed(1, full_vocabulary) - fixed
    if room.device == "cpu":
        largest = min(largest, _LARGEST_CPU_BATCH)
    # where weights come from elsewhere, half of the room is for the states of a block
    share = 2 if room.coming else 1
    return int(max(1, min(largest, room.beside(fixed) / share // per_row)))


def choose_block(
    architecture: Architecture,
    units: Sized,
    calibration: CalibrationSet,
    top_r: int,
    units_per_batch: int,
    full_vocabulary: bool = False,
    room: Room | None = None,
) -> int:
    """Choose how many ablations advance together: 1 (a single batch) if all weights are present.

    Otherwise as many as half of what is left beside a batch holds, since each block reads the
    weights anew. Arguments are those of `choose_batch` and its result.
    """
    room = room or Room.of(architecture.model)
    if not room.coming:
        return 1
    build = (architecture, units, calibration, top_r, units_per_batch, full_vocabulary)
    needed = partial(memory_needed, *build, coming=room.coming)
    fixed = needed()
    per_unit = needed(block=1) - fixed
    return int(max(1, min(len(units), room.beside(fixed) // per_unit)))


def free_memory(device: torch.device) -> float:
    """Return the bytes still free on a device; on the CPU, under the limits of this process."""
    if device.type in ("cuda", "xpu"):
        on = torch.cuda if device.type == "cuda" else torch.xpu
        # what torch holds back from earlier work is free to us as well
        reserved = float(on.mem_get_info(device)[0])
        return reserved + on.memory_reserved(device) - on.memory_allocated(device)
    import psutil  # mps has the memory of the CPU

    free, process = float(psutil.virtual_memory().available), psutil.Process()
    if hasattr(process, "rlimit"):  # on Linux
        taken = process.memory_info()
        for which, used in ((psutil.RLIMIT_DATA, taken.data), (psutil.RLIMIT_AS, taken.vms)):
            most = process.rlimit(which)[0]
            free = free if most == psutil.RLIM_INFINITY else min(free, most - used)
    return free


def memory_needed(
    architecture: Architecture,
    units: Sized,
    calibration: CalibrationSet,
    top_r: int,
    units_per_batch: int,
    full_vocabulary: bool = False,
    block: int = 0,
    coming: int | None = None,
) -> float:
    """Estimate the bytes of a build: features, activations, group Grams, and weights that come.

    Weights that are in memory anyway are not counted: all of a loaded model, and the parts around
    the layers of a streamed one, of which two layers at a time are added here.

    Args:
        architecture, units, calibration, top_r: of the build; only the number of units counts.
        units_per_batch: ablations per forward pass.
        full_vocabulary: whether risks are measured over the full vocabulary.
        block: ablations whose states wait for each other (`choose_block`).
        coming: bytes of weights that come, as in `Room`; None: those of the model.
    """
    config, length = architecture.config, calibration.seq_len
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
    width = max(map(architecture.active_width, range(len(architecture.layers))))
    row = (
        length * size * (6 * hidden + 3 * width)
        + 4 * scored
        + calibration.positions_per_sequence * hidden * 8
    )
    if getattr(config, "_attn_implementation", "") == "eager":
        row += config.num_attention_heads * length**2 * (size + 4)
    if full_vocabulary:  # the head in float32; logits of a few positions, and what KL makes of them
        head += 4 * vocabulary * hidden + 4 * LOGIT_BYTES
    states = block * length * hidden * size
    if coming is None:
        coming = weights_of(architecture.model).bytes_present
    return features + teacher + traces + head + grams + units_per_batch * row + states + coming
