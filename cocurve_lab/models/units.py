"""Structured units: the removable parts of a model, their costs and their order.

Units are ordered by layer; within a layer, attention units come before FFN groups, then those of
registered kinds. A `UnitSet` needs no model, so a stored H can be explored on any machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..base.arguments import EXACT, as_int, as_list
from ..base.errors import InputError, MismatchError, shown
from ..base.schema import COUNT, Field, Schema, list_of, nullable, optional, require_fields
from ..base.storage import fingerprint
from .architectures import UNIT_KINDS, Architecture, describe, is_packed, kind_number, widths
from .kinds import KINDS
from .unit import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MOST_LAYERS = 100_000  # a bound against files that make arrays without end
_FACTS = ("ffn_groups", "total_parameters", "model_layers")
_LEAST = "experts_per_token"  # in files: the only kind so far whose layers must keep some units

# The set ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitSet(Sequence[Unit]):
    """The ordered set U of M units. Supports len, iteration, and indexing by number or name.

    Attributes:
        units: the units in order.
        ffn_groups: FFN groups per layer the set was made with; None if unknown.
        total_parameters: parameters of the whole model, embeddings included; None if no model is
            known, and then no share of all parameters can be stated.
        model_layers: decoder layers of the model; None if unknown. After pruning, the last layers
            may have no unit.
        least: the fewest units that a layer must keep of the kinds in `limited`; None without any.
    """

    units: tuple[Unit, ...]
    ffn_groups: int | None = None
    total_parameters: int | None = field(default=None, compare=False)
    model_layers: int | None = field(default=None, compare=False)
    least: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for unit in self.units:
            counted = isinstance(unit.cost, int) and unit.cost > 0
            if not counted or unit.stop <= unit.start:
                raise InputError(
                    f"unit {unit} has the columns {unit.start}:{unit.stop} and cost {unit.cost}. "
                    "Give it a column or more, and a whole number of parameters."
                )
        keys = [(unit.layer, kind_number(unit.kind), unit.index) for unit in self.units]
        if keys != sorted(set(keys)):
            raise InputError(
                f"the units are not distinct and ordered by layer, by kind {tuple(UNIT_KINDS)}, "
                "then by index. Use enumerate_units, or sort them."
            )
        deepest = max((unit.layer for unit in self.units), default=-1)
        total = sum(unit.cost for unit in self.units)
        # statistics keep a number per layer; float64 and the browser round larger sums
        layers = _MOST_LAYERS if self.model_layers is None else self.model_layers
        whole = EXACT - 1 if self.total_parameters is None else self.total_parameters
        if not deepest < layers <= _MOST_LAYERS or total > whole:
            raise InputError(
                f"the units reach layer {deepest} and cost {total:,} together, "
                f"but model_layers is {layers:,} and total_parameters {whole:,}. Correct them."
            )

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    @overload
    def __getitem__(self, key: int | str) -> Unit: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Unit]: ...
    def __getitem__(self, key: int | str | slice) -> Unit | Sequence[Unit]:
        return self.units[self.index(key) if isinstance(key, str) else key]

    def index(self, unit: Unit | str | int, *_: Any) -> int:
        """Return the position of a `Unit`, a name such as "L3.ffn[5]", or an index."""
        position: int | None = None
        if isinstance(unit, (int, np.integer)) and not isinstance(unit, bool):
            position = int(unit) if 0 <= int(unit) < len(self) else None
        elif isinstance(unit, (str, Unit)):
            position = self._positions.get(unit if isinstance(unit, str) else unit.name)
        if position is None or (isinstance(unit, Unit) and self.units[position] != unit):
            name = unit if isinstance(unit, str) else shown(unit)
            raise InputError(
                f"there is no unit {name} in this set of {len(self)} units, {self.units[0].name} "
                f"to {self.units[-1].name}. Take units from enumerate_units(model)."
            )
        return position

    def indices(self, units: Iterable[Unit | str | int]) -> tuple[int, ...]:
        """Return the positions of several distinct units, in the given order."""
        positions = tuple(self.index(unit) for unit in as_list(units, "the list of units"))
        if len(set(positions)) != len(positions):
            twice = Counter(positions).most_common(1)[0][0]
            raise InputError(f"unit {self[twice]} is named twice. Name each unit once.")
        return positions

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {unit.name: position for position, unit in enumerate(self.units)}

    @cached_property
    def costs(self) -> np.ndarray:
        """Costs c [M], int64, in parameters."""
        return _frozen([unit.cost for unit in self.units], np.int64)

    @cached_property
    def layers(self) -> np.ndarray:
        """Layer of each unit [M], int64."""
        return _frozen([unit.layer for unit in self.units], np.int64)

    @cached_property
    def kinds(self) -> np.ndarray:
        """Kind of each unit [M], one of `UNIT_KINDS`."""
        return _frozen([unit.kind for unit in self.units], np.str_)

    @cached_property
    def limited(self) -> np.ndarray:
        """Which units are of a kind that no layer may lose as a whole [M], bool."""
        return ~np.isin(self.kinds, KINDS)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers; if unknown, up to the last one that has a unit."""
        known = int(self.layers.max(initial=-1)) + 1
        return known if self.model_layers is None else self.model_layers

    @property
    def total_cost(self) -> int:
        """Sum of all costs: the removable parameters. Pruning ratios are shares of it."""
        return int(self.costs.sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the units, without the facts about the model around them."""
        return fingerprint(self.to_plain()["units"])

    def require_same(self, other: UnitSet, *, mine: str, theirs: str) -> None:
        """Raise MismatchError, naming the first difference between `mine` and `theirs`, if any."""
        found = next(((a, b) for a, b in zip(self, other, strict=False) if a != b), None)
        if found is None and len(self) == len(other):
            return
        fact = f"{mine} has {len(self)} units, {theirs} has {len(other)}"
        if found is not None:
            a, b = found
            fact = (
                f"{mine} and {theirs} differ first at {a}: columns {a.start}:{a.stop}, cost "
                f"{a.cost:,} against {b} {b.start}:{b.stop}, cost {b.cost:,}"
            )
        raise MismatchError(
            f"{fact}. Use the model (and ffn_groups) the units were enumerated on; one that is "
            "pruned already has other units."
        )

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain containers for JSON and pickles; `from_plain` reads them back."""
        rows = [[u.kind, u.layer, u.index, u.start, u.stop, u.cost] for u in self.units]
        facts = {name: getattr(self, name) for name in _FACTS}
        return {"units": rows} | facts | ({} if self.least is None else {_LEAST: self.least})

    @classmethod
    def from_plain(cls, value: Any) -> UnitSet:
        """Make a set from what `to_plain` returned, and a file may have changed."""
        require_fields(value, _FIELDS, inside="units")
        units = tuple(Unit(kind, *numbers) for kind, *numbers in value["units"])
        facts = {name: value.get(name) for name in _FACTS}
        return cls(units, **facts, least=value.get(_LEAST))

    def __repr__(self) -> str:
        counts = ((int((self.kinds == name).sum()), kind) for name, kind in UNIT_KINDS.items())
        parts = ", ".join(f"{n} {kind.plural}" for n, kind in counts if n or kind.columns)
        return (
            f"UnitSet({len(self)} units: {parts} in {self.num_layers} layers; "
            f"{self.total_cost:,} removable parameters)"
        )


def _is_row(value: Any) -> bool:
    """Whether a value is a row of `UnitSet.to_plain`: a kind, and the five numbers of a unit."""
    if not isinstance(value, list) or len(value) != 6 or not isinstance(value[0], str):
        return False
    return value[0] in UNIT_KINDS and all(type(n) is int and 0 <= n < EXACT for n in value[1:])


_FIELDS: Schema = {
    "units": Field("rows of kind, layer, index, start, stop, cost", list_of(_is_row)),
    **dict.fromkeys(_FACTS, nullable(COUNT)),
    **optional({_LEAST: nullable(COUNT)}),
}


# The units of a model -----------------------------------------------------------------------------


def enumerate_units(model: PreTrainedModel, ffn_groups: int = 16) -> UnitSet:
    """List the removable units of a model (Section 2, appendix "Structured Units").

    Heads are removable one by one (MHA) or one KV group at a time (GQA, MQA). OLMo2 norms queries
    and keys over all heads together, so removing one head would change the others; there the
    attention of a layer is one unit, norm weights included. Biases of output projections, norms of
    the residual, and norms whose weights all heads share (Qwen3, Gemma 3) belong to no unit and
    stay.

    Args:
        model: a supported causal language model, dense or already pruned. Only shapes are read, so
            it may live on the meta device.
        ffn_groups: n_f, contiguous channel groups per FFN. If the width is not a multiple of it,
            the first groups are one channel wider. A layer that pruning left with fewer channels
            than groups has one group per channel.

    Returns:
        The M units; for Llama-3.1-8B with 16 groups, M = 768.
    """
    return list_units(describe(model), ffn_groups)


def list_units(architecture: Architecture, ffn_groups: int = 16) -> UnitSet:
    """List the removable units of a model that is described already; see `enumerate_units`."""
    widest = max(architecture.width(layer, "ffn") for layer in range(len(architecture.layers)))
    ffn_groups = as_int(ffn_groups, "ffn_groups")
    if widest and not 1 <= ffn_groups <= widest:
        raise InputError(
            f"ffn_groups is {ffn_groups}, but the widest FFN has {widest} channels. "
            f"Choose between 1 and {widest} (the paper uses 16)."
        )
    units: list[Unit] = []
    for layer in range(len(architecture.layers)):
        for kind in architecture.kinds(layer):
            units += UNIT_KINDS[kind].units(architecture, layer, ffn_groups)
    if not units:
        raise InputError("the model has no units left to remove. Start from a dense one.")
    least = max(kind.least(architecture) for kind in UNIT_KINDS.values())
    return UnitSet(
        tuple(units),
        ffn_groups,
        _total(architecture.model),
        len(architecture.layers),
        least or None,
    )


def units_like(model: PreTrainedModel, units: UnitSet) -> UnitSet:
    """Enumerate a model's units with the FFN groups of another set (16 if unknown)."""
    return enumerate_units(model, units.ffn_groups or 16)


def require_units(model: PreTrainedModel, units: UnitSet) -> None:
    """Raise MismatchError, naming the first difference, unless the units are the model's."""
    units.require_same(units_like(model, units), mine="the unit set", theirs="the model")


def _total(model: PreTrainedModel) -> int:
    # a packed weight stores several parameters per element: count its rows x columns instead
    stored = sum(p.numel() for p in model.parameters())
    packed: list[Any] = [module for module in model.modules() if is_packed(module)]
    return stored + sum(math.prod(widths(part)) - int(part.weight.numel()) for part in packed)


def _frozen(values: list[Any], dtype: Any) -> np.ndarray:
    """Return a read-only array, because the properties that return it are cached."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array
