"""Better plans by local search on the surrogate R_lambda of eq. (lambda).

A plan that is better there is a better answer to the solver's question, which held-out text may or
may not reward.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from ..curvature.matrix import Curvature
from ..errors import InputError
from .greedy import require_strength
from .guards import Rules, UnitsLike
from .selection import Selection, risk_terms
from .targets import target_cost

log = logging.getLogger(__name__)
_WIN = 1e-12  # of the trace: an exchange that lowers R_lambda by less is rounding


def refine(
    selection: Selection,
    curvature: Curvature,
    *,
    exclude: UnitsLike = (),
    max_rounds: int = 10_000,
) -> Selection:
    """Improve a plan by local search on the objective, budget and guards that made it.

    A round makes one exchange that lowers R_lambda: the best of dropping a unit, adding one and
    swapping one for one; where none of these helps, two for one or one for two (the best exchange
    of the first unit that has one). Ties go to the lowest indices, so equal input gives equal
    output. The result is a local optimum: no such exchange improves it. It reaches `target_cost`
    and overshoots by less than the dearest admissible unit, as greedy does (Proposition
    "Overshoot").

    Args:
        selection: a plan with an interaction strength. Its `forced` units stay; its gains, solved
            for its own pruned set, are dropped.
        curvature: H [M, M] to judge by, nats per token.
        exclude: units that may not enter; a Selection does not record what `solve_greedy` excluded.
        max_rounds: exchanges at most; beyond, the plan so far is returned, and that is logged.

    Returns:
        A Selection with the same ratio asked for, guards and lambda, but no removal order: forced
        units first, then ascending; a plan that cannot be improved keeps its order. Its objective
        is never above the plan's.

    Raises:
        InputError: the plan has no interaction strength, misses its ratio, overshoots by a unit or
            more, or breaks its guards; an excluded unit is in it; or max_rounds is negative.
        MismatchError: the curvature is of other units.
    """
    strength = selection.interaction_strength
    if strength is None:
        raise InputError(
            f"{selection!r} has no interaction_strength, so there is no objective to improve. Set "
            "one with dataclasses.replace(selection, interaction_strength=...)."
        )
    require_strength(strength)
    if max_rounds < 0:
        raise InputError(f"max_rounds is {max_rounds}; it counts exchanges.")
    curvature.units.require_same(selection.units, mine="the curvature", theirs="the selection")
    selection.require_by_ratio("a refined plan")
    search = _Search(selection, curvature, strength, exclude)
    if not search.run(max_rounds):
        log.warning("refine stopped after %d exchanges, before a local optimum", max_rounds)
    forced = selection.pruned[: selection.forced]
    rest = sorted(set(np.flatnonzero(search.pruned).tolist()) - set(forced))
    same = set(selection.pruned) == {*forced, *rest}
    if same and selection.curvature_fingerprint == curvature.fingerprint and not selection.gains:
        # summed in another order, its terms could come out above the plan's by rounding
        return replace(selection, ordered=False)
    node, edge = risk_terms(curvature.matrix, (*forced, *rest))
    return replace(
        selection,
        pruned=(*forced, *rest),
        ordered=False,
        node_terms=node,
        edge_terms=edge,
        gains={},
        curvature_fingerprint=curvature.fingerprint,
    )


@dataclass(frozen=True)
class _Exchange:
    """Units that change sides, and by how much that changes R_lambda, nats per token."""

    change: float
    units: tuple[int, ...] = ()


class _Search:
    """State of the local search.

    With t = +1 for a unit that enters the pruned set and -1 for one that leaves, an exchange
    changes R_lambda by the sum of t_u m_u plus, over its pairs, t_u t_v E_uv.

    Attributes:
        pruned: s [M], bool.
        edges: E = lambda H without its diagonal [M, M], so that a unit has no edge to itself.
        marginal: m_u = 1/2 H_uu + lambda g_u [M], g over the pruned units other than u: the running
            sum of eq. (marginal).
        free: [M] bool, units that may change sides: admissible and not forced.
        spent: pruned cost, parameters; at least `target` and below `ceiling`.
        room: [layers] cost still free under the cap, parameters.
        win: an exchange must lower R_lambda by more than this.
    """

    def __init__(
        self, selection: Selection, curvature: Curvature, strength: float, exclude: UnitsLike
    ) -> None:
        units, ratio = selection.units, selection.requested_ratio
        forced = list(selection.pruned[: selection.forced])
        rules = Rules(units, selection.guards, ratio, forced, exclude)
        self.costs, self.layers = units.costs, units.layers
        self.pruned = selection.indicator.copy()
        self.edges = strength * curvature.matrix
        np.fill_diagonal(self.edges, 0.0)
        self.marginal = curvature.saliency / 2 + self.edges @ self.pruned
        self.win = _WIN * float(curvature.saliency.sum())
        self.free = rules.admissible.copy()
        self.free[forced] = False
        self.spent = selection.pruned_cost
        self.room = np.array(rules.room_after(selection.pruned), dtype=np.int64)
        self.target = target_cost(units, ratio)
        largest = int(self.costs[rules.admissible].max(initial=0))
        self.ceiling = max(self.target + largest, int(self.costs[forced].sum()) + 1)
        self._require_feasible(selection, rules)

    def _require_feasible(self, selection: Selection, rules: Rules) -> None:
        strangers = np.flatnonzero(self.pruned & ~rules.admissible)
        full = np.flatnonzero(self.room < 0)
        if len(strangers):
            why = f"prunes {selection.units[int(strangers[0])]}, which it may not"
        elif len(full):
            why = f"takes layer {full[0]} above its cap of {rules.cap:.4g} of the layer's cost"
        elif self.spent < self.target:
            why = f"removes {self.spent:,} of the {self.target:,.0f} parameters asked for"
        elif self.spent >= self.ceiling:
            why = f"removes {self.spent:,} parameters where {self.target:,.0f} were asked for"
        else:
            return
        raise InputError(
            f"{selection!r} cannot be refined: it {why}. Give a plan that keeps its own ratio and "
            "guards, such as one of solve_greedy."
        )

    def run(self, max_rounds: int) -> bool:
        """Make up to `max_rounds` exchanges; whether a local optimum was reached."""
        for _ in range(max_rounds):
            exchange = self._best()
            if exchange is None:
                return True
            self._make(exchange)
        return self._best() is None

    def _best(self) -> _Exchange | None:
        simple = min(self._single(), self._swap(), key=lambda exchange: exchange.change)
        if simple.change < -self.win:
            return simple
        movable = np.flatnonzero(self.free)
        inside = self.pruned[movable]
        sides = movable[inside], movable[~inside]
        for leaving, (pivots, partners) in ((True, sides), (False, sides[::-1])):
            pairs = self.edges[np.ix_(partners, partners)]
            lowest = pairs.min(axis=1, initial=0.0)
            for pivot in pivots.tolist():
                found = self._triple(pivot, leaving, partners, lowest)
                if found.change < -self.win:
                    return found
        return None

    def _make(self, exchange: _Exchange) -> None:
        for unit in exchange.units:
            sign = -1 if self.pruned[unit] else 1
            self.pruned[unit] = sign > 0
            self.marginal += sign * self.edges[unit]
            self.spent += sign * int(self.costs[unit])
            self.room[self.layers[unit]] -= sign * self.costs[unit]

    def _in_budget(self, spent: np.ndarray) -> np.ndarray:
        return (spent >= self.target) & (spent < self.ceiling)

    def _single(self) -> _Exchange:
        """The best unit to drop or to add."""
        sign = np.where(self.pruned, -1, 1)
        allowed = self.free & self._in_budget(self.spent + sign * self.costs)
        allowed &= self.pruned | (self.costs <= self.room[self.layers])
        return _lowest(sign * self.marginal, allowed, np.arange(len(sign)))

    def _swap(self) -> _Exchange:
        """The best swap of one for one."""
        leave = np.flatnonzero(self.free & self.pruned)[:, None]
        enter = np.flatnonzero(self.free & ~self.pruned)
        change = self.marginal[enter] - self.marginal[leave] - self.edges[leave, enter]
        allowed = self._in_budget(self.spent - self.costs[leave] + self.costs[enter])
        freed = self.costs[leave] * (self.layers[leave] == self.layers[enter])
        allowed &= self.costs[enter] <= self.room[self.layers[enter]] + freed
        return _lowest(change, allowed, leave, enter)

    def _triple(
        self, pivot: int, leaving: bool, partners: np.ndarray, lowest: np.ndarray
    ) -> _Exchange:
        """The best exchange of `pivot` for two partners from the other side.

        `lowest` is min over partners k of E_jk: together with the smallest x it shows which j
        cannot be in any exchange that wins, which is most of them.
        """
        sign = -1 if leaving else 1
        alone = sign * self.marginal[pivot]
        x = -sign * self.marginal[partners] - self.edges[pivot, partners]
        hopeful = alone + x + x.min(initial=0.0) + lowest < -self.win
        one, x = partners[hopeful], x[hopeful]
        two = one[:, None]
        change = alone + x + x[:, None] + self.edges[two, one]
        cost, layer, same = (
            self.costs[pivot],
            self.layers[pivot],
            self.layers[two] == self.layers[one],
        )
        pair = self.costs[two] + self.costs[one]
        allowed = self._in_budget(self.spent + sign * (cost - pair)) & (one < two)
        if leaving:  # the partners enter: each fits, and both do where they share a layer
            room = self.room[self.layers[one]] + cost * (self.layers[one] == layer)
            fits = self.costs[one] <= room
            allowed &= fits & fits[:, None] & (~same | (pair <= room))
        else:
            freed = self.costs[one] * (self.layers[one] == layer)
            allowed &= cost <= self.room[layer] + freed + freed[:, None]
        best = _lowest(change, allowed, two, one)
        return _Exchange(best.change, (pivot, *best.units))


def _lowest(change: np.ndarray, allowed: np.ndarray, *units: np.ndarray) -> _Exchange:
    """The allowed entry of lowest change, first in order among equals; `units` name its axes."""
    if not allowed.any():
        return _Exchange(np.inf)
    place = int(np.where(allowed, change, np.inf).argmin())
    named = (int(np.broadcast_to(axis, change.shape).flat[place]) for axis in units)
    return _Exchange(float(change.flat[place]), tuple(named))
