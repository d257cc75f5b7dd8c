"""Algorithm 2: cost-normalized greedy co-pruning, and `fill`, its loop.

The objective is fixed, so a solve is a loop over one vector: the running interactions g of
Proposition "Running-sum marginal". At M = 768 and ratio 0.2 that is about a millisecond, which is
why sliders re-solve instead of caching. Read `fill`, `Greedy.run`, `cheapest` and `remove`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from ..base.errors import InfeasibleError
from ..curvature.matrix import Curvature
from .guards import PartialPlan, Rules
from .protection import remedy
from .selection import Made, Selection, Terms

Step = TypeVar("Step")


def fill(steps: Iterable[Step], take: Callable[[Step], object], enough: Callable[[], bool]) -> bool:
    """Take steps in turn until there is enough; return whether the steps sufficed.

    Plans differ in their steps: the unit of lowest marginal per cost, scored again after each
    removal (Algorithm 2); several units at once (uniform.py); units in the order of a score
    (methods/).
    """
    if enough():
        return True
    for step in steps:
        take(step)
        if enough():
            return True
    return False


class Greedy(PartialPlan):
    """The state of Algorithm 2.

    Attributes:
        order: S, the removed units so far; the first `len(rules.forced)` were forced.
        edges: g_u at each removal, nats per token.
        g: [M], the sum of H_uv over the removed units v.
        open: [M], 1/2 H_uu of the admissible units A, +inf for all others.
        divisors: [M], c_u of the score.
        stalled: the last run ended below the target for want of admissible units.
    """

    def __init__(self, curvature: Curvature, rules: Rules) -> None:
        super().__init__(rules)
        self.curvature, self.half = curvature, curvature.saliency / 2
        costs, layers = self.budget.costs, rules.units.layers
        self.divisors = np.where(costs > 0, costs, 1).astype(np.float64)  # cost 0: never chosen
        self.strength, self.stalled = 0.0, False
        self.edges: list[float] = []
        largest = np.zeros(rules.units.num_layers, dtype=costs.dtype)
        np.maximum.at(largest, layers, costs)
        self.largest = largest.tolist()

    def solve(self, strength: float) -> Selection:
        """Run once and return the plan; raise InfeasibleError if the run stalls."""
        self.run(strength)
        if self.stalled:
            raise self.infeasible()
        return self.selection()

    def run(self, strength: float) -> None:
        """Algorithm 2 at lambda = `strength`."""
        self.restart(strength)  # S <- {}, g <- 0, C_S <- 0
        # while C_S < rho sum_u c_u:
        #     u* <- argmin over A of (1/2 H_uu + lambda g_u) / c_u;  S <- S + u*
        self.stalled = not fill(self.cheapest(), self.remove, self.enough)

    def restart(self, strength: float) -> None:
        """Begin anew at a lambda: nothing is removed but the included units."""
        self.strength, self.stalled = float(strength), False
        self.order, self.spent, self.edges = [], 0, []
        self.room, self.spare = self.rules.room_after(()), self.rules.spare_after(())
        self.g = np.zeros(len(self.half))
        self.open = np.where(self.rules.admissible, self.half, np.inf)
        for u in self.rules.forced:
            self.remove(u)

    def cheapest(self) -> Iterator[int]:
        """Yield u*, the admissible unit of lowest marginal per cost, anew after each removal."""
        score = np.empty(len(self.g))
        while True:
            np.multiply(self.g, self.strength, out=score)  # lambda g_u: signed, never clipped
            score += self.open  # 1/2 H_uu, or inf outside of A
            score /= self.divisors  # c_u
            u = int(score.argmin())  # the lowest index of equal scores
            if self.open[u] == np.inf:  # A is empty
                return
            yield u

    def remove(self, u: int) -> None:
        """Remove a unit; what no longer fits under the guards leaves A."""
        super().remove(u)  # S <- S + u, C_S <- C_S + c_u
        self.edges.append(float(self.g[u]))
        self.g += self.curvature.matrix[u]  # g <- g + H_:u
        self.open[u] = np.inf
        layer, block = self.layers[u], self.blocks[u]
        full = self.spare[block] <= 0
        if full or self.room[layer] < self.largest[layer]:  # both only ever tighten
            closed = (self.budget.costs > self.room[layer]) & (self.rules.units.layers == layer)
            self.open[closed | (full & (self.rules.block == block))] = np.inf

    @property
    def pruned_cost(self) -> float:
        """What has been removed so far, in the budget's costs; whole where they are."""
        return self.budget.costs[self.order].sum().item() if self.order else 0

    @property
    def pruned_share(self) -> float:
        """`pruned_cost` as a share of all costs."""
        return self.pruned_cost / self.budget.costs.sum().item()

    def selection(self, strength: float | None = None) -> Selection:
        """The plan of the last run; NumericalError if it misses the target without a stall.

        `strength` is another lambda that gives the same plan.
        """
        if not self.stalled:
            self.budget.require_reached(self.order)
        units, target, ratio = self.rules.units, self.budget.target, self.budget.share
        if target is not None and not target.in_parameters:
            ratio = int(units.costs[self.order].sum()) / units.total_cost if self.order else 0.0
        facts = self.curvature.provenance
        made = Made(
            requested_ratio=float(ratio),
            interaction_strength=self.strength if strength is None else float(strength),
            guards=self.rules.guards,
            target=target,
            forced=len(self.rules.forced),
            ordered=True,
            matrix=self.curvature.matrix_name,
            curvature_fingerprint=self.curvature.fingerprint,
            origin=self.curvature.origin,
            text_windows=facts.get("text_windows"),
        )
        terms = Terms(self.half[self.order] if self.order else np.zeros(0), np.array(self.edges))
        return Selection(units, tuple(self.order), terms, made)

    def infeasible(self) -> InfeasibleError:
        """The error of a stalled run: no plan at all, or none that greedy finds at this lambda."""
        most, shown = self.rules.reachable(), self.budget.shown
        if most < self.budget.needed:
            return self.rules.out_of_reach(
                f"the most that any plan reaches under {self.rules} is {shown(most)}. "
                f"{remedy(self.rules)}",
                most,
            )
        return self.rules.out_of_reach(
            f"greedy at lambda {self.strength:g} stalls at {shown(self.pruned_cost)} under "
            f"{self.rules}, though there is room for {shown(most)}. Try another "
            "interaction_strength, ask for less, or loosen the guards.",
            most,
            stalled=self.pruned_share,
        )
