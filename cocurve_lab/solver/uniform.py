"""The same counts in every layer: plans whose pruned model is one of its stock class.

A stock configuration has one number of heads, of key/value heads and of FFN channels for all
layers. So each layer loses as many units of each width, which ones being free. A plan is searched
over these counts: every choice that reaches the budget and would not with one unit per layer less
is filled by greedy within its quotas, and the one with the least objective wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from ..errors import InputError
from ..models.families import KINDS, Kind
from .greedy import Greedy
from .selection import Selection

Shape = tuple[Kind, int]  # of a unit: its kind and columns
Counts = tuple[int, ...]  # units that go per layer, of each shape


def solve_uniform(greedy: Greedy, strength: float) -> Selection:
    """The plan `solve_greedy(..., uniform=True)` describes: the best of one greedy fill per counts.

    Every layer keeps at least one unit of each kind: no stock class has layers without. Layer caps,
    kinds, include and exclude bind as ever.

    Raises:
        InputError: guards protect layers, layers differ in their units, or own costs differ between
            units of one width.
        InfeasibleError: no such plan reaches the budget.
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
    """The units of each layer by shape, and which counts a plan may take of them.

    Attributes:
        shapes: (kind, columns) of the units of a layer; the same in each.
        of: [M] position of each unit's shape.
        free: [layers, shapes] units that may go; `forced` of them must.
    """

    def __init__(self, greedy: Greedy) -> None:
        units, rules = greedy.curvature.units, greedy.rules
        guards, layers = rules.guards, units.num_layers
        if guards.protect_first or guards.protect_last:
            raise InputError(
                f"protect_first/protect_last are {guards.protect_first}/{guards.protect_last}, but "
                "uniform=True takes the same from every layer. Leave one of the two away."
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
        """Counts that guards, include and exclude allow and that leave each kind one unit."""
        low, high = self.forced.max(axis=0), self.free.min(axis=0)
        room = min(self.greedy.rules.room)
        for counts in product(*(range(a, b + 1) for a, b in zip(low, high, strict=True))):
            if self.removed(counts) <= room * self.layers and self._leaves_each_kind(counts):
                yield counts

    def minimal(self) -> Iterator[Counts]:
        """Allowed counts that reach the budget, and would not with one unit per layer less."""
        needed, low = self.greedy.target, self.forced.max(axis=0)
        for counts in self.allowed():
            removed = self.removed(counts)
            if removed >= needed and not any(
                count > least and removed - cost * self.layers >= needed
                for count, least, cost in zip(counts, low, self.cost, strict=True)
            ):
                yield counts

    def removed(self, counts: Counts) -> float:
        """What a plan of these counts removes, in the budget's costs."""
        per_layer = sum(n * cost for n, cost in zip(counts, self.cost, strict=True))
        return float(per_layer * self.layers)

    def fill(self, counts: Counts, strength: float) -> tuple[list[int], list[float]]:
        """Alg. 2 with a quota per layer and shape: the order, and g_u at each removal."""
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
            if left[layer, shape] == 0:
                half[(units.layers == layer) & (self.of == shape)] = np.inf
        return order, edges

    def _leaves_each_kind(self, counts: Counts) -> bool:
        return all(
            sum(n - c for n, c, shape in zip(self.total, counts, self.shapes, strict=True)
                if shape[0] == kind) > 0
            for kind in KINDS if any(shape[0] == kind for shape in self.shapes)
        )  # fmt: skip

    def _count(self, chosen: np.ndarray) -> np.ndarray:
        """How many chosen units there are [layers, shapes]."""
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
                "do not make layers alike. Start from the dense model, or leave uniform away."
            )
        for number, (kind, width) in enumerate(self.shapes):
            mine = costs[self.of == number]
            if (mine != mine[0]).any():
                raise InputError(
                    f"costs of {kind} units of {width} columns range from {mine.min():g} to "
                    f"{mine.max():g}; uniform=True needs one cost for all of them. Give equal "
                    "costs, or leave uniform away."
                )
