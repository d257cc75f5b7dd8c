"""Pruning: delete the weights of a plan's units.

All other weights keep their bits, except that gains are folded into the columns of W_down.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, overload

from ..base.arguments import require_type
from ..base.errors import InputError
from ..calibration import CalibrationSet
from ..models.architectures import Architecture, describe
from ..models.identity import model_device, require_source
from ..models.layers import weights_of
from ..models.runtime import require_one_device
from ..models.units import list_units
from ..models.weights import is_readable
from ..solver.selection import Selection
from .equivalence import Reference
from .folder import FOLDERS
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
        inplace: change `model` itself. Otherwise a new model is built, and what is cut is never
            copied.
        verify: text; the result must compute on its first two rows what the masked model computes.
        out: a new folder. The pruned model is written there as `save_pruned` would, weight by
            weight. `model` may be streamed, or all on disk.
        tokenizer: with `out`: the dense model's, to save in the folder too.

    Returns:
        The pruned model, whose `cocurve_manifest` records widths, plan and fingerprints of the
        weights. With `out`, the folder.

    Raises:
        ArchitectureError: the weights are packed in 4 bits, which can be measured but not cut.
        InputError: the weights are spread over devices, or the folder cannot be written.
        MismatchError: the model's units or weights are not the plan's. Nothing was changed.
        EquivalenceError: the check of `verify` failed; no folder is left.
    """
    architecture = require_prunable(model, selection, on_disk=out is not None)
    if out is not None and inplace:
        raise InputError(
            "out= is given with inplace=True, which changes the model in memory. Leave one out."
        )
    # recorded before the cut, because inplace leaves no dense model to compare with
    reference = None
    if verify is not None:
        reference = Reference.record(architecture, selection, verify.rows(0, min(2, len(verify))))
    if out is not None:
        device, stream = model_device(model), bool(weights_of(model).devices)

        def check(folder: Path) -> None:
            if reference is not None:
                saved = load_pruned(folder, device=device, stream=stream)
                reference.require_equal(describe(saved))

        return FOLDERS()(model, selection, out, tokenizer=tokenizer, check=check)
    origin = Origin.of(model, selection)
    pruned = cut_model(architecture, selection, inplace=inplace)
    pruned.model.cocurve_manifest = manifest_of(pruned, selection, origin)
    if reference is not None:
        reference.require_equal(pruned)
    smaller: PreTrainedModel = pruned.model
    return smaller


def require_prunable(
    model: PreTrainedModel, selection: Selection, *, on_disk: bool = False
) -> Architecture:
    """Describe a model, or raise as `prune`; with `on_disk`, weights need not be in memory."""
    require_type(selection, Selection, "the plan")
    architecture = describe(model)
    if not (on_disk and is_readable(model)):
        require_one_device(model)
    architecture.require_unpacked()
    selection.require_units(list_units(architecture, selection.units.ffn_groups or 16))
    return architecture


def cut(model: PreTrainedModel, selection: Selection, *, inplace: bool = False) -> PreTrainedModel:
    """Prune without a manifest and its fingerprints, for a model that is not saved."""
    architecture = require_prunable(model, selection)
    require_source(model, selection)
    smaller: PreTrainedModel = cut_model(architecture, selection, inplace=inplace).model
    return smaller
