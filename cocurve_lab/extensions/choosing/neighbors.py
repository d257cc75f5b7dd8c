"""Plans near a plan: a few units swapped, with its target, guards and forced units kept.

This file needs numpy only: it proposes plans, and search.py measures them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from ...base.errors import InputError
from ...curvature.matrix import Curvature
from ...solver.greedy import fill
from ...solver.guards import Rules, UnitsLike
from ...solver.selection import Selection
from ...solver.targets import ratio_budget, require_strength

Units = frozenset[int]
# mean place of a guided draw, as a share of the units in order: near the best, but not always it
_NOISE = 0.1


class Neighbors:
    """Draws plans that differ from a given one by a few units.

    A drawn plan reaches the target of `start` and contains no superfluous unit: without any one of
    its units that may be kept, it would miss the target. It keeps the guards and forced units of
    `start`, and its counts per layer if `start` is uniform.

    A draw takes some units out, then adds others until the target is reached. A random draw takes
    both at random. A guided draw prefers to take out what has the largest marginal per cost on the
    surrogate, 1/2 H_uu + lambda g_u (eq. marginal), and to add what has the smallest.

    Attributes:
        start: the plan that says what to keep.
        rules: its guards and budget.

    Args:
        exclude: units that may not enter; a Selection does not record them.
        surrogate: H [M, M] for guided draws; without it all draws are random.
        strength: lambda of the marginals; None takes that of `start`, or 1 where it has none.
        most: the most units to take out in one draw.
        random_share: share of the draws that are random although there is a surrogate.
    """

    def __init__(
        self,
        start: Selection,
        exclude: UnitsLike = (),
        surrogate: Curvature | None = None,
        *,
        strength: float | None = None,
        most: int = 3,
        random_share: float = 0.5,
    ) -> None:
        units, target = start.units, start.target
        self.start, self.most, self.random_share = start, most, random_share
        budget = (
            ratio_budget(units, start.requested_ratio) if target is None else target.budget(units)
        )
        forced = start.pruned[: start.forced]
        self.rules = Rules(units, start.guards, budget, forced, tuple(exclude), portions=True)
        self.costs, self.layers, self.forced = budget.costs, units.layers, frozenset(forced)
        self.half: np.ndarray | None = None  # 1/2 H_uu [M] and lambda H [M, M], for guided draws
        self.edges: np.ndarray | None = None
        if surrogate is not None:
            surrogate.units.require_same(units, mine="the surrogate", theirs="the plan")
            if strength is None:
                strength = start.interaction_strength
            self.half = surrogate.saliency / 2
            self.edges = surrogate.matrix * require_strength(1.0 if strength is None else strength)
        widths = [unit.stop - unit.start for unit in units]
        # units that may replace each other in a plan that fixes the counts of its blocks
        self.slots = list(zip(units.layers.tolist(), units.kinds.tolist(), widths, strict=True))
        self._require_feasible()

    def draw(
        self, pruned: Collection[int], rng: np.random.Generator, *, least: int = 1
    ) -> Units | None:
        """Draw a plan near `pruned`; None where this draw leads to none.

        Args:
            pruned: the units of a plan, this one or one of another target.
            rng: the draws.
            least: the fewest units to take out; with 0 a plan of another target may only be fitted.
        """
        guided = self.edges is not None and rng.random() >= self.random_share
        draw = _Draw(self, set(pruned) | self.forced, rng, guided)
        if self.start.uniform or self.rules.portions is not None:
            return draw.swap(int(rng.integers(1, self.most + 1)))
        return draw.exchange(int(rng.integers(least, self.most + 1)))

    def selection(self, pruned: Collection[int], curvature: Curvature | None = None) -> Selection:
        """Make the plan of these units, with the target and guards of `start`."""
        start = self.start
        plan = Selection.from_pruned(
            start.units,
            (*start.pruned[: start.forced], *sorted(set(pruned) - self.forced)),
            curvature,
            guards=start.guards,
            forced=start.forced,
            target=start.target,
            uniform=start.uniform,
        )
        if start.target is None or start.target.in_parameters:
            return replace(plan, requested_ratio=start.requested_ratio)
        return plan  # its target implies no share of parameters, so the realized one stays

    def room(self, chosen: Collection[int]) -> np.ndarray:
        """Return the cost that each layer may still lose [layers]."""
        return np.array(self.rules.room_after(sorted(chosen)))

    def _require_feasible(self) -> None:
        start, rules = self.start, self.rules
        strangers = [u for u in start.pruned if not rules.admissible[u] and u not in self.forced]
        full = np.flatnonzero(self.room(start.pruned) < 0)
        if start.gains:
            why = f"has {len(start.gains)} gains, which belong to its own pruned set"
            step = "Search from with_gains({}), and solve the gains of the result."
        elif strangers:
            why = f"prunes {start.units[strangers[0]]}, which is not admissible"
            step = "Give a plan that keeps its own guards, and exclude none of its units."
        elif len(full):
            why = f"takes layer {full[0]} above its cap of {rules.cap:.4g} of the layer's cost"
            step = "Give a plan that keeps its own guards."
        elif not rules.budget.reached(start.pruned):
            removed = self.costs[list(start.pruned)].sum().item()
            why = f"removes {removed:,} of the {rules.budget.needed:,.0f} that its target needs"
            step = "Give a plan that reaches its target."
        else:
            return
        raise InputError(f"{start!r} cannot be searched from: it {why}. {step}")


@dataclass
class _Draw:
    """One draw: the units chosen so far, and whether H guides what leaves and enters."""

    around: Neighbors
    chosen: set[int]
    rng: np.random.Generator
    guided: bool

    def exchange(self, count: int) -> Units | None:
        """Take out `count` units, then keep the rules and just reach the target."""
        rules, forced, layers = self.around.rules, self.around.forced, self.around.layers
        before = set(self.chosen)
        for _ in range(count):
            self._remove_one(self.chosen - forced)
        gone = before - self.chosen  # they may not come back
        self.chosen = {u for u in self.chosen if rules.admissible[u]} | forced
        for layer in np.flatnonzero(self._room < 0):  # a plan of a looser cap
            while self._room[layer] < 0:  # forced units alone fit, or Rules would have raised
                self._remove_one({u for u in self.chosen - forced if layers[u] == layer})
        kept = set(self.chosen)

        def proposed() -> int | None:
            fits = rules.admissible & (self.around.costs <= self._room[layers])
            return self._pick(set(np.flatnonzero(fits).tolist()) - self.chosen - gone, 1.0)

        if not fill(
            iter(proposed, None), self.chosen.add, lambda: rules.budget.reached(self.chosen)
        ):
            return None
        # what was just added leaves last: without it the draw would change nothing
        for group in (kept - forced, self.chosen - kept):
            while self._remove_one(self._superfluous() & group) is not None:
                pass
        return frozenset(self.chosen)

    def swap(self, count: int) -> Units:
        """Swap units for others of the same layer, kind and width, which keeps all counts."""
        before, slots = frozenset(self.chosen), self.around.slots
        for _ in range(count):
            out = self._remove_one((self.chosen - self.around.forced) & before)
            if out is None:
                break
            alike = {u for u, slot in enumerate(slots) if slot == slots[out]} - before
            free = {u for u in alike - self.chosen if self.around.rules.admissible[u]}
            unit = self._pick(free, 1.0)
            self.chosen.add(out if unit is None else unit)
        return frozenset(self.chosen)

    @property
    def _room(self) -> np.ndarray:
        return self.around.room(self.chosen)

    def _superfluous(self) -> set[int]:
        """The units without any one of which the target is still reached."""
        budget, costs = self.around.rules.budget, self.around.costs
        over = sum(costs[list(self.chosen)].tolist()) - budget.needed
        bound = over * (1 + 1e-9) + 1e-9 * budget.needed
        small = [u for u in self.chosen if costs[u] <= bound]
        return {u for u in small if budget.reached(self.chosen - {u})}  # the rule itself decides

    def _remove_one(self, among: Collection[int]) -> int | None:
        unit = self._pick(among, -1.0)
        if unit is not None:
            self.chosen.remove(unit)
        return unit

    def _pick(self, among: Collection[int], sign: float) -> int | None:
        """Draw one unit: at random, or guided, near the lowest sign x marginal per cost."""
        if not among:
            return None
        units = np.array(sorted(among))
        if not self.guided:
            return int(self.rng.choice(units))
        edges, half = self.around.edges, self.around.half
        assert edges is not None
        assert half is not None
        inside = np.array(sorted(self.chosen), dtype=np.int64)
        # the sum over S includes the own entry of a unit inside; it belongs to no edge
        sums = edges[np.ix_(units, inside)].sum(axis=1)
        sums -= np.where(np.isin(units, inside), edges[units, units], 0)
        scores = sign * (half[units] + sums) / self.around.costs[units]
        place = int(self.rng.exponential(max(1.0, _NOISE * len(units))))
        return int(units[np.argsort(scores, kind="stable")[min(place, len(units) - 1)]])
