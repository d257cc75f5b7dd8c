"""Plans near a plan: a few units swapped, with its target, guards and forced units kept.

This file needs numpy only: it proposes plans, and search.py measures them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

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

    A drawn plan reaches the target of `start` and holds no superfluous unit: without any one of its
    units that may be kept, it would miss the target. It keeps the guards and forced units of
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
        if surrogate is not None:
            surrogate.units.require_same(units, mine="the surrogate", theirs="the plan")
        self.start, self.most, self.random_share = start, most, random_share
        budget = ratio_budget(units, start.requested_ratio) if target is None else None
        if target is not None:
            budget = target.budget(units)
        assert budget is not None
        forced = start.pruned[: start.forced]
        self.rules = Rules(units, start.guards, budget, forced, tuple(exclude), portions=True)
        self.costs, self.layers = budget.costs, units.layers
        self.forced = frozenset(forced)
        self._edges = None if surrogate is None else self._weighted(surrogate, strength)
        widths = [unit.stop - unit.start for unit in units]
        # units that may stand in for each other in a plan that fixes the counts of its blocks
        self._slots = list(zip(units.layers.tolist(), units.kinds.tolist(), widths, strict=True))
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
        guided = self._edges is not None and rng.random() >= self.random_share
        chosen, gone = set(pruned) | self.forced, set[int]()
        if self.start.uniform or self.rules.portions is not None:
            return self._swap_slots(chosen, rng, guided)
        for _ in range(int(rng.integers(least, self.most + 1))):
            unit = self._leaving(chosen, chosen - self.forced, rng, guided)
            if unit is None:
                break
            chosen.remove(unit)
            gone.add(unit)
        return self._fit(chosen, gone, rng, guided)

    def selection(self, pruned: Collection[int], curvature: Curvature | None = None) -> Selection:
        """Make the plan of these units, with the target and guards of `start`."""
        forced = self.start.pruned[: self.start.forced]
        plan = Selection.from_pruned(
            self.start.units,
            (*forced, *sorted(set(pruned) - self.forced)),
            curvature,
            guards=self.start.guards,
            forced=self.start.forced,
            target=self.start.target,
            uniform=self.start.uniform,
        )
        target = self.start.target
        if target is None or target.in_parameters:
            return replace(plan, requested_ratio=self.start.requested_ratio)
        return plan  # its target implies no share of parameters, so the realized one stands

    # Draws ---------------------------------------------------------------------------------------

    def _fit(
        self, chosen: set[int], gone: set[int], rng: np.random.Generator, guided: bool
    ) -> Units | None:
        """Make a set keep the rules and just reach the target; `gone` may not come back."""
        costs, budget = self.costs, self.rules.budget
        chosen = {u for u in chosen if self.rules.admissible[u]} | self.forced
        for layer in np.flatnonzero(self._room(chosen) < 0):  # a plan of a looser cap
            while self._room(chosen)[layer] < 0:
                inside = {u for u in chosen - self.forced if self.layers[u] == layer}
                unit = self._leaving(chosen, inside, rng, guided)
                assert unit is not None  # forced units alone fit, or Rules would have raised
                chosen.remove(unit)
        added = set[int]()

        def proposed() -> int | None:
            fits = self.rules.admissible & (costs <= self._room(chosen)[self.layers])
            free = set(np.flatnonzero(fits).tolist()) - chosen - gone
            return self._entering(chosen, free, rng, guided)

        def take(unit: int) -> None:
            chosen.add(unit)
            added.add(unit)

        if not fill(iter(proposed, None), take, lambda: budget.reached(chosen)):
            return None
        # what was just added goes last: without it the draw would change nothing
        for group in (chosen - self.forced - added, added):
            while True:
                spare = self._superfluous(chosen) & group
                unit = self._leaving(chosen, spare, rng, guided)
                if unit is None:
                    break
                chosen.remove(unit)
        return frozenset(chosen)

    def _superfluous(self, chosen: set[int]) -> set[int]:
        """The units without any one of which the target is still reached."""
        budget = self.rules.budget
        over = sum(self.costs[list(chosen)].tolist()) - budget.needed
        small = [u for u in chosen if self.costs[u] <= over * (1 + 1e-9) + 1e-9 * budget.needed]
        return {u for u in small if budget.reached(chosen - {u})}  # the rule itself decides

    def _swap_slots(self, chosen: set[int], rng: np.random.Generator, guided: bool) -> Units | None:
        """Swap units for others of the same layer, kind and width, which keeps all counts."""
        before = frozenset(chosen)
        for _ in range(int(rng.integers(1, self.most + 1))):
            out = self._leaving(chosen, (chosen - self.forced) & before, rng, guided)
            if out is None:
                break
            alike = {u for u, slot in enumerate(self._slots) if slot == self._slots[out]}
            free = {u for u in alike - before - chosen if self.rules.admissible[u]}
            unit = self._entering(chosen - {out}, free, rng, guided)
            if unit is not None:
                chosen = chosen - {out} | {unit}
        return frozenset(chosen)

    def _leaving(
        self, chosen: set[int], among: Collection[int], rng: np.random.Generator, guided: bool
    ) -> int | None:
        return self._pick(chosen, among, rng, -1.0 if guided else 0.0)

    def _entering(
        self, chosen: set[int], among: Collection[int], rng: np.random.Generator, guided: bool
    ) -> int | None:
        return self._pick(chosen, among, rng, 1.0 if guided else 0.0)

    def _pick(
        self, chosen: set[int], among: Collection[int], rng: np.random.Generator, sign: float
    ) -> int | None:
        """Draw one unit: at random (sign 0), or near the lowest sign x marginal per cost."""
        if not among:
            return None
        units = np.array(sorted(among))
        if not sign:
            return int(rng.choice(units))
        assert self._edges is not None
        inside = np.array(sorted(chosen), dtype=np.int64)
        # the sum over S holds the own entry of a unit inside; it belongs to no edge
        edges = self._edges[np.ix_(units, inside)].sum(axis=1)
        own = self._edges[units, units]
        edges -= np.where(np.isin(units, inside), own, 0)
        scores = sign * (self._half[units] + edges) / self.costs[units]
        place = int(rng.exponential(max(1.0, _NOISE * len(units))))
        return int(units[np.argsort(scores, kind="stable")[min(place, len(units) - 1)]])

    def _weighted(self, surrogate: Curvature, strength: float | None) -> np.ndarray:
        if strength is None:
            strength = self.start.interaction_strength
        self._half = surrogate.saliency / 2
        return surrogate.matrix * require_strength(1.0 if strength is None else strength)

    def _room(self, chosen: Collection[int]) -> np.ndarray:
        return np.array(self.rules.room_after(sorted(chosen)))

    def _require_feasible(self) -> None:
        start, rules = self.start, self.rules
        strangers = [u for u in start.pruned if not rules.admissible[u] and u not in self.forced]
        full = np.flatnonzero(self._room(start.pruned) < 0)
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
