"""Physical removal: the weights of pruned units are deleted, the rest is kept bit for bit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ..calibration import CalibrationSet
from ..errors import InputError
from ..models.architectures import describe
from ..models.identity import fingerprint_model, weight_marks
from ..models.runtime import require_one_device
from ..models.units import units_like
from ..solver.selection import Selection
from .equivalence import Reference
from .manifest import Origin, manifest_of, weights_now
from .slicing import settle_heads, sliced_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prune(
    model: PreTrainedModel,
    selection: Selection,
    *,
    inplace: bool = False,
    verify: CalibrationSet | None = None,
) -> PreTrainedModel:
    """Delete the weights of a plan's units (appendix "Structured Units").

    Args:
        model: the dense model the units were enumerated on.
        selection: the plan; gains are folded into the kept columns of W_down.
        inplace: change `model` itself (for models that do not fit twice); else a new model is built
            by slicing, which never copies what is cut away.
        verify: text to check the result on (two rows); the masked reference is recorded before
            anything is cut.

    Returns:
        The pruned model, with `cocurve_manifest` describing its widths, the plan, and fingerprints
        of the dense and of the pruned weights. Both are read in full for that.

    Raises:
        ArchitectureError: the weights are packed in 4 bits, which can be measured but not cut.
        InputError: the weights are spread over devices or offloaded.
        MismatchError: the model's units are not the selection's; nothing was changed.
        EquivalenceError: verification failed.
    """
    require_prunable(model, selection)
    origin = _origin(model)
    reference = None
    if verify is not None:
        reference = Reference.record(model, selection, verify.rows(0, min(2, len(verify))))
    pruned = _cut(model, selection, inplace)
    manifest = manifest_of(describe(pruned), selection, origin)
    pruned.cocurve_manifest = manifest  # type: ignore[assignment]
    if reference is not None:
        reference.require_equal(pruned)
    return pruned


def require_prunable(model: PreTrainedModel, selection: Selection) -> None:
    """Raise, as `prune` does, where this plan cannot be cut out of this model."""
    if not isinstance(selection, Selection):
        raise InputError(
            f"the plan is {type(selection).__name__} {selection!r:.40}, not a Selection. Make one: "
            "Selection.from_pruned(units, [0, 1])."
        )
    architecture = describe(model)
    require_one_device(model)
    architecture.require_unpacked()
    selection.require_units(units_like(model, selection.units))


def cut(model: PreTrainedModel, selection: Selection, *, inplace: bool = False) -> PreTrainedModel:
    """The pruned model without a manifest, so it cannot be saved: for what is only measured.

    Args and raises: as `prune`.
    """
    require_prunable(model, selection)
    return _cut(model, selection, inplace)


def _cut(model: PreTrainedModel, selection: Selection, inplace: bool) -> PreTrainedModel:
    replacements = sliced_modules(describe(model), selection)
    if inplace:
        for parent, name, module in replacements:
            setattr(parent, name, module)
        pruned = model
    else:
        # deepcopy takes a module found in its memo for already copied: cut weights are not touched
        memo = {id(getattr(parent, name)): module for parent, name, module in replacements}
        pruned = copy.deepcopy(model, memo)
    settle_heads(describe(pruned))
    vars(pruned).pop("cocurve_manifest", None)  # of an earlier round, whose widths these are not
    return pruned


def _origin(model: PreTrainedModel) -> Origin:
    marks = weight_marks(model)
    earlier: Any = getattr(model, "cocurve_manifest", None)
    if earlier is not None:
        earlier = earlier | weights_now(model, earlier, marks)
    return Origin(fingerprint_model(model, marks), earlier)
