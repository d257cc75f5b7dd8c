"""Plans made from changed versions of H, measured and compared in pairs with those of the method.

The paper's "Ablations: the edge term is decisive" and appendix "Extended Ablations". A variant
changes the H that is solved on; the predicted cost of a plan always comes from the full signed H.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.measuring.risk import PlanTable, standard_error
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty
from ..draws import Plans, Redrawn
from ..shared import known, marks, solved
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, pick
from .ablations import structure_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

    from cocurve_lab.calibration import CalibrationSet


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


def plot_edges(table: Table) -> Figure:
    """Plot the held-out KL of every variant, log axis."""
    figure, hover = empty(), "%{y}: KL %{x:.3g}<extra>%{fullData.name}</extra>"
    done = [row for row in pick(table) if row["measured"] is not None]
    for number, ratio in enumerate(dict.fromkeys(row["requested_ratio"] for row in done)):
        rows = pick(done, requested_ratio=ratio)
        y = [[row["axis"] for row in rows], [row["variant"] for row in rows]]
        add(figure, rows, "measured", y, f"{ratio:.0%} removed", number, bars="x", hover=hover)
    x = {"title_text": "held-out KL, nats per token", "type": "log"}
    y_axis = {"title_text": "axis and variant", "autorange": "reversed"}
    return chart(figure, "Held-out KL by edge variant", x, y_axis, height=760)
