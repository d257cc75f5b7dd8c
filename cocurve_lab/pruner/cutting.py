"""Pruning a model: the weights of a plan's units are deleted.

What stays is kept bit for bit, except that gains are folded into the columns of W_down.
"""

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
from .blocks import settle_heads
from .equivalence import Reference
from .manifest import Origin, manifest_of, weights_now
from .slicing import sliced_modules

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
        model: the model that the units were enumerated on.
        selection: the plan; its gains are folded into the kept columns of W_down.
        inplace: change `model` itself, for a model that does not fit into memory twice. Otherwise a
            new model is built by slicing, and what is cut is never copied.
        verify: text whose first two rows the result is checked on.

    Returns:
        The pruned model. Its `cocurve_manifest` describes the widths, the plan, and fingerprints of
        the dense and the pruned weights; all weights are read for these.

    Raises:
        ArchitectureError: the weights are packed in 4 bits, which can be measured but not cut.
        InputError: the plan is not a Selection, or the weights are spread over devices or
            offloaded.
        MismatchError: the model's units are not the selection's. Nothing was changed.
        EquivalenceError: the pruned model does not compute what the masked model computes.
    """
    require_prunable(model, selection)
    origin = _origin(model)
    # recorded before the cut, because inplace leaves no dense model to compare with
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
    """Raise, as `prune` does, unless this plan can be cut out of this model."""
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
    """Prune without a manifest: for a model that is measured and not saved.

    No weight is read for a fingerprint, so this is faster than `prune`.

    Args and raises: as `prune`.
    """
    require_prunable(model, selection)
    return _cut(model, selection, inplace)


def _cut(model: PreTrainedModel, selection: Selection, inplace: bool) -> PreTrainedModel:
    """Put the sliced modules in place, in the model itself or in a copy."""
    replacements = sliced_modules(describe(model), selection)
    if inplace:
        for parent, name, module in replacements:
            setattr(parent, name, module)
        pruned = model
    else:
        # deepcopy takes a module in its memo as copied already, so dense weights that are cut are
        # never duplicated
        memo = {id(getattr(parent, name)): module for parent, name, module in replacements}
        pruned = copy.deepcopy(model, memo)
    settle_heads(describe(pruned))
    vars(pruned).pop("cocurve_manifest", None)  # that of an earlier round has other widths
    return pruned


def _origin(model: PreTrainedModel) -> Origin:
    """The model as it is before the cut."""
    marks = weight_marks(model)
    earlier: Any = getattr(model, "cocurve_manifest", None)
    if earlier is not None:
        earlier = earlier | weights_now(model, earlier, marks)
    return Origin(fingerprint_model(model, marks), earlier)
