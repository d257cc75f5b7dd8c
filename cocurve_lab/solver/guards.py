"""Guards: where units may be pruned, and the most that any plan can remove under them.

The objective plays no part here: which of the admissible units to remove is greedy.py's question.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from ..base.arguments import as_float, as_int, as_list, require_type
from ..base.errors import InfeasibleError, InputError
from ..models.families import KINDS, Kind
from ..models.units import Unit, UnitSet
from .portions import Depth, Portions
from .targets import Budget, ratio_budget

UnitsLike = Iterable[Unit | str | int]


@dataclass(frozen=True)
class Guards:
    """Anti-collapse guards (Alg. 2): limits on where units may be pruned.

    They never change the objective.

    Attributes:
        layer_cap: kappa, the largest share of a layer's removable cost that may be removed, in
            (0, 1]; None for no cap.
        layer_cap_factor: the cap as a multiple of the ratio (the release uses 1.5). Give at most
            one of the two caps. This one depends on the ratio, so plans of smaller ratios are not
            prefixes of larger ones.
        protect_first, protect_last: number of layers at either end that stay whole.
        kinds: the unit kinds that may be pruned.
        tensor_parallel: a number of devices that share each layer: the KV heads and the FFN
            channels left are multiples of it, or none are left.
        align: FFN channels left are a multiple of it, such as 64 or 128, or none are left.
        depth: "block" removes attention and FFN blocks only as a whole, "layer" only whole layers.

    Raises:
        InputError: both caps given, or a value out of range.
    """

    layer_cap: float | None = None
    layer_cap_factor: float | None = None
    protect_first: int = 0
    protect_last: int = 0
    kinds: tuple[Kind, ...] = KINDS
    tensor_parallel: int = 1
    align: int = 1
    depth: Depth | None = None

    def __post_init__(self) -> None:
        self._convert()
        if self.layer_cap is not None and self.layer_cap_factor is not None:
            raise InputError(
                f"layer_cap is {self.layer_cap} and layer_cap_factor is {self.layer_cap_factor}. "
                "Give only one of them."
            )
        if self.layer_cap is not None and not 0 < self.layer_cap <= 1:
            raise InputError(
                f"layer_cap is {self.layer_cap}, but a share lies in (0, 1]. Give one in that "
                "range, or None for no cap."
            )
        if self.layer_cap_factor is not None and not 0 < self.layer_cap_factor < math.inf:
            raise InputError(
                f"layer_cap_factor is {self.layer_cap_factor}, but it must be above 0 and finite. "
                "Give 1.5, say, or None for no cap."
            )
        kinds = tuple(as_list(self.kinds, "kinds"))
        if not kinds or any(kind not in KINDS for kind in kinds):
            raise InputError(f"kinds is {self.kinds!r}; choose from {KINDS}.")
        object.__setattr__(self, "kinds", kinds)
        if self.depth not in (None, *get_args(Depth)):
            raise InputError(
                f"depth is {self.depth!r}. Choose from {get_args(Depth)}, or None for single units."
            )

    @property
    def machine(self) -> str:
        """The guards of the machine (see portions.py) as arguments; empty where there are none."""
        given = {"tensor_parallel": self.tensor_parallel, "align": self.align, "depth": self.depth}
        return ", ".join(f"{k}={v!r}" for k, v in given.items() if v not in (1, None))

    def to_plain(self) -> dict[str, Any]:
        """The fields for JSON; those of the machine only where they are set."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("tensor_parallel", "align", "depth"):
            if fields[name] in (1, None):
                del fields[name]
        return fields

    def _convert(self) -> None:
        """Take numbers of any type: a half-precision cap would round the room of every layer."""
        for name in ("layer_cap", "layer_cap_factor"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_float(getattr(self, name), name))
        for name in ("protect_first", "protect_last"):
            object.__setattr__(self, name, as_int(getattr(self, name), name))
        for name in ("tensor_parallel", "align"):
            object.__setattr__(self, name, as_int(getattr(self, name), name, 1))

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
    most expensive set of admissible units that fits under the cap. It is solved exactly for up to
    40 units per layer. For more units it is exact if the costs are whole and the cap is at most
    2^24 times their common divisor, which is true of all real models. Otherwise the cap itself is
    used, which is an upper bound.

    Args:
        units: the UnitSet.
        guards: where units may be pruned.
        ratio: the ratio asked for; it matters only through `Guards.layer_cap_factor`.
        include, exclude: as for `solve_greedy`.

    Returns:
        A share of the removable parameters, in [0, 1].

    Raises:
        InputError: as for `solve_greedy`.
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
        portions: how many units each block may lose; None where any number may go.

    Args:
        portions: whether the caller takes units in portions only. Without it, guards of the machine
            are refused, because single units would break them.

    Raises:
        InputError: the ratio is out of range, a unit is unknown, or an included unit breaks a rule.
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
        layers = units.layers
        self.open = (layers >= guards.protect_first) & (
            layers < units.num_layers - guards.protect_last
        )
        self.of_kind = np.isin(units.kinds, guards.kinds)
        self.excluded = np.zeros(len(units), dtype=bool)
        self.excluded[list(units.indices(exclude))] = True
        self.admissible = self.open & self.of_kind & ~self.excluded
        # a unit larger than its layer's room never fits; one of cost 0 brings the target no nearer
        self.admissible &= (costs <= room[layers]) & (costs > 0)
        self.forced = units.indices(include)
        self._require_forced()

    def room_after(self, pruned: Sequence[int]) -> list[int]:
        """Return the cost that each layer may still lose once `pruned` is removed [layers]."""
        room = self.room.copy()
        for u in pruned:
            room[self.units[u].layer] -= self.budget.costs[u].item()
        return room

    def reachable(self) -> tuple[float, bool]:
        """Return the most that any plan can remove, in the budget's costs, and whether it is exact.

        Where it is not exact it is an upper bound; see `reachable_ratio`.
        """
        costs = self.budget.costs
        reachable, exact = costs[list(self.forced)].sum().item(), True
        free = self.admissible.copy()
        free[list(self.forced)] = False
        if self.portions is not None:
            return self.portions.most(self.forced, free, self.room), True
        # more is always allowed (a plan may overshoot its target), so layers do not compete
        for layer, room in enumerate(self.room_after(self.forced)):
            largest, sure = _largest_sum(costs[free & (self.units.layers == layer)], room)
            reachable, exact = reachable + largest, exact and sure
        return reachable, exact

    def remedy(self, ask: str) -> str:
        """Word the remedy for a target that no plan reaches; `ask` is the most there is."""
        factor = self.guards.layer_cap_factor
        if factor is None or self.cap == 1:
            return f"Ask for {ask}, or loosen the guards."
        return (
            f"Loosen the guards: the layer cap is {factor:g} x the ratio, so a smaller ratio has a "
            "tighter one."
        )

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
                why = (
                    f"takes layer {unit.layer} above its cap of {self.cap:.4g} of the layer's cost"
                )
            else:
                continue
            raise InputError(f"include names {unit}, which {why}. Remove it or loosen the guards.")

    def __str__(self) -> str:
        """The guards and exclusions in force, in words."""
        guards, excluded = self.guards, int(self.excluded.sum())
        parts = [
            f"a layer cap of {self.cap:.4g}" if self.cap < 1 else "",
            *(
                f"a protected {end} layer" if count == 1 else f"{count} protected {end} layers"
                for end, count in (("first", guards.protect_first), ("last", guards.protect_last))
                if count
            ),
            f"kinds {', '.join(guards.kinds)}" if len(set(guards.kinds)) == 1 else "",
            f"{excluded} unit{'' if excluded == 1 else 's'} excluded" if excluded else "",
            guards.machine,
        ]
        return "; ".join(part for part in parts if part) or "no guards"


