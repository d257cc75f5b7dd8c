"""Plans made from changed versions of H, measured and compared in pairs with those of the method.

The paper's "Ablations: the edge term is decisive" and appendix "Extended Ablations". A variant
changes the H that is solved on; the predicted cost of a plan always comes from the full signed H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.curvature.matrix import BLOCKS, Curvature
from cocurve_lab.extensions.analysis.variants import edge_variant, solve_variant
from cocurve_lab.measuring.risk import PlanTable, standard_error
from cocurve_lab.models.kinds import KINDS
from cocurve_lab.solver.greedy import Greedy
from cocurve_lab.solver.guards import FREE, Guards, Rules
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from cocurve_lab.solver.targets import require_strength

from ..draws import Plans, Redrawn
from ..lazy import CalibrationSet, DataFrame, PreTrainedModel
from ..shared import known, marks, solved
from ..study import Study
from ..tables import Columns, Folder, Row, Rows

METHOD = ("structure", "full H")  # axis and variant that every other row is compared with
STRENGTHS = (0.0, 0.5, 1.0)  # of the axis "lambda"

# columns of `edge_study` for reading, with `shown`
COLUMNS: Columns = {
    "variant": "",
    "requested_ratio": "removed",
    "units": "",
    "common": "",
    "measured": "KL",
    "difference": "KL − method",
    "perplexity": "",
    "perplexity_difference": "perplexity − method",
}


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


# The study ----------------------------------------------------------------------------------------
def edge_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    ratios: Sequence[float] = (0.2, 0.4),
    *,
    draws: int = 0,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Measure the held-out KL of the plan of every edge variant, beside that of the method.

    The axes are those of `structure_table` (structure, reach, sign, kinds, rule) and "lambda".
    Equal plans are measured once. Each draw of H makes every variant again.

    Returns:
        One row per (axis, variant, ratio): realized_ratio, units, common (units shared with the
        method's plan), predicted_risk (under the full H), measured KL, difference (to the method's
        plan), perplexity and perplexity_difference (its error is first order in the nll). Where a
        variant reaches no plan the numbers are None and `note` says why.
    """

    def compute(study: Study) -> Rows:
        rows = _variants(ratios, curvature)
        plans = {row["selection"].fingerprint: row["selection"] for row in rows if row["selection"]}
        table, drawn = study.measure(list(plans.values())), study.redraw(partial(_plans, ratios))
        places = {mark: place for place, mark in enumerate(plans)}
        methods = {_name(row)[0]: row["selection"] for row in rows if _name(row)[1:] == METHOD}
        return [
            _identity(row) | _numbers(table, places, row, methods[_name(row)[0]], drawn)
            for row in rows
        ]

    settings = marks(model, curvature, held_out, ratios=[float(ratio) for ratio in ratios])
    study = Study(model, held_out, curvature, draws, cache, progress)
    return study.table("edges", settings, compute)


def _variants(ratios: Sequence[float], curvature: Curvature) -> Rows:
    """Axis, name, selection or None, note and ratio of every row."""
    rows: Rows = []
    for ratio in ratios:
        found = structure_table(curvature, ratio)
        for value in STRENGTHS:
            plan, note = solved(curvature, ratio, value)
            row = {"axis": "lambda", "name": f"lambda {value:g}"}
            found.append(row | {"selection": plan, "note": note})
        rows += [row | {"requested_ratio": ratio} for row in found]
    return rows


def _plans(ratios: Sequence[float], curvature: Curvature) -> Plans:
    """Return the plans of all rows on one draw of H."""
    return {_name(row): row["selection"] for row in _variants(ratios, curvature)}


def _name(row: Row) -> tuple[Any, str, str]:
    return row["requested_ratio"], row["axis"], row["name"]


def _identity(row: Row) -> Row:
    """Return the columns that name a row; those that are measured are None."""
    names = (
        "realized_ratio",
        "units",
        "common",
        "predicted_risk",
        "measured",
        "measured_error",
        "difference",
        "difference_error",
        "perplexity",
        "perplexity_difference",
        "perplexity_difference_error",
    )
    named = {"axis": row["axis"], "variant": row["name"], "requested_ratio": row["requested_ratio"]}
    return named | {"note": row["note"]} | dict.fromkeys(names)


def _numbers(
    table: PlanTable, places: dict[str, int], row: Row, method: Selection, drawn: Redrawn
) -> Row:
    """Return the measured columns of one row; nothing for a variant without a plan."""
    plan: Selection | None = row["selection"]
    if plan is None:
        return {}
    mine, other = places[plan.fingerprint], places[method.fingerprint]
    assert table.nll is not None  # measure_plans always has it
    difference, error = table.paired(mine, other)
    perplexity = table.perplexity
    nll_error = standard_error(table.nll[mine] - table.nll[other])
    perplexity_error = known(perplexity[mine] * nll_error)
    name, whole = _name(row), (row["requested_ratio"], *METHOD)
    return {
        "realized_ratio": plan.realized_ratio,
        "units": len(plan),
        "common": len(set(plan.pruned) & set(method.pruned)),
        "predicted_risk": plan.predicted_risk,
        "measured": table.mean[mine],
        "measured_error": known(table.standard_error[mine]),
        "difference": difference,
        **drawn.columns("difference", known(error), name, whole),
        "perplexity": perplexity[mine],
        "perplexity_difference": perplexity[mine] - perplexity[other],
        **drawn.columns("perplexity_difference", perplexity_error, name, whole, "perplexity"),
    }
