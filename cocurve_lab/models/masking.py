"""Runtime masks: a unit is ablated by zeroing its input columns of the output projection.

Units of a registered kind without columns are masked as that kind says.

Nothing else changes: no normalization, no position code, no other unit. A bias of the output
projection belongs to no unit and stays (appendix "Structured Units").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..base.arguments import as_list
from ..base.errors import MismatchError
from .architectures import UNIT_KINDS, Architecture, describe
from .identity import require_source
from .runtime import exclusive
from .unit import Scales
from .units import Unit, list_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..solver.selection import Selection


@contextmanager
def ablate(
    model: PreTrainedModel, units: Selection | Iterable[Unit | str | int]
) -> Iterator[PreTrainedModel]:
    """Run the model without some units inside a `with` block; leaving it always restores them.

    Only calls on the thread of the block are ablated; on other threads the model stays whole.

    Args:
        model: the model that the units were enumerated on.
        units: a Selection (its gains are applied), or units, names or indices; the last two are of
            the model's own units with 16 FFN groups per layer.
    """
    architecture = describe(model)
    with exclusive(model), scaled(architecture, plan_scales(architecture, units)):
        yield model


def plan_scales(
    architecture: Architecture, units: Selection | Iterable[Unit | str | int]
) -> Scales:
    """Build the factors of `column_scales` for what `ablate` takes, after checking it."""
    return column_scales(architecture, *resolve(architecture, units))


def resolve(
    architecture: Architecture, units: Selection | Iterable[Unit | str | int]
) -> tuple[list[Unit], dict[Unit, float]]:
    """Return the removed units and the gains of kept ones, after checking them as `ablate`."""
    plan: Any = units
    if hasattr(plan, "pruned"):
        plan.require_units(list_units(architecture, plan.units.ffn_groups or 16))
        if plan.origin is not None:  # one made by hand is nobody's
            require_source(architecture.model, plan)
        gains = {plan.units[i]: gain for i, gain in plan.gains.items()}
        return [plan.units[i] for i in plan.pruned], gains
    chosen = as_list(plan, "the list of units")
    if all(isinstance(unit, Unit) for unit in chosen):  # a Unit knows its columns: no set needed
        return chosen, {}
    own = list_units(architecture)
    return [own.units[i] for i in own.indices(chosen)], {}


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
        for (layer, kind), scale in scales.items():
            stack.enter_context(UNIT_KINDS[kind].mask(architecture, layer, scale))
        yield


def _require_fit(architecture: Architecture, unit: Unit) -> None:
    layers = len(architecture.layers)
    width = architecture.width(unit.layer, unit.kind) if unit.layer < layers else 0
    if unit.stop > width:
        raise MismatchError(
            f"{unit} (columns {unit.start}:{unit.stop}) is not in this model of {layers} layers, "
            f"whose layer {unit.layer} has {width} {unit.kind} columns. Enumerate the units on "
            "this model."
        )
