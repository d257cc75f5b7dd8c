"""Algorithm 2: cost-normalized greedy co-pruning, as a loop that can be resumed.

The surrogate is fixed, so a solve is a loop over one vector: the running interactions g of
Proposition "Running-sum marginal". At M = 768 and ratio 0.2 that is about a millisecond, which is
why sliders re-solve instead of caching. `Greedy.run` is the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..base.arguments import require_type
from ..base.errors import InfeasibleError
from ..curvature.matrix import Curvature
from .guards import Guards, Rules, UnitsLike
from .selection import Selection
from .targets import Budget


class Greedy:
    """The loop of Alg. 2 with its state, for `solve_greedy` (one run) and `lambda_path` (many).

    Attributes:
        order: removed units so far; the first `len(rules.forced)` were forced.
        edges: g_u at each removal, nats per token.
        until: [M] int, the first step at which a unit is no longer admissible.
        history: [M + 1, M], g before each step, where asked for.
        stalled: the last run ended below the target for want of admissible units.
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
    ) -> None:
        require_type(curvature, Curvature, "curvature")
        units = curvature.units
        self.curvature, self.guards = curvature, guards
        self.rules = Rules(units, guards, ratio, include, exclude, portions=portions)
        self.budget = self.rules.budget
        self.target = self.budget.needed
        self.half = curvature.saliency / 2
        costs = self.budget.costs
        self.costs = np.where(costs > 0, costs, 1).astype(np.float64)  # cost 0: forced or never
        self.size = len(units)
        self.unit_costs, self.layers = costs.tolist(), units.layers.tolist()
        self.until = np.where(self.rules.admissible, self.size + 1, 0)
        self.history = np.zeros((self.size + 1, self.size)) if keep_history else None
        self.order: list[int] = []
        self.edges: list[float] = []
        self.spent: float = 0  # C_S, in the budget's costs
        self.room = self.rules.room_after(())  # of each layer, under its cap
        self.strength = 0.0
        self.stalled = False
        # units are layer-major, so a layer is a slice
        layers = np.arange(units.num_layers)
        self.bounds = np.searchsorted(units.layers, np.append(layers, len(layers))).tolist()
        largest = np.zeros(len(layers), dtype=costs.dtype)
        np.maximum.at(largest, units.layers, costs)
        self.largest = largest.tolist()

    def run(self, strength: float, start: int = 0) -> int:
        """Algorithm 2 at this lambda, from step `start` on; the steps before it stay.

        Resuming (`start` > 0) needs the history. Once the new order has removed the same set as the
        last run's order at that step, the rest of that order is kept too: g, caps and cost depend
        on the set alone. That holds only if no later step of it changes its winner at this lambda,
        which the caller must know (`lambda_path` does); a run from step 0 keeps nothing. To read
        the algorithm, skip `former` and `_row`, which serve resuming.

        Returns:
            The step from which on the last run was kept.
        """
        S, c, forced = self.order, self.costs, self.rules.forced
        former = self._rewind(start)
        # A: neither pruned, protected (L_p) nor excluded, and within the layer cap kappa
        half = np.where(self.until > start, self.half, np.inf)  # 1/2 H_uu, +inf outside of A
        g = self._row(start, np.zeros(self.size))  # g_u = sum of H_uv over v in S
        score = np.empty(self.size)
        self.strength, self.stalled = float(strength), False
        while self.spent < self.target or len(S) < len(forced):  # while C_S < rho sum_u c_u
            if len(S) < len(forced):
                u = forced[len(S)]
            else:  # u* = argmin over A of (1/2 H_uu + lambda g_u) / c_u: signed, never clipped
                np.multiply(g, strength, out=score)
                score += half
                score /= c
                u = int(score.argmin())
                if half[u] == np.inf:  # A is empty
                    self.stalled = True
                    break
            S.append(u)
            self.edges.append(float(g[u]))
            g = self.interactions(g, u, out=self._row(len(S), g))  # g <- g + H_:u
            self.remove(u, half)  # C_S <- C_S + c_u, and what no longer fits leaves A
            if start and former.rejoined(u, len(S) - 1):
                return self._keep(former, len(S))
        return len(S)

    def interactions(self, g: np.ndarray, unit: int, out: np.ndarray) -> np.ndarray:
        """Write to `out` what g [M] becomes once `unit` has joined S: g + H_:u."""
        return np.add(g, self.curvature.matrix[unit], out=out)

    def _row(self, step: int, g: np.ndarray) -> np.ndarray:
        """Where g before a step is kept: in the history where there is one, else in place."""
        return g if self.history is None else self.history[step]

    def remove(self, u: int, half: np.ndarray) -> None:
        """Take u out of the admissible set A, and with it what no longer fits its layer's cap."""
        step, cost, layer = len(self.order), self.unit_costs[u], self.layers[u]
        half[u] = np.inf
        self.until[u] = step
        self.spent += cost
        self.room[layer] -= cost
        if self.room[layer] < self.largest[layer]:  # a cap only ever tightens
            first, last = self.bounds[layer : layer + 2]
            too_large = (self.costs[first:last] > self.room[layer]) & (half[first:last] < np.inf)
            half[first:last][too_large] = np.inf
            self.until[first:last][too_large] = step

    def _rewind(self, start: int) -> Former:
        """Put S, C_S and the caps back to what they were before step `start`."""
        former = Former(
            start, self.order[start:], self.edges[start:], self.until.copy(), self.stalled
        )
        del self.order[start:], self.edges[start:]
        self.until[self.until > start] = self.size + 1
        self.room, self.spent = self.rules.room_after(self.order), self.pruned_cost
        return former

    def _keep(self, former: Former, step: int) -> int:
        """Take over the former run's steps from `step` on."""
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
    def realized_ratio(self) -> float:
        return self.pruned_cost / self.budget.costs.sum().item()

    def selection(self, strength: float) -> Selection:
        """The plan of the last run, recorded as made at this lambda.

        Raises NumericalError if it misses the target, though the run did not stall.
        """
        if not self.stalled:
            self.budget.require_reached(self.order)
        units, target = self.curvature.units, self.budget.target
        ratio = self.budget.share
        if target is not None and not target.in_parameters:
            ratio = int(units.costs[self.order].sum()) / units.total_cost if self.order else 0.0
        return Selection(
            units=units,
            pruned=tuple(self.order),
            requested_ratio=float(ratio),
            node_terms=self.half[self.order] if self.order else np.zeros(0),
            edge_terms=np.array(self.edges),
            interaction_strength=float(strength),
            guards=self.guards,
            curvature_fingerprint=self.curvature.fingerprint,
            forced=len(self.rules.forced),
            target=target,
            surrogate=self.curvature.surrogate,
        )

    def infeasible(self) -> InfeasibleError:
        """The error of a stalled run: no plan at all, or none that greedy finds at this lambda."""
        most, exact = self.rules.reachable()
        stalled = self.realized_ratio if most >= self.target else None
        if stalled is None:
            beyond, ask = self.budget.bounds(most)
            fact, remedy = f"no plan {beyond} under {self.rules}", self.rules.remedy(ask)
        else:
            shown = self.budget.shown
            there = f"{'a plan of' if exact else 'room for'} {shown(most)} exists"
            fact = (
                f"greedy at lambda {self.strength:g} stalls at {shown(self.pruned_cost)} "
                f"under {self.rules}, though {there}"
            )
            less = "a smaller ratio" if self.budget.target is None else "a milder target"
            remedy = f"Try another interaction_strength, {less}, or looser guards."
        return self.rules.out_of_reach(f"{fact}. {remedy}", most, stalled)


@dataclass
class Former:
    """The steps that a resumed run replaces, until it has removed the same set again."""

    start: int
    order: list[int]
    edges: list[float]
    until: np.ndarray
    stalled: bool
    differs: set[int] = field(default_factory=set)  # units removed by only one of the two runs

    def rejoined(self, u: int, step: int) -> bool:
        """Whether the new run, having removed u at `step`, has removed the set this one had."""
        if step - self.start >= len(self.order):
            return False
        self.differs ^= {u} ^ {self.order[step - self.start]}
        return not self.differs
