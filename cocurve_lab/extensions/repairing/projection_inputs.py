"""One pass over the rows with hooks, and with it the inputs of the output projections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...base.progress import open_bar
from ...calibration import CalibrationSet
from ...models.architectures import Architecture, describe, here
from ...models.identity import model_device
from ...models.runtime import measuring, require_measurable
from ...models.unit import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_BATCH = 2048  # rows per forward = this // row length, at least one

Block = tuple[int, Kind]  # (layer, kind)


def run_rows(
    model: PreTrainedModel,
    calibration: CalibrationSet,
    hooks: Mapping[nn.Module, Callable[..., None]],
    *,
    progress: bool,
    title: str,
) -> None:
    """Run the decoder on all rows once, with a forward hook on each of some modules."""
    require_measurable(model, calibration)
    decoder = describe(model).decoder
    step = max(1, TOKENS_PER_BATCH // calibration.seq_len)
    bar = open_bar(progress, total=len(calibration), desc=title, unit="row")
    with measuring(model, torch.get_num_threads()), ExitStack() as stack, bar:
        for module, hook in hooks.items():
            stack.callback(module.register_forward_hook(here(hook)).remove)
        for ids in calibration.input_ids.split(step):
            decoder(input_ids=ids.to(model_device(model)), use_cache=False)
            bar.update(len(ids))


def text_record(calibration: CalibrationSet) -> dict[str, Any]:
    """Describe the text of a refit or a training for the manifest."""
    return {
        "calibration": calibration.source,
        "calibration_fingerprint": calibration.fingerprint,
        "sequences": len(calibration),
        "positions": calibration.input_ids.numel(),
    }


def watch_inputs(
    model: PreTrainedModel,
    calibration: CalibrationSet,
    observe: Callable[[Block, Tensor], None],
    *,
    only: Collection[Block] | None = None,
    progress: bool = True,
    title: str = "Inputs",
) -> None:
    """Run all rows once and pass each output projection's input to an observer.

    Args:
        observe: called as observe((layer, kind), X) with X [rows, T, W] in the model's dtype, in
            the order of the forward; it may keep sums of X but not X, which is not a copy.
        only: blocks to watch; None watches all that have columns.
    """
    architecture = describe(model)

    def show(block: Block, _: Any, args: tuple[Tensor, ...], __: Any) -> None:
        # OPT's FFN sees [rows * T, W]
        observe(block, args[0].reshape(-1, calibration.seq_len, args[0].shape[-1]))

    hooks = {
        architecture.output_projection(*block): partial(show, block)
        for block in present_blocks(architecture)
        if only is None or block in only
    }
    run_rows(model, calibration, hooks, progress=progress, title=title)


def present_blocks(architecture: Architecture) -> list[Block]:
    """List every (layer, kind) that still has columns, in order."""
    return [
        (layer, kind)
        for layer in range(len(architecture.layers))
        for kind in architecture.column_kinds(layer)
        if architecture.width(layer, kind) > 0
    ]
