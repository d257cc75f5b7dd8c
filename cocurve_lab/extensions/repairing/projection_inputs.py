"""One pass over the rows with hooks, and with it the inputs of the output projections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...base.progress import Bar
from ...calibration import CalibrationSet
from ...models.architectures import Architecture, describe, here
from ...models.identity import model_device
from ...models.runtime import measuring, require_measurable
from ...models.unit import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_BATCH = 2048  # rows per forward = this // row length, at least one

Block = tuple[int, Kind]  # (layer, kind)
Observer = Callable[[Block, Tensor], None]


def run_rows(
    model: PreTrainedModel,
    calibration: CalibrationSet,
    hooks: Callable[[], Iterable[RemovableHandle]],
    *,
    progress: bool,
    title: str,
) -> None:
    """Run the decoder on all rows once with hooks, which are removed afterwards.

    `hooks` registers them, once it is known that the model can run.
    """
    require_measurable(model, calibration)
    architecture, device = describe(model), model_device(model)
    step = max(1, TOKENS_PER_BATCH // calibration.seq_len)
    with measuring(model, torch.get_num_threads()), ExitStack() as stack:
        for handle in hooks():
            stack.callback(handle.remove)
        bar = stack.enter_context(
            Bar(total=len(calibration), desc=title, unit="row", disable=not progress)
        )
        for ids in calibration.input_ids.split(step):
            architecture.decoder(input_ids=ids.to(device), use_cache=False)
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
    observe: Observer,
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

    def hooks() -> Iterator[RemovableHandle]:
        for block in present_blocks(architecture):
            if only is None or block in only:

                def show(_: Any, args: tuple[Tensor, ...], block: Block = block) -> None:
                    columns = args[0]  # OPT's FFN sees [rows * T, W]
                    if columns.dim() == 2:
                        columns = columns.unflatten(0, (-1, calibration.seq_len))
                    observe(block, columns)

                yield architecture.output_projection(*block).register_forward_pre_hook(here(show))

    run_rows(model, calibration, hooks, progress=progress, title=title)


def present_blocks(architecture: Architecture) -> list[Block]:
    """List every (layer, kind) that still has columns, in order."""
    return [
        (layer, kind)
        for layer in range(len(architecture.layers))
        for kind in architecture.column_kinds(layer)
        if architecture.width(layer, kind) > 0
    ]
