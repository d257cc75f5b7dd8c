"""Plans near a plan: a few units or a whole part swapped; target, guards and forced units stay.

This file needs numpy only: it proposes plans, and search.py measures them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import InputError
from ...curvature.matrix import Curvature
from ...solver.greedy import fill
from ...solver.guards import Rules, UnitsLike
from ...solver.selection import Selection
from ...solver.targets import as_budget

if TYPE_CHECKING:
    from ..interactions.measured import Interactions

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
    surrogate, 1/2 H_uu + lambda g_u (eq. marginal), and to add what has the smallest. A draw at the
    scale of parts moves whole blocks or layers, guided by their measured interactions; lambda is
    drawn from [0, 1].

    Attributes:
        start: the plan that says what to keep.
        rules: its guards and budget.
        unit_scale, part_scales: what a draw may move.

    Args:
        exclude: units that may not enter; a Selection does not record them.
        surrogate: H [M, M] for guided draws; without it all draws are random.
        most: the most units to take out in one draw.
        random_share: share of the draws that are random although there is a surrogate.
        scales: measured parts that draws may move as a whole, each scale as often as units.
        seen: the record of the text that drawn plans are chosen on.
    """

    def __init__(
        self,
        start: Selection,
        exclude: UnitsLike = (),
        surrogate: Curvature | None = None,
        *,
        most: int = 3,
        random_share: float = 0.5,
        scales: Sequence[Interactions] = (),
        seen: str | None = None,
    ) -> None:
        units, target = start.units, start.made.target
        self.start, self.most, self.random_share, self.seen = start, most, random_share, seen
        budget = as_budget(units, target or start.requested_ratio)
        forced = start.pruned[: start.forced]
        self.rules = Rules(units, start.guards, budget, forced, tuple(exclude))
        self.costs, self.layers, self.forced = budget.costs, units.layers, frozenset(forced)
        self.unit_scale = _Scale(tuple(frozenset([u]) for u in range(len(units))), self.costs)
        if surrogate is not None:
            surrogate.units.require_same(units, mine="the surrogate", theirs="the plan")
            strength = start.interaction_strength  # lambda of the marginals
            edges = surrogate.matrix * (1.0 if strength is None else strength)
            self.unit_scale = replace(self.unit_scale, half=surrogate.saliency / 2, edges=edges)
        self.part_scales = []
        for found in scales:
            found.units.require_same(units, mine="a scale", theirs="the plan")
            self.part_scales.append(_Scale.of(found, self.costs))
        widths = [unit.stop - unit.start for unit in units]
        # units that may replace each other in a plan that fixes the counts of its blocks
        self.slots = list(zip(units.layers.tolist(), units.kinds.tolist(), widths, strict=True))
        self._require_feasible()

    def draw(self, pruned: Collection[int], rng: np.random.Generator) -> Units | None:
        """Draw a plan near `pruned`, `start` or one drawn before; None where there is none."""
        guided = self.unit_scale.half is not None and rng.random() >= self.random_share
        draw = _Draw(self, set(pruned), rng, guided)
        if self.start.counted:
            return draw.swap(int(rng.integers(1, self.most + 1)))
        if self.part_scales and (at := int(rng.integers(len(self.part_scales) + 1))):
            draw.guided, scale = rng.random() >= self.random_share, self.part_scales[at - 1]
            assert scale.edges is not None
            return draw.exchange(1, replace(scale, edges=scale.edges * rng.random()))
        return draw.exchange(int(rng.integers(1, self.most + 1)), self.unit_scale)

    def selection(self, pruned: Collection[int], curvature: Curvature | None = None) -> Selection:
        """Make the plan of these units, with the target and guards of `start`."""
        start = self.start
        own = {} if curvature is not None else {"origin": start.origin}
        plan = Selection.from_pruned(
            start.units,
            (*start.pruned[: start.forced], *sorted(set(pruned) - self.forced)),
            curvature,
            guards=start.guards,
            forced=start.forced,
            target=start.made.target,
            uniform=start.made.uniform,
            rule=start.made.rule,
            text_windows=self.seen,
            **own,
        )
        if start.made.target is None or start.made.target.in_parameters:
            return plan.with_made(requested_ratio=start.requested_ratio)
        return plan  # its target implies no share of parameters, so the realized one stays

    def room(self, chosen: Collection[int]) -> np.ndarray:
        """Return the cost that each layer may still lose [layers]."""
        return np.array(self.rules.room_after(sorted(chosen)))

    def _require_feasible(self) -> None:
        start, rules = self.start, self.rules
        if start.gains:
            raise InputError(
                f"{start!r} has {len(start.gains)} gains, which belong to its own pruned set. "
                "Search from with_gains({}), and solve the gains of the result."
            )
        if not rules.budget.reached(start.pruned):
            removed = self.costs[list(start.pruned)].sum().item()
            raise InputError(
                f"{start!r} removes {removed:,} of the {rules.budget.needed:,.0f} that its target "
                "needs. Give a plan that reaches its target."
            )
        keeps = rules.admissible[list(start.pruned[start.forced :])].all()
        if not keeps or min(self.room(start.pruned)) < 0:
            raise InputError(
                f"{start!r} breaks its own guards. Give a plan that keeps them, and exclude none "
                "of its units."
            )


