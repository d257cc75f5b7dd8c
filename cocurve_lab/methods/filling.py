"""The fill that methods share: from an order of units to a plan of the asked cost.

The orders say how blocks share the budget: `uniform_order` evenly, `global_order` by score alone. A
block is the units of one kind in one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..models.unit import Kind
from ..models.units import UnitSet
from ..solver.greedy import fill
from ..solver.guards import Guards, PartialPlan, Rules
from ..solver.selection import Selection

Allocation = Literal["uniform", "global"]
Block = tuple[int, Kind]  # (layer, kind)


def take_in_order(
    units: UnitSet, order: Sequence[int], ratio: float, guards: Guards, **fields: Any
) -> Selection:
    """Take units in order until the ratio is reached, passing over those the guards keep.

    This is the greedy solver's stopping rule: it ends as soon as the cost of the pruned units is at
    least ratio x total, so it overshoots by less than one unit (Proposition "Overshoot").

    Args:
        order: unit indices, first to go first; each once.
        ratio: share of removable cost in parameters, [0, 1).
        guards: units that would break them are passed over.
        **fields: further fields of the Selection.
    """
    rules = Rules(units, guards, ratio)
    plan = PartialPlan(rules)
    # a unit too large for its layer's room is passed over; a smaller one later may still fit
    if not fill((int(u) for u in order if plan.fits(u)), plan.remove, plan.enough):
        most = rules.reachable()
        reached, reachable = plan.spent / units.total_cost, most / units.total_cost
        raise rules.out_of_reach(
            f"the method reaches {reached:.2%} of the removable cost, and no plan exceeds "
            f"{reachable:.2%} under {rules}. Lower the ratio or loosen the guards.",
            most,
            stalled=reached,
        )
    defaults: dict[str, Any] = {"requested_ratio": float(ratio), "ordered": True, "guards": guards}
    return Selection.from_pruned(units, plan.order, **(defaults | fields))


def uniform_order(
    units: UnitSet, scores: np.ndarray, weights: np.ndarray | None = None
) -> list[int]:
    """Order units so that all blocks empty evenly, the lowest score of a block first.

    A unit's turn is the share of its block's cost that is gone with half of the unit, divided by
    the block's weight. So any prefix takes about the same share (times the weight) of every block,
    in parameters and not in counts. Units of equal turn go by the share they hold of their block's
    score, smallest first.

    Args:
        scores: [M], low goes first.
        weights: [M], the same within a block, >= 0: how much of the block goes relative to others;
            None: all alike. A block of weight 0 comes last.
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


def global_order(units: UnitSet, scores: np.ndarray) -> list[int]:
    """Order the units of all blocks by score, lowest first; ties to the lowest index."""
    return np.argsort(scores, kind="stable").tolist()


def blocks(units: UnitSet) -> dict[Block, np.ndarray]:
    """Indices of the units of every (layer, kind) that has any, in order of the first one."""
    found: dict[Block, list[int]] = {}
    for index, unit in enumerate(units):
        found.setdefault((unit.layer, unit.kind), []).append(index)
    return {block: np.array(ids) for block, ids in found.items()}
