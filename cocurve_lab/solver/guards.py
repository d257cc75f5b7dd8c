"""Guards: where units may be pruned, and the most that any plan can remove under them.

Which of the admissible units to remove is the question of greedy.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from ..base.arguments import as_float, as_int, as_list, require_type
from ..base.errors import InfeasibleError, InputError
from ..models.architectures import UNIT_KINDS
from ..models.unit import Kind
from ..models.units import Unit, UnitSet
from .portions import Depth, Portions
from .subset_sum import largest_sum
from .targets import Budget, ratio_budget

UnitsLike = Iterable[Unit | str | int]
_COUNTS = {"protect_first": 0, "protect_last": 0, "tensor_parallel": 1, "align": 1}  # and the least
_MACHINE = ("tensor_parallel", "align", "depth")


@dataclass(frozen=True)
class Guards:
    """Anti-collapse guards (Alg. 2): limits on where units may be pruned.

    They never change the objective. Whatever they are, a layer keeps as many experts as its router
    chooses for a token.

    Attributes:
        layer_cap: kappa, the largest share of a layer's removable cost that may be removed, in
            (0, 1]; None for no cap.
        layer_cap_factor: the cap as a multiple of the ratio (the release uses 1.5). Give at most
            one of the two caps. This one depends on the ratio, so plans of smaller ratios are not
            prefixes of larger ones.
        protect_first, protect_last: number of decoder layers at either end that stay whole.
        kinds: the unit kinds that may be pruned; by default every kind of the model.
        tensor_parallel: a number of devices that share each layer: the KV heads and the FFN
            channels left are multiples of it, or none are left.
        align: FFN channels left are a multiple of it, such as 64 or 128, or none are left.
        depth: "block" removes attention and FFN blocks only as a whole, "layer" only whole layers.

    Example:
        >>> from cocurve_lab import Guards
        >>> guards = Guards(layer_cap_factor=2, protect_first=1)
        >>> print(guards, guards.cap_at(0.2))
        cap 2x protect 1/0 0.4
    """

    layer_cap: float | None = None
    layer_cap_factor: float | None = None
    protect_first: int = 0
    protect_last: int = 0
    kinds: tuple[Kind, ...] = tuple(UNIT_KINDS)
    tensor_parallel: int = 1
    align: int = 1
    depth: Depth | None = None

    def __post_init__(self) -> None:
        # numbers of any type: a half-precision cap would round the room of every layer
        for name in ("layer_cap", "layer_cap_factor"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_float(getattr(self, name), name))
        for name, least in _COUNTS.items():
            object.__setattr__(self, name, as_int(getattr(self, name), name, least))
        object.__setattr__(self, "kinds", tuple(as_list(self.kinds, "kinds")))
        cap, factor = self.layer_cap, self.layer_cap_factor
        if cap is not None and factor is not None:
            fault = f"layer_cap is {cap} and layer_cap_factor is {factor}. Give only one of them."
        elif cap is not None and not 0 < cap <= 1:
            fault = f"layer_cap is {cap}. Give a share in (0, 1], or None for no cap."
        elif factor is not None and not 0 < factor < math.inf:
            fault = f"layer_cap_factor is {factor}. Give a number above 0, such as 1.5, or None."
        elif not self.kinds or any(kind not in UNIT_KINDS for kind in self.kinds):
            fault = f"kinds is {self.kinds!r}; choose from {tuple(UNIT_KINDS)}."
        elif self.depth not in (None, *get_args(Depth)):
            fault = f"depth is {self.depth!r}. Choose from {get_args(Depth)}, or None."
        else:
            return
        raise InputError(fault)

    @property
    def machine(self) -> str:
        """The guards of the machine (see portions.py) as arguments; empty where there are none."""
        given = {k: v for k, v in self.to_plain().items() if k in _MACHINE}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    def to_plain(self) -> dict[str, Any]:
        """Return the fields for JSON; those of the machine only where they are set."""
        fields = vars(self).items()
        return {k: v for k, v in fields if k not in _MACHINE or v not in (1, None)}

    def cap_at(self, ratio: float) -> float:
        """Return the layer cap at a ratio, as a share of a layer's cost; 1 where there is none."""
        if self.layer_cap_factor is not None:
            return min(1.0, self.layer_cap_factor * ratio)
        return 1.0 if self.layer_cap is None else self.layer_cap

    def __str__(self) -> str:
        """Cap and protected layers for a table, "cap 1.5x protect 1/1"; kinds are not named."""
        cap = "none" if self.layer_cap is None else f"{self.layer_cap:g}"
        if self.layer_cap_factor is not None:
            cap = f"{self.layer_cap_factor:g}x"
        machine = f" {self.machine}" if self.machine else ""
        return f"cap {cap} protect {self.protect_first}/{self.protect_last}{machine}"


