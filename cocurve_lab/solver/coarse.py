"""Algorithm 2 in coarse steps: portions of a block, or the same counts in every layer.

Guards of the machine (portions.py) let units leave in portions only. Each step removes the portion
of lowest signed marginal per parameter, whose units are chosen as Algorithm 2 would: the cheapest
first, given those that went before.

A uniform plan keeps the model's stock class: a stock configuration has one number of heads, of
key/value heads and of FFN channels for all layers. Each layer must therefore lose the same number
of units of each shape, but not the same units. Greedy fills each choice of these counts that just
reaches the budget (with one unit per layer less it would not). The lowest objective wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from ..base.errors import InputError
from ..models.unit import Kind
from .greedy import Greedy, fill
from .portions import Group, Portions, incomplete
from .selection import Selection

Shape = tuple[Kind, int]  # kind and number of columns of a unit
Counts = tuple[int, ...]  # units of each shape that every layer loses


# Portions -----------------------------------------------------------------------------------------


def solve_in_portions(greedy: Greedy, portions: Portions, strength: float) -> Selection:
    """Solve under guards of the machine; `solve_greedy` calls this on a solve that has not run.

    The plan overshoots by less than one portion.
    """

    def steps() -> Iterator[list[int]]:
        while True:
            counts = portions.counts(greedy.order)
            # included units may leave groups between two stops: these are completed first
            numbers = portions.unfinished(greedy.order) or range(len(counts))
            offers = [_offer(greedy, portions.groups[n], counts[n], strength) for n in numbers]
            found = [offer for offer in offers if offer is not None]
            if not found:
                return
            yield min(found, key=lambda offer: offer[0])[1]  # the first of equal ones

    def remove(chosen: list[int]) -> None:
        for u in chosen:
            greedy.remove(u)

    def enough() -> bool:
        return greedy.enough() and not portions.unfinished(greedy.order)

    greedy.restart()
    if fill(steps(), remove, enough):
        return greedy.selection(strength)
    greedy.rules.reachable()  # raises if the included units make the target unreachable
    if portions.unfinished(greedy.order):
        raise incomplete("of a block")
    greedy.strength, greedy.stalled = strength, True
    raise greedy.infeasible()


def _offer(
    greedy: Greedy, group: Group, count: int, strength: float
) -> tuple[float, list[int]] | None:
    """Return marginal per cost and units, in order, of the next portion of a group.

    `count` units of the group are gone; None if no portion is left or fits.
    """
    size = next((n for n in group.stops if n > count), 0) - count
    ids = group.ids[np.isfinite(greedy.open[group.ids])]
    if not 0 < size <= len(ids):
        return None
    half, g, divisors = greedy.open[ids].copy(), greedy.g[ids].copy(), greedy.divisors[ids]
    chosen: list[int] = []
    marginal = 0.0
    for _ in range(size):
        i = int(((half + strength * g) / divisors).argmin())
        marginal += float(half[i] + strength * g[i])
        half[i] = np.inf
        g += greedy.curvature.matrix[ids[i], ids]
        chosen.append(int(ids[i]))
    if sum(greedy.costs[u] for u in chosen) > greedy.room[group.layer]:
        return None
    return marginal / float(greedy.divisors[chosen].sum()), chosen


# The same counts of some kinds --------------------------------------------------------------------


def solve_alike(greedy: Greedy, kinds: tuple[Kind, ...], strength: float) -> Selection:
    """Solve with as many units of these kinds gone from each layer that has any.

    `solve_greedy` calls this on a solve that has not run. A step removes one such unit from every
    layer, or one unit of another kind. The plan overshoots by less than such a step.
    """
    units = greedy.curvature.units
    tied = {kind: np.flatnonzero(units.kinds == kind) for kind in kinds}
    for kind, ids in tied.items():
        counts = np.bincount(units.layers[ids], minlength=1)
        if len(set(counts[counts > 0].tolist())) > 1:
            raise InputError(
                f"layers have {min(counts[counts > 0])} to {max(counts)} units of {kind}, so equal "
                "counts do not make them alike. Start from the dense model, or give uniform=()."
            )
    single = ~np.isin(units.kinds, kinds)

    def behind(kind: Kind) -> np.ndarray:
        """The units of a kind in the layers that have lost fewest; all where none is ahead."""
        ids = tied[kind]
        gone = np.isin(ids, greedy.order)
        lost = np.bincount(units.layers[ids], gone, minlength=units.num_layers)[units.layers[ids]]
        return ids[lost == lost.min()] if lost.max() > lost.min() else ids

    def uneven() -> list[Kind]:
        return [kind for kind, ids in tied.items() if len(ids) and len(behind(kind)) < len(ids)]

    def steps() -> Iterator[list[int]]:
        while True:
            wanted = uneven()  # included units may leave layers behind: these come first
            offers = [_round(greedy, behind(kind), strength) for kind in wanted or tied]
            score = (greedy.open + strength * greedy.g) / greedy.divisors
            score[~single] = np.inf
            if not wanted and np.isfinite(score.min(initial=np.inf)):
                offers.append((float(score.min()), [int(score.argmin())]))
            found = [offer for offer in offers if offer is not None]
            if not found:
                return
            yield min(found, key=lambda offer: offer[0])[1]  # the first of equal ones

    def remove(chosen: list[int]) -> None:
        for u in chosen:
            greedy.remove(u)

    greedy.restart()
    greedy.strength = strength
    if not fill(steps(), remove, lambda: greedy.enough() and not uneven()):
        greedy.stalled = True
        raise greedy.infeasible()
    return greedy.selection(strength).with_made(uniform=kinds)


def _round(greedy: Greedy, ids: np.ndarray, strength: float) -> tuple[float, list[int]] | None:
    """Return marginal per cost and units, in order, of one unit from each layer of `ids`.

    None if a layer has none left that fits.
    """
    layers, matrix = greedy.curvature.units.layers, greedy.curvature.matrix
    half, g, score = np.full(greedy.size, np.inf), greedy.g.copy(), np.empty(greedy.size)
    half[ids] = greedy.open[ids]
    chosen: list[int] = []
    marginal = 0.0
    for _ in range(len(np.unique(layers[ids]))):
        np.multiply(g, strength, out=score)
        score += half
        score /= greedy.divisors
        u = int(score.argmin())
        if half[u] == np.inf:
            return None
        marginal += float(half[u] + strength * g[u])
        half[slice(*greedy.bounds[layers[u] : layers[u] + 2])] = np.inf
        g += matrix[u]
        chosen.append(u)
    return (marginal / float(greedy.divisors[chosen].sum()), chosen) if chosen else None


# Uniform plans ------------------------------------------------------------------------------------


def solve_uniform(greedy: Greedy, strength: float) -> Selection:
    """Solve for the best uniform plan; `solve_greedy` calls this on a solve that has not run.

    Every layer keeps at least one unit of each kind, because no stock class has layers without.
    Layer caps, kinds, include and exclude apply as in any solve.
    """
    slices = _Slices(greedy)
    plans = []
    for counts in slices.minimal():
        slices.run(counts, strength)
        plans.append(greedy.selection(strength).with_made(uniform=True))
    if not plans:
        most = max((slices.removed(counts) for counts in slices.allowed()), default=0)
        beyond, ask = greedy.budget.bounds(most)
        raise greedy.rules.out_of_reach(
            f"with the same counts in every layer no plan {beyond}. Ask for {ask}, loosen the "
            "guards, or omit uniform.",
            most,
        )
    return plans[np.array([plan.objective for plan in plans]).argmin()]  # the first of equal ones


class _Slices:
    """The units of each layer by shape, and the counts that a plan may take of them.

    Attributes:
        shapes: (kind, columns) of the units of a layer; every layer has the same.
        of: [M] index of each unit's shape in `shapes`.
        total: [shapes] units in a layer.
        free: [layers, shapes] units that may be removed.
        forced: [layers, shapes] units that must be removed.
        cost: [shapes] cost of one unit.
    """

    def __init__(self, greedy: Greedy) -> None:
        units, rules = greedy.curvature.units, greedy.rules
        guards = rules.guards
        if guards.protect_first or guards.protect_last:
            raise InputError(
                f"protect_first/protect_last are {guards.protect_first}/{guards.protect_last}, but "
                "uniform=True takes the same from every layer. Remove the protection or omit "
                "uniform."
            )
        shape_of: list[Shape] = [(unit.kind, unit.stop - unit.start) for unit in units]
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
        self.total, self.free = every[0], self._count(rules.admissible)
        self.forced = self._count(np.array(rules.forced, dtype=np.int64))
        self.cost = [self._cost_of(number) for number in range(len(self.shapes))]

    def allowed(self) -> Iterator[Counts]:
        """Yield the counts that guards, include and exclude allow and that keep each kind."""
        # one count serves all layers: the layer with the most forced units sets the minimum, those
        # with the fewest free units and the least room set the maximum
        low, high = self.forced.max(axis=0), self.free.min(axis=0)
        room = min(self.greedy.rules.room)
        for counts in product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))):
            fits = self.removed(counts) <= room * self.layers and self._leaves_each_kind(counts)
            if fits and self._in_portions(counts):
                yield counts

    def minimal(self) -> Iterator[Counts]:
        """Yield the allowed counts that reach the budget and would not with any one lowered."""
        # larger counts would remove more than was asked for
        needed, low = self.greedy.target, self.forced.max(axis=0)
        for counts in self.allowed():
            lower = (self._lowered(counts, place, least) for place, least in enumerate(low))
            if self.removed(counts) >= needed and not any(
                fewer is not None and self.removed(fewer) >= needed for fewer in lower
            ):
                yield counts

    def removed(self, counts: Counts) -> float:
        """Return the cost that a plan of these counts removes, in the budget's costs."""
        per_layer = sum(n * cost for n, cost in zip(counts, self.cost, strict=True))
        return float(per_layer * self.layers)

    def run(self, counts: Counts, strength: float) -> None:
        """Run Algorithm 2 with a quota per layer and shape."""
        greedy, layers = self.greedy, self.greedy.curvature.units.layers
        left = np.tile(counts, (self.layers, 1))

        def close(u: int) -> None:
            """Count a removed unit, and close its layer and shape once their quota is filled."""
            left[layers[u], self.of[u]] -= 1
            if left[layers[u], self.of[u]] == 0:
                greedy.open[(layers == layers[u]) & (self.of == self.of[u])] = np.inf

        def take(u: int) -> None:
            greedy.remove(u)
            close(u)

        greedy.restart()
        greedy.open[left[layers, self.of] == 0] = np.inf
        for u in greedy.order:
            close(u)
        fill(greedy.cheapest(strength), take, lambda: not left.any())

    def _leaves_each_kind(self, counts: Counts) -> bool:
        pairs = list(zip(self.shapes, self.total - counts, strict=True))
        least = {"expert": self.greedy.curvature.units.least or 1}
        return all(n >= least.get(kind, 0) for (kind, _), n in pairs) and {
            kind for (kind, _), n in pairs if n
        } == {kind for kind, _ in self.shapes}

    def _lowered(self, counts: Counts, place: int, least: int) -> Counts | None:
        """The counts with the next smaller one at `place` that portions allow; None if none."""
        for n in range(counts[place] - 1, least - 1, -1):
            fewer = (*counts[:place], n, *counts[place + 1 :])
            if self._in_portions(fewer):
                return fewer
        return None

    def _in_portions(self, counts: Counts) -> bool:
        """Whether the guards of the machine allow these counts; all layers are alike."""
        portions = self.greedy.rules.portions
        groups = [] if portions is None else [g for g in portions.groups if g.layer == 0]
        return all(
            sum(counts[shape] for shape in set(self.of[group.ids].tolist())) in group.stops
            for group in groups
        )

    def _count(self, chosen: np.ndarray) -> np.ndarray:
        """Count the units of an index array or mask by layer and shape [layers, shapes]."""
        counts = np.zeros((self.layers, len(self.shapes)), dtype=np.int64)
        np.add.at(counts, (self.greedy.curvature.units.layers[chosen], self.of[chosen]), 1)
        return counts

    def _cost_of(self, number: int) -> float:
        """The one cost of all units of a shape."""
        (kind, width), mine = self.shapes[number], self.greedy.budget.costs[self.of == number]
        if (mine != mine[0]).any():
            raise InputError(
                f"costs of {kind} units of {width} columns range from {mine.min():g} to "
                f"{mine.max():g}; uniform=True needs one cost for all of them. Give equal costs, "
                "or omit uniform."
            )
        return mine[0].item()
