"""Least squares on what stays: the dense and the pruned model on the same rows, layer by layer.

The formula and the targets are in repair.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...estimator.support import widen
from ...models.architectures import Architecture, weight_of
from ...models.identity import model_device
from ...models.kinds import KINDS
from ...models.layer_calls import LayerCall, capture_calls, here, run_decoder
from ...models.layers import present
from ...models.unit import Kind
from ...pruner.equivalence import float32_layer, upcast
from .least_squares import ridge_of, ridge_update, wide_product
from .projection_inputs import TOKENS_PER_BATCH

Target = Literal["stream", "write", "dense"]


# Two models, layer by layer -----------------------------------------------------------------------


@dataclass(eq=False)
class Pair:
    """The dense and the pruned model on the same rows, at the layer whose turn it is.

    Attributes:
        calls: how the decoder calls each layer; masks and position embeddings have batch size 1.
        target: what a refit matches (see repair.py); "dense" takes all from the dense model.
        hidden: by model, the hidden states [B, T, d] of each batch of rows, on the CPU; only of the
            models that the target needs.
        passed: "stream": what one run of the dense layer left of each batch, until `advance`.
    """

    dense: Architecture
    pruned: Architecture
    calls: Sequence[LayerCall]
    target: Target
    hidden: dict[str, list[Tensor]]
    passed: list[dict[Kind, Tensor]] = field(default_factory=list)

    @classmethod
    def enter(
        cls, dense: Architecture, pruned: Architecture, input_ids: Tensor, target: Target
    ) -> Pair:
        """Stop rows [N, T] before the first layer; "stream" becomes "write" behind norms."""
        device = model_device(dense.model)
        _, calls = capture_calls(dense, input_ids[:1].to(device))
        if target == "stream" and not is_additive(dense, calls):
            target = "write"
        step = max(1, TOKENS_PER_BATCH // input_ids.shape[1])
        with present(dense, 0):  # it is called for each batch, though it does not run
            entered = [
                _entering(dense, ids.to(device)).hidden.cpu() for ids in input_ids.split(step)
            ]
        needed = {"stream": ("dense", "pruned"), "write": ("pruned",), "dense": ("dense",)}[target]
        return cls(dense, pruned, calls, target, dict.fromkeys(needed, entered))

    def sums(self, layer: int, kind: Kind, kept: Tensor) -> Sums:
        """Sum up a block's kept columns `kept` [R] and what its output lacks, over all rows."""
        projection = self.pruned.output_projection(layer, kind)
        whole, start = self.dense.output_weight(layer, kind), weight_of(projection)
        sums = Sums(centred=projection.bias is not None)
        if self.target == "stream" and not self.passed:
            self.passed = [self._dense_streams(layer, hidden) for hidden in self.hidden["dense"]]
        for place, hidden in enumerate(zip(*self.hidden.values(), strict=True)):
            if self.target == "stream":
                x, found = self._stop(layer, kind, hidden[1])
                wanted = _flat(self.passed[place][kind]).to(found.device)
                sums.add(x, widen(wanted) - widen(found))
                continue
            columns = self._dense_columns(layer, kind, hidden[0])
            x = columns[:, kept.to(columns.device)]
            write = F.linear(widen(columns), widen(whole))  # without the bias, which is the same
            sums.add(x, write - F.linear(widen(x), widen(start)))
        return sums

    def advance(self, layer: int) -> None:
        """Run the layer on all rows, in each model that the target needs."""
        for name, hidden in self.hidden.items():
            if name == "dense" and self.passed:
                self.hidden[name] = [streams["ffn"] for streams in self.passed]
                continue
            model = self.dense if name == "dense" else self.pruned
            self.hidden[name] = [self._run(model, layer, rows).cpu() for rows in hidden]
        self.passed = []

    def _dense_streams(self, layer: int, hidden: Tensor) -> dict[Kind, Tensor]:
        """The dense stream [B, T, d] right after each block, from one run of the layer."""
        with _watching(self.dense, layer, "ffn") as seen:
            stream = self._run(self.dense, layer, hidden)
        before = widen(stream) - widen(seen[0][1].reshape(stream.shape))
        return {"attention": before.cpu(), "ffn": stream.cpu()}

    def _stop(self, layer: int, kind: Kind, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The pruned block's columns [n, W], and the stream [n, d] right after the block."""
        model = self.pruned
        with ExitStack() as stack:
            if kind == "attention":
                stack.enter_context(_answering(model, layer, "ffn", None))
            columns = stack.enter_context(_watching(model, layer, kind))
            stream = self._run(model, layer, hidden)
        return _flat(columns[0][0]), _flat(stream)

    def _dense_columns(self, layer: int, kind: Kind, hidden: Tensor) -> Tensor:
        """The columns [n, W] of the dense block, on what enters this block in the model."""
        with ExitStack() as stack:
            if kind == "ffn" and self.target == "write":
                # what enters this FFN depends on the attention before it, which is refitted already
                with _watching(self.pruned, layer, "attention") as seen:
                    self._run(self.pruned, layer, hidden)
                stack.enter_context(_answering(self.dense, layer, "attention", seen[0][1]))
            columns = stack.enter_context(_watching(self.dense, layer, kind))
            self._run(self.dense, layer, hidden)
        return _flat(columns[0][0])

    def _run(self, model: Architecture, layer: int, hidden: Tensor) -> Tensor:
        call = self.calls[layer]
        return call.run(model.layers[layer], hidden.to(call.hidden.device))


def _flat(values: Tensor) -> Tensor:
    """[n, W] of [B, T, W]; OPT's FFN sees [n, W] already."""
    return values.reshape(-1, values.shape[-1])


@contextmanager
def _watching(model: Architecture, layer: int, kind: Kind) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record columns and write of each run of a block while the context is open."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.output_projection(layer, kind).register_forward_hook(
        here(lambda _, args, out: seen.append((args[0], out)))
    )
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def _answering(model: Architecture, layer: int, kind: Kind, write: Tensor | None) -> Iterator[None]:
    """Let a block write this, or zeros, while the context is open."""
    hook = model.output_projection(layer, kind).register_forward_hook(
        here(lambda _, __, out: torch.zeros_like(out) if write is None else write)
    )
    try:
        yield
    finally:
        hook.remove()