FREE = Guards()  # the default of every verb; frozen, so one instance serves all


def reachable_ratio(
    units: UnitSet,
    guards: Guards,
    ratio: float,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
) -> float:
    """Return the largest share of removable cost that any plan can remove under the guards.

    Guards act on each layer separately, so the maximum is one subset-sum problem per layer: the
    most expensive set of admissible units that fits under the cap. It is exact for up to 40 units
    per layer, and for whole costs if the cap is at most 2^24 times their common divisor, as in all
    real models. Otherwise the cap itself is used, an upper bound. `ratio` matters only through
    `Guards.layer_cap_factor`.
    """
    rules = Rules(units, guards, ratio, include, exclude, portions=True)
    return rules.reachable()[0] / units.total_cost


class Rules:
    """Guards, include and exclude, resolved for one UnitSet and budget.

    Attributes:
        admissible: [M] bool, False for units that no plan may contain.
        forced: indices of the included units, in the given order.
        room: [layers] the cost that each layer may lose (kappa x the cost of all its units); whole
            where costs are whole.
        budget: the unit costs, and the cost to remove.
        portions: how many units each block may lose; None where any number may go. Guards of the
            machine are refused unless the caller takes units in portions.
    """

    def __init__(
        self,
        units: UnitSet,
        guards: Guards,
        ratio: float | Budget,
        include: UnitsLike = (),
        exclude: UnitsLike = (),
        *,
        portions: bool = False,
    ) -> None:
        require_type(guards, Guards, "guards")
        if guards.machine and not portions:
            raise InputError(
                f"the guards have {guards.machine}, but units are taken one by one here, which "
                "would break that. Use solve_greedy, or leave it out of the guards."
            )
        self.units, self.guards = units, guards
        self.budget = ratio if isinstance(ratio, Budget) else ratio_budget(units, ratio)
        costs = self.budget.costs
        self.portions = None
        if guards.machine:
            machine = (guards.tensor_parallel, guards.align, guards.depth)
            self.portions = Portions(units, *machine, costs)
        self.cap = guards.cap_at(self.budget.share)
        layer_costs = np.bincount(units.layers, costs, minlength=units.num_layers)
        # slightly more than the product, so that 0.29 x 100 = 28.999999999999996 stays 29
        room = self.cap * layer_costs * (1 + 1e-12)
        if costs.dtype == np.int64:  # whole costs are then compared and summed exactly
            room = np.floor(room).astype(np.int64)
        self.room = room.tolist()
        layers, last = units.layers, units.num_layers - guards.protect_last
        self.open = (layers >= guards.protect_first) & (layers < last)
        self.of_kind = np.isin(units.kinds, guards.kinds)
        self.excluded = np.zeros(len(units), dtype=bool)
        self.excluded[list(units.indices(exclude))] = True
        self.routed = units.limited
        spared = ~self.routed | (np.array(self.spare_after(()))[layers] > 0)
        self.admissible = self.open & self.of_kind & ~self.excluded & spared
        # a unit larger than its layer's room never fits; one of cost 0 brings the target no nearer
        self.admissible &= (costs <= room[layers]) & (costs > 0)
        self.forced = units.indices(include)
        self._require_forced()

    def room_after(self, pruned: Iterable[int]) -> list[float]:
        """Return the cost that each layer may still lose once `pruned` is removed [layers]."""
        room, gone = np.array(self.room), list(pruned)
        np.subtract.at(room, self.units.layers[gone], self.budget.costs[gone])  # one after another
        return room.tolist()

    def spare_after(self, pruned: Iterable[int]) -> list[int]:
        """Return the experts that each layer may still lose once `pruned` is removed [layers].

        A router needs at least as many as it chooses for a token.
        """
        left = self.routed.copy()
        left[list(pruned)] = False
        there, counts = (
            np.bincount(self.units.layers[mask], minlength=self.units.num_layers)
            for mask in (self.routed, left)
        )
        return np.where(there > 0, counts - (self.units.least or 0), 0).tolist()

    def reachable(self) -> tuple[float, bool]:
        """Return the most that any plan can remove (see `reachable_ratio`), and if it is exact."""
        costs = self.budget.costs
        reachable, exact = costs[list(self.forced)].sum().item(), True
        free = self.admissible.copy()
        free[list(self.forced)] = False
        if self.portions is not None:
            return self.portions.most(self.forced, free, self.room), True
        # more is always allowed (a plan may overshoot its target), so layers do not compete
        spare = self.spare_after(self.forced)
        for layer, room in enumerate(self.room_after(self.forced)):
            mine = free & (self.units.layers == layer)
            experts = np.sort(costs[mine & self.routed])[::-1][: max(spare[layer], 0)]
            pool = np.concatenate([costs[mine & ~self.routed], experts])
            largest, sure = largest_sum(pool, room)
            reachable, exact = reachable + largest, exact and sure
        return reachable, exact

    def out_of_reach(
        self, message: str, most: float, stalled: float | None = None
    ) -> InfeasibleError:
        """Make the error that no plan removes more than `most` of the budget's costs."""
        asked = self.budget.target or f"ratio {self.budget.share:g}"
        return InfeasibleError(
            f"{asked} is out of reach: {message}",
            requested_ratio=float(self.budget.share),
            reachable_ratio=most / self.budget.costs.sum().item(),
            stalled_ratio=stalled,
        )

    def _require_forced(self) -> None:
        """Raise InputError if an included unit breaks a rule."""
        for count, u in enumerate(self.forced, start=1):
            unit = self.units[u]
            if self.excluded[u]:
                why = "is also in exclude"
            elif not self.open[u]:
                first, last = self.guards.protect_first, self.guards.protect_last
                why = f"is in a protected layer (first {first}, last {last})"
            elif not self.of_kind[u]:
                why = f"is of a kind that may not be pruned (kinds {self.guards.kinds})"
            # only the units up to this one, so that the first to exceed the cap is named
            elif self.room_after(self.forced[:count])[unit.layer] < 0:
                why = f"takes layer {unit.layer} above its cap of {self.cap:.4g} of its cost"
            elif self.routed[u] and self.spare_after(self.forced[:count])[unit.layer] < 0:
                why = f"leaves fewer experts than the {self.units.least} of a token"
            else:
                continue
            raise InputError(f"include names {unit}, which {why}. Remove it or loosen the guards.")

    def __str__(self) -> str:
        """The guards and exclusions in force, in words."""
        guards, excluded = self.guards, int(self.excluded.sum())
        protected = (
            f"a protected {end} layer" if count == 1 else f"{count} protected {end} layers"
            for end, count in (("first", guards.protect_first), ("last", guards.protect_last))
            if count
        )
        parts = [
            f"a layer cap of {self.cap:.4g}" if self.cap < 1 else "",
            *protected,
            f"kinds {', '.join(guards.kinds)}" if set(guards.kinds) != set(UNIT_KINDS) else "",
            f"{excluded} unit{'' if excluded == 1 else 's'} excluded" if excluded else "",
            guards.machine,
        ]
        return "; ".join(part for part in parts if part) or "no guards"


