"""Least squares on what stays: the dense and the pruned model on the same rows, layer by layer.

The formula and the targets are in repair.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
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
Batch = tuple[Tensor, Tensor, Tensor]  # x [n, R], e [n, d] and p [n] of repair.py
Seen = dict[Kind, tuple[Tensor, Tensor]]  # columns [n, W] and write [n, d] of each block


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


class Pair:
    """The dense and the pruned model on the same rows [N, T], at the layer whose turn it is.

    Attributes:
        calls: how the decoder calls each layer; masks and position embeddings have batch size 1.
        target: what a refit matches (see repair.py); "dense" takes all from the dense model.
        norms: the weights of the norms between blocks and the stream, see `norms_behind`.
        hidden: what enters the layer [B, T, d], of each batch of rows, on the CPU: in the dense
            model for "dense", else in the pruned one.
        ahead: the dense stream behind each block in turn; it runs ahead over a gap.
    """

    def __init__(
        self, dense: Architecture, pruned: Architecture, input_ids: Tensor, target: Target
    ) -> None:
        self.dense = dense
        self.pruned = pruned
        device = model_device(dense.model)
        _, self.calls = capture_calls(dense, input_ids[:1].to(device))
        norms = norms_behind(dense, self.calls) if target != "dense" else None
        self.target: Target = "dense" if norms is None else target
        self.norms = norms or {}
        step = max(1, TOKENS_PER_BATCH // input_ids.shape[1])
        with present(dense, 0):  # it is called for each batch, though it does not run
            self.hidden = [_entering(dense, ids.to(device)).cpu() for ids in input_ids.split(step)]
        self.ahead = self._dense_streams(self.hidden)

    def refit(self, fit: Fit, ridge: float) -> None:
        """Change the weight and bias of a projection of the pruned model, in place."""
        batches = self._cut_off(fit) if self.target == "dense" else self._lacking(fit)
        projection = self.pruned.output_projection(*fit.block)
        fit_projection(projection, batches, ridge, own_ridge=self.target == "gap")

    def advance(self, layer: int) -> None:
        """Run the layer on all rows."""
        model = self.dense if self.target == "dense" else self.pruned
        run = partial(run_layer, model, layer, self.calls[layer])
        self.hidden = [run(rows)[0].cpu() for rows in self.hidden]

    def _cut_off(self, fit: Fit) -> Iterator[Batch]:
        """The dense model's kept columns, and what the others wrote."""
        layer, kind = fit.block
        whole = self.dense.output_weight(layer, kind)
        start = self.pruned.output_weight(layer, kind)
        for hidden in self.hidden:
            _, seen = run_layer(self.dense, layer, self.calls[layer], hidden)
            columns, _ = seen[kind]
            x = columns[:, fit.kept.to(columns.device)]
            write = F.linear(widen(columns), widen(whole))  # without the bias, which stays
            yield x, write - F.linear(widen(x), widen(start)), torch.ones(len(x), device=x.device)

    def _lacking(self, fit: Fit) -> Iterator[Batch]:
        """The pruned model's columns, and what its stream lacks behind the block and its gap."""
        layer, kind = fit.block
        end = (fit.block, *fit.gap)[-1]
        wanted = next(streams for block, streams in self.ahead if block == end)
        left = sum(self._bias(block) for block in fit.gap)
        norm = self.norms.get(fit.block)
        silent = KINDS[KINDS.index(kind) + 1 :]  # the stream right after the block
        for hidden, dense in zip(self.hidden, wanted, strict=True):
            found, seen = run_layer(self.pruned, layer, self.calls[layer], hidden, silent)
            x, write = seen[kind]
            stream = widen(dense.flatten(0, 1).to(found.device))
            lacking = stream - widen(found.flatten(0, 1)) - left
            sizes = stream if self.target == "gap" else torch.ones_like(stream)
            weight = 1 / sizes.square().mean(-1)  # the next norm divides by the size of the stream
            if norm is not None:
                # The norm multiplies the write by 1 / its size and by its weight. The size is taken
                # as it is now, so the fit is linear; the size comes back as a weight of the token.
                size = widen(write).square().mean(-1).rsqrt()
                passes = norm.abs() > 1e-6 * norm.abs().max()
                lacking = lacking * torch.where(passes, 1 / norm, 0.0) / size[:, None]
                weight = weight * size.square()
            yield x, lacking, weight

    def _bias(self, block: Block) -> Tensor | float:
        """What is left of a removed block: the bias [d] of its output projection, or 0."""
        projection = self.dense.output_projection(*block)
        if projection.bias is None:
            return 0.0
        with present(self.dense, block[0]):
            return widen(projection.bias.detach().clone())

    def _dense_streams(self, hidden: list[Tensor]) -> Iterator[tuple[Block, list[Tensor]]]:
        """The dense stream [B, T, d] of each batch right after each block, layer by layer."""
        for layer in range(len(self.dense.layers)):
            with present(self.dense, layer):
                after = [self._after_blocks(layer, rows) for rows in hidden]
            for kind in KINDS:
                hidden = [streams.pop(kind) for streams in after]
                yield (layer, kind), hidden

    def _after_blocks(self, layer: int, hidden: Tensor) -> dict[Kind, Tensor]:
        """The dense stream [B, T, d] after each block, from one run of the layer."""
        stream, seen = run_layer(self.dense, layer, self.calls[layer], hidden)
        write = widen(seen["ffn"][1].reshape(stream.shape))
        norm = self.norms.get((layer, "ffn"))
        if norm is not None:
            write = F.rms_norm(write, norm.shape, eps=0.0) * norm
        return {"attention": (widen(stream) - write).cpu(), "ffn": stream.cpu()}


