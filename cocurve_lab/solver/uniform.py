"""Algorithm 2 with the same counts in every layer, so that layers stay alike.

A uniform plan keeps the model's stock class: a stock configuration has one number of heads, of
key/value heads and of FFN channels for all layers. Each layer must therefore lose the same number
of units of each shape, but not the same units. Greedy fills each choice of these counts that just
reaches the budget (with one unit per layer less it would not). The lowest objective wins.

Where only some kinds must stay even, a step of greedy removes one unit of such a kind from every
layer, or one unit of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import numpy as np

from ..base.errors import InputError
from ..models.unit import Kind
from .greedy import Greedy, fill
from .selection import Selection

Counts = tuple[int, ...]  # units of each shape that every layer loses
Offer = tuple[float, list[int]]  # units that go together, in order, and their marginal per cost


# Several units at once ----------------------------------------------------------------------------


def cheapest_of(greedy: Greedy, ids: np.ndarray, count: int, apart: np.ndarray) -> Offer | None:
    """Choose `count` of the units `ids` as Algorithm 2 would, each given those before it.

    No two of them have the same number in `apart` [ids]. None if too few are admissible.
    """
    half, g, costs = greedy.open[ids].copy(), greedy.g[ids].copy(), greedy.divisors[ids]
    chosen: list[int] = []
    marginal = 0.0
    for _ in range(count):
        i = int(((half + greedy.strength * g) / costs).argmin())
        if half[i] == np.inf:
            return None
        marginal += float(half[i] + greedy.strength * g[i])
        half[apart == apart[i]] = np.inf
        g += greedy.curvature.matrix[ids[i], ids]
        chosen.append(int(ids[i]))
    return marginal / float(greedy.divisors[chosen].sum()), chosen


def solve_together(
    greedy: Greedy,
    strength: float,
    offers: Callable[[], Iterable[Offer | None]],
    unfinished: Callable[[], object],
) -> bool:
    """Run Algorithm 2 in steps of several units; return whether it reached the target.

    Each step takes the offer of lowest marginal per cost, the first of equal ones. It does not end
    while something is `unfinished`, such as layers that included units left uneven.
    """

    def steps() -> Iterator[list[int]]:
        while found := [offer for offer in offers() if offer is not None]:
            yield min(found, key=lambda offer: offer[0])[1]

    def remove(chosen: list[int]) -> None:
        for u in chosen:
            greedy.remove(u)

    greedy.restart(strength)
    greedy.stalled = not fill(steps(), remove, lambda: greedy.enough() and not unfinished())
    return not greedy.stalled


# The same counts of some kinds --------------------------------------------------------------------


def solve_alike(greedy: Greedy, kinds: tuple[Kind, ...], strength: float) -> Selection:
    """Solve with as many units of these kinds gone from each layer that has any.

    The plan overshoots by less than a step: one such unit from every layer.
    """
    units = greedy.rules.units
    tied = {kind: np.flatnonzero(units.kinds == kind) for kind in kinds}
    for kind, ids in tied.items():
        counts = np.unique(units.layers[ids], return_counts=True)[1]
        if counts.min() < counts.max():
            raise InputError(
                f"layers have {counts.min()} to {counts.max()} units of {kind}, so equal counts do "
                "not make them alike. Start from the dense model, or give uniform=()."
            )
    single = np.flatnonzero(~np.isin(units.kinds, kinds))

    def behind(ids: np.ndarray) -> np.ndarray:
        """The units of a kind in the layers that have lost fewest."""
        lost = np.bincount(units.layers[ids], np.isin(ids, greedy.order))[units.layers[ids]]
        return ids[lost == lost.min()]

    def uneven() -> list[np.ndarray]:
        """Of the kinds whose layers differ, the units that go next."""
        return [late for ids in tied.values() if len(late := behind(ids)) < len(ids)]

    def offers() -> Iterator[Offer | None]:
        late = uneven()  # included units may leave layers behind: these come first
        for ids in late or tied.values():
            layers = units.layers[ids]
            yield cheapest_of(greedy, ids, len(np.unique(layers)), layers)
        if not late and len(single):
            yield cheapest_of(greedy, single, 1, single)

    if not solve_together(greedy, strength, offers, uneven):
        raise greedy.infeasible()
    return greedy.selection().with_made(uniform=kinds)


# The same counts of all kinds ---------------------------------------------------------------------


class EqualCounts:
    """The counts of units by shape that every layer may lose; a shape is a kind and a width.

    Every layer keeps at least one unit of each kind, because no stock class has layers without.
    Layer caps, kinds, include and exclude apply as in any solve.

    Attributes:
        shapes: (kind, columns) of the units of a layer; every layer has the same.
        of: [M] index of each unit's shape in `shapes`.
        total: [shapes] units in a layer.
        low, high: [shapes] fewest and most units that a layer may lose.
        least: the fewest units that a layer keeps of each kind.
        cost: [shapes] cost of one unit.
    """

    def __init__(self, greedy: Greedy) -> None:
        units, rules = greedy.rules.units, greedy.rules
        guards = rules.guards
        if guards.protect_first or guards.protect_last:
            raise InputError(
                f"protect_first/protect_last are {guards.protect_first}/{guards.protect_last}, but "
                "a uniform plan takes the same from every layer. Remove the protection or omit "
                "uniform."
            )
        shape_of = [(unit.kind, unit.stop - unit.start) for unit in units]
        self.greedy, self.layers = greedy, units.num_layers
        self.shapes = sorted(set(shape_of))
        self.of = np.array([self.shapes.index(shape) for shape in shape_of])
        every = self._count(np.arange(len(units)))
        odd = np.flatnonzero((every != every[0]).any(axis=1))
        if len(odd):
            raise InputError(
                f"layer {odd[0]} has other units than layer 0 (a pruned model?), so the same "
                "counts do not make layers alike. Start from the dense model, or omit uniform."
            )
        self.total = every[0]
        # the layer with the most forced units sets the least, that with fewest free ones the most
        self.low = self._count(np.array(rules.forced, dtype=np.int64)).max(axis=0)
        self.high = self._count(np.flatnonzero(rules.admissible)).min(axis=0)
        fewest = np.maximum(rules.fewest, 1)[rules.block].tolist()
        self.least = dict(zip(units.kinds.tolist(), fewest, strict=True))
        self.cost = [self._cost_of(number) for number in range(len(self.shapes))]

    def solve(self, strength: float) -> Selection:
        """Return the plan of lowest objective, the first of equal ones."""
        plans = []
        for counts in self.minimal():
            self.run(counts, strength)
            plans.append(self.greedy.selection().with_made(uniform=True))
        if plans:
            return plans[np.array([plan.objective for plan in plans]).argmin()]
        most = max((self.removed(counts) for counts in self.allowed()), default=0)
        raise self.greedy.rules.out_of_reach(
            "the most that a plan with the same counts in every layer reaches is "
            f"{self.greedy.budget.shown(most)}. Ask for less, loosen the guards, or omit uniform.",
            most,
        )

    def allowed(self) -> Iterator[Counts]:
        """Yield the counts that guards, include and exclude allow and that keep each kind."""
        room = min(self.greedy.rules.room) * self.layers
        ranges = [range(low, high + 1) for low, high in zip(self.low, self.high, strict=True)]
        for counts in product(*ranges):
            if self.removed(counts) <= room and self._keeps_each_kind(counts) and self.fit(counts):
                yield counts

    def minimal(self) -> list[Counts]:
        """Return the allowed counts that reach the budget, without those that exceed another."""
        needed = self.greedy.budget.needed  # larger counts would remove more than was asked for
        found: list[Counts] = []
        for counts in self.allowed():  # in rising order, so those below come first
            below = any(np.less_equal(fewer, counts).all() for fewer in found)
            if self.removed(counts) >= needed and not below:
                found.append(counts)
        return found

    def fit(self, counts: Counts) -> bool:
        """Whether layers may lose these counts, apart from guards; here any."""
        return True

    def removed(self, counts: Counts) -> float:
        """Return the cost that a plan of these counts removes, in the budget's costs."""
        per_layer = sum(n * cost for n, cost in zip(counts, self.cost, strict=True))
        return float(per_layer * self.layers)

    def run(self, counts: Counts, strength: float) -> None:
        """Run Algorithm 2 with a quota per layer and shape."""
        greedy, layers = self.greedy, self.greedy.rules.units.layers
        greedy.restart(strength)
        left = np.tile(counts, (self.layers, 1)) - self._count(np.array(greedy.order, np.int64))
        greedy.open[left[layers, self.of] == 0] = np.inf
        for u in greedy.cheapest():  # it ends where all quotas are filled
            greedy.remove(u)
            left[layers[u], self.of[u]] -= 1
            greedy.open[left[layers, self.of] == 0] = np.inf

    def _keeps_each_kind(self, counts: Counts) -> bool:
        left: dict[Kind, int] = {}
        for (kind, _), kept in zip(self.shapes, self.total - counts, strict=True):
            left[kind] = left.get(kind, 0) + kept
        return all(kept >= self.least[kind] for kind, kept in left.items())

    def _count(self, chosen: np.ndarray) -> np.ndarray:
        """Count the units of an index array by layer and shape [layers, shapes]."""
        counts = np.zeros((self.layers, len(self.shapes)), dtype=np.int64)
        np.add.at(counts, (self.greedy.rules.units.layers[chosen], self.of[chosen]), 1)
        return counts

    def _cost_of(self, number: int) -> float:
        """The one cost of all units of a shape."""
        (kind, width), mine = self.shapes[number], self.greedy.budget.costs[self.of == number]
        if (mine != mine[0]).any():
            raise InputError(
                f"costs of {kind} units of {width} columns range from {mine.min():g} to "
                f"{mine.max():g}; a uniform plan needs one cost for all of them. Give equal costs, "
                "or omit uniform."
            )
        return mine[0].item()
