"""Uniform plans: every layer loses the same number of units, so the model keeps its stock class.

A stock configuration has one number of heads, of key/value heads and of FFN channels for all
layers. Each layer must therefore lose the same number of units of each shape, but not the same
units. The search runs over these counts. Greedy fills each choice of counts that just reaches the
budget (with one unit per layer less it would not), and the plan of lowest objective wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from ..base.errors import InputError
from ..models.families import KINDS, Kind
from .greedy import Greedy
from .selection import Selection

Shape = tuple[Kind, int]  # kind and number of columns of a unit
Counts = tuple[int, ...]  # units of each shape that every layer loses


def solve_uniform(greedy: Greedy, strength: float) -> Selection:
    """Solve for the best uniform plan; `solve_greedy(..., uniform=True)` calls this.

    Every layer keeps at least one unit of each kind, because no stock class has layers without.
    Layer caps, kinds, include and exclude apply as in any solve.

    Args:
        greedy: a solve that has not run: its curvature, budget and rules.
        strength: lambda >= 0.

    Raises:
        InputError: guards protect layers, layers differ in their units, or custom costs differ
            between units of one shape.
        InfeasibleError: no uniform plan reaches the budget.
    """
    slices = _Slices(greedy)
    choices = list(slices.minimal())
    if not choices:
        most = max((slices.removed(counts) for counts in slices.allowed()), default=0)
        beyond, ask = greedy.budget.bounds(most)
        raise greedy.rules.out_of_reach(
            f"with the same counts in every layer no plan {beyond}. {greedy.rules.remedy(ask)} Or "
            "omit uniform.",
            most,
        )
    plans = []
    for counts in choices:
        greedy.order, greedy.edges = slices.fill(counts, strength)
        plans.append(replace(greedy.selection(strength), uniform=True))
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
        guards, layers = rules.guards, units.num_layers
        if guards.protect_first or guards.protect_last:
            raise InputError(
                f"protect_first/protect_last are {guards.protect_first}/{guards.protect_last}, but "
                "uniform=True takes the same from every layer. Remove the protection or omit "
                "uniform."
            )
        shape_of: list[Shape] = [(unit.kind, unit.stop - unit.start) for unit in units]
        self.greedy, self.layers = greedy, layers
        self.shapes = sorted(set(shape_of))
        self.of = np.array([self.shapes.index(shape) for shape in shape_of])
        self._require_alike(shape_of)
        self.total = self._count(np.ones(len(units), dtype=bool))[0]
        self.free = self._count(rules.admissible)
        forced = np.zeros(len(units), dtype=bool)
        forced[list(rules.forced)] = True
        self.forced = self._count(forced)
        first = [self.of.tolist().index(shape) for shape in range(len(self.shapes))]
        self.cost = greedy.budget.costs[first].tolist()

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
            removed = self.removed(counts)
            lower = (self._lowered(counts, place, least) for place, least in enumerate(low))
            if removed >= needed and not any(
                fewer is not None and self.removed(fewer) >= needed for fewer in lower
            ):
                yield counts

    def removed(self, counts: Counts) -> float:
        """Return the cost that a plan of these counts removes, in the budget's costs."""
        per_layer = sum(n * cost for n, cost in zip(counts, self.cost, strict=True))
        return float(per_layer * self.layers)

    def fill(self, counts: Counts, strength: float) -> tuple[list[int], list[float]]:
        """Run Alg. 2 with a quota per layer and shape: the order, and g_u at each removal."""
        greedy, units = self.greedy, self.greedy.curvature.units
        left = np.tile(counts, (self.layers, 1))
        half = np.where(greedy.rules.admissible, greedy.half, np.inf)  # +inf: never the argmin
        half[left[units.layers, self.of] == 0] = np.inf
        g, order, edges = np.zeros(len(units)), [], []
        for step in range(int(left.sum())):
            forced = step < len(greedy.rules.forced)
            scores = (strength * g + half) / greedy.costs
            u = greedy.rules.forced[step] if forced else int(scores.argmin())
            layer, shape = units.layers[u], self.of[u]
            order.append(u)
            edges.append(float(g[u]))
            g += greedy.curvature.matrix[u]
            half[u] = np.inf
            left[layer, shape] -= 1
            if left[layer, shape] == 0:  # the quota of this layer and shape is filled
                half[(units.layers == layer) & (self.of == shape)] = np.inf
        return order, edges

    def _leaves_each_kind(self, counts: Counts) -> bool:
        return all(
            sum(n - c for n, c, shape in zip(self.total, counts, self.shapes, strict=True)
                if shape[0] == kind) > 0
            for kind in KINDS if any(shape[0] == kind for shape in self.shapes)
        )  # fmt: skip

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
        if portions is None:
            return True
        for group in portions.of_layer(0):
            shapes = set(self.of[group.ids].tolist())
            if sum(counts[shape] for shape in shapes) not in group.stops:
                return False
        return True

    def _count(self, chosen: np.ndarray) -> np.ndarray:
        """Count the chosen units of each layer and shape [layers, shapes]."""
        counts = np.zeros((self.layers, len(self.shapes)), dtype=np.int64)
        np.add.at(counts, (self.greedy.curvature.units.layers[chosen], self.of[chosen]), 1)
        return counts

    def _require_alike(self, shape_of: list[Shape]) -> None:
        units, costs = self.greedy.curvature.units, self.greedy.budget.costs
        layers = units.layers.tolist()
        found = [Counter(s for s, at in zip(shape_of, layers, strict=True) if at == layer)
                 for layer in range(self.layers)]  # fmt: skip
        odd = next((layer for layer in range(self.layers) if found[layer] != found[0]), None)
        if odd is not None:
            raise InputError(
                f"layer {odd} has other units than layer 0 (a pruned model?), so the same counts "
                "do not make layers alike. Start from the dense model, or omit uniform."
            )
        for number, (kind, width) in enumerate(self.shapes):
            mine = costs[self.of == number]
            if (mine != mine[0]).any():
                raise InputError(
                    f"costs of {kind} units of {width} columns range from {mine.min():g} to "
                    f"{mine.max():g}; uniform=True needs one cost for all of them. Give equal "
                    "costs, or omit uniform."
                )
