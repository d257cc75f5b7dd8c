"""The matched-pair causal test: does connectivity carry the damage, saliency held fixed?

Bridge units and controls of the same kind, cost and saliency are forced out in two arms, and one
and the same list of further units completes both (appendix "Mechanism Analysis", "Controlled
causal test"). The arms then differ in connectivity only, so what differs in the measurement is due
to it. Numpy and scipy only: arms are made here and measured elsewhere (`measure_plans`, whose
`PlanTable.paired` is the effect with its error).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.optimize import linear_sum_assignment

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.measuring.results import Tabular
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import FREE, Guards, Rules, UnitsLike, reachable_ratio
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.targets import target_cost

from ..tables import DataFrame

Fill = Literal["greedy", "diagonal", "random"]
_STRENGTHS = {"greedy": 1.0, "diagonal": 0.0, "random": 0.0}  # lambda of the fill


@dataclass(frozen=True, eq=False, repr=False)
class Matching(Tabular):
    """Bridge units paired with controls; made by `match_controls`.

    Attributes:
        units: the UnitSet.
        pairs: (bridge, control) unit indices, closest pair first.
        saliency: [k, 2] float64, H_uu of bridge and control, nats per token.
        connectivity: [k, 2] float64, b_u = sum over v != u of |H_uv|, nats per token.
        caliper: the largest |log saliency| difference that was allowed.
        unmatched: bridge index -> why it has no control.
    """

    units: UnitSet
    pairs: tuple[tuple[int, int], ...]
    saliency: np.ndarray
    connectivity: np.ndarray
    caliper: float
    unmatched: dict[int, str]

    @property
    def bridges(self) -> tuple[int, ...]:
        """The matched bridges, in the order of the pairs."""
        return tuple(bridge for bridge, _ in self.pairs)

    @property
    def controls(self) -> tuple[int, ...]:
        """Their controls, in the same order."""
        return tuple(control for _, control in self.pairs)

    @property
    def distances(self) -> np.ndarray:
        """|log H_bb - log H_cc| of each pair [k], ascending."""
        return np.abs(np.log(self.saliency[:, 0]) - np.log(self.saliency[:, 1]))

    @property
    def contrast(self) -> np.ndarray:
        """Connectivity of the bridge over that of its control [k], above 1: the treatment."""
        return np.divide(
            self.connectivity[:, 0],
            self.connectivity[:, 1],
            out=np.full(len(self), np.inf),
            where=self.connectivity[:, 1] > 0,
        )

    @property
    def worst(self) -> dict[str, Any] | None:
        """The pair furthest apart in saliency, a row of `table`; None without pairs."""
        return dict(self.table.iloc[-1]) if self.pairs else None

    @property
    def table(self) -> DataFrame:
        """One row per pair, closest first."""
        from pandas import DataFrame

        return DataFrame(
            {
                "bridge": [self.units[unit].name for unit in self.bridges],
                "control": [self.units[unit].name for unit in self.controls],
                "kind": [self.units[unit].kind for unit in self.bridges],
                "cost": [self.units[unit].cost for unit in self.bridges],
                "bridge_saliency": self.saliency[:, 0],
                "control_saliency": self.saliency[:, 1],
                "distance": self.distances,
                "bridge_connectivity": self.connectivity[:, 0],
                "control_connectivity": self.connectivity[:, 1],
                "contrast": self.contrast,
            }
        )

    def closest(self, count: int) -> Matching:
        """Return the `count` closest pairs only; the other bridges become unmatched."""
        if not 1 <= count <= len(self):
            raise InputError(
                f"count is {count}. Give 1 to {len(self)}, the pairs of this matching."
            )
        dropped = dict.fromkeys(self.bridges[count:], f"not among the {count} closest pairs")
        return replace(
            self,
            pairs=self.pairs[:count],
            saliency=self.saliency[:count],
            connectivity=self.connectivity[:count],
            unmatched=self.unmatched | dropped,
        )

    def __len__(self) -> int:
        return len(self.pairs)


def match_controls(
    curvature: Curvature,
    bridges: UnitsLike,
    caliper: float = 0.2,
    exclude: UnitsLike = (),
    guards: Guards = FREE,
) -> Matching:
    """Pair bridges one to one with controls equal in kind and cost, close in saliency.

    The paper matches "unit-for-unit on saliency, type and cost" without a rule. Ours: a pair may
    form if kind and cost are equal, |log H_bb - log H_cc| is at most the caliper, and the control
    is the less connected of the two (else the pair would test nothing). Among all assignments it is
    one with the most pairs, and of those one of smallest total distance: fewer pairs rather than
    bad ones. A control is never a bridge, matched or not.

    Args:
        curvature: H [M, M], nats per token.
        bridges: units, names or indices, such as `bridge_units(curvature)`.
        caliper: largest |log saliency| difference, finite and >= 0; 0.2 is about 20 %.
        exclude: units that are neither matched nor controls.
        guards: protection and kinds, so that both arms may be forced out; its cap is left to
            `causal_arms`, because it depends on the ratio.

    Returns:
        A Matching, possibly without pairs.
    """
    units, wanted = curvature.units, curvature.units.indices(bridges)
    if not wanted:
        raise InputError("there is no bridge to match. Loosen the thresholds of bridge_units.")
    if not 0 <= caliper < math.inf:
        raise InputError(
            f"caliper is {caliper}; it bounds |log saliency|. Give a finite number >= 0."
        )
    allowed = Rules(units, replace(guards, layer_cap=None, layer_cap_factor=None), 0.0, (), exclude)
    problem = _Problem(curvature, wanted, caliper, allowed)
    rows, columns = problem.solve()
    order = np.argsort(problem.distance[rows, columns], kind="stable")
    pairs = tuple((wanted[i], int(j)) for i, j in zip(rows[order], columns[order], strict=True))
    index = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    left = sorted(set(range(len(wanted))) - set(rows.tolist()))
    return Matching(
        units,
        pairs,
        curvature.saliency[index],
        curvature.connectivity[index],
        float(caliper),
        {wanted[row]: problem.why_not(row) for row in left},
    )


class _Problem:
    """The possible controls of each of B bridges among all M units, and their distances.

    Attributes:
        alike: [B, M] bool, same kind and cost, not a bridge, and not ruled out.
        distance: [B, M] |log saliency| differences; inf where a saliency is 0.
        lower: [B, M] bool, less connected than the bridge.
    """

    def __init__(
        self, curvature: Curvature, bridges: tuple[int, ...], caliper: float, allowed: Rules
    ) -> None:
        units, rows = curvature.units, list(bridges)
        self.units, self.bridges, self.caliper, self.rules = units, bridges, caliper, allowed
        free = allowed.admissible.copy()
        free[rows] = False
        same = (units.kinds[rows, None] == units.kinds) & (units.costs[rows, None] == units.costs)
        self.alike = same & free & allowed.admissible[rows, None]
        self.live = curvature.saliency > 0
        logs = np.log(curvature.saliency, out=np.zeros(len(units)), where=self.live)
        both = self.live[rows, None] & self.live
        self.distance = np.where(both, np.abs(logs[rows, None] - logs), np.inf)
        self.lower = curvature.connectivity < curvature.connectivity[rows, None]

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column numbers of the assigned pairs that may form."""
        may = self.alike & self.lower & (self.distance <= self.caliper)
        # above the distance of all pairs together, so no pair is given up to bring others closer
        prohibitive = 1.0 + self.caliper * len(self.bridges)
        rows, columns = linear_sum_assignment(np.where(may, self.distance, prohibitive))
        formed = may[rows, columns]
        return rows[formed], columns[formed]

    def why_not(self, row: int) -> str:
        """Return the first condition that leaves a bridge without a control, in words."""
        bridge = self.bridges[row]
        if self.rules.excluded[bridge]:
            return "it is in exclude"
        if not self.rules.admissible[bridge]:
            return "the guards keep it"
        if not self.live[bridge]:
            return "its saliency is 0, which has no logarithm"
        if not self.alike[row].any():
            return "no other free unit has its kind and cost"
        nearest = self.distance[row, self.alike[row]].min()
        if nearest > self.caliper:
            return f"the nearest unit of its kind and cost is {nearest:.3g} away in log saliency"
        if not (self.alike & self.lower & (self.distance <= self.caliper))[row].any():
            return "no unit within the caliper is less connected than it"
        return "every control within the caliper went to another bridge"


