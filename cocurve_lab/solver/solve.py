"""From a curvature and a budget to a plan, by Algorithm 2: `solve_greedy`, and `longest`."""

from __future__ import annotations

from collections.abc import Iterable

from ..base.arguments import as_list, require_type
from ..base.errors import InputError
from ..curvature.matrix import Curvature
from ..models.architectures import UNIT_KINDS
from ..models.unit import Kind
from .greedy import Greedy
from .guards import FREE, Guards, Rules, UnitsLike
from .selection import Selection
from .targets import Target, require_strength
from .uniform import EqualCounts, solve_alike


def solve_greedy(
    curvature: Curvature,
    ratio: float | Target,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
    *,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
    uniform: bool | Iterable[Kind] | None = None,
) -> Selection:
    """Remove `ratio` of the removable cost, cheapest signed marginal per parameter first (Alg. 2).

    Each step takes argmin over admissible u of (1/2 H_uu + lambda g_u) / c_u, where g_u is the sum
    of H_uv over v in S (eq. marginal with the lambda of eq. lambda). Marginals are never clipped: a
    negative one cancels distortion already there. Exact ties go to the lowest index. The loop stops
    once the pruned cost reaches `target_cost`: it overshoots by less than one unit (Proposition
    "Overshoot").

    Args:
        curvature: H [M, M], nats per token.
        ratio: share of removable cost to remove, [0, 1); 0 is the empty plan. Or a `Target`: at
            most so many parameters, bytes, or bytes of KV cache left; or a share of other costs,
            which then stand for parameters throughout (ratio, score, layer caps).
        interaction_strength: lambda >= 0; 0 is the diagonal (OBD) selector, 1 the full edge model.
        guards: where units may go. A unit that would push its layer above the cap is inadmissible.
        include: units pruned first, in this order, whatever they cost and even beyond the ratio.
        exclude: units never pruned.
        uniform: True removes the same number of units of each kind and width in each layer, so that
            the pruned model is one of its stock class (uniform.py). Or the kinds of which each
            layer loses as many; () or False for none. None is the kinds of which a stock class has
            one number (`UnitKind.even`). The ratio may be exceeded by up to a unit per layer.

    Raises:
        InfeasibleError: no plan reaches the ratio under the guards (`stalled_ratio` is None), or
            some plan does but greedy runs out of admissible units at this lambda. Its ratios are
            shares of what the target counts.

    Example:
        Units 0 and 1 write the same, so removing both costs four times as much as one:

        >>> import numpy as np
        >>> from cocurve_lab import Curvature, Unit, UnitSet, solve_greedy
        >>> units = UnitSet(tuple(Unit("ffn", 0, i, i, i + 1, 10) for i in range(4)))
        >>> H = np.diag([1.0, 1.1, 1.5, 9.0])
        >>> H[0, 1] = H[1, 0] = 1.0
        >>> solve_greedy(Curvature(H, units), 0.5, interaction_strength=0.0).pruned
        (0, 1)
        >>> plan = solve_greedy(Curvature(H, units), 0.5)
        >>> plan.pruned, plan.predicted_risk
        ((0, 2), 1.25)
    """
    require_type(curvature, Curvature, "curvature")
    strength = require_strength(interaction_strength)
    greedy = Greedy(curvature, Rules(curvature.units, guards, ratio, include, exclude))
    if uniform is True:
        return EqualCounts(greedy).solve(strength)
    alike = _alike(uniform, greedy.rules)
    return solve_alike(greedy, alike, strength) if alike else greedy.solve(strength)


def _alike(uniform: bool | Iterable[Kind] | None, rules: Rules) -> tuple[Kind, ...]:
    """Return the kinds of which every layer loses as many, among those that may be pruned."""
    if uniform is None:
        uniform = [name for name, kind in UNIT_KINDS.items() if kind.even]
    elif isinstance(uniform, bool):
        uniform = ()
    asked = as_list(uniform, "uniform")
    if any(kind not in tuple(UNIT_KINDS) for kind in asked):
        raise InputError(f"uniform is {uniform!r}. Give True, or some of {tuple(UNIT_KINDS)}.")
    may = set(rules.units.kinds[rules.admissible].tolist())
    return tuple(kind for kind in UNIT_KINDS if kind in asked and kind in may)


def longest(
    curvature: Curvature, guards: Guards, upto: float, interaction_strength: float = 1.0
) -> Selection:
    """Return the longest plan that greedy reaches (Alg. 2): up to a ratio, or to where it stalls.

    Under guards whose cap does not depend on the ratio, each prefix of the result is the plan of
    its own ratio (`Selection.prefix`). If greedy stalls, `requested_ratio` is the realized ratio. A
    `layer_cap_factor` refers to `upto`.
    """
    require_type(curvature, Curvature, "curvature")
    greedy = Greedy(curvature, Rules(curvature.units, guards, upto))
    greedy.run(require_strength(interaction_strength))
    plan = greedy.selection()
    return plan.with_made(requested_ratio=min(plan.requested_ratio, plan.realized_ratio))