def _largest_sum(costs: np.ndarray, room: float) -> tuple[float, bool]:
    """Largest sum of a subset of `costs` that is at most `room`, and whether it is exact."""
    if costs.sum() <= room:
        return costs.sum().item(), True
    # every sum of whole costs is a multiple of their common divisor, so sums are counted in steps
    # of it. Costs of a model are multiples of a width: a layer of Llama-3.1-8B has 416 steps
    whole = costs.dtype == np.int64
    step = int(np.gcd.reduce(costs)) if whole else 0
    if not whole or room // step > 1 << 24:  # above this the bits below would take over 2 MB
        few = len(costs) <= 40  # each half then has at most 2^20 sums, 8 MB
        return (_largest_of_halves(costs, room) if few else room), few
    room = int(room)
    # one big integer holds every reachable sum: bit k is set if some subset sums to k steps
    sums, within = 1, (1 << room // step + 1) - 1
    for cost in costs.tolist():
        # shifting adds this cost to every sum so far; the mask drops sums beyond the room
        sums |= sums << cost // step & within
    return (sums.bit_length() - 1) * step, True  # the highest set bit is the largest sum


def _largest_of_halves(costs: np.ndarray, room: float) -> float:
    """Largest subset sum within `room`, by meeting in the middle (Horowitz and Sahni 1974)."""
    # listing the sums of all subsets takes 2^n; of two halves, 2 x 2^(n/2)
    halves = []
    for half in (costs[::2], costs[1::2]):
        sums = np.zeros(1, dtype=costs.dtype)
        for cost in half:
            sums = np.concatenate([sums, sums + cost])
        halves.append(np.sort(sums[sums <= room]))
    one, other = halves
    # each sum of one half is paired with the largest sum of the other that still fits; the empty
    # sum 0 is in both halves, so there always is one
    return (one + other[np.searchsorted(other, room - one, "right") - 1]).max().item()
