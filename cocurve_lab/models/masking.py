"""Runtime masks: a unit is ablated by zeroing its input columns of the output projection.

Units of a registered kind without columns are masked as that kind says.

Nothing else changes: no normalization, no position code, no other unit. A bias of the output
projection belongs to no unit and stays (appendix "Structured Units").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ..base.arguments import as_list
from ..base.errors import InputError, MismatchError
from .architectures import UNIT_KINDS, Architecture, describe, is_packed
from .identity import embedding_weight, require_source
from .layers import weights_of
from .runtime import exclusive
from .unit import Kind, Scales
from .units import Unit, UnitSet, enumerate_units, units_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Plan(Protocol):
    """The part of a `Selection` that a mask needs; the class itself is in `solver/`, above."""

    @property
    def units(self) -> UnitSet:
        """All units, removed or not."""

    @property
    def pruned(self) -> tuple[int, ...]:
        """The numbers of those that are removed."""

    @property
    def gains(self) -> Mapping[int, float]:
        """Factors of kept units."""

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Which weights it was made for; None if it was made by hand."""

    def require_units(self, units: UnitSet) -> None:
        """Raise MismatchError unless these are its units."""


@contextmanager
def ablate(
    model: PreTrainedModel,
    units: Plan | Iterable[Unit | str | int],
    *,
    unit_set: UnitSet | None = None,
) -> Iterator[PreTrainedModel]:
    """Run the model without some units inside a `with` block; leaving it always restores them.

    Only calls on the thread of the block are ablated; on other threads the model stays whole.

    Args:
        model: the model that the units were enumerated on.
        units: a Selection (its gains are applied), or units, names or indices.
        unit_set: the set that names and indices refer to; by default the model's own units with
            16 FFN groups per layer.
    """
    architecture = describe(model)
    chosen = resolve(model, units, unit_set)
    scales = column_scales(architecture, *chosen)
    with exclusive(model), scaled(architecture, scales):
        yield model


def resolve(
    model: PreTrainedModel,
    units: Plan | Iterable[Unit | str | int],
    unit_set: UnitSet | None = None,
) -> tuple[list[Unit], dict[Unit, float]]:
    """Return the removed units and the gains of kept ones, after checking them as `ablate`."""
    if _is_plan(units):
        units.require_units(units_like(model, units.units))
        if units.origin is not None:  # one made by hand is nobody's
            require_source(model, units)
        gains = {units.units[i]: gain for i, gain in units.gains.items()}
        return [units.units[i] for i in units.pruned], gains
    chosen: list[Any] = as_list(units, "the list of units")  # type: ignore[arg-type]
    if not all(isinstance(unit, Unit) for unit in chosen):
        unit_set = unit_set or enumerate_units(model)
        return [unit_set.units[i] for i in unit_set.indices(chosen)], {}
    if len(set(chosen)) != len(chosen):  # a Unit knows its columns: no set needed
        twice = next(unit for unit in chosen if chosen.count(unit) > 1)
        raise InputError(f"unit {twice} is named twice. Name each unit once.")
    return chosen, {}


def _is_plan(units: Any) -> TypeGuard[Plan]:
    return hasattr(units, "pruned")


def column_scales(
    architecture: Architecture, pruned: Iterable[Unit], gains: Mapping[Unit, float] | None = None
) -> Scales:
    """Build the factors [W] of the input columns of each output projection that changes.

    A factor is 0 for a removed column, its gain for a kept one, else 1.
    """
    scales: Scales = {}
    for unit, factor in [*((unit, 0.0) for unit in pruned), *(gains or {}).items()]:
        _require_fit(architecture, unit)
        key = (unit.layer, unit.kind)
        if key not in scales:
            scales[key] = torch.ones(architecture.width(*key))
        scales[key][unit.start : unit.stop] = factor
    return scales


def stack_rows(architecture: Architecture, rows: list[Scales]) -> Scales:
    """Stack masks to [B, 1, W]: row b of a batch runs with rows[b], so one batch tries B plans."""
    stacked = {}
    for key in sorted({key for scales in rows for key in scales}):
        ones = torch.ones(architecture.width(*key))  # for rows that leave the projection as it is
        stacked[key] = torch.stack([scales.get(key, ones) for scales in rows]).unsqueeze(1)
    return stacked


@contextmanager
def scaled(architecture: Architecture, scales: Scales) -> Iterator[None]:
    """Multiply the inputs of output projections by `scales` ([W] or [B, 1, W]) inside the block.

    Of a unit without columns, a factor of 0 takes it away, and any other leaves it as it is.
    """
    with ExitStack() as stack:
        for (layer, name), scale in scales.items():
            kind = UNIT_KINDS[name]
            if kind.columns:
                scale = like_columns(architecture, scale, layer, name)
            stack.enter_context(kind.mask(architecture, layer, scale))
        yield


def like_columns(architecture: Architecture, scale: Tensor, layer: int, kind: Kind) -> Tensor:
    """Convert a scale to the dtype and device of the columns it multiplies."""
    projection = architecture.output_projection(layer, kind)
    weight = projection.weight
    device = weight.device
    if weight.is_meta:
        coming = weights_of(architecture.model).devices
        if layer not in coming:
            raise InputError(
                f"the {kind} weights of layer {layer} are on the meta device: never loaded. Load "
                "the model with load_model."
            )
        device = coming[layer]
    # a packed weight is stored as bytes; the activations have the dtype of the embedding
    dtype = embedding_weight(architecture.model).dtype if is_packed(projection) else weight.dtype
    return scale.to(device=device, dtype=dtype)


def _require_fit(architecture: Architecture, unit: Unit) -> None:
    layers = len(architecture.layers)
    width = architecture.width(unit.layer, unit.kind) if unit.layer < layers else 0
    if unit.stop > width:
        raise MismatchError(
            f"{unit} (columns {unit.start}:{unit.stop}) is not in this model of {layers} layers, "
            f"whose layer {unit.layer} has {width} {unit.kind} columns. Enumerate the units on "
            "this model."
        )