@dataclass(frozen=True)
class _Scale:
    """Parts that move as a whole: single units, blocks or layers.

    Attributes:
        parts: the units of each.
        costs: of each [parts].
        half: predicted KL of each alone, or its marginal [parts]; None where nothing guides draws.
        edges: lambda times the interaction of each pair [parts, parts]; None where there is none.
    """

    parts: tuple[Units, ...]
    costs: np.ndarray
    half: np.ndarray | None = None
    edges: np.ndarray | None = None

    @classmethod
    def of(cls, found: Interactions, costs: np.ndarray) -> _Scale:
        """The scale of measured parts; `costs` are those of units."""
        parts = tuple(frozenset(found.parts[part]) for part in found.pool)
        own = np.array([costs[list(part)].sum() for part in parts])
        return cls(parts, own, found.alone.mean(axis=0)[list(found.pool)], found.interaction)

    def touching(self, units: Collection[int]) -> list[int]:
        """The parts that have any of these units."""
        return [at for at, part in enumerate(self.parts) if not part.isdisjoint(units)]


@dataclass
class _Draw:
    """One draw: the units chosen so far, and whether H guides what leaves and enters."""

    around: Neighbors
    chosen: set[int]
    rng: np.random.Generator
    guided: bool

    def exchange(self, count: int, scale: _Scale) -> Units | None:
        """Take out `count` parts, then add parts, keep the rules and just reach the target."""
        rules, forced, layers = self.around.rules, self.around.forced, self.around.layers
        before = set(self.chosen)
        for _ in range(count):
            part = self._pick(scale.touching(self.chosen - forced), -1.0, scale)
            self.chosen -= frozenset() if part is None else scale.parts[part] - forced
        gone = before - self.chosen  # they may not come back
        kept = set(self.chosen)

        def proposed() -> Units | None:
            fits = rules.admissible & (self.around.costs <= self._room[layers])
            fits &= np.array(rules.spare_after(self.chosen))[rules.block] > 0
            free = frozenset(np.flatnonzero(fits).tolist()) - self.chosen - gone
            part = self._pick(scale.touching(free), 1.0, scale)
            return None if part is None else scale.parts[part] & free

        whole = fill(
            iter(proposed, None), self.chosen.update, lambda: rules.budget.reached(self.chosen)
        )
        if not whole or (self._room < 0).any() or min(rules.spare_after(self.chosen)) < 0:
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
            unit = self._pick(free, 1.0, self.around.unit_scale)
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
        unit = self._pick(among, -1.0, self.around.unit_scale)
        if unit is not None:
            self.chosen.remove(unit)
        return unit

    def _pick(self, among: Collection[int], sign: float, scale: _Scale) -> int | None:
        """Draw one part: at random, or guided, near the lowest sign x marginal per cost."""
        if not among:
            return None
        parts = np.array(sorted(among))
        if not self.guided or scale.half is None:
            return int(self.rng.choice(parts))
        marginals = scale.half[parts]
        if (edges := scale.edges) is not None:
            whole = (p for p, units in enumerate(scale.parts) if units <= self.chosen)
            inside = np.fromiter(whole, int)
            # the sum over S includes the own entry of a part inside; it belongs to no edge
            sums = edges[np.ix_(parts, inside)].sum(axis=1)
            marginals = marginals + (
                sums - np.where(np.isin(parts, inside), edges[parts, parts], 0)
            )
        scores = sign * marginals / scale.costs[parts]
        place = int(self.rng.exponential(max(1.0, _NOISE * len(parts))))
        return int(parts[np.argsort(scores, kind="stable")[min(place, len(parts) - 1)]])
