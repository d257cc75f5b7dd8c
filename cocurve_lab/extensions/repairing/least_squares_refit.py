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
from .projection_inputs import TOKENS_PER_BATCH, Block

Target = Literal["gap", "stream", "dense"]


# Two models, layer by layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """One output projection to refit.

    Attributes:
        block: its layer and kind.
        kept: the columns [R] int64 that stay.
        gap: the removed blocks between this block and the next that stays.
    """

    block: Block
    kept: Tensor
    gap: tuple[Block, ...] = ()


@dataclass(eq=False)
class Pair:
    """The dense and the pruned model on the same rows, at the layer whose turn it is.

    Attributes:
        calls: how the decoder calls each layer; masks and position embeddings have batch size 1.
        target: what a refit matches (see repair.py); "dense" takes all from the dense model.
        norms: the weights of the norms between blocks and the stream, see `norms_behind`.
        hidden: by model, the hidden states [B, T, d] of each batch of rows, on the CPU; only of the
            models that the target needs.
        reached: the layer that `hidden["dense"]` enters. The dense model runs ahead over a gap.
        streams: of each batch, the dense stream after each block of layer `reached`, once asked.
    """

    dense: Architecture
    pruned: Architecture
    calls: Sequence[LayerCall]
    target: Target
    norms: dict[Block, Tensor]
    hidden: dict[str, list[Tensor]]
    reached: int = 0
    streams: list[dict[Kind, Tensor]] = field(default_factory=list)

    @classmethod
    def enter(
        cls, dense: Architecture, pruned: Architecture, input_ids: Tensor, target: Target
    ) -> Pair:
        """Stop rows [N, T] before the first layer."""
        device = model_device(dense.model)
        _, calls = capture_calls(dense, input_ids[:1].to(device))
        norms = norms_behind(dense, calls) if target != "dense" else {}
        if norms is None:
            target, norms = "dense", {}
        step = max(1, TOKENS_PER_BATCH // input_ids.shape[1])
        with present(dense, 0):  # it is called for each batch, though it does not run
            entered = [
                _entering(dense, ids.to(device)).hidden.cpu() for ids in input_ids.split(step)
            ]
        needed = ["dense"] if target == "dense" else ["dense", "pruned"]
        return cls(dense, pruned, calls, target, norms, dict.fromkeys(needed, entered))

    def sums(self, fit: Fit) -> Sums:
        """Sum up a block's kept columns and what its output lacks, over all rows."""
        layer, kind = fit.block
        projection = self.pruned.output_projection(layer, kind)
        sums = Sums(centred=projection.bias is not None, own_ridge=self.target == "gap")
        if self.target == "dense":
            whole, start = self.dense.output_weight(layer, kind), weight_of(projection)
            for hidden in self.hidden["dense"]:
                with _watching(self.dense, layer, kind) as seen:
                    self._run(self.dense, layer, hidden)
                columns = _flat(seen[0][0])
                x = columns[:, fit.kept.to(columns.device)]
                write = F.linear(widen(columns), widen(whole))  # without the bias, which stays
                sums.add(x, write - F.linear(widen(x), widen(start)))
            return sums
        wanted = self._dense_streams((fit.block, *fit.gap)[-1])
        left = sum(self._bias(block) for block in fit.gap)
        norm = self.norms.get(fit.block)
        for hidden, stream in zip(self.hidden["pruned"], wanted, strict=True):
            x, write, found = self._stop(layer, kind, hidden)
            stream = widen(_flat(stream).to(found.device))
            lacking = stream - widen(found) - left
            weight = torch.ones(len(x), device=x.device)
            if self.target == "gap":  # the next norm divides by the size of the stream
                weight = 1 / stream.square().mean(-1)
            if norm is not None:
                # The norm multiplies the write by 1 / its size and by its weight. The size is taken
                # as it is now, so the fit is linear; the size comes back as a weight of the token.
                size = widen(write).square().mean(-1).rsqrt()
                lacking = lacking * _inverse(norm) / size[:, None]
                weight = weight * size.square()
            sums.add(x, lacking, weight)
        return sums

    def _bias(self, block: Block) -> Tensor | float:
        """What is left of a removed block: the bias [d] of its output projection, or 0."""
        if self.dense.output_projection(*block).bias is None:
            return 0.0
        with present(self.dense, block[0]):
            return widen(self.dense.output_projection(*block).bias.detach().clone())

    def advance(self, layer: int) -> None:
        """Run the layer on all rows, in each model that the target needs."""
        if "dense" in self.hidden:
            self._reach(layer + 1)
        if "pruned" in self.hidden:
            states = self.hidden["pruned"]
            self.hidden["pruned"] = [self._run(self.pruned, layer, rows).cpu() for rows in states]

    def _reach(self, layer: int) -> None:
        """Run the dense model up to what enters a layer, unless it is there or beyond."""
        while self.reached < layer:
            if self.streams:
                self.hidden["dense"] = [stream["ffn"] for stream in self.streams]
            else:
                with present(self.dense, self.reached):
                    self.hidden["dense"] = [
                        self._run(self.dense, self.reached, rows).cpu()
                        for rows in self.hidden["dense"]
                    ]
            self.reached, self.streams = self.reached + 1, []

    def _dense_streams(self, block: Block) -> list[Tensor]:
        """The dense stream [B, T, d] of each batch right after a block."""
        layer, kind = block
        self._reach(layer)
        if not self.streams:
            with present(self.dense, layer):
                self.streams = [self._after_blocks(layer, rows) for rows in self.hidden["dense"]]
        return [stream[kind] for stream in self.streams]

    def _after_blocks(self, layer: int, hidden: Tensor) -> dict[Kind, Tensor]:
        """The dense stream [B, T, d] after each block, from one run of the layer."""
        with _watching(self.dense, layer, "ffn") as seen:
            stream = self._run(self.dense, layer, hidden)
        write = widen(seen[0][1].reshape(stream.shape))
        norm = self.norms.get((layer, "ffn"))
        if norm is not None:
            write = write * write.square().mean(-1, keepdim=True).rsqrt() * norm
        return {"attention": (widen(stream) - write).cpu(), "ffn": stream.cpu()}

    def _stop(self, layer: int, kind: Kind, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pruned block's columns [n, W] and write [n, d], and the stream [n, d] after it."""
        model = self.pruned
        with ExitStack() as stack:
            if kind == "attention":
                stack.enter_context(_silent(model, layer, "ffn"))
            seen = stack.enter_context(_watching(model, layer, kind))
            stream = self._run(model, layer, hidden)
        columns, write = seen[0]
        return _flat(columns), _flat(write), _flat(stream)

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
def _silent(model: Architecture, layer: int, kind: Kind) -> Iterator[None]:
    """Let a block write zeros while the context is open."""
    hook = model.output_projection(layer, kind).register_forward_hook(
        here(lambda _, __, out: torch.zeros_like(out))
    )
    try:
        yield
    finally:
        hook.remove()


def norms_behind(
    architecture: Architecture, calls: Sequence[LayerCall]
) -> dict[Block, Tensor] | None:
    """How the blocks' writes enter the residual stream, tried on the calls of one row.

    Returns:
        The weight [d] of the RMS norm behind a block, as in Gemma 2 and 3 and OLMo2; a block whose
        write is added as it is has none. None: some block's write is changed in another way, as by
        the layer norms of OPT-350m, which lie on the stream itself.
    """
    norms: dict[Block, Tensor] = {}
    for layer, call in enumerate(map(upcast, calls)):
        with float32_layer(architecture, layer) as module:
            for kind in KINDS:
                with ExitStack() as stack:
                    if kind == "attention":  # the FFN would answer to its absence
                        stack.enter_context(_silent(architecture, layer, "ffn"))
                    with _watching(architecture, layer, kind) as seen:
                        whole = call.run(module, call.hidden)
                    with _silent(architecture, layer, kind):
                        without = call.run(module, call.hidden)
                write, change = _flat(seen[0][1]), _flat(whole - without)
                if _same(change, write):
                    continue
                unit = write * write.square().mean(-1, keepdim=True).rsqrt()
                norm = (change * unit).sum(dim=0) / unit.square().sum(dim=0)
                if not _same(change, norm * unit):
                    return None
                norms[layer, kind] = norm
    return norms


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether two writes differ by at most a hundredth."""
    return float((found - expected).norm()) <= 0.01 * float(expected.norm())


def _inverse(norm: Tensor) -> Tensor:
    """1 / a norm's weight, and 0 where nothing passes."""
    return torch.where(norm.abs() > 1e-6 * norm.abs().max(), 1 / norm, 0.0)


# Least squares ------------------------------------------------------------------------------------


class Sums:
    """Sums over tokens of x [R], the kept columns, and e [d], what the block's output lacks.

    `centred` takes the means off, for a projection with a bias. With `own_ridge` a ridge is in
    units of each column's own second moment, so that a column that is rare in these rows moves
    little. Otherwise it is in units of their mean.
    """

    def __init__(self, *, centred: bool, own_ridge: bool) -> None:
        self.centred, self.own_ridge, self.tokens = centred, own_ridge, 0.0
        self.gram = self.cross = self.x = self.e = torch.zeros(())

    def add(self, x: Tensor, e: Tensor, weight: Tensor | None = None) -> None:
        """Add tokens: x [n, R] and e [n, d], each with a weight [n] or 1."""
        weight = torch.ones(len(x), device=x.device) if weight is None else weight
        weighted = x * weight[:, None].to(x)
        self.tokens += float(weight.sum())
        self.gram = self.gram.to(x.device) + wide_product(weighted, x)
        self.cross = self.cross.to(x.device) + wide_product(e, weighted)
        self.x = self.x.to(x.device) + weighted.sum(dim=0, dtype=torch.float64)
        self.e = self.e.to(x.device) + (e * weight[:, None]).sum(dim=0, dtype=torch.float64)

    def refit(self, projection: Any, ridge: float) -> None:
        """Change a projection's weight [d, R] and bias [d] to the least squares fit, in place."""
        gram, cross = self.gram, self.cross
        x, e = self.x / self.tokens, self.e / self.tokens
        if self.centred:
            gram = gram - self.tokens * torch.outer(x, x)
            cross = cross - self.tokens * torch.outer(e, x)
        gamma: float | Tensor = ridge_of(gram, ridge)
        if self.own_ridge:
            own = gram.diagonal().clamp(min=0)
            gamma = torch.where(own > 0, ridge * own, 1.0)
        update = ridge_update(gram, cross, gamma)
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
