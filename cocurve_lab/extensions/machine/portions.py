"""Portions: the numbers of units a block may lose, so that the rest runs fast on its machine.

Tensor parallelism gives each device the same number of KV heads and FFN channels. Matrix kernels
want widths in multiples of 64 or 128. A block removed as a whole costs no time at all. A block may
then lose only some numbers of units, its stops, and units are removed in portions, from one stop to
the next. Each step of Algorithm 2 removes the portion of lowest signed marginal per parameter. Its
units are the cheapest, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from ...base.arguments import as_int, require_type
from ...base.errors import InputError
from ...curvature.matrix import Curvature
from ...models.architectures import UNIT_KINDS
from ...models.units import UnitSet
from ...solver.greedy import Greedy
from ...solver.guards import FREE, Guards, Rules, UnitsLike
from ...solver.selection import Selection
from ...solver.targets import Budget, Target, require_strength
from ...solver.uniform import Counts, EqualCounts, Offer, cheapest_of, solve_together

Depth = Literal["block", "layer"]


@dataclass(frozen=True)
class Machine:
    """What the widths of the pruned model must suit.

    Attributes:
        tensor_parallel: a number of devices that share each layer: the KV heads and the FFN
            channels left are multiples of it, or none are left.
        align: FFN channels left are a multiple of it, such as 64 or 128, or none are left.
        depth: "block" removes attention and FFN blocks only as a whole, "layer" only whole layers.
    """

    tensor_parallel: int = 1
    align: int = 1
    depth: Depth | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "align"):
            object.__setattr__(self, name, as_int(getattr(self, name), name, 1))
        if self.depth not in (None, *get_args(Depth)):
            raise InputError(f"depth is {self.depth!r}. Choose from {get_args(Depth)}, or None.")

    def __str__(self) -> str:
        """The fields that are set, as arguments."""
        given = {name: value for name, value in vars(self).items() if value not in (1, None)}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


@dataclass(frozen=True)
class Group:
    """Units that share their stops: those of a block, or of a layer that goes as a whole.

    Attributes:
        layer, ids: the layer, and the indices of the units.
        stops: the numbers of units that it may lose, ascending, from 0 on.
        costs: what it saves at each stop, in the budget's costs.
    """

    layer: int
    ids: np.ndarray
    stops: tuple[int, ...]
    costs: tuple[float, ...]


class MachineRules(Rules):
    """Guards and a machine, resolved for one UnitSet and budget.

    Attributes:
        groups: the groups of units, by layer.
        of: [M] number of each unit's group.
    """

    def __init__(
        self,
        units: UnitSet,
        guards: Guards,
        ratio: float | Target | Budget,
        include: UnitsLike = (),
        exclude: UnitsLike = (),
        *,
        machine: Machine,
    ) -> None:
        super().__init__(units, guards, ratio, include, exclude)
        self.machine = machine
        if machine.depth is not None and units.limited.any():
            raise InputError(
                f"depth is {machine.depth!r}, but a layer keeps at least {units.least} of its "
                f"{units.kinds[units.limited][0]} units. Leave depth out."
            )
        blocks = [np.flatnonzero(self.block == number) for number in range(len(self.fewest))]
        stops = [self._stops(ids) for ids in blocks]
        self.of = self.block
        if machine.depth == "layer":
            self.of = np.unique(units.layers, return_inverse=True)[1]
            blocks = [np.flatnonzero(units.layers == layer) for layer in np.unique(units.layers)]
            stops = [(0, len(ids)) for ids in blocks]
        self.groups = [self._group(*pair) for pair in zip(blocks, stops, strict=True)]

    def under(self, guards: Guards) -> MachineRules:
        """The same problem under other guards."""
        excluded = np.flatnonzero(self.excluded).tolist()
        return MachineRules(
            self.units, guards, self.budget, self.forced, excluded, machine=self.machine
        )

    def counts(self, chosen: Iterable[int]) -> list[int]:
        """Return how many of the chosen units each group holds."""
        return np.bincount(self.of[list(chosen)], minlength=len(self.groups)).tolist()

    def unfinished(self, chosen: Iterable[int]) -> list[int]:
        """Return the numbers of the groups that the chosen units leave between two stops."""
        pairs = zip(self.counts(chosen), self.groups, strict=True)
        return [number for number, (n, group) in enumerate(pairs) if n not in group.stops]

    def reachable(self) -> float:
        """Return the most that any plan can remove, in the budget's costs; it is exact."""
        free = self.admissible.copy()
        free[list(self.forced)] = False
        options: dict[int, list[list[float]]] = {}
        for group, least in zip(self.groups, self.counts(self.forced), strict=True):
            most = least + int(free[group.ids].sum())
            pairs = zip(group.stops, group.costs, strict=True)
            found = [cost for stop, cost in pairs if least <= stop <= most]
            options.setdefault(group.layer, []).append(found)
        total = 0.0
        for layer, of_groups in options.items():
            sums = [cost for cost in map(sum, product(*of_groups)) if cost <= self.room[layer]]
            if not sums:
                raise incomplete(f"of layer {layer}")
            total += max(sums)
        return total

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.machine}"

    def _stops(self, ids: np.ndarray) -> tuple[int, ...]:
        """The numbers of units that a block may lose so that a multiple is left, or nothing."""
        units = [self.units[u] for u in ids.tolist()]
        kind, layer = UNIT_KINDS[units[0].kind], units[0].layer
        multiple = self.machine.tensor_parallel
        widths, noun = [1] * len(units), f"units of {kind.label}"
        if kind.grouped:
            multiple = math.lcm(multiple, self.machine.align)
            widths, noun = [unit.stop - unit.start for unit in units], f"{kind.label} channels"
        elif len(units) == 1:  # one KV head, of which engines keep a copy per device, or all heads
            multiple = 1
        if sum(widths) % multiple:
            raise InputError(
                f"layer {layer} has {sum(widths)} {noun}, not a multiple of {multiple}, before "
                "anything is removed. Lower tensor_parallel or align."
            )
        if self.machine.depth is not None:
            return 0, len(units)
        most = len(units) - int(self.fewest[self.block[ids[0]]])
        if all(width % multiple == 0 for width in widths):
            return tuple(range(most + 1))
        if len(set(widths)) > 1:
            raise InputError(
                f"{kind.label} units of layer {layer} have {min(widths)} to {max(widths)} "
                f"channels, not one multiple of {multiple}. Choose ffn_groups that divide the "
                "width."
            )
        step = multiple // math.gcd(multiple, widths[0])
        return tuple(range(0, most + 1, step))

    def _group(self, ids: np.ndarray, stops: tuple[int, ...]) -> Group:
        mine, first = self.budget.costs[ids], self.units[int(ids[0])]
        if len(stops) > 2 and (mine != mine[0]).any():
            raise InputError(
                f"costs of units like {first} range from {mine.min():g} to {mine.max():g}; "
                "portions need one cost in each block. Give equal costs."
            )
        costs = [n * mine[0].item() for n in stops]
        if stops[-1] == len(ids):  # of two stops this is the second, so costs may differ there
            costs[-1] = mine.sum().item()
        return Group(first.layer, ids, stops, tuple(costs))


