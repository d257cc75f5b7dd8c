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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..base.errors import ArchitectureError
from ..models.architectures import Architecture, is_packed, weight_of
from ..models.families import KINDS, Kind
from ..models.identity import embedding_weight
from ..models.layer_calls import LayerCall, first_output, replaced_forward, run_decoder
from ..models.layers import source_of
from ..models.runtime import is_out_of_memory
from ..models.units import Unit

# up to this many times the support, the whole head is cheaper than gathering rows of it
_WHOLE_HEAD_FACTOR = 8
GATHER_BYTES = 256 << 20  # bytes of head rows gathered at a time
TRACE_BYTES = 256 << 20  # bytes of activations inside layers; they are kept if all of them fit


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


class Replay:
    """The teacher pass over one sequence, kept so that ablations can restart in it.

    Args:
        input_ids: [1, T] int64 on the model's device.
        positions: [P] int64 on the model's device, the scored positions.
        refit_scales: what an ablation takes from each block's columns [W, W]; None: the unit's own
            columns, as in the paper.
        along: the batches that `ride` will be asked for first. Where weights come from elsewhere,
            they ride along in this pass, while each layer is there for it.
    """

    def __init__(
        self,
        architecture: Architecture,
        input_ids: Tensor,
        positions: Tensor,
        refit_scales: Mapping[tuple[int, Kind], Tensor] | None = None,
        along: Batched = (),
    ) -> None:
        self.architecture = architecture
        self.positions, self.refit_scales = positions, refit_scales
        self.stream = source_of(architecture.model)
        self._traces: dict[int, dict[Kind, BlockTrace]] = {}
        # what rides along, and its states; None if nothing does, or if it did not fit
        self._riding: tuple[Batched, list[Tensor]] | None = None
        if along and self.stream is not None:
            self._riding = along, []
        self.calls: list[LayerCall] = []
        # a restart needs the activations inside its layer. They are kept for all layers if they
        # fit; else `_trace` runs each layer once more when its turn comes
        self._keeps_traces = trace_bytes(architecture, input_ids.shape[1]) <= TRACE_BYTES
        final = run_decoder(architecture, input_ids, self._passed)
        self.final_hidden = final.to(input_ids.device)  # from the last of several devices

    @contextmanager
    def _passed(self, layer: int, call: LayerCall) -> Iterator[None]:
        """Record what restarts need of a layer, and advance what rides along with the teacher."""
        self.calls.append(call)
        with self._tracing([layer] if self._keeps_traces else ()):
            yield
        if self._riding is None:
            return
        try:
            with self.held(layer):
                self._advance(layer, *self._riding)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._riding = None  # `ride` runs the block by itself, where batches can be halved

    @property
    def scored_hidden(self) -> Tensor:
        """The teacher's final hidden states at the scored positions [1, P, d]."""
        return self.final_hidden[:, self.positions]

    def ablated_hidden(self, units: Sequence[Unit]) -> Tensor:
        """Run a single batch as `ride` does, and return its final hidden states [B, P, d]."""
        return next(self.ride([units]))

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
        riding, self._riding = self._riding, None
        if riding is not None and list(riding[0]) == list(batches):
            states = riding[1]
        else:
            states = []
            for layer in range(batches[0][0].layer, len(self.architecture.layers)):
                with self.held(layer):
                    self._advance(layer, batches, states)
        del riding
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
                    states[at] = states[at][:, self._positions_on(states[at].device)]
        states += [self._started(units) for units in batches if units[0].layer == layer]

    def _started(self, units: Sequence[Unit]) -> Tensor:
        """Return the output [B, T, d] of these units' layer, or [B, P, d] if it is the last."""
        if sorted(units, key=lambda unit: KINDS.index(unit.kind)) != list(units):
            raise ValueError("units of a batch must come attention first, as in their UnitSet")
        layer = units[0].layer
        parts = [
            self._restart(layer, kind, chosen)
            for kind in KINDS
            if (chosen := [unit for unit in units if unit.kind == kind])
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    # Layers -------------------------------------------------------------------------------------

    def held(self, layer: int) -> AbstractContextManager[None]:
        """Keep the weights of a layer present, where they come from elsewhere."""
        return nullcontext() if self.stream is None else self.stream.held(layer)

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """Run a layer on [B, T, d] with the other arguments of the teacher pass."""
        # masks and position embeddings have batch size 1 and broadcast over B
        call = self.calls[layer]
        return first_output(self.architecture.layers[layer](hidden, *call.args, **call.kwargs))

    def _positions_on(self, device: torch.device) -> Tensor:
        """Return the scored positions, to index a tensor on this device."""
        return self.positions.to(device)

    def _restart(self, layer: int, kind: Kind, units: list[Unit]) -> Tensor:
        """Return the output of `layer` [B, T or P, d], each row without one unit of a kind."""
        # after the projections of the last layer nothing mixes positions any more, so those not
        # scored are dropped at once; in earlier layers attention still reads them
        keep: Any = slice(None)
        if layer == len(self.architecture.layers) - 1:
            keep = self._positions_on(self._trace(layer)[kind].write.device)
        # exact, because the input of the layer is the teacher's: whatever precedes the output
        # projection of the unit would compute again what the teacher pass computed
        trace = self._trace(layer)
        own = trace[kind]
        projection = self.architecture.output_projection(layer, kind)
        taken = None if self.refit_scales is None else self.refit_scales[layer, kind]
        writes = _writes_without(projection, own.columns[:, keep], own.write[:, keep], units, taken)
        rows = len(units)
        hidden = self.calls[layer].hidden.to(own.write.device)[:, keep].expand(rows, -1, -1)
        with ExitStack() as stack:
            # an FFN ablation leaves attention as it was, so attention answers as in the teacher
            # pass; after an attention ablation the FFN of the layer has a new input, and runs
            if kind == "ffn":
                attention = trace["attention"]
                known = attention.write[:, keep].expand(rows, -1, -1)
                stack.enter_context(_answering(attention, known))
            stack.enter_context(_answering(own, writes))
            return self.run(layer, hidden)

    def _trace(self, layer: int) -> dict[Kind, BlockTrace]:
        """Return the teacher's activations inside a layer, by kind of block."""
        if layer not in self._traces:
            # all layers of an 8B would take gigabytes, so only this one is kept. Running each layer
            # once more is 2/M of the work
            self._traces.clear()
            with self._tracing([layer]):
                self.run(layer, self.calls[layer].hidden)
        return self._traces[layer]

    @contextmanager
    def _tracing(self, layers: Iterable[int]) -> Iterator[None]:
        """Record the activations of the blocks of these layers while the context is open."""
        with ExitStack() as stack:
            for layer, kind in product(layers, KINDS):
                for hook in self._watch(layer, kind):
                    stack.callback(hook.remove)
            yield

    def _watch(self, layer: int, kind: Kind) -> tuple[RemovableHandle, RemovableHandle]:
        """Hook a block and its output projection, which runs inside it and so reports first."""
        columns = write = torch.empty(0)

        def see_projection(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            nonlocal columns, write
            columns, write = args[0], out

        def see_block(_: nn.Module, __: tuple[Any, ...], answer: Any) -> None:
            trace = _block_trace(self.architecture, layer, kind, columns, write, answer)
            self._traces.setdefault(layer, {})[kind] = trace

        projection = self.architecture.output_projection(layer, kind)
        block = self.architecture.block(layer, kind)
        # a layer has not answered yet while it runs; see `_block_trace` for a block that is one
        last = projection if block is self.architecture.layers[layer] else block
        return (
            projection.register_forward_hook(see_projection),
            last.register_forward_hook(see_block),
        )

    @contextmanager
    def _scored_only(self, layer: int) -> Iterator[None]:
        """Let the FFN of the last layer skip the positions that are not scored."""
        # it acts position by position, and only scored positions are read afterwards
        block = self.architecture.block(layer, "ffn")
        length = self.calls[layer].hidden.shape[1]
        # not worth it for most positions; not possible for an FFN without a module of its own
        if len(self.positions) > length // 2 or block is self.architecture.layers[layer]:
            yield
            return
        forward = block.forward

        def scored(hidden: Tensor) -> Tensor:
            write, positions = torch.zeros_like(hidden), self._positions_on(hidden.device)
            write[:, positions] = forward(hidden[:, positions])
            return write

        with replaced_forward(block, scored):
            yield


# The head on the support ------------------------------------------------------------------------


class SupportHead:
    """The language-model head on the teacher's top-r support, in float32 (float64 models: float64).

    Its rows are gathered once if they fit in 256 MB. Otherwise the whole head runs if it is not
    much larger than the support. If it is, the rows are gathered piece by piece in each call.

    Args:
        architecture: the model, whose logits are the head's own z, scaled and capped if it says so.
        support: [P, r] int64 token ids, the same for every unit (Alg. 1: one coordinate system).
        temperature: by which all logits are divided; 1 is the paper's.
    """

    def __init__(
        self, architecture: Architecture, support: Tensor, temperature: float = 1.0
    ) -> None:
        self.weight: Tensor = architecture.head.weight
        self.bias, self.temperature = architecture.head.bias, temperature
        self.cap, self.scale = architecture.logit_cap, architecture.logit_scale
        self.support = support = support.to(self.weight.device)
        vocabulary, size = self.weight.shape
        self.identity = support.shape[1] == vocabulary  # then the support is every token, in order
        self.columns: Tensor | None = None  # [P, d, r]
        if not self.identity and support.numel() * size * 4 <= GATHER_BYTES:
            self.columns = self._columns().transpose(1, 2)
        self.whole = self.columns is None and vocabulary <= _WHOLE_HEAD_FACTOR * support.shape[1]
        if self.whole:
            self.weight = widen(self.weight)

    def _columns(self) -> Tensor:
        """The rows of the support [P, r, d], float32 or better, with no second copy in half."""
        dtype, place = widen(self.weight[:0]).dtype, self.weight.device
        rows = torch.empty(*self.support.shape, self.weight.shape[1], dtype=dtype, device=place)
        for at in range(0, len(rows), 8):
            rows[at : at + 8] = F.embedding(self.support[at : at + 8], self.weight)
        return rows

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the logits [B, P, r], float32 or better, of hidden states [B, P, d]."""
        logits = self.linear(hidden)
        logits = logits if self.scale == 1 else logits.mul_(self.scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1 else logits / self.temperature

    def slope(self, logits: Tensor) -> Tensor | None:
        """Compute d(logit) / d(head's z) at given logits, in their shape; None if it is 1."""
        if self.cap is None:
            return None if self.scale == 1 else torch.full_like(logits, self.scale)
        return self.scale * (1 - (logits / self.cap).square())

    def linear(self, hidden: Tensor) -> Tensor:
        """Compute the head's own z [B, P, r], before a scale and a cap."""
        device = hidden.device
        return self._linear(widen(hidden).to(self.weight.device)).to(device)

    def _linear(self, hidden: Tensor) -> Tensor:
        """The same, on the device of the head."""
        if self.columns is not None:
            logits = torch.bmm(hidden.transpose(0, 1), self.columns).transpose(0, 1)
            return logits if self.bias is None else logits + widen(self.bias[self.support])
        if self.whole:
            bias = None if self.bias is None else widen(self.bias)
            logits = F.linear(hidden, self.weight, bias)
            if self.identity:
                return logits
            return logits.gather(-1, self.support.expand(len(hidden), -1, -1))
        return self._gathered(hidden)

    def _gathered(self, hidden: Tensor) -> Tensor:
        """The head's z [B, P, r], gathering rows for a few positions at a time."""
        positions, top = self.support.shape
        step = max(1, GATHER_BYTES // (top * hidden.shape[-1] * 4))
        logits = hidden.new_empty(len(hidden), positions, top)
        for start in range(0, positions, step):
            support = self.support[start : start + step]
            rows = widen(self.weight[support])  # [p, r, d]
            chunk = torch.bmm(rows, hidden[:, start : start + step].permute(1, 2, 0))  # [p, r, B]
            if self.bias is not None:
                chunk = chunk + widen(self.bias[support]).unsqueeze(-1)
            logits[:, start : start + step] = chunk.permute(2, 0, 1)
        return logits


def top_support(head: nn.Linear, hidden: Tensor, top_r: int) -> Tensor:
    """Find the token ids [P, r] of the teacher's r largest logits; all tokens in order if r = V.

    The logits are in the model's own dtype. In half precision near-ties at place r may fall either
    way, which decides between two equally unlikely tokens. `hidden` is the teacher's [1, P, d].
    """
    vocabulary = head.weight.shape[0]
    if top_r == vocabulary:
        return torch.arange(vocabulary, device=hidden.device).expand(hidden.shape[1], -1)
    # a scale and a cap keep the order of logits, so the head's own z is sorted
    step = max(1, GATHER_BYTES // (vocabulary * 4))
    parts = [widen(head(part)).topk(top_r, dim=-1).indices for part in hidden[0].split(step)]
    return torch.cat(parts).to(hidden.device)


# Hooks and traces -------------------------------------------------------------------------------


def trace_bytes(architecture: Architecture, length: int) -> int:
    """Compute the bytes of the activations inside all layers for `length` tokens."""
    layers, size = range(len(architecture.layers)), architecture.model.config.hidden_size
    values = sum(architecture.width(at, kind) + size for at in layers for kind in KINDS)
    return length * values * embedding_weight(architecture.model).element_size()


def _block_trace(
    architecture: Architecture, layer: int, kind: Kind, columns: Tensor, write: Tensor, answer: Any
) -> BlockTrace:
    """Trace a block: at the block itself if it returns the write, else at its projection."""
    block = architecture.block(layer, kind)
    if first_output(answer) is write and block is not architecture.layers[layer]:
        rest = tuple(answer[1:]) if isinstance(answer, tuple) else None
        return BlockTrace(columns, write, block, rest)
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


def _writes_without(
    projection: Any,
    columns: Tensor,
    write: Tensor,
    units: list[Unit],
    taken: Tensor | None = None,
) -> Tensor:
    """Return the writes of a block without each of B units [B, T, d]."""
    if is_packed(projection):  # packed weights cannot be sliced: run them on masked columns
        masked = columns.repeat(len(units), 1, 1)
        for row, unit in zip(masked, units, strict=True):
            row[:, unit.start : unit.stop] = 0
        return projection(masked)
    weight = weight_of(projection)
    gone = columns[0] if taken is None else F.linear(columns[0], taken)
    own = [
        F.linear(gone[:, unit.start : unit.stop], weight[:, unit.start : unit.stop])
        for unit in units
    ]
    without = write - torch.stack(own)
    whole = [row for row, unit in enumerate(units) if unit.stop - unit.start == columns.shape[-1]]
    if whole:
        # only the bias is left, exactly: the difference would leave a residue of rounding, which a
        # norm after the write (Gemma, OLMo2) blows up
        without[whole] = 0 if projection.bias is None else projection.bias
    return without


def widen(values: Tensor) -> Tensor:
    """Return half precision as float32, and float32 and float64 as they are."""
    return values if values.dtype == torch.float64 else values.float()
