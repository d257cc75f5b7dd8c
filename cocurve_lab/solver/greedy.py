"""Cost-normalised greedy co-pruning (Alg. 2): from a curvature and a ratio to a plan.

The surrogate is fixed, so a solve is a loop over one vector: the running interactions g of
Proposition "Running-sum marginal". At M = 768 and ratio 0.2 that is about a millisecond, which is
why sliders re-solve instead of caching.
"""

from __future__ import annotations

import math

import numpy as np

from ..curvature.matrix import Curvature
from ..errors import InfeasibleError, InputError
from .guards import Guards, Rules, UnitsLike
from .selection import Selection
from .targets import Budget


def require_strength(interaction_strength: float) -> None:
    """Raise InputError unless lambda is finite and >= 0."""
    if not 0 <= interaction_strength < math.inf:
        raise InputError(
            f"interaction_strength is {interaction_strength}; lambda is finite and at least 0 "
            "(0 ignores the edges, 1 takes them in full)."
        )


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
    ) -> None:
        units = curvature.units
        self.curvature, self.guards = curvature, guards
        self.rules = Rules(units, guards, ratio, tuple(include), tuple(exclude))
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
        self.strength = 0.0
        self.stalled = False
        # units are layer-major, so a layer is a slice
        layers = np.arange(units.num_layers)
        self.bounds = np.searchsorted(units.layers, np.append(layers, len(layers))).tolist()
        largest = np.zeros(len(layers), dtype=costs.dtype)
        np.maximum.at(largest, units.layers, costs)
        self.largest = largest.tolist()

    def run(self, strength: float, start: int = 0) -> int:
        """Solve at this lambda from step `start` on, keeping the steps before it.

        Resuming (`start` > 0) needs the history. Once the new order has removed the same set as the
        last run's order at that step, the rest of that order is kept too: g, caps and cost depend
        on the set alone. That holds only if no later step of it changes its winner at this lambda,
        which the caller must know (`lambda_path` does); a run from step 0 keeps nothing.

        Returns:
            The step from which on the last run was kept.
        """
        matrix, costs, history, order = self.curvature.matrix, self.costs, self.history, self.order
        old_order, old_edges = order[start:], self.edges[start:]
        old_until, old_stalled = self.until.copy(), self.stalled
        del order[start:], self.edges[start:]
        self.until[self.until > start] = self.size + 1
        differs: set[int] = set()  # units removed by only one of the two orders so far
        half = np.where(self.until > start, self.half, np.inf)  # +inf: never the argmin
        room, spent = self.rules.room_after(order), self.pruned_cost
        forced = self.rules.forced
        g = np.zeros(self.size) if history is None else history[start]
        score = np.empty(self.size)
        self.strength, self.stalled = float(strength), False
        for step in range(start, self.size + 1):
            if step < len(forced):
                u = forced[step]
            elif spent >= self.target:
                break
            else:
                np.multiply(g, strength, out=score)
                score += half
                score /= costs
                u = int(score.argmin())
                if half[u] == np.inf:
                    self.stalled = True
                    break
            order.append(u)
            self.edges.append(float(g[u]))
            g = np.add(g, matrix[u], out=g if history is None else history[step + 1])
            half[u] = np.inf
            self.until[u] = step + 1
            cost, layer = self.unit_costs[u], self.layers[u]
            spent += cost
            room[layer] -= cost
            if room[layer] < self.largest[layer]:
                self._block(layer, room[layer], half, step + 1)
            if start and step - start < len(old_order):
                differs ^= {u} ^ {old_order[step - start]}
                if not differs:
                    kept = step + 1
                    order += old_order[kept - start :]
                    self.edges += old_edges[kept - start :]
                    later = old_until > kept
                    self.until[later] = old_until[later]
                    self.stalled = old_stalled
                    return kept
        return len(order)

    def _block(self, layer: int, room: int, half: np.ndarray, step: int) -> None:
        """Bar the units of a layer that no longer fit under its cap: a cap only ever tightens."""
        first, last = self.bounds[layer : layer + 2]
        fits_not = (self.costs[first:last] > room) & (half[first:last] < np.inf)
        half[first:last][fits_not] = np.inf
        self.until[first:last][fits_not] = step

    @property
    def pruned_cost(self) -> float:
        """What has been removed so far, in the budget's costs; whole where they are."""
        return self.budget.costs[self.order].sum().item() if self.order else 0

    @property
    def realized_ratio(self) -> float:
        return self.pruned_cost / self.budget.costs.sum().item()

    def selection(self, strength: float) -> Selection:
        """The plan of the last run, recorded as made at this lambda."""
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
        )

    def infeasible(self) -> InfeasibleError:
        """The error of a stalled run: no plan at all, or none that greedy finds at this lambda."""
        most, exact = self.rules.reachable()
        stalled = self.realized_ratio if most >= self.target else None
        if stalled is None:
            beyond, ask = self.budget.bounds(most)
            fact, remedy = f"no plan {beyond} under {self.rules}", self.remedy(ask)
        else:
            shown = self.budget.shown
            there = f"{'a plan of' if exact else 'room for'} {shown(most)} exists"
            fact = (
                f"greedy at lambda {self.strength:g} stalls at {shown(self.pruned_cost)} "
                f"under {self.rules}, though {there}"
            )
            less = "a smaller ratio" if self.budget.target is None else "a milder target"
            remedy = f"Try another interaction_strength, {less}, or looser guards."
        return self.out_of_reach(f"{fact}. {remedy}", most, stalled)

    def remedy(self, ask: str) -> str:
        """What to do where no plan reaches the target; `ask` is the most there is."""
        factor = self.guards.layer_cap_factor
        if factor is None or self.rules.cap == 1:
            return f"Ask for {ask}, or loosen the guards."
        return (
            f"Loosen the guards: the layer cap is {factor:g} x the ratio, so a smaller ratio has a "
            "tighter one."
        )

    def out_of_reach(
        self, message: str, most: float, stalled: float | None = None
    ) -> InfeasibleError:
        """The error that no plan removes more than `most` of the budget's costs."""
        asked = self.budget.target or f"ratio {self.budget.share:g}"
        return InfeasibleError(
            f"{asked} is out of reach: {message}",
            requested_ratio=float(self.budget.share),
            reachable_ratio=most / self.budget.costs.sum().item(),
            stalled_ratio=stalled,
        )
