"""The paper's ablations of the edges and of the greedy rule as one table of plans.

Appendix "Extended Ablations" and Table "Joint co-pruning vs. single-module pruning". Every plan is
predicted with the full signed H, whatever it was solved on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.curvature.matrix import BLOCKS, Curvature
from cocurve_lab.extensions.analysis.variants import edge_variant, solve_variant
from cocurve_lab.models.kinds import KINDS
from cocurve_lab.solver.greedy import Greedy
from cocurve_lab.solver.guards import FREE, Guards, Rules
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from cocurve_lab.solver.targets import require_strength

# axis -> name of the row -> arguments of edge_variant; the first row of an axis is the method
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "structure": {
        "full H": {},
        "diagonal": {"structure": "diagonal"},
        "within module": {"structure": "within_module"},
        **{f"{block} block": {"structure": block} for block in BLOCKS},
        **{
            f"{block} block, no diagonal": {"structure": block, "keep_diagonal": False}
            for block in BLOCKS
        },
    },
    "reach": {
        "all layers": {},
        "adjacent layers": {"reach": "adjacent"},
        "within layer": {"reach": "within_layer"},
    },
    "sign": {
        "signed": {},
        "clipped": {"sign": "clipped"},
        "absolute": {"sign": "absolute"},
        "correlation clipped": {"sign": "correlation_clipped"},
    },
}


def plain_greedy(
    curvature: Curvature,
    ratio: float,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
) -> Selection:
    """Solve by greedy on the marginal itself, not per parameter: Alg. 2 without dividing by c_u.

    This is `solve_greedy` for the ablation of cost normalization; its arguments and errors are the
    same. With equal costs the two agree.
    """
    greedy = Greedy(curvature, Rules(curvature.units, guards, ratio))
    greedy.divisors[:] = 1
    return greedy.solve(require_strength(interaction_strength))


def structure_table(
    curvature: Curvature,
    ratio: float,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
) -> list[dict[str, Any]]:
    """Solve every row of the edge ablations, ready for `measure_plans` ("Extended Ablations").

    The axes are edge structure, reach, sign, the kinds that may be pruned (joint, head-only,
    FFN-only) and the greedy rule (per cost, plain). The first row of each axis is the same plan,
    that of the method; `measure_plans` measures equal plans once.

    The kinds axis restricts `guards.kinds`; it is omitted if they name only one kind.

    Returns:
        One dict per row: "axis", "name", "selection" (its predicted risk is under the full H) and
        "note". If a row has no plan (head-only at a high ratio, say), "selection" is None and
        "note" gives the reason; otherwise "note" is empty.
    """
    settings = (ratio, interaction_strength)
    solve_greedy(curvature, *settings, guards)  # raises where even the method has no plan
    rows = []
    for axis, variants in _VARIANTS.items():
        for name, changes in variants.items():
            variant = edge_variant(curvature, **changes)
            solve = partial(solve_variant, curvature, variant, *settings, guards)
            rows.append(_row(axis, name, solve))
    if all(map(guards.allows, KINDS)):
        for name, kinds in (("joint", KINDS), ("head-only", KINDS[:1]), ("FFN-only", KINDS[1:])):
            only = replace(guards, kinds=kinds)
            rows.append(_row("kinds", name, partial(solve_greedy, curvature, *settings, only)))
    for name, rule in (("per cost", solve_greedy), ("plain", plain_greedy)):
        rows.append(_row("rule", name, partial(rule, curvature, *settings, guards)))
    return rows


def _row(axis: str, name: str, solve: Callable[[], Selection]) -> dict[str, Any]:
    """One row of the table; if no plan is reached, the reason becomes its note."""
    selection, note = None, ""
    try:
        selection = solve()
    except InfeasibleError as error:
        note = str(error)
    return {"axis": axis, "name": name, "selection": selection, "note": note}