def incomplete(where: str) -> InputError:
    """Make the error for included units whose portion cannot be completed."""
    return InputError(
        f"include names units {where} whose portions cannot be completed under the guards. Include "
        "all units of a portion, or loosen the guards."
    )


# Algorithm 2 in portions --------------------------------------------------------------------------


def solve_aligned(
    curvature: Curvature,
    ratio: float | Target,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
    *,
    machine: Machine,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
    uniform: bool = False,
) -> Selection:
    """Solve as `solve_greedy` does, so that the widths left suit a machine.

    Args:
        curvature, ratio, interaction_strength, guards, include, exclude: as for `solve_greedy`. The
            ratio may be exceeded by up to a portion. Of included units, the portion goes with them.
        machine: what the widths must suit.
        uniform: remove the same counts from each layer, too.

    Returns:
        The plan. `made.rule` names the machine; `refine` and `search_plan` keep its counts.

    Example:
        >>> import numpy as np
        >>> from cocurve_lab import Curvature, Machine, Unit, UnitSet, solve_aligned
        >>> units = UnitSet(tuple(Unit("ffn", 0, i, 8 * i, 8 * i + 8, 10) for i in range(4)))
        >>> H = Curvature(np.diag([1.0, 1.1, 1.5, 9.0]), units)
        >>> solve_aligned(H, 0.25, machine=Machine(align=16)).pruned
        (0, 1)
    """
    require_type(curvature, Curvature, "curvature")
    require_type(machine, Machine, "machine")
    strength, units = require_strength(interaction_strength), curvature.units
    rules = MachineRules(units, guards, ratio, include, exclude, machine=machine)
    greedy = Greedy(curvature, rules)
    if uniform:
        plan = _AlignedCounts(greedy, rules).solve(strength)
    else:
        plan = _solve_in_portions(greedy, rules, strength)
    return plan.with_made(rule=f"aligned to {machine}")


def _solve_in_portions(greedy: Greedy, rules: MachineRules, strength: float) -> Selection:
    def unfinished() -> list[int]:
        return rules.unfinished(greedy.order)

    def offers() -> Iterator[Offer | None]:
        counts = rules.counts(greedy.order)
        # included units may leave groups between two stops: these are completed first
        for number in unfinished() or range(len(counts)):
            yield _next_portion(greedy, rules.groups[number], counts[number])

    if solve_together(greedy, strength, offers, unfinished):
        return greedy.selection()
    rules.reachable()  # raises if the included units make the target unreachable
    if unfinished():
        raise incomplete("of a block")
    raise greedy.infeasible()


def _next_portion(greedy: Greedy, group: Group, count: int) -> Offer | None:
    """The next portion of a group that lost `count` units; None if none is left or fits."""
    size = next((stop for stop in group.stops if stop > count), count) - count
    found = cheapest_of(greedy, group.ids, size, group.ids) if size else None
    if found is None or sum(greedy.costs[u] for u in found[1]) > greedy.room[group.layer]:
        return None
    return found


class _AlignedCounts(EqualCounts):
    """The counts by shape that suit the machine, too; all layers are alike."""

    def __init__(self, greedy: Greedy, rules: MachineRules) -> None:
        super().__init__(greedy)
        first = [group for group in rules.groups if group.layer == 0]
        self.stops = [(set(self.of[group.ids].tolist()), group.stops) for group in first]

    def fit(self, counts: Counts) -> bool:
        """Whether each group of a layer would come to one of its stops."""
        return all(sum(counts[shape] for shape in shapes) in stops for shapes, stops in self.stops)