# Arms ---------------------------------------------------------------------------------------------
def causal_arms(
    curvature: Curvature,
    matching: Matching,
    ratio: float,
    guards: Guards = FREE,
    fill: Fill = "greedy",
    seed: int = 0,
) -> tuple[Selection, Selection]:
    """Two plans of equal cost: one forces the bridges out, one the controls; the rest is the same.

    The fill is one list, made once with neither set in it, of units both arms can take: no bridge
    (matched or not), no control, and within what either arm leaves under the layer cap. It stops
    when forced units and fill reach the ratio, so both arms overshoot equally, by less than a unit.

    Args:
        curvature: H [M, M], nats per token.
        matching: the pairs, from `match_controls` on the same units.
        ratio: share of removable cost of each arm, [0, 1).
        guards: where units may go, in both arms.
        fill: "greedy" is the cost-normalized greedy at lambda 1 over the fill alone (it sees no
            edge to the forced units, or it would differ between the arms); "diagonal" the same at
            lambda 0; "random" takes units in random order.
        seed: for the random fill; the others ignore it.

    Returns:
        (bridge arm, control arm): forced units first, then the fill, in order; `forced` counts the
        former. Node and edge terms [k] are those of the full H, nats per token; no lambda is
        recorded, since no single one made the plan.
    """
    if fill not in _STRENGTHS:
        raise InputError(f"fill is {fill!r}. Choose one of {', '.join(map(repr, _STRENGTHS))}.")
    _require_fair(curvature, matching)
    room = _shared_room(matching, ratio, guards)
    pool = Rules(curvature.units, guards, ratio, (), _kept_out(matching)).admissible
    half, strength = curvature.saliency / 2, _STRENGTHS[fill]
    if fill == "random":  # random scores per parameter are a random order
        half = np.random.default_rng(seed).random(len(half)) * curvature.units.costs
    needed = target_cost(ratio, curvature.units.total_cost) - _forced_cost(matching)
    half = np.where(pool, half, np.inf)
    order, missing = _fill(curvature, half, strength, needed, room)
    if missing > 0:
        raise _infeasible(matching, ratio, guards, missing)
    arms = tuple(
        Selection.from_pruned(
            curvature.units,
            [*forced, *order],
            curvature,
            requested_ratio=float(ratio),
            ordered=True,
            guards=guards,
            forced=len(matching),
        )
        for forced in (matching.bridges, matching.controls)
    )
    return arms[0], arms[1]


