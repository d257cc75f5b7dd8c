"""Algorithm 2 in portions: each step removes the portion of lowest signed marginal per parameter.

Its units are chosen as Algorithm 2 would: the cheapest first, given those that went before.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...base.arguments import require_type
from ...curvature.matrix import Curvature
from ...solver.greedy import Greedy
from ...solver.guards import FREE, Guards, UnitsLike
from ...solver.selection import Selection
from ...solver.targets import Target, require_strength
from ...solver.uniform import Counts, EqualCounts, Offer, cheapest_of, solve_together
from .portions import Group, Machine, MachineRules, incomplete


def solve_aligned(
    curvature: Curvature,
    ratio: float | Target,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
    *,
    machine: Machine,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
    uniform: bool = False,
) -> Selection:
    """Solve as `solve_greedy` does, so that the widths left suit a machine.

    Args:
        curvature, ratio, interaction_strength, guards, include, exclude: as for `solve_greedy`. The
            ratio may be exceeded by up to a portion. Of included units, the portion goes with them.
        machine: what the widths must suit.
        uniform: remove the same counts from each layer, too.

    Returns:
        The plan. `made.rule` names the machine; `refine` and `search_plan` keep its counts.

    Example:
        >>> import numpy as np
        >>> from cocurve_lab import Curvature, Machine, Unit, UnitSet, solve_aligned
        >>> units = UnitSet(tuple(Unit("ffn", 0, i, 8 * i, 8 * i + 8, 10) for i in range(4)))
        >>> H = Curvature(np.diag([1.0, 1.1, 1.5, 9.0]), units)
        >>> solve_aligned(H, 0.25, machine=Machine(align=16)).pruned
        (0, 1)
    """
    require_type(curvature, Curvature, "curvature")
    require_type(machine, Machine, "machine")
    strength, units = require_strength(interaction_strength), curvature.units
    rules = MachineRules(units, guards, ratio, include, exclude, machine=machine)
    greedy = Greedy(curvature, rules)
    if uniform:
        plan = _AlignedCounts(greedy, rules).solve(strength)
    else:
        plan = _solve_in_portions(greedy, rules, strength)
    return plan.with_made(rule=f"aligned to {machine}")


def _solve_in_portions(greedy: Greedy, rules: MachineRules, strength: float) -> Selection:
    def unfinished() -> list[int]:
        return rules.unfinished(greedy.order)

    def offers() -> Iterator[Offer | None]:
        counts = rules.counts(greedy.order)
        # included units may leave groups between two stops: these are completed first
        for number in unfinished() or range(len(counts)):
            yield _next_portion(greedy, rules.groups[number], counts[number])

    if solve_together(greedy, strength, offers, unfinished):
        return greedy.selection()
    rules.reachable()  # raises if the included units make the target unreachable
    if unfinished():
        raise incomplete("of a block")
    raise greedy.infeasible()


def _next_portion(greedy: Greedy, group: Group, count: int) -> Offer | None:
    """The next portion of a group that lost `count` units; None if none is left or fits."""
    size = next((stop for stop in group.stops if stop > count), count) - count
    found = cheapest_of(greedy, group.ids, size, group.ids) if size else None
    if found is None or sum(greedy.costs[u] for u in found[1]) > greedy.room[group.layer]:
        return None
    return found


class _AlignedCounts(EqualCounts):
    """The counts by shape that suit the machine, too; all layers are alike."""

    def __init__(self, greedy: Greedy, rules: MachineRules) -> None:
        super().__init__(greedy)
        first = [group for group in rules.groups if group.layer == 0]
        self.stops = [(set(self.of[group.ids].tolist()), group.stops) for group in first]

    def fit(self, counts: Counts) -> bool:
        """Whether each group of a layer would come to one of its stops."""
        return all(sum(counts[shape] for shape in shapes) in stops for shapes, stops in self.stops)
