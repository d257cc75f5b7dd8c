"""Algorithm 2: cost-normalized greedy co-pruning, and `fill`, the one loop behind every plan.

The surrogate is fixed, so a solve is a loop over one vector: the running interactions g of
Proposition "Running-sum marginal". At M = 768 and ratio 0.2 that is about a millisecond, which is
why sliders re-solve instead of caching. Read `fill`, `Greedy.run`, `cheapest` and `remove`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ..base.arguments import require_type
from ..base.errors import InfeasibleError
from ..curvature.matrix import Curvature
from .guards import Guards, PartialPlan, Rules, UnitsLike
from .protection import remedy
from .selection import Made, Selection, Terms
from .targets import Budget

Step = TypeVar("Step")


def fill(steps: Iterable[Step], take: Callable[[Step], object], enough: Callable[[], bool]) -> bool:
    """Take steps in turn until there is enough; return whether the steps sufficed.

    This loop makes all plans, which differ in their steps: the unit of lowest marginal per cost,
    scored again after each removal (Algorithm 2); the same within a quota per layer, or portions of
    a block (coarse.py); units in the order of a score (methods/); units near another plan (search).
    """
    if enough():
        return True
    for step in steps:
        take(step)
        if enough():
            return True
    return False


class Greedy(PartialPlan):
    """The state of Algorithm 2, for `solve_greedy` (one run) and `lambda_path` (many).

    Attributes:
        order: removed units so far; the first `len(rules.forced)` were forced.
        edges: g_u at each removal, nats per token.
        g: [M], the sum of H_uv over the removed units v.
        open: [M], 1/2 H_uu of the admissible units A, +inf for all others.
        until: [M] int, the first step at which a unit is no longer admissible.
        history: [M + 1, M], g before each step, where asked for.
        stalled: the last run ended below the target for want of admissible units.

    Args:
        per_cost: False ranks by the marginal itself (`plain_greedy`).
    """

    def __init__(
        self,
        curvature: Curvature,
        ratio: float | Budget,
        guards: Guards,
        include: UnitsLike = (),
        exclude: UnitsLike = (),
        *,
        keep_history: bool = False,
        portions: bool = False,
        per_cost: bool = True,
    ) -> None:
        require_type(curvature, Curvature, "curvature")
        units = curvature.units
        super().__init__(Rules(units, guards, ratio, include, exclude, portions=portions))
        self.curvature, self.guards = curvature, guards
        self.target, self.half = self.budget.needed, curvature.saliency / 2
        costs = self.budget.costs
        self.divisors = np.where(costs > 0, costs, 1).astype(np.float64)  # cost 0: forced or never
        if not per_cost:
            self.divisors = np.ones(len(units))
        self.size = len(units)
        self.until = np.where(self.rules.admissible, self.size + 1, 0)
        self.history = np.zeros((self.size + 1, self.size)) if keep_history else None
        self.edges: list[float] = []
        self.g, self.open = np.zeros(self.size), np.full(self.size, np.inf)  # until `restart`
        self.strength, self.stalled = 0.0, False
        # units are layer-major, so a layer is a slice
        layers = np.arange(units.num_layers)
        self.bounds = np.searchsorted(units.layers, np.append(layers, len(layers))).tolist()
        largest = np.zeros(len(layers), dtype=costs.dtype)
        np.maximum.at(largest, units.layers, costs)
        self.largest = largest.tolist()

    def solve(self, strength: float) -> Selection:
        """Run once and return the plan; raise InfeasibleError if the run stalls."""
        self.run(strength)
        if self.stalled:
            raise self.infeasible()
        return self.selection(strength)

    def longest(self, strength: float) -> Selection:
        """Run once and return the plan, up to where it stalls."""
        self.run(strength)
        plan = self.selection(strength)
        return plan.with_made(requested_ratio=min(plan.requested_ratio, plan.realized_ratio))

    def run(self, strength: float, start: int = 0) -> int:
        """Algorithm 2 at this lambda, from step `start` on; the steps before it stay.

        Resuming (`start` > 0) needs the history. Once the new order has removed the same set as the
        last run's order at that step, the rest of that order is kept too: g, caps and cost depend
        on the set alone. That holds only if no later step of it changes its winner at this lambda,
        which the caller must know (`lambda_path` does). To read the algorithm, take `start` for 0.

        Returns:
            The step from which on the last run was kept.
        """
        former = self.restart(start)
        self.strength, rejoined = float(strength), False

        def enough() -> bool:
            nonlocal rejoined
            rejoined = start > 0 and former.rejoined(self.order)
            return rejoined or self.enough()

        # while C_S < rho sum_u c_u: S <- S + u*
        self.stalled = not fill(self.cheapest(strength), self.remove, enough)
        return self._keep(former) if rejoined else len(self.order)

    def cheapest(self, strength: float) -> Iterator[int]:
        """Yield u* = argmin over A of (1/2 H_uu + lambda g_u) / c_u, anew after each removal."""
        score = np.empty(self.size)
        while True:
            np.multiply(self.g, strength, out=score)  # signed, never clipped
            score += self.open
            score /= self.divisors
            u = int(score.argmin())  # the lowest index of equal scores
            if self.open[u] == np.inf:  # A is empty
                return
            yield u

    def remove(self, u: int) -> None:
        """S <- S + u, C_S <- C_S + c_u, g <- g + H_:u, and what no longer fits leaves A."""
        super().remove(u)
        self.edges.append(float(self.g[u]))
        step, layer = len(self.order), self.layers[u]
        out = self.g if self.history is None else self.history[step]
        self.g = self.interactions(self.g, u, out)
        self.open[u], self.until[u] = np.inf, step
        out_of_experts = self.rules.routed[u] and self.spare[layer] <= 0
        if self.room[layer] < self.largest[layer] or out_of_experts:  # both only ever tighten
            mine = slice(*self.bounds[layer : layer + 2])
            closed = self.budget.costs[mine] > self.room[layer]
            closed |= out_of_experts & self.rules.routed[mine]
            closed &= self.open[mine] < np.inf
            self.open[mine][closed] = np.inf
            self.until[mine][closed] = step

    def interactions(self, g: np.ndarray, unit: int, out: np.ndarray) -> np.ndarray:
        """Write to `out` what g [M] becomes once `unit` has joined S: g + H_:u."""
        return np.add(g, self.curvature.matrix[unit], out=out)

    def restart(self, start: int = 0) -> FormerRun:
        """Go back to before step `start` or to the forced units; return the run this replaces."""
        former = self._rewind(start)
        for u in self.rules.forced[len(self.order) :]:
            self.remove(u)
        return former

    def _rewind(self, start: int) -> FormerRun:
        former = FormerRun(
            start, self.order[start:], self.edges[start:], self.until.copy(), self.stalled
        )
        del self.order[start:], self.edges[start:]
        self.until[self.until > start] = self.size + 1
        self.open = np.where(self.until > start, self.half, np.inf)
        self.g = np.zeros(self.size) if self.history is None else self.history[start]
        self.room, self.spent = self.rules.room_after(self.order), self.pruned_cost
        self.spare = self.rules.spare_after(self.order)
        return former

    def _keep(self, former: FormerRun) -> int:
        """Take over the former run's steps from here on."""
        step = len(self.order)
        self.order += former.order[step - former.start :]
        self.edges += former.edges[step - former.start :]
        later = former.until > step
        self.until[later] = former.until[later]
        self.stalled = former.stalled
        return step

    @property
    def pruned_cost(self) -> float:
        """What has been removed so far, in the budget's costs; whole where they are."""
        return self.budget.costs[self.order].sum().item() if self.order else 0

    @property
    def pruned_share(self) -> float:
        """`pruned_cost` as a share of all costs."""
        return self.pruned_cost / self.budget.costs.sum().item()

    def selection(self, strength: float) -> Selection:
        """The plan of the last run; NumericalError if it misses the target without a stall."""
        if not self.stalled:
            self.budget.require_reached(self.order)
        units, target, ratio = self.curvature.units, self.budget.target, self.budget.share
        if target is not None and not target.in_parameters:
            ratio = int(units.costs[self.order].sum()) / units.total_cost if self.order else 0.0
        terms = Terms(self.half[self.order] if self.order else np.zeros(0), np.array(self.edges))
        made = Made(
            requested_ratio=float(ratio),
            interaction_strength=float(strength),
            guards=self.guards,
            target=target,
            forced=len(self.rules.forced),
            ordered=True,
            matrix=self.curvature.provenance.get("surrogate", "H"),
            curvature_fingerprint=self.curvature.fingerprint,
            origin=self.curvature.origin,
            text_windows=self.curvature.provenance.get("text_windows"),
        )
        return Selection(units, tuple(self.order), terms, made)

    def infeasible(self) -> InfeasibleError:
        """The error of a stalled run: no plan at all, or none that greedy finds at this lambda."""
        most, exact = self.rules.reachable()
        if most < self.target:
            beyond, ask = self.budget.bounds(most)
            advice = remedy(self.rules, ask)
            return self.rules.out_of_reach(f"no plan {beyond} under {self.rules}. {advice}", most)
        shown, done = self.budget.shown, self.pruned_cost
        less = "a smaller ratio" if self.budget.target is None else "a milder target"
        return self.rules.out_of_reach(
            f"greedy at lambda {self.strength:g} stalls at {shown(done)} under {self.rules}, "
            f"though {'a plan of' if exact else 'room for'} {shown(most)} exists. Try another "
            f"interaction_strength, {less}, or looser guards.",
            most,
            stalled=self.pruned_share,
        )


@dataclass
class FormerRun:
    """The steps that a resumed run replaces, until it has removed the same set again."""

    start: int
    order: list[int]
    edges: list[float]
    until: np.ndarray
    stalled: bool
    differs: set[int] = field(default_factory=set)  # units removed by only one of the two runs

    def rejoined(self, order: list[int]) -> bool:
        """Whether the new run, after each of its steps, has removed the set this one had."""
        step = len(order) - 1 - self.start
        if not 0 <= step < len(self.order):
            return False
        self.differs ^= {order[-1]} ^ {self.order[step]}
        return not self.differs
