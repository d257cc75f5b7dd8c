"""From scores or an order of units to a plan of one cost: how every method fills its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..errors import InfeasibleError
from ..models.families import Kind
from ..models.units import UnitSet
from ..solver.guards import Guards, Rules, reachable_ratio
from ..solver.selection import Selection
from ..solver.targets import target_cost

Allocation = Literal["uniform", "global"]


def take_in_order(
    units: UnitSet, order: Sequence[int], ratio: float, guards: Guards, **fields: Any
) -> Selection:
    """The shortest prefix of an order that reaches the ratio, skipping what the guards keep.

    The stopping rule is that of the greedy solver: it ends as soon as the cost of the pruned units
    is at least ratio x total, so it overshoots by less than one unit (Proposition "Overshoot").

    Args:
        units: the UnitSet.
        order: unit indices, first to go first; each once.
        ratio: share of removable cost, [0, 1).
        guards: units that would break them are passed over.
        **fields: further fields of the Selection.

    Raises:
        InputError: the ratio is out of range.
        InfeasibleError: the order runs out first.
    """
    rules = Rules(units, guards, ratio)
    room = np.array(rules.room, dtype=np.int64)
    needed, chosen = target_cost(units, ratio), []
    for u in order:
        if needed <= 0:
            break
        layer, cost = units.layers[u], units.costs[u]
        if rules.admissible[u] and cost <= room[layer]:
            chosen.append(int(u))
            room[layer] -= cost
            needed -= float(cost)
    if needed > 0:
        raise _infeasible(units, ratio, guards, chosen)
    defaults: dict[str, Any] = {"requested_ratio": float(ratio), "ordered": True, "guards": guards}
    return Selection.from_pruned(units, chosen, **(defaults | fields))


def take_counts(
    units: UnitSet,
    scores: np.ndarray,
    counts: Mapping[tuple[int, Kind], int],
    ratio: float,
    guards: Guards,
) -> Selection:
    """So many of the lowest scores of each block, as published code counts.

    The cost that comes out is what it is: `realized_ratio` may be far from `requested_ratio`.
    Units the guards keep are passed over, and nothing is taken for them elsewhere.

    Args:
        units: the UnitSet.
        scores: [M], low goes first; ties to the lowest index.
        counts: units to take by (layer, kind); above a block's size it is the whole block.
        ratio: what was asked for, [0, 1).
        guards: kinds, protection and layer cap.

    Raises:
        InputError: the ratio is out of range.
    """
    rules, chosen = Rules(units, guards, ratio), []
    room = np.array(rules.room, dtype=np.int64)
    for block in blocks(units):
        layer, kind = int(units.layers[block[0]]), units[block[0]].kind
        left = counts[layer, kind]
        for u in block[np.argsort(scores[block], kind="stable")]:
            if left <= 0:
                break
            if rules.admissible[u] and units.costs[u] <= room[layer]:
                chosen.append(int(u))
                room[layer] -= units.costs[u]
                left -= 1
    return Selection.from_pruned(units, chosen, requested_ratio=float(ratio), guards=guards)


def uniform_order(
    units: UnitSet, scores: np.ndarray, weights: np.ndarray | None = None
) -> list[int]:
    """Units in the order that empties all blocks evenly, the lowest score of a block first.

    A block is the units of one kind in one layer. A unit's turn is the share of its block's cost
    that is gone with half of the unit, divided by the block's weight, so that any prefix takes
    about the same share (times the weight) of every block, in parameters and not in counts. Where a
    round is left unfinished, it is done in the blocks whose unit holds the smallest share of its
    block's score: raw scores of different blocks do not compare, and the order of layers should
    decide nothing.

    Args:
        units: the UnitSet.
        scores: [M], low goes first.
        weights: [M], the same within a block, >= 0: how much of the block goes relative to others;
            None: all alike. A block of weight 0 comes last.
    """
    weights = np.ones(len(units)) if weights is None else np.asarray(weights, dtype=np.float64)
    turn, share = np.zeros(len(units)), np.zeros(len(units))
    for block in blocks(units):
        ranked = block[np.argsort(scores[block], kind="stable")]
        total = float(np.abs(scores[block]).sum())
        share[block] = scores[block] / total if total > 0 else 0.0
        costs = units.costs[ranked].astype(np.float64)
        # the middle of the unit's own share: blocks of few large units and of many small ones meet
        gone = (np.cumsum(costs) - costs / 2) / costs.sum()
        turn[ranked] = np.divide(
            gone, weights[ranked], out=np.full(len(gone), np.inf), where=weights[ranked] > 0
        )
    order: list[int] = np.lexsort((np.arange(len(units)), share, turn.round(12))).tolist()
    return order


def global_order(units: UnitSet, scores: np.ndarray, per_parameter: bool = False) -> list[int]:
    """Units of all blocks by one ranking, the lowest score first; ties to the lowest index.

    Args:
        units: the UnitSet.
        scores: [M], comparable across blocks.
        per_parameter: rank by score / cost.
    """
    ranked = scores / units.costs if per_parameter else scores
    return np.argsort(ranked, kind="stable").tolist()


def blocks(units: UnitSet) -> list[np.ndarray]:
    """Unit indices of every (layer, kind) that has units, in order of the first one."""
    keys = [(int(layer), str(kind)) for layer, kind in zip(units.layers, units.kinds, strict=True)]
    found: dict[tuple[int, str], list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return [np.array(members) for members in found.values()]


def _infeasible(
    units: UnitSet, ratio: float, guards: Guards, chosen: Sequence[int]
) -> InfeasibleError:
    reachable = reachable_ratio(units, guards, ratio)
    reached = float(units.costs[list(chosen)].sum()) / units.total_cost
    return InfeasibleError(
        f"the method reaches {reached:.2%} of the removable cost, not {ratio:.2%}; under these "
        f"guards no plan exceeds {reachable:.2%}. Lower the ratio or loosen the guards.",
        requested_ratio=ratio,
        reachable_ratio=reachable,
        stalled_ratio=reached,
    )