class PartialPlan:
    """A plan in the making: the units removed so far, and the room their layers have left.

    Attributes:
        order: the removed units.
        spent: their cost, C_S, in the budget's costs.
        room: [layers] the cost that each layer may still lose under its cap.
        spare: [layers] the experts that each layer may still lose.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules, self.budget = rules, rules.budget
        self.costs: list[float] = rules.budget.costs.tolist()
        self.layers: list[int] = rules.units.layers.tolist()
        self.order: list[int] = []
        self.spent: float = 0
        self.room, self.spare = rules.room_after(()), rules.spare_after(())

    def fits(self, u: int) -> bool:
        """Whether a unit is admissible, fits under its layer's cap, and its router can spare it."""
        layer, rules = self.layers[u], self.rules
        spared = self.spare[layer] > 0 or not rules.routed[u]
        return bool(rules.admissible[u]) and spared and self.costs[u] <= self.room[layer]

    def remove(self, u: int) -> None:
        """Take a unit out, whether or not it fits."""
        self.order.append(u)
        self.spent += self.costs[u]
        self.room[self.layers[u]] -= self.costs[u]
        self.spare[self.layers[u]] -= int(self.rules.routed[u])

    def enough(self) -> bool:
        """Whether the budget is met; a budget of NaN is, and fails the last check of the plan."""
        return not self.spent < self.budget.needed
