"""Local search for better plans on the surrogate R_lambda (eq. lambda); not in the paper.

A plan of lower R_lambda answers the solver's question better. Whether it is better on held-out text
has to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...base.arguments import require_type
from ...base.errors import InputError
from ...curvature.matrix import Curvature
from ...solver.guards import Rules, UnitsLike
from ...solver.selection import Selection

_WIN = 1e-12  # of the trace of H: an exchange that lowers R_lambda by less is rounding


def refine(
    selection: Selection,
    curvature: Curvature,
    *,
    exclude: UnitsLike = (),
) -> Selection:
    """Improve a plan by local search, keeping its objective, budget and guards.

    Each round makes one exchange that lowers R_lambda: the best of dropping a unit, adding one, and
    swapping one for one. If none of these helps, it tries two for one and one for two, and takes
    the best exchange of the first unit that has one. Ties go to the lowest indices. The result is a
    local optimum: no such exchange improves it. Like a greedy plan, it reaches `target_cost` and
    overshoots by less than the most expensive admissible unit (Proposition "Overshoot bound").
    In a plan that keeps to some counts (`solve_aligned`), units are swapped one for one with units
    of their layer, kind and width.

    Args:
        selection: a plan with an interaction strength. Its `forced` units stay; its gains are
            dropped, because they were solved for its own pruned set.
        exclude: units that may not enter. Repeat those given to `solve_greedy`: a Selection does
            not record them.

    Returns:
        A Selection with the same requested ratio, guards and lambda, whose objective is never above
        that of `selection`. It has no removal order (forced units first, then ascending), unless
        nothing could be improved.

    Example:
        >>> import numpy as np
        >>> from cocurve_lab import Curvature, Unit, UnitSet, refine, solve_greedy
        >>> units = UnitSet(tuple(Unit("ffn", 0, i, i, i + 1, 10) for i in range(4)))
        >>> H = np.diag([1.0, 1.2, 1.2, 9.0])
        >>> H[1, 2] = H[2, 1] = -1.0  # removed together, units 1 and 2 cost little
        >>> plan = solve_greedy(Curvature(H, units), 0.5)
        >>> better = refine(plan, Curvature(H, units))
        >>> plan.pruned, better.pruned, round(better.objective, 3)
        ((0, 1), (1, 2), 0.2)
    """
    require_type(selection, Selection, "selection")
    require_type(curvature, Curvature, "curvature")
    if selection.interaction_strength is None:
        raise InputError(
            f"{selection!r} has no interaction_strength, so no objective to improve. Set one with "
            "selection.with_made(interaction_strength=...)."
        )
    selection.require_own_terms(curvature)
    if not selection.with_made(rule="").by_ratio:
        raise InputError(f"{selection!r} keeps to more than a ratio. Solve again instead.")
    search = _Search(selection, curvature, selection.interaction_strength, exclude)
    while (exchange := search.best()) is not None:
        search.make(exchange)
    forced = selection.pruned[: selection.forced]
    rest = sorted(set(np.flatnonzero(search.pruned).tolist()) - set(forced))
    pruned, same_h = (*forced, *rest), selection.curvature_fingerprint == curvature.fingerprint
    if set(selection.pruned) == set(pruned) and same_h and not selection.gains:
        # nothing changed: terms summed in another order could exceed the plan's own by rounding
        return selection.with_made(ordered=False)
    found = replace(selection.with_made(ordered=False), pruned=pruned, gains={})
    return found.predicted_by(curvature)


@dataclass(frozen=True)
class _Exchange:
    """Units that change sides, and the change of R_lambda in nats per token."""

    change: float
    units: tuple[int, ...] = ()


class _Search:
    """State of the local search.

    Let t_u = +1 for a unit that enters the pruned set and -1 for one that leaves it. An exchange
    then changes R_lambda by the sum of t_u m_u over its units plus that of t_u t_v E_uv over its
    pairs.

    Attributes:
        pruned: s [M], bool.
        edges: E = lambda H with a zero diagonal [M, M], so that a unit has no edge to itself.
        marginal: m_u = 1/2 H_uu + lambda g_u [M], where g sums over the pruned units other than u
            (eq. marginal); updated with each exchange.
        free: [M] bool, units that may change sides: admissible and not forced.
        shape: [M] int, equal for units of one layer, kind and width.
        spent: pruned cost, parameters; at least `target` and below `ceiling`.
        room: [layers] the cost each layer may still lose under its cap, parameters.
        win: an exchange must lower R_lambda by more than this.
    """

    def __init__(
        self, selection: Selection, curvature: Curvature, strength: float, exclude: UnitsLike
    ) -> None:
        units = selection.units
        forced = list(selection.pruned[: selection.forced])
        ratio, guards = selection.requested_ratio, selection.guards
        rules = Rules(units, guards, ratio, forced, exclude)
        self.counted = selection.counted
        shapes = [(unit.layer, unit.kind, unit.stop - unit.start) for unit in units]
        self.shape = np.array([shapes.index(shape) for shape in shapes])
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
        self.target = rules.budget.needed
        largest = int(self.costs[rules.admissible].max(initial=0))
        # forced units may exceed the target by any amount, and the plan must still be admitted
        self.ceiling = max(self.target + largest, int(self.costs[forced].sum()) + 1)
        if self.counted:  # they may overshoot by more than a unit
            self.ceiling = max(self.ceiling, self.spent + 1)
        self._require_feasible(selection, rules)

    def _require_feasible(self, selection: Selection, rules: Rules) -> None:
        bounded = np.flatnonzero(self.free & (rules.fewest[rules.block] > 0))
        if len(bounded):
            kind = selection.units[int(bounded[0])].kind
            raise InputError(
                f"refine does not count how many {kind} units a layer must keep. Use search_plan, "
                f"or guards whose kinds are without {kind!r}."
            )
        strangers = np.flatnonzero(self.pruned & ~rules.admissible)
        full = np.flatnonzero(self.room < 0)
        if len(strangers) or len(full) or not self._in_budget(np.array(self.spent)):
            raise InputError(
                f"{selection!r} cannot be refined: it does not keep its own ratio and guards "
                f"(units that may not go: {[selection.units[int(u)].name for u in strangers]}; "
                f"layers above their cap: {full.tolist()}; removed: {self.spent:,} where "
                f"{self.target:,.0f} were asked for). Give a plan that solve_greedy made."
            )

    def best(self) -> _Exchange | None:
        """The exchange to make next; None at a local optimum."""
        if self.counted:
            swap = self._swap()
            return swap if swap.change < -self.win else None
        simple = min(self._single(), self._swap(), key=lambda exchange: exchange.change)
        if simple.change < -self.win:
            return simple
        # three units at a time are M^3 exchanges, so the first unit that has a winning one suffices
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

    def make(self, exchange: _Exchange) -> None:
        for unit in exchange.units:
            sign = -1 if self.pruned[unit] else 1
            self.pruned[unit] = sign > 0
            self.marginal += sign * self.edges[unit]  # its own stays: E has a zero diagonal
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
        # the edge is in the marginal of the unit that enters, but the other one is leaving
        change = self.marginal[enter] - self.marginal[leave] - self.edges[leave, enter]
        allowed = self._in_budget(self.spent - self.costs[leave] + self.costs[enter])
        if self.counted:
            allowed &= self.shape[leave] == self.shape[enter]
        freed = self.costs[leave] * (self.layers[leave] == self.layers[enter])
        allowed &= self.costs[enter] <= self.room[self.layers[enter]] + freed
        return _lowest(change, allowed, leave, enter)

    def _triple(
        self, pivot: int, leaving: bool, partners: np.ndarray, lowest: np.ndarray
    ) -> _Exchange:
        """The best exchange of `pivot`, which may be leaving, for two partners of the other side.

        `lowest` [partners] is the minimum over partners k of E_jk.
        """
        sign = -1 if leaving else 1
        alone = sign * self.marginal[pivot]
        x = -sign * self.marginal[partners] - self.edges[pivot, partners]
        # x_j is the change that partner j adds, apart from its edge to the other partner. Even with
        # the smallest x and the lowest edge most j cannot win: only the others are tried in pairs
        hopeful = alone + x + x.min(initial=0.0) + lowest < -self.win
        one, x = partners[hopeful], x[hopeful]
        two = one[:, None]
        change = alone + x + x[:, None] + self.edges[two, one]
        cost, layer = self.costs[pivot], self.layers[pivot]
        pair, same = self.costs[two] + self.costs[one], self.layers[two] == self.layers[one]
        allowed = self._in_budget(self.spent + sign * (cost - pair)) & (one < two)
        if leaving:  # the partners enter: each must fit, and both together if they share a layer
            room = self.room[self.layers[one]] + cost * (self.layers[one] == layer)
            fits = self.costs[one] <= room
            allowed &= fits & fits[:, None] & (~same | (pair <= room))
        else:
            freed = self.costs[one] * (self.layers[one] == layer)
            allowed &= cost <= self.room[layer] + freed + freed[:, None]
        best = _lowest(change, allowed, two, one)
        return _Exchange(best.change, (pivot, *best.units))


def _lowest(change: np.ndarray, allowed: np.ndarray, *units: np.ndarray) -> _Exchange:
    """The allowed exchange of lowest change, the first among equals.

    `change` and `allowed` have an entry for each combination; `units` are the indices on each axis.
    """
    if not allowed.any():
        return _Exchange(np.inf)
    place = int(np.where(allowed, change, np.inf).argmin())
    named = (int(np.broadcast_to(axis, change.shape).flat[place]) for axis in units)
    return _Exchange(float(change.flat[place]), tuple(named))
