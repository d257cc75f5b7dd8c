"""Plans made from changed versions of H, measured and compared in pairs with those of the method.

The paper's "Ablations: the edge term is decisive" and appendix "Extended Ablations". A variant
changes the H that is solved on; the predicted cost of a plan always comes from the full signed H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.figures import look
from cocurve_lab.measuring.risk import PlanTable, standard_error
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty
from ..draws import Plans, Redrawn
from ..shared import known, marks, solved
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, column, pick
from .ablations import structure_table
from .activations import with_correlations

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

    from cocurve_lab.calibration import CalibrationSet


ACTIVATIONS = "activations"  # the axis of edges that are not of H
METHOD = ("structure", "full H")  # axis and variant that every other row is compared with

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


@dataclass(frozen=True)
class EdgeOptions:
    """The plans to compare.

    Attributes:
        ratios, guards: of all rows; the kinds axis restricts the kinds of the guards.
        interaction_strength: lambda of all rows but those of the lambda axis.
        strengths: lambdas of the lambda axis, solved on the full H.
        correlations: name -> [M, M] in place of those of H, on its diagonal (axis "activations").
    """

    ratios: tuple[float, ...] = (0.2, 0.4)
    interaction_strength: float = 1.0
    strengths: tuple[float, ...] = (0.0, 0.5, 1.0)
    guards: Guards = field(default_factory=Guards)
    correlations: Mapping[str, np.ndarray] = field(default_factory=dict)


def edge_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    options: EdgeOptions = EdgeOptions(),
    cache: Folder = None,
    progress: bool = True,
    *,
    draws: int = 0,
) -> DataFrame:
    """Measure the held-out KL of the plan of every edge variant, beside that of the method.

    The axes of `structure_table` (structure, reach, sign, kinds, rule), "lambda", and those of
    `options.correlations`. Equal plans are measured once. Each draw of H makes every variant again;
    correlations that are given stay as they are.

    Returns:
        One row per (axis, variant, ratio): realized_ratio, units, common (units shared with the
        method's plan), predicted_risk (under the full H), measured KL, difference (to the method's
        plan), perplexity, perplexity_difference (its error is first order in the nll) and
        dense_perplexity. Where a variant reaches no plan the numbers are None and `note` says why;
        where the method itself reaches none, its row is the only one of that ratio.
    """
    if not options.ratios:
        raise InputError("ratios is empty. Give at least one share of removable cost, such as 0.2.")

    def compute(study: Study) -> Rows:
        rows = [row for ratio in options.ratios for row in _variants(curvature, ratio, options)]
        plans = [row["selection"] for row in rows if row["selection"] is not None]
        if not plans:
            return [_identity(row) for row in rows]
        table, drawn = study.measure(plans), study.redraw(partial(_plans, options))
        places = {plan.fingerprint: number for number, plan in enumerate(plans)}
        methods = {row["requested_ratio"]: row["selection"] for row in rows if _is_method(row)}
        return [
            _identity(row)
            | _numbers(table, places, row, methods.get(row["requested_ratio"]), drawn)
            for row in rows
        ]

    chosen = asdict(options)
    if found := chosen.pop("correlations"):  # kept tables without any keep their names
        chosen["correlations"] = {name: fingerprint(rho) for name, rho in found.items()}
    settings = marks(model, curvature, held_out, **chosen)
    study = Study(model, held_out, curvature, draws, cache, progress)
    return study.table("edges", settings, compute)


def _variants(curvature: Curvature, ratio: float, options: EdgeOptions) -> Rows:
    """Axis, name, selection or None, note and ratio of every row of one ratio."""
    strength, guards = options.interaction_strength, options.guards
    try:
        rows = structure_table(curvature, ratio, strength, guards)
    except InfeasibleError as error:
        axis, name = METHOD
        return [_entry(axis, name, None, str(error)) | {"requested_ratio": ratio}]
    for value in options.strengths:
        plan, note = solved(curvature, ratio, value, guards)
        rows.append(_entry("lambda", f"lambda {value:g}", plan, note))
    for name, rho in options.correlations.items():
        plan, note = solved(with_correlations(curvature, rho), ratio, strength, guards)
        priced = None if plan is None else plan.predicted_by(curvature)
        rows.append(_entry(ACTIVATIONS, name, priced, note))
    return [row | {"requested_ratio": ratio} for row in rows]


def _plans(options: EdgeOptions, curvature: Curvature) -> Plans:
    """Return the plans of all rows on one draw of H."""
    rows = [row for ratio in options.ratios for row in _variants(curvature, ratio, options)]
    return {_name(row): row["selection"] for row in rows}


def _name(row: Row) -> tuple[float, str, str]:
    return row["requested_ratio"], row["axis"], row["name"]


def _entry(axis: str, name: str, selection: Selection | None, note: str = "") -> Row:
    return {"axis": axis, "name": name, "selection": selection, "note": note}


def _is_method(row: Row) -> bool:
    return (row["axis"], row["name"]) == METHOD


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
        "dense_perplexity",
    )
    named = {"axis": row["axis"], "variant": row["name"], "requested_ratio": row["requested_ratio"]}
    return named | {"note": row["note"]} | dict.fromkeys(names)


def _numbers(
    table: PlanTable,
    places: dict[str, int],
    row: Row,
    method: Selection | None,
    drawn: Redrawn,
) -> Row:
    """Return the measured columns of one row; nothing for a variant without a plan."""
    plan: Selection | None = row["selection"]
    if plan is None or method is None:
        return {}
    mine, other = places[plan.fingerprint], places[method.fingerprint]
    assert table.nll is not None
    assert table.dense_nll is not None
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
        "dense_perplexity": np.exp(table.dense_nll.mean()),
    }


def plot_edges(table: Table) -> Figure:
    """Plot the held-out KL of every variant, log axis; a dotted line per ratio is the method."""
    figure, hover = empty(), "%{text}<br>KL %{x:.3g}<extra></extra>"
    done = [row for row in pick(table) if row["measured"] is not None]
    for number, ratio in enumerate(dict.fromkeys(column(table, "requested_ratio").tolist())):
        rows, name = pick(done, requested_ratio=ratio), f"{ratio:.0%} removed"
        y = [[row["axis"] for row in rows], [row["variant"] for row in rows]]
        text = [_against_method(row) for row in rows]
        add(figure, rows, "measured", y, name, number, bars="x", text=text, hover=hover)
        for row in pick(rows, axis=METHOD[0], variant=METHOD[1]):
            if row["measured"] > 0:
                line = {"color": look(number)["color"], "dash": "dot"}
                figure.add_vline(x=row["measured"], line=line)
    missing = len(table) - len(done)
    title = "Held-out KL by edge variant" + (f"; {missing} without a plan" if missing else "")
    x = {"title_text": "held-out KL, nats per token", "type": "log"}
    y_axis = {"title_text": "axis and variant", "autorange": "reversed"}
    return chart(figure, title, x, y_axis, height=760)


def _against_method(row: Row) -> str:
    error = "" if row["difference_error"] is None else f" ± {row['difference_error']:.3g}"
    return f"{row['variant']}: {row['difference']:+.3g}{error} against the method"
