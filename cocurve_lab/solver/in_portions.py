"""Algorithm 2 where units leave in portions, for the guards of the machine (portions.py).

Each step removes the portion with the lowest signed marginal per parameter. A block fills its
portion as Algorithm 2 would: the cheapest unit first, given those that went before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..base.errors import InputError
from .greedy import Greedy
from .selection import Selection


def solve_in_portions(greedy: Greedy, strength: float) -> Selection:
    """Solve under guards of the machine; `solve_greedy` calls this.

    Args:
        greedy: a solve that has not run: its curvature, budget and rules.
        strength: lambda >= 0.

    Returns:
        A plan that removes what was asked for, and overshoots by less than one portion.

    Raises:
        InputError: included units whose portion cannot be completed.
        InfeasibleError: no plan reaches the budget, or this greedy stalls below it.
    """
    run = _Run(greedy, strength)
    while True:
        open_groups = run.unfinished()
        if not open_groups and greedy.spent >= greedy.target:
            return greedy.selection(strength)
        offers = [run.offer(number) for number in open_groups or range(len(run.groups))]
        found = [offer for offer in offers if offer is not None]
        if not found:
            break
        for u in min(found, key=lambda offer: offer.score).units:  # the first of equal ones
            run.remove(u)
    greedy.rules.reachable()  # says so where the included units are the reason
    if open_groups:
        raise InputError(
            "include names units whose portions cannot be completed under the guards. Include all "
            "units of a portion, or loosen the guards."
        )
    greedy.strength, greedy.stalled = strength, True
    raise greedy.infeasible()


class _Offer(NamedTuple):
    """The next portion of a group: its marginal per cost, and its units in order."""

    score: float
    units: list[int]


class _Run:
    """A solve whose steps are portions; what is gone, spent and still fits is the greedy's own.

    Attributes:
        groups, counts: the groups, and how many units each has lost.
        half: [M], 1/2 H_uu; infinite for units that may not go.
        g: [M], interactions with what is gone, nats per token.
    """

    def __init__(self, greedy: Greedy, strength: float) -> None:
        rules = greedy.rules
        assert rules.portions is not None
        self.greedy, self.strength, self.portions = greedy, strength, rules.portions
        self.groups, self.counts = rules.portions.groups, [0] * len(rules.portions.groups)
        self.half = np.where(rules.admissible, greedy.half, np.inf)
        self.g = np.zeros(greedy.size)
        for u in rules.forced:
            self.remove(u)

    def remove(self, u: int) -> None:
        """Take a unit out."""
        self.greedy.order.append(u)
        self.greedy.edges.append(float(self.g[u]))
        self.g = self.greedy.interactions(self.g, u, out=self.g)
        self.greedy.remove(u, self.half)
        self.counts[self.portions.of[u]] += 1

    def unfinished(self) -> list[int]:
        """Groups between two stops: where units were included."""
        pairs = zip(self.counts, self.groups, strict=True)
        return [number for number, (n, group) in enumerate(pairs) if n not in group.stops]

    def offer(self, number: int) -> _Offer | None:
        """The next portion of a group; None where it has none, or it does not fit."""
        greedy, group = self.greedy, self.groups[number]
        size = next((n for n in group.stops if n > self.counts[number]), 0) - self.counts[number]
        ids = group.ids[np.isfinite(self.half[group.ids])]
        if not 0 < size <= len(ids):
            return None
        half, g, costs = self.half[ids].copy(), self.g[ids].copy(), greedy.costs[ids]
        chosen: list[int] = []
        marginal = 0.0
        for _ in range(size):
            i = int(((half + self.strength * g) / costs).argmin())
            marginal += float(half[i] + self.strength * g[i])
            half[i] = np.inf
            g += greedy.curvature.matrix[ids[i], ids]
            chosen.append(int(ids[i]))
        if sum(greedy.unit_costs[u] for u in chosen) > greedy.room[group.layer]:
            return None
        return _Offer(marginal / float(greedy.costs[chosen].sum()), chosen)
