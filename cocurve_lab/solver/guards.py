"""Guards: where units may be pruned, and the most that any plan can remove under them.

Which of the admissible units to remove is the question of greedy.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from ..base.arguments import as_float, as_int, as_list, require_type
from ..base.errors import InfeasibleError, InputError
from ..models.architectures import UNIT_KINDS
from ..models.unit import Kind
from ..models.units import Unit, UnitSet
from .targets import Budget, Target, as_budget

UnitsLike = Iterable[Unit | str | int]


@dataclass(frozen=True, repr=False)
class Guards:
    """Anti-collapse guards (Alg. 2): limits on where units may be pruned.

    They never change the objective. Whatever they are, a layer keeps as many units of a kind as the
    model needs (`UnitSet.least`).

    Attributes:
        layer_cap: kappa, the largest share of a layer's removable cost that may be removed, in
            (0, 1]; None for no cap.
        layer_cap_factor: the cap as a multiple of the ratio (the release uses 1.5). Give at most
            one of the two caps. This one depends on the ratio, so plans of smaller ratios are not
            prefixes of larger ones.
        protect_first, protect_last: number of layers at either end that stay whole.
        kinds: the unit kinds that may be pruned; None for every kind of the model.

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
    kinds: tuple[Kind, ...] | None = None

    def __post_init__(self) -> None:
        # numbers of any type: a half-precision cap would round the room of every layer
        for name, most in (("layer_cap", 1.0), ("layer_cap_factor", sys.float_info.max)):
            if getattr(self, name) is not None:
                number = as_float(getattr(self, name), name)
                if not 0 < number <= most:
                    raise InputError(
                        f"{name} is {number}. Give a layer_cap in (0, 1], a finite factor above 0, "
                        "or None."
                    )
                object.__setattr__(self, name, number)
        for name in ("protect_first", "protect_last"):
            object.__setattr__(self, name, as_int(getattr(self, name), name))
        if self.layer_cap is not None and self.layer_cap_factor is not None:
            raise InputError(
                f"layer_cap is {self.layer_cap} and layer_cap_factor is {self.layer_cap_factor}. "
                "Give only one of them."
            )
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(as_list(self.kinds, "kinds")))
            if not self.kinds or any(kind not in tuple(UNIT_KINDS) for kind in self.kinds):
                raise InputError(f"kinds is {self.kinds!r}; choose from {tuple(UNIT_KINDS)}.")

    def allows(self, kind: Kind) -> bool:
        """Whether units of a kind may be pruned."""
        return self.kinds is None or kind in self.kinds

    def cap_at(self, ratio: float) -> float:
        """Return the layer cap at a ratio, as a share of a layer's cost; 1 where there is none."""
        if self.layer_cap_factor is not None:
            return min(1.0, self.layer_cap_factor * ratio)
        return 1.0 if self.layer_cap is None else self.layer_cap

    def __repr__(self) -> str:
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Guards({', '.join(given)})"

    def __str__(self) -> str:
        """Cap and protected layers for a table, "cap 1.5x protect 1/1"; kinds are not named."""
        cap = "none" if self.layer_cap is None else f"{self.layer_cap:g}"
        if self.layer_cap_factor is not None:
            cap = f"{self.layer_cap_factor:g}x"
        return f"cap {cap} protect {self.protect_first}/{self.protect_last}"


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
    most expensive set of admissible units that fits under the cap. It is exact for whole costs if
    the cap is at most 2^24 times their common divisor, as in all real models. Otherwise the cap
    itself is used, an upper bound. `ratio` matters only through `Guards.layer_cap_factor`.
    """
    return Rules(units, guards, ratio, include, exclude).reachable() / units.total_cost


class Rules:
    """Guards, include and exclude, resolved for one UnitSet and budget.

    A block is the units of one layer and kind.

    Attributes:
        budget: the unit costs c_u, and the cost to remove.
        room: [layers] the cost that each layer may lose (kappa x the cost of all its units); whole
            where costs are whole.
        block: [M] the number of each unit's block.
        fewest: [blocks] the fewest units that each block keeps.
        admissible: [M] bool, False for units that no plan may contain.
        forced: indices of the included units, in the given order.
    """

    def __init__(
        self,
        units: UnitSet,
        guards: Guards,
        ratio: float | Target | Budget,
        include: UnitsLike = (),
        exclude: UnitsLike = (),
    ) -> None:
        require_type(guards, Guards, "guards")
        self.units, self.guards = units, guards
        self.budget = as_budget(units, ratio)
        self.cap = guards.cap_at(self.budget.share)
        self.room = self._room()
        self.block, self.fewest = self._blocks()
        self.excluded = np.zeros(len(units), dtype=bool)
        self.excluded[list(units.indices(exclude))] = True
        last = units.num_layers - guards.protect_last
        self.open = (units.layers >= guards.protect_first) & (units.layers < last)
        self.of_kind = np.ones(len(units), dtype=bool)
        if guards.kinds is not None:
            self.of_kind = np.isin(units.kinds, guards.kinds)
        self.admissible = self.open & self.of_kind & ~self.excluded & self._may_leave()
        self.forced = units.indices(include)
        self._require_forced()

    def _room(self) -> list[float]:
        costs, units = self.budget.costs, self.units
        layer_costs = np.bincount(units.layers, costs, minlength=units.num_layers)
        # slightly more than the product, so that 0.29 x 100 = 28.999999999999996 stays 29
        room = self.cap * layer_costs * (1 + 1e-12)
        if costs.dtype == np.int64:  # whole costs are then compared and summed exactly
            room = np.floor(room).astype(np.int64)
        return room.tolist()

    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """The block of each unit [M], and the fewest units that each block keeps [blocks]."""
        layers, kinds = self.units.layers, self.units.kinds
        begins = np.ones(len(layers), dtype=bool)  # units are ordered by layer, then by kind
        begins[1:] = (layers[1:] != layers[:-1]) | (kinds[1:] != kinds[:-1])
        fewest = np.where(self.units.limited[begins], self.units.least or 0, 0)
        return np.cumsum(begins) - 1, fewest

    def _may_leave(self) -> np.ndarray:
        """Which units can leave at all, whatever the guards [M] bool."""
        costs, spare = self.budget.costs, np.array(self.spare_after(()), dtype=np.int64)
        # a unit larger than its layer's room never fits; one of cost 0 brings the target no nearer
        fits = (costs > 0) & (costs <= np.array(self.room)[self.units.layers])
        return fits & (spare[self.block] > 0)

    def room_after(self, pruned: Iterable[int]) -> list[float]:
        """Return the cost that each layer may still lose once `pruned` is removed [layers]."""
        room, gone = np.array(self.room), list(pruned)
        np.subtract.at(room, self.units.layers[gone], self.budget.costs[gone])  # one after another
        return room.tolist()

    def spare_after(self, pruned: Iterable[int]) -> list[int]:
        """Return how many units each block may still lose once `pruned` is removed [blocks]."""
        left = np.ones(len(self.units))
        left[list(pruned)] = 0
        return (np.bincount(self.block, left).astype(np.int64) - self.fewest).tolist()

    def reachable(self) -> float:
        """Return the most that any plan can remove, or a bound on it (see `reachable_ratio`)."""
        costs = self.budget.costs
        reachable: float = costs[list(self.forced)].sum().item()
        free = self.admissible.copy()
        free[list(self.forced)] = False
        spare = self.spare_after(self.forced)
        # more is always allowed (a plan may overshoot its target), so layers do not compete
        for layer, room in enumerate(self.room_after(self.forced)):
            pools = [np.zeros(0, costs.dtype)]
            for block in np.unique(self.block[self.units.layers == layer]).tolist():
                pool = costs[free & (self.block == block)]
                if self.fewest[block]:  # the dearest of those that may go
                    pool = np.sort(pool)[::-1][: max(spare[block], 0)]
                pools.append(pool)
            reachable += largest_sum(np.concatenate(pools), room)
        return reachable

    def under(self, guards: Guards) -> Rules:
        """The same problem under other guards."""
        excluded = np.flatnonzero(self.excluded).tolist()
        return Rules(self.units, guards, self.budget, self.forced, excluded)

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
            unit, upto = self.units[u], self.forced[:count]  # so that the first fault is named
            faults = {
                "exclude": self.excluded[u],
                "the protected layers": not self.open[u],
                "the kinds that may be pruned": not self.of_kind[u],
                f"the cap of layer {unit.layer}": self.room_after(upto)[unit.layer] < 0,
                f"the fewest {unit.kind} units that a layer keeps": (
                    self.spare_after(upto)[self.block[u]] < 0
                ),
            }
            broken = " and ".join(name for name, holds in faults.items() if holds)
            if broken:
                raise InputError(
                    f"include names {unit}, against {broken} (under {self}). Remove it or loosen "
                    "the guards."
                )

    def __str__(self) -> str:
        guards, excluded = self.guards, int(self.excluded.sum())
        kinds = "" if guards.kinds is None else f", kinds {' and '.join(guards.kinds)}"
        return f"{guards}{kinds}" + (f", {excluded} units excluded" if excluded else "")


class PartialPlan:
    """A plan in the making: the units removed so far, and what their layers may still lose.

    Attributes:
        order: the removed units.
        spent: their cost, C_S, in the budget's costs.
        room: [layers] the cost that each layer may still lose under its cap.
        spare: [blocks] the units that each block may still lose.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules, self.budget = rules, rules.budget
        self.costs: list[float] = rules.budget.costs.tolist()
        self.layers: list[int] = rules.units.layers.tolist()
        self.blocks: list[int] = rules.block.tolist()
        self.order: list[int] = []
        self.spent: float = 0
        self.room, self.spare = rules.room_after(()), rules.spare_after(())

    def fits(self, u: int) -> bool:
        """Whether a unit is admissible, and its layer and block can still lose it."""
        fits = self.costs[u] <= self.room[self.layers[u]] and self.spare[self.blocks[u]] > 0
        return bool(self.rules.admissible[u]) and fits

    def remove(self, u: int) -> None:
        """Take a unit out, whether or not it fits."""
        self.order.append(u)
        self.spent += self.costs[u]
        self.room[self.layers[u]] -= self.costs[u]
        self.spare[self.blocks[u]] -= 1

    def enough(self) -> bool:
        """Whether the budget is met; a budget of NaN is, and fails the last check of the plan."""
        return not self.spent < self.budget.needed


def largest_sum(costs: np.ndarray, room: float) -> float:
    """Return the largest sum of some of the costs that is at most `room`, or else the room.

    It is exact where `reachable_ratio` says so.
    """
    if costs.sum() <= room:
        return float(costs.sum().item())
    # every sum of whole costs is a multiple of their common divisor, so sums are counted in steps
    # of it. Costs of a model are multiples of a width: a layer of Llama-3.1-8B has 416 steps
    step = int(np.gcd.reduce(costs)) if costs.dtype == np.int64 else 0
    if not step or room // step > 1 << 24:  # above this the bits below would take over 2 MB
        return room
    # one big integer holds every reachable sum: bit k is set if some subset sums to k steps
    sums, within = 1, (1 << (int(room) // step + 1)) - 1
    for cost in costs.tolist():
        # shifting adds this cost to every sum so far; the mask drops sums beyond the room
        sums |= (sums << (cost // step)) & within
    return (sums.bit_length() - 1) * step  # the highest set bit is the largest sum
