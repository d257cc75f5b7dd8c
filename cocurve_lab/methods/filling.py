"""The fill that methods share: from scores or an order of units to a plan of the asked cost.

`take_in_order` is the rule of all comparisons: units go in order until the ratio is reached.
`take_counts` takes the numbers of units that published code would, whatever that costs. The orders
say how blocks share the budget: `uniform_order` evenly, `global_order` by score alone. A block is
the units of one kind in one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..base.errors import InfeasibleError
from ..models.families import Kind
from ..models.units import UnitSet
from ..solver.guards import Guards, Rules, reachable_ratio
from ..solver.selection import Selection
from ..solver.targets import target_cost

Allocation = Literal["uniform", "global"]
Block = tuple[int, Kind]  # (layer, kind)


def take_in_order(
    units: UnitSet, order: Sequence[int], ratio: float, guards: Guards, **fields: Any
) -> Selection:
    """Take units in order until the ratio is reached, passing over those the guards keep.

    This is the greedy solver's stopping rule: it ends as soon as the cost of the pruned units is at
    least ratio x total, so it overshoots by less than one unit (Proposition "Overshoot").

    Args:
        units: the UnitSet.
        order: unit indices, first to go first; each once.
        ratio: share of removable cost in parameters, [0, 1).
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
        # a unit too large for its layer's room is passed over; a smaller one later may still fit
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
    counts: Mapping[Block, int],
    ratio: float,
    guards: Guards,
) -> Selection:
    """Take a number of the lowest scores of each block, as published code does.

    Nothing corrects the cost: `realized_ratio` may be far from `requested_ratio`. Units the guards
    keep are passed over, and nothing is taken for them elsewhere.

    Args:
        units: the UnitSet.
        scores: [M], low goes first; ties to the lowest index.
        counts: units to take by (layer, kind); above a block's size it is the whole block.
        ratio: the ratio asked for, [0, 1).
        guards: kinds, protection and layer cap.

    Raises:
        InputError: the ratio is out of range.
    """
    rules, chosen = Rules(units, guards, ratio), []
    room = np.array(rules.room, dtype=np.int64)
    for block, ids in blocks(units).items():
        layer, left = block[0], counts[block]
        for u in ids[np.argsort(scores[ids], kind="stable")]:
            if left <= 0:
                break
            if rules.admissible[u] and units.costs[u] <= room[layer]:
                chosen.append(int(u))
                room[layer] -= units.costs[u]
                left -= 1
    return Selection.from_pruned(units, chosen, requested_ratio=float(ratio), guards=guards)


def floor_counts(units: UnitSet, ratio: float) -> dict[Block, int]:
    """int(ratio x n) of the n units of every block, which falls short of the ratio."""
    return {block: int(ratio * len(ids)) for block, ids in blocks(units).items()}


def uniform_order(
    units: UnitSet, scores: np.ndarray, weights: np.ndarray | None = None
) -> list[int]:
    """Order units so that all blocks empty evenly, the lowest score of a block first.

    A unit's turn is the share of its block's cost that is gone with half of the unit, divided by
    the block's weight. So any prefix takes about the same share (times the weight) of every block,
    in parameters and not in counts. Units of equal turn go by the share they hold of their block's
    score, smallest first.

    Args:
        units: the UnitSet.
        scores: [M], low goes first.
        weights: [M], the same within a block, >= 0: how much of the block goes relative to others;
            None: all alike. A block of weight 0 comes last.

    Returns:
        Unit indices [M].
    """
    weights = np.ones(len(units)) if weights is None else np.asarray(weights, dtype=np.float64)
    turn, share = np.zeros(len(units)), np.zeros(len(units))
    for ids in blocks(units).values():
        ranked = ids[np.argsort(scores[ids], kind="stable")]
        # the budget usually ends within a round of equal turns; raw scores of different blocks do
        # not compare, and going by index would always prune the first layers
        total = float(np.abs(scores[ids]).sum())
        share[ids] = scores[ids] / total if total > 0 else 0.0
        # half of the unit: counted to its end, a block of few large units would always come late
        # against one of many small units; counted to its start, always early
        costs = units.costs[ranked].astype(np.float64)
        gone = (np.cumsum(costs) - costs / 2) / costs.sum()
        turn[ranked] = np.divide(
            gone, weights[ranked], out=np.full(len(gone), np.inf), where=weights[ranked] > 0
        )
    # rounded, or turns that are equal on paper would differ in their last bit
    order: list[int] = np.lexsort((np.arange(len(units)), share, turn.round(12))).tolist()
    return order


def global_order(units: UnitSet, scores: np.ndarray, per_parameter: bool = False) -> list[int]:
    """Order units of all blocks by one ranking, lowest score first; ties to the lowest index.

    Args:
        units: the UnitSet.
        scores: [M], comparable across blocks.
        per_parameter: rank by score / cost.
    """
    ranked = scores / units.costs if per_parameter else scores
    return np.argsort(ranked, kind="stable").tolist()


def blocks(units: UnitSet) -> dict[Block, np.ndarray]:
    """Indices of the units of every (layer, kind) that has any, in order of the first one."""
    found: dict[Block, list[int]] = {}
    for index, unit in enumerate(units):
        found.setdefault((unit.layer, unit.kind), []).append(index)
    return {block: np.array(ids) for block, ids in found.items()}


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
