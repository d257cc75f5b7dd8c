"""A build on paper: what it would take on a machine that is not here, from shapes alone.

The batch, the block, the memory and the weights that are read come from the functions that a build
asks itself (batches.py, models/streaming.py). Only operations are counted here.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn

from ...calibration import CalibrationSet, draw_positions
from ...estimator.batches import Room, choose_batch, choose_block, memory_needed, sweeps
from ...estimator.replay import TRACE_BYTES, trace_bytes
from ...models.architectures import UNIT_KINDS, Architecture, describe, widths
from ...models.layer_calls import entering
from ...models.layers import bytes_of
from ...models.unit import Kind
from ...models.units import UnitSet
from .streaming import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel


BATCH, HERE = 4, 256  # rows and tokens of each, of what is timed on this machine


class Gpu(NamedTuple):
    """A GPU as its data sheet gives it: bytes of memory, dense bfloat16 operations per second."""

    name: str
    memory: float
    peak: float


GPUS = (
    Gpu("RTX 4090, 24 GB", 24e9, 165e12),
    Gpu("RTX A6000, 48 GB", 48e9, 155e12),
    Gpu("H100, 80 GB", 80e9, 989e12),
    Gpu("H200, 141 GB", 141e9, 989e12),
)


@dataclass(frozen=True)
class PaperBuild:
    """A build as it would run.

    Attributes:
        streamed: whether layers are read when they run, because the model does not fit.
        units_per_batch, block: ablations per forward pass, and that advance together.
        memory: bytes beside the weights that stay.
        sweeps: passes over the layers for each row, in which they are read; 0 if all are loaded.
        weights: bytes of all weights.
        bytes_read: bytes of weights read for each row.
        operations: multiplications and additions for each row.
    """

    streamed: bool
    units_per_batch: int
    block: int
    memory: float
    sweeps: int
    weights: int
    bytes_read: int
    operations: float

    def hours_computing(self, rows: int, rate: float) -> float:
        """Hours of arithmetic at `rate` operations per second."""
        return rows * self.operations / rate / 3600

    def hours_reading(self, rows: int, rate: float, host_memory: float) -> float:
        """Hours of reading at `rate` bytes per second.

        Files that fit into `host_memory` bytes are read once: after that the system has them.
        """
        again = 0 if self.weights <= host_memory else rows * self.bytes_read
        return max(self.weights, again) / rate / 3600


def build_on_paper(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    memory: float,
) -> PaperBuild:
    """Decide how a build would run on a GPU with `memory` bytes, and what it takes."""
    architecture = describe(model)
    inputs = (architecture, units, calibration, top_r)
    stream = Stream.of_shapes(architecture)
    weights = bytes_of(model.parameters())
    free = Room(memory - weights)
    streamed = free.beside(memory_needed(*inputs, 1, coming=0)) < 0  # not even one ablation fits
    room = Room(memory - (weights - stream.bytes_from(0)), stream.bytes_present)
    room = room if streamed else free
    batch = choose_batch(*inputs, room=room)
    block = choose_block(*inputs, batch, room=room)
    waiting = block if streamed else 0
    passes = sweeps(list(units), batch, block) if streamed else []
    return PaperBuild(
        streamed=streamed,
        units_per_batch=batch,
        block=max(batch, block),
        memory=memory_needed(*inputs, batch, block=waiting, coming=room.coming),
        sweeps=len(passes),
        weights=weights,
        bytes_read=sum(map(stream.bytes_from, passes)),
        operations=row_operations(*inputs),
    )


def rows_of(rows: int, length: int, positions: int | Literal["all"]) -> CalibrationSet:
    """Rows without text, of which only the size counts."""
    drawn = draw_positions(rows, length, positions, 0)
    return CalibrationSet(torch.zeros(rows, length, dtype=torch.int64), drawn, "on paper")


def rate_here(model: PreTrainedModel, seconds: float = 2.0) -> float:
    """Operations per second that this CPU reaches in float32 in the model's first layer, measured.

    Args:
        model: on the meta device; a copy of its first layer gets weights at random.
        seconds: to measure for.
    """
    architecture = describe(copy.deepcopy(model).float())
    small = nn.Embedding(1, architecture.config.hidden_size)  # no weights for other tokens
    architecture.decoder.set_input_embeddings(small)
    layer, rest = architecture.layers[0], architecture.backbone.children()
    for module in (
        layer,
        *(x for x in rest if x is not small and not isinstance(x, nn.ModuleList)),
    ):
        for tensor in module.to_empty(device="cpu").state_dict().values():
            nn.init.normal_(tensor, std=0.02)
    call = entering(architecture, torch.zeros(BATCH, HERE, dtype=torch.int64))
    call.run(layer, call.hidden)  # the first one is slower
    done, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds:
        call.run(layer, call.hidden)
        done += 1
    return BATCH * done * _layer(architecture, 0, HERE, HERE, causal=True) / took


# Operations ---------------------------------------------------------------------------------------


def row_operations(
    architecture: Architecture,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    *,
    causal: bool = True,
) -> float:
    """Multiplications and additions of matrix products for one row: teacher, ablations, Gram.

    `causal`: whether attention skips what its mask hides, as fused kernels do.
    """
    length, scored = calibration.seq_len, calibration.positions_per_sequence
    count, hidden = len(architecture.layers), architecture.config.hidden_size
    last, read = count - 1, scored if scored <= length // 2 else length
    layers = [_layer(architecture, at, length, length, causal) for at in range(count)]
    final = _layer(architecture, last, length, read, causal)
    head = 2 * scored * hidden * top_r
    kept = trace_bytes(architecture, length) <= TRACE_BYTES
    total = sum(layers) * (1 if kept else 2)
    total += head + 2 * scored * hidden * architecture.vocabulary  # the teacher, and its support
    above = [sum(layers[at + 1 : last]) + (final if at < last else 0) for at in range(count)]
    for unit in units:
        rows = scored if unit.layer == last else length
        total += above[unit.layer] + head + 2 * rows * hidden * (unit.stop - unit.start)
        if not UNIT_KINDS[unit.kind].columns:  # every token passes other experts
            total += 2 * rows * _weights(architecture, unit.layer, unit.kind)
        for kind in ("ffn", "expert") if unit.kind == "attention" else ():  # these have a new input
            total += 2 * rows * _weights(architecture, unit.layer, kind)
    return total + 2.0 * len(units) ** 2 * scored * top_r


def _layer(architecture: Architecture, layer: int, length: int, in_ffn: int, causal: bool) -> float:
    scores = 4 * length**2 * architecture.width(layer, "attention")
    own, *after = (_weights(architecture, layer, kind) for kind in UNIT_KINDS)
    return 2 * length * own + 2 * in_ffn * sum(after) + (scores / 2 if causal else scores)


def _weights(architecture: Architecture, layer: int, kind: Kind) -> int:
    """The weights of a block that a token passes; of experts, as many as its router chooses."""
    if kind not in architecture.kinds(layer):
        return 0
    if not UNIT_KINDS[kind].columns:
        declared = UNIT_KINDS[kind]
        return declared.least(architecture) * declared.units(architecture, layer, 1)[0].cost
    names = architecture.projection_names(layer, kind)
    found = (widths(architecture.projection(layer, kind, name)) for name in names)
    return sum(outputs * inputs for outputs, inputs in found)