def _fill(
    curvature: Curvature, half: np.ndarray, strength: float, needed: float, room: np.ndarray
) -> tuple[list[int], float]:
    """Alg. 2 within given room per layer: units in order, and the cost still missing at the end."""
    units, room, half = curvature.units, room.copy(), half.copy()
    order: list[int] = []
    g = np.zeros(len(units))
    while needed > 0:
        half[units.costs > room[units.layers]] = np.inf
        u = int(((half + strength * g) / units.costs).argmin())
        if half[u] == np.inf:
            break
        order.append(u)
        g += curvature.matrix[u]
        needed -= float(units.costs[u])
        room[units.layers[u]] -= units.costs[u]
        half[u] = np.inf
    return order, needed


def _require_fair(curvature: Curvature, matching: Matching) -> None:
    """The invariants of the test: pairs that differ in connectivity only, and no unit twice."""
    units = curvature.units
    units.require_same(matching.units, mine="the curvature", theirs="the matching")
    if not matching.pairs:
        raise InputError(
            "the matching has no pair, so there is nothing to compare. Widen the caliper, or see "
            "matching.unmatched for the reasons."
        )
    named = [*matching.bridges, *matching.controls]
    units.indices(named)  # refuses a unit named twice
    mixed = set(matching.controls) & set(matching.unmatched)
    if mixed:
        raise InputError(f"control {units[min(mixed)]} is a bridge itself. Match again.")
    for bridge, control in matching.pairs:
        a, b = units[bridge], units[control]
        if (a.kind, a.cost) != (b.kind, b.cost):
            raise InputError(
                f"{a} (cost {a.cost:,}) is paired with {b} (cost {b.cost:,}): a pair has one kind "
                "and one cost. Use match_controls."
            )


def _shared_room(matching: Matching, ratio: float, guards: Guards) -> np.ndarray:
    """Cost that may still go per layer [layers] in both arms once their units are forced out."""
    units, cost = matching.units, _forced_cost(matching)
    rooms = []
    for forced, other in _arms(matching):
        rules = Rules(units, guards, ratio, forced, other)  # refuses what the guards forbid
        rooms.append(rules.room_after(rules.forced))
    if cost > ratio * units.total_cost * (1 + 1e-12):  # 0.29 x 100 is 28.999999999999996
        raise InputError(
            f"the {len(matching)} forced units cost {cost / units.total_cost:.2%} of the removable "
            f"parameters, above ratio {ratio:g}. Take fewer pairs (matching.closest) or a larger "
            "ratio."
        )
    return np.min(rooms, axis=0)


def _arms(matching: Matching) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the units that each arm forces out, and those that it must keep."""
    kept = set(_kept_out(matching))
    for forced in (matching.bridges, matching.controls):
        yield forced, tuple(sorted(kept - set(forced)))


def _kept_out(matching: Matching) -> tuple[int, ...]:
    """Units that no fill may hold; unmatched bridges too, so the control arm has no bridge."""
    return (*matching.bridges, *matching.controls, *matching.unmatched)


def _forced_cost(matching: Matching) -> int:
    return int(matching.units.costs[list(matching.bridges)].sum())


def _infeasible(
    matching: Matching, ratio: float, guards: Guards, missing: float
) -> InfeasibleError:
    """The error of a fill that ran out; `reachable_ratio` bounds the arm that can reach less."""
    units, target = matching.units, target_cost(ratio, matching.units.total_cost)
    reachable = min(
        reachable_ratio(units, guards, ratio, forced, other) for forced, other in _arms(matching)
    )
    stalled = (target - missing) / units.total_cost
    return InfeasibleError(
        f"ratio {ratio:g} is out of reach: the shared fill stalls at {stalled:.2%} with "
        f"{len(_kept_out(matching))} bridges and controls set aside. Ask for less, loosen the "
        "guards, or match fewer bridges.",
        requested_ratio=float(ratio),
        reachable_ratio=reachable,
        stalled_ratio=stalled if reachable * units.total_cost >= target else None,
    )
