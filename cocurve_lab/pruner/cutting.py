"""Pruning a model: the weights of a plan's units are deleted.

What stays is kept bit for bit, except that gains are folded into the columns of W_down.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, overload

from ..base.errors import InputError
from ..base.seams import require_extension
from ..calibration import CalibrationSet
from ..models.architectures import describe
from ..models.identity import model_device
from ..models.layers import source_of
from ..models.runtime import require_one_device
from ..models.units import units_like
from ..models.weights import is_readable
from ..solver.selection import Selection
from .equivalence import Reference
from .manifest import Origin, manifest_of
from .saving import load_pruned
from .slicing import cut_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@overload
def prune(
    model: PreTrainedModel,
    selection: Selection,
    *,
    inplace: bool = False,
    verify: CalibrationSet | None = None,
) -> PreTrainedModel: ...
@overload
def prune(
    model: PreTrainedModel,
    selection: Selection,
    *,
    verify: CalibrationSet | None = None,
    out: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path: ...
def prune(
    model: PreTrainedModel,
    selection: Selection,
    *,
    inplace: bool = False,
    verify: CalibrationSet | None = None,
    out: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel | Path:
    """Delete the weights of a plan's units (appendix "Structured Units").

    Args:
        model: the model that the units were enumerated on.
        selection: the plan; its gains are folded into the kept columns of W_down.
        inplace: change `model` itself, for a model that does not fit into memory twice. Otherwise a
            new model is built by slicing, and what is cut is never copied.
        verify: text whose first two rows the result is checked on; with `out`, what was written
            is, before it becomes the folder.
        out: a new folder. The pruned model is written there as `save_pruned` would, one weight
            after the other, and never in memory as a whole. `model` may be a streamed one, or one
            whose weights are all on disk.
        tokenizer: with `out`: the dense model's, to save in the folder too.

    Returns:
        The pruned model. Its `cocurve_manifest` describes the widths, the plan, and fingerprints of
        the dense and the pruned weights; all weights are read for these. With `out`, the folder.

    Raises:
        ArchitectureError: the weights are packed in 4 bits, which can be measured but not cut.
        InputError: the plan is not a Selection, or the weights are spread over devices or
            offloaded; with `out`, as `save_pruned`, or the disk has too little space.
        MismatchError: the model's units are not the selection's. Nothing was changed.
        EquivalenceError: the pruned model does not compute what the masked model computes. With
            `out`, nothing is left of it.
        FileFormatError: with `out`: the model's weights are on disk, and damaged.
    """
    require_prunable(model, selection, on_disk=out is not None)
    text = None if verify is None else verify.rows(0, min(2, len(verify)))
    if out is not None:
        if inplace:
            raise InputError(
                "out= is given with inplace=True, which changes the model in memory. Leave one out."
            )
        check = None if text is None else _check_of_files(model, selection, text)
        write = require_extension("prune to folder", "prune(out=)")
        folder: Path = write(model, selection, out, tokenizer=tokenizer, check=check)
        return folder
    origin = Origin.of(model)
    # recorded before the cut, because inplace leaves no dense model to compare with
    reference = None if text is None else Reference.record(model, selection, text)
    pruned = cut_model(model, selection, inplace=inplace)
    manifest = manifest_of(describe(pruned), selection, origin)
    pruned.cocurve_manifest = manifest  # type: ignore[assignment]
    if reference is not None:
        reference.require_equal(pruned)
    return pruned


def _check_of_files(
    model: PreTrainedModel, selection: Selection, text: CalibrationSet
) -> Callable[[Path], object]:
    """A check of a folder that was written; of a streamed model, its layers are streamed too."""
    reference = Reference.record(model, selection, text)
    device, stream = model_device(model), source_of(model) is not None
    return lambda folder: reference.require_equal(load_pruned(folder, device=device, stream=stream))


def require_prunable(
    model: PreTrainedModel, selection: Selection, *, on_disk: bool = False
) -> None:
    """Raise, as `prune` does, unless this plan can be cut out of this model.

    Args:
        model, selection: as for `prune`.
        on_disk: the weights are read one by one, so they need not be in memory.
    """
    if not isinstance(selection, Selection):
        raise InputError(
            f"the plan is {type(selection).__name__} {selection!r:.40}, not a Selection. Make one: "
            "Selection.from_pruned(units, [0, 1])."
        )
    architecture = describe(model)
    if not (on_disk and is_readable(model)):
        require_one_device(model)
    architecture.require_unpacked()
    selection.require_units(units_like(model, selection.units))


def cut(model: PreTrainedModel, selection: Selection, *, inplace: bool = False) -> PreTrainedModel:
    """Prune without a manifest: for a model that is measured and not saved.

    No weight is read for a fingerprint, so this is faster than `prune`.

    Args and raises: as `prune`.
    """
    require_prunable(model, selection)
    return cut_model(model, selection, inplace=inplace)