def run_layer(
    model: Architecture,
    layer: int,
    call: LayerCall,
    hidden: Tensor,
    silent: Collection[Kind] = (),
) -> tuple[Tensor, Seen]:
    """Run a layer on [B, T, d]: what leaves it, and the columns and write of each block.

    Blocks of the kinds `silent` write zeros.
    """
    seen: Seen = {}

    def look(kind: Kind, _: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        seen[kind] = args[0].flatten(0, -2), out.flatten(0, -2)  # OPT's FFN sees [n, W] already
        return torch.zeros_like(out) if kind in silent else None

    with ExitStack() as stack:
        for kind in KINDS:
            projection = model.output_projection(layer, kind)
            stack.callback(projection.register_forward_hook(here(partial(look, kind))).remove)
        return call.run(model.layers[layer], hidden.to(call.hidden.device)), seen


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
        with float32_layer(architecture, layer):
            whole, seen = run_layer(architecture, layer, call, call.hidden)
            # the FFN would answer to the absence of attention
            alone, _ = run_layer(architecture, layer, call, call.hidden, ("ffn",))
            none, _ = run_layer(architecture, layer, call, call.hidden, KINDS)
        changes = {"attention": alone - none, "ffn": whole - alone}
        for kind, (_, write) in seen.items():
            change = changes[kind].flatten(0, 1)
            if not _same(change, write):
                unit = F.rms_norm(write, write.shape[-1:], eps=0.0)
                norm = (change * unit).sum(dim=0) / unit.square().sum(dim=0)
                if not _same(change, norm * unit):
                    return None
                norms[layer, kind] = norm
    return norms


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether two writes differ by at most a hundredth."""
    return float((found - expected).norm()) <= 0.01 * float(expected.norm())


class _Stop(Exception):
    """Ends a pass before its first layer runs."""


def _entering(architecture: Architecture, input_ids: Tensor) -> Tensor:
    """Return what enters the first layer [B, T, d]; no layer runs. Args: as `run_decoder`."""
    seen: list[Tensor] = []

    def stop(_: int, call: LayerCall) -> AbstractContextManager[None]:
        seen.append(call.hidden)
        raise _Stop

    with suppress(_Stop):
        run_decoder(architecture, input_ids, stop)
    return seen[0]


# Least squares ------------------------------------------------------------------------------------


def fit_projection(
    projection: Any, batches: Iterable[Batch], ridge: float, *, own_ridge: bool
) -> None:
    """Change a projection's weight [d, R] and bias [d] to the least squares fit, in place.

    `ridge` is in units of the mean second moment of the columns, or with `own_ridge` of each
    column's own.
    """
    gram: Any = 0.0  # [R + 1, R + 1]; a last column of ones sums up x, and the weights of tokens
    cross: Any = 0.0  # [d, R + 1]
    for x, e, weight in batches:
        x = F.pad(x, (0, 1), value=1.0)
        weighted = x * weight[:, None].to(x)
        gram = gram + wide_product(weighted, x)
        cross = cross + wide_product(e, weighted)
    means = gram[:, -1] / gram[-1, -1]  # of x, and 1
    missed = cross[:, -1] / gram[-1, -1]  # the mean of e
    if projection.bias is not None:
        gram = gram - torch.outer(means, gram[-1])
        cross = cross - torch.outer(cross[:, -1], means)
    gram = gram[:-1, :-1]
    update = ridge_update(gram, cross[:, :-1], ridge_of(gram, ridge, own=own_ridge))
    weight = weight_of(projection)
    weight.copy_(weight.double() + update)
    if projection.bias is not None:
        projection.bias.copy_(projection.bias.double() + missed - update @ means[:-1])
