"""Exact replay: an ablation restarts at its output projection and runs only what follows.

Removing a unit changes nothing before its own output projection, so the layers below it need not
run again. No forward function is copied: a restart calls the model's own layer modules with the
arguments of the teacher pass. In the restarted layer, attention and FFN blocks do not run but
answer with a known write. (A block without a module of its own is replaced at its output
projection.) Everything a layer does around its blocks runs as usual, such as a norm of the write
(Gemma, OLMo2) or a parallel residual (GPT-NeoX).

The output projection is linear in its columns, so masking a unit subtracts that unit's own write:
all units of a layer together cost one projection. The speed-up changes no result (appendix "The
CoCurve Estimator", prefix-cache replay).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..base.errors import ArchitectureError
from ..models.architectures import (
    UNIT_KINDS,
    Architecture,
    here,
    is_packed,
    kind_number,
    weight_of,
)
from ..models.layer_calls import capture_calls, first_output, replaced_forward
from ..models.layers import present
from ..models.masking import column_scales, scaled, stack_rows
from ..models.unit import Kind
from ..models.units import Unit

# The teacher pass and its restarts --------------------------------------------------------------


@dataclass(frozen=True)
class BlockTrace:
    """The activations of one block in the teacher pass.

    Attributes:
        columns: [1, T, W], the input of its output projection.
        write: [1, T, d], the output of that projection.
        module: the module that returned the write: the block, or the projection itself.
        rest: the other values that the module returned; None if it returned the write alone.
        flat: whether its tensors have no batch axis, [B * T, ...]. (OPT flattens hidden states
            before its FFN and restores the axis after it.)
    """

    columns: Tensor
    write: Tensor
    module: nn.Module
    rest: tuple[Any, ...] | None = None
    flat: bool = False


Batched = Sequence[Sequence[Unit]]  # batches of units
Traces = dict[Kind | int, BlockTrace]  # of a layer, by kind of block; mixers by number


class Replay:
    """The teacher pass over one sequence, kept so that ablations can restart in it.

    Args:
        input_ids: [1, T] int64 on the model's device.
        positions: [P] int64 on the model's device, the scored positions.

    Attributes:
        scored_hidden: the teacher's final hidden states at the scored positions [1, P, d].
        calls: how the decoder called each layer.
    """

    def __init__(self, architecture: Architecture, input_ids: Tensor, positions: Tensor) -> None:
        self.architecture, self.positions = architecture, positions
        final, self.calls = capture_calls(architecture, input_ids)
        # from the last of several devices
        self.scored_hidden = final.to(input_ids.device)[:, positions]
        # the last layer that was traced, and the activations inside it
        self._traced: tuple[int, Traces] = (-1, {})

    def ride(self, batches: Batched) -> Iterator[Tensor]:
        """Run batches of ablations to the end together, and yield what comes out of each.

        They advance layer by layer, so the weights of a layer are needed only once. A single batch
        keeps the least in memory, many need the fewest weights; the result has the same bits.

        Args:
            batches: B units each, of one layer, attention before FFN; row b runs without units[b].
                Layers must not fall from one batch to the next.

        Yields:
            The final hidden states [B, P, d] of each batch at the scored positions.
        """
        states: list[Tensor] = []
        for layer in range(batches[0][0].layer, len(self.architecture.layers)):
            with present(self.architecture, layer):
                self._advance(layer, batches, states)
        states.reverse()
        while states:
            yield self.architecture.final(states.pop()).to(self.positions.device)

    def _advance(self, layer: int, batches: Batched, states: list[Tensor]) -> None:
        """Run a layer on the states of the batches below it, and start those that are of it."""
        last = len(self.architecture.layers) - 1
        with self._scored_only(last) if layer == last and states else nullcontext():
            for at in range(len(states)):  # each replaces the one before at once
                states[at] = self.run(layer, states[at])
                if layer == last:
                    states[at] = states[at][:, self.positions.to(states[at].device)]
        states += [self._started(units) for units in batches if units[0].layer == layer]

    def _started(self, units: Sequence[Unit]) -> Tensor:
        """Return the output [B, T, d] of these units' layer, or [B, P, d] if it is the last."""
        layer = units[0].layer
        parts = [
            self._restart(layer, kind, chosen)
            for kind in UNIT_KINDS
            if (chosen := [unit for unit in units if unit.kind == kind])
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    # Layers -------------------------------------------------------------------------------------

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """Run a layer on [B, T, d] with the other arguments of the teacher pass."""
        # masks and position embeddings have batch size 1 and broadcast over B
        return self.calls[layer].run(self.architecture.layers[layer], hidden)

    def _restart(self, layer: int, kind: Kind, units: list[Unit]) -> Tensor:
        """Return the output of `layer` [B, T or P, d], each row without one unit of a kind."""
        # after the projections of the last layer nothing mixes positions any more, so those not
        # scored are dropped at once; in earlier layers attention still reads them
        keep: Any = slice(None)
        traces = self._trace(layer)
        device = next(iter(traces.values())).write.device
        if layer == len(self.architecture.layers) - 1:
            keep = self.positions.to(device)
        # exact, because the input of the layer is the teacher's: whatever precedes the output
        # projection of the unit would compute again what the teacher pass computed
        rows = len(units)
        hidden = self.calls[layer].hidden.to(device)[:, keep].expand(rows, -1, -1)
        with ExitStack() as stack:
            # an ablation leaves the blocks before its own as they were, so they answer as in the
            # teacher pass: attention in an FFN ablation. Blocks after it have a new input. Mixers
            # always answer
            for name, trace in traces.items():
                if isinstance(name, int) or kind_number(name) < kind_number(kind):
                    known = trace.write[:, keep].expand(rows, -1, -1)
                    stack.enter_context(_answering(trace, known))
            stack.enter_context(self._without(layer, kind, units, keep))
            return self.run(layer, hidden)

    def _without(
        self, layer: int, kind: Kind, units: list[Unit], keep: Any
    ) -> AbstractContextManager[None]:
        """Let the block of a kind answer without one of these units in each row of a batch."""
        if not UNIT_KINDS[kind].columns:  # there is no write of its own to subtract
            masks = [column_scales(self.architecture, [unit]) for unit in units]
            return scaled(self.architecture, stack_rows(self.architecture, masks))
        own = self._trace(layer)[kind]
        projection = self.architecture.output_projection(layer, kind)
        columns, write = own.columns[:, keep], own.write[:, keep]
        return _answering(own, _writes_without(projection, columns, write, units))

    def _trace(self, layer: int) -> Traces:
        """Return the teacher's activations inside a layer."""
        if self._traced[0] != layer:
            # a restart needs the activations inside its layer. All layers of an 8B would take
            # gigabytes, so each runs once more when its turn comes, which is 2/M of the work
            traces: Traces = {}
            with ExitStack() as stack:
                for kind in self.architecture.column_kinds(layer):
                    for hook in self._watch(traces, layer, kind):
                        stack.callback(hook.remove)
                for number, mixer in enumerate(self.architecture.mixers(layer)):
                    stack.callback(_watch_mixer(traces, number, mixer).remove)
                self.run(layer, self.calls[layer].hidden)
            self._traced = layer, traces
        return self._traced[1]

    def _watch(
        self, traces: Traces, layer: int, kind: Kind
    ) -> tuple[RemovableHandle, RemovableHandle]:
        """Hook a block and its output projection, which runs inside it and so reports first."""
        columns = write = torch.empty(0)

        def see_projection(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            nonlocal columns, write
            columns, write = args[0], out

        def see_block(_: nn.Module, __: tuple[Any, ...], answer: Any) -> None:
            traces[kind] = _block_trace(self.architecture, layer, kind, columns, write, answer)

        projection = self.architecture.output_projection(layer, kind)
        block = self.architecture.block(layer, kind)
        # a layer has not answered yet while it runs; see `_block_trace` for a block that is one
        last = projection if block is self.architecture.layers[layer] else block
        return (
            projection.register_forward_hook(here(see_projection)),
            last.register_forward_hook(here(see_block)),
        )

    @contextmanager
    def _scored_only(self, layer: int) -> Iterator[None]:
        """Let the last block of the last layer skip the positions that are not scored."""
        # it acts position by position (`UnitKind.block`), and only scored ones are read afterwards
        block = self.architecture.block(layer, self.architecture.kinds(layer)[-1])
        length = self.calls[layer].hidden.shape[1]
        # not worth it for most positions; not possible for an FFN without a module of its own
        if len(self.positions) > length // 2 or block is self.architecture.layers[layer]:
            yield
            return
        forward = block.forward

        def scored(hidden: Tensor) -> Any:
            write, positions = torch.zeros_like(hidden), self.positions.to(hidden.device)
            answer = forward(hidden[:, positions])
            write[:, positions] = first_output(answer)
            return (write, *answer[1:]) if isinstance(answer, tuple) else write

        with replaced_forward(block, scored):
            yield


# Hooks and traces -------------------------------------------------------------------------------


def _watch_mixer(traces: Traces, number: int, mixer: nn.Module) -> RemovableHandle:
    def see(_: nn.Module, __: tuple[Any, ...], write: Tensor) -> None:
        traces[number] = BlockTrace(write[..., :0], write, mixer)

    return mixer.register_forward_hook(here(see))


def _block_trace(
    architecture: Architecture, layer: int, kind: Kind, columns: Tensor, write: Tensor, answer: Any
) -> BlockTrace:
    """Trace a block: at the block itself if it returns the write, else at its projection."""
    block = architecture.block(layer, kind)
    if first_output(answer) is write and block is not architecture.layers[layer]:
        rest, flat = tuple(answer[1:]) if isinstance(answer, tuple) else None, columns.dim() == 2
        if flat:  # the FFN in a mixture of Qwen2
            columns, write = columns[None], write[None]
        return BlockTrace(columns, write, block, rest, flat)
    # an FFN may have no module of its own (OPT) or change its write afterwards: its projection then
    # answers, and what stands around it runs. Attention may not: its inside would run too, which
    # mixes positions, and in the last layer only the scored ones are there
    if kind == "attention":
        raise ArchitectureError(
            f"the attention block of layer {layer} does something after its output projection, so "
            "a replay from there would skip it. This family needs its own replay rule."
        )
    projection = architecture.output_projection(layer, kind)
    if columns.dim() == 3:
        return BlockTrace(columns, write, projection)
    return BlockTrace(columns[None], write[None], projection, flat=True)


def _answering(trace: BlockTrace, write: Tensor) -> Any:
    """Let the traced module return a write [B, T, d], in the form of its own output."""
    shaped = write.flatten(0, 1) if trace.flat else write
    answer = shaped if trace.rest is None else (shaped, *trace.rest)
    return replaced_forward(trace.module, lambda *_, **__: answer)


def _writes_without(projection: Any, columns: Tensor, write: Tensor, units: list[Unit]) -> Tensor:
    """Return the writes of a block without each of B units [B, T, d]."""
    if is_packed(projection):  # packed weights cannot be sliced: run them on masked columns
        masked = columns.repeat(len(units), 1, 1)
        for row, unit in zip(masked, units, strict=True):
            row[:, unit.start : unit.stop] = 0
        return projection(masked)
    weight = weight_of(projection)
    own = [
        F.linear(columns[0, :, unit.start : unit.stop], weight[:, unit.start : unit.stop])
        for unit in units
    ]
    without = write - torch.stack(own)
    whole = [row for row, unit in enumerate(units) if unit.stop - unit.start == columns.shape[-1]]
    if whole:
        # only the bias is left, exactly: the difference would leave a residue of rounding, which a
        # norm after the write (Gemma, OLMo2) blows up
        without[whole] = 0 if projection.bias is None else projection.bias
    return without