def is_additive(architecture: Architecture, calls: Sequence[LayerCall]) -> bool:
    """Whether every block's write is added to the residual stream as it is, without a norm.

    Tried on the calls of one row, in float32: without the write, the layer's output must be less by
    the write.
    """
    return all(_adds(architecture, layer, upcast(call)) for layer, call in enumerate(calls))


def _adds(architecture: Architecture, layer: int, call: LayerCall) -> bool:
    """Whether a layer adds the writes of both its blocks as they are, tried on a float32 call."""
    with float32_layer(architecture, layer) as module:
        for kind in KINDS:
            with ExitStack() as stack:
                if kind == "attention":  # the FFN would answer to its absence
                    stack.enter_context(_answering(architecture, layer, "ffn", None))
                with _watching(architecture, layer, kind) as seen:
                    whole = call.run(module, call.hidden)
                with _answering(architecture, layer, kind, None):
                    without = call.run(module, call.hidden)
            write = seen[0][1].reshape(whole.shape)
            if not float((whole - without - write).norm()) <= 0.01 * float(write.norm()):
                return False
    return True


# Least squares ------------------------------------------------------------------------------------


class Sums:
    """Sums over tokens of x [R], the kept columns, and e [d], what the block's output lacks.

    `centred` takes the means off, for a projection with a bias.
    """

    def __init__(self, *, centred: bool) -> None:
        self.centred, self.tokens = centred, 0
        self.gram = self.cross = self.x = self.e = torch.zeros(())

    def add(self, x: Tensor, e: Tensor) -> None:
        """Add tokens: x [n, R] and e [n, d]."""
        self.tokens += len(x)
        self.gram = self.gram.to(x.device) + wide_product(x, x)
        self.cross = self.cross.to(x.device) + wide_product(e, x)
        self.x = self.x.to(x.device) + x.sum(dim=0, dtype=torch.float64)
        self.e = self.e.to(x.device) + e.sum(dim=0, dtype=torch.float64)

    def refit(self, projection: Any, ridge: float) -> None:
        """Change a projection's weight [d, R] and bias [d] to the least squares fit, in place."""
        gram, cross = self.gram, self.cross
        x, e = self.x / self.tokens, self.e / self.tokens
        if self.centred:
            gram = gram - self.tokens * torch.outer(x, x)
            cross = cross - self.tokens * torch.outer(e, x)
        update = ridge_update(gram, cross, ridge_of(gram, ridge))
        _add_rounded(weight_of(projection), update)
        if self.centred:
            _add_rounded(projection.bias, e - update @ x)


def _add_rounded(weight: Tensor, update: Tensor) -> None:
    weight.copy_(weight.double() + update)


class _Stop(Exception):
    """Ends a pass before its first layer runs."""


def _entering(architecture: Architecture, input_ids: Tensor) -> LayerCall:
    """Return how the first layer is called, with what enters it [B, T, d]; no layer runs.

    Args: as `run_decoder`.
    """
    seen: list[LayerCall] = []

    def stop(_: int, call: LayerCall) -> AbstractContextManager[None]:
        seen.append(call)
        raise _Stop

    with suppress(_Stop):
        run_decoder(architecture, input_ids, stop)
    return seen[0]
