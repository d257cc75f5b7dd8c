"""How many ablations run together: as many units of one layer as memory holds.

The number is estimated from the free memory before a build, and halved when memory runs out after
all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..base import memory
from ..base.errors import InputError
from ..calibration import CalibrationSet
from ..models.architectures import Architecture
from ..models.identity import embedding_weight, model_device
from ..models.layers import weights_of
from ..models.logits import LOGIT_BYTES
from ..models.runtime import is_out_of_memory
from ..models.units import Unit, UnitSet
from .replay import Batched
from .support import GATHER_BYTES

SMALLER = "Use shorter rows, fewer positions, bfloat16 weights, or a larger device."
Tick = Callable[[int], object]  # told the number of ablations that are done
Ride = Callable[[Batched], Iterator[Tensor]]  # `Replay.ride`

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
        if self.size == self.block == 1:
            raise InputError(f"memory runs out with one ablation per batch. {SMALLER}")
        self.size, self.block = max(1, self.size // 2), max(1, self.block // 2)
        self._fitted = True
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        self.notes.append(f"out of memory, {self.size} units per batch from here on")


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
    """The memory of a device, and what ablations take of it, in bytes.

    Weights that are in memory anyway are not counted: all of a loaded model, and the parts around
    the layers where the layers come from elsewhere. Of these the most that are there at a time are.

    Attributes:
        free: what can still be taken.
        device_kind: "cpu", "cuda" and so on.
        fixed: features, teacher, Grams and weights that come; taken in any case.
        row: more for each ablation of a batch.
        state: more for each ablation of a block, while it waits.
        coming: the most weights that come from elsewhere and are there at a time; part of `fixed`.
    """

    free: float
    device_kind: str
    fixed: int
    row: int
    state: int
    coming: int = 0

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        units: Sized,
        text: CalibrationSet,
        top_r: int,
        full_vocabulary: bool = False,
        sharing: int = 1,
    ) -> Room:
        """Estimate what ablations of these units on this text take.

        Args:
            architecture, units, text, top_r: of units only the number counts.
            full_vocabulary: whether risks are measured over the full vocabulary.
            sharing: how many workers share the memory.
        """
        config, model = architecture.config, architecture.model
        length, positions = text.seq_len, text.positions_per_sequence
        hidden, vocabulary = config.hidden_size, architecture.vocabulary
        size = embedding_weight(model).element_size()
        scored = positions * top_r * 4
        head = min(scored * hidden, GATHER_BYTES)
        if full_vocabulary:  # the head in float32; logits of a few positions, and their KL
            head += 4 * vocabulary * hidden + 4 * LOGIT_BYTES
        teacher = length * hidden * size * (len(architecture.layers) + 8)
        width = max(map(architecture.active_width, range(len(architecture.layers))))
        teacher += positions * vocabulary * 4 + length * (3 * hidden + width) * size  # and a trace
        features, grams = len(units) * scored, 8 * len(units) ** 2 * 18
        coming = weights_of(model).bytes_present
        # residual, normed, queries/keys/values, three FFN activations; then logits and shifts
        row = length * size * (6 * hidden + 3 * width) + 4 * scored + positions * hidden * 8
        if getattr(config, "_attn_implementation", "") == "eager":
            row += config.num_attention_heads * length**2 * (size + 4)
        device = model_device(model)
        return cls(
            free_memory(device) / sharing,
            device.type,
            fixed=features + teacher + head + grams + coming,
            row=row,
            state=length * hidden * size,
            coming=coming,
        )

    def needed(self, batch: int, block: int = 0) -> int:
        """Bytes for batches of `batch` ablations, with `block` of them waiting for each other."""
        return self.fixed + batch * self.row + block * self.state

    def beside(self, fixed: int) -> float:
        """Bytes for ablations where `fixed` bytes are needed anyway."""
        # half of what is left: with half of all, a large model on a small GPU would have none for
        # its block, and read all weights for every unit
        if self.coming:
            return (self.free - fixed) / 2
        return self.free / 2 - fixed  # unchanged: the batch size affects the last bits of H

    def batch(self, units: UnitSet) -> int:
        """Choose ablations per batch: as many of a layer's units as fit in half of the memory."""
        largest = max(len(members) for _, members in by_layer(units))
        if self.device_kind == "cpu":
            largest = min(largest, _LARGEST_CPU_BATCH)
        # where weights come from elsewhere, half of the room is for the states of a block
        share = 2 if self.coming else 1
        return int(max(1, min(largest, self.beside(self.fixed) / share // self.row)))

    def block(self, units: Sized, batch: int) -> int:
        """Choose how many ablations advance together: 1 (a single batch) if all weights are here.

        Otherwise as many as half of what is left beside a batch holds, since each block reads the
        weights anew.
        """
        if not self.coming:
            return 1
        return int(max(1, min(len(units), self.beside(self.needed(batch)) // self.state)))


def free_memory(device: torch.device) -> float:
    """Return the bytes still free on a device."""
    if device.type in ("cuda", "xpu"):
        on = torch.cuda if device.type == "cuda" else torch.xpu
        # what torch holds back from earlier work is free to us as well
        reserved = float(on.mem_get_info(device)[0])
        return reserved + on.memory_reserved(device) - on.memory_allocated(device)
    return memory.free_memory()  # mps has the memory of the CPU
