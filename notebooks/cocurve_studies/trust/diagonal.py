"""Edges against the diagonal: H in full against its diagonal alone, with guards and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.extensions.choosing.settings import choose_guards, guards_grid
from cocurve_lab.measuring.risk import PlanTable, standard_error
from cocurve_lab.solver.guards import FREE
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty
from ..draws import Redrawn, again
from ..shared import plan_overlap, solved
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, pick
from .choices import Texts, choice_marks, kept_beside

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

NONE, OWN = "without guards", "each with its own guards"
COLUMNS: Columns = {
    "requested_ratio": "removed",
    "search": "",
    "kl_0": "KL, diagonal",
    "kl_1": "KL, edges",
    "edge_benefit": "saved by edges",
    "loss_benefit": "loss saved",
    "guards_0": "guards, diagonal",
    "guards_1": "guards, edges",
}
_Name = tuple[float, str, float]  # ratio, search, lambda


def diagonal_study(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5),
    *,
    options: ChoiceOptions = ChoiceOptions(),
    draws: int = 0,
    cache: Folder = None,
) -> DataFrame:
    """Measure the plans of lambda 1 and lambda 0, without guards and each with its own.

    Guards are chosen by `choose_guards` on `texts.choose`, in one grid and by one rule for both.
    Each draw of H solves every plan again under the same guards; the choice is not repeated.

    Returns:
        One row per ratio and search (`NONE`, `OWN`) with a plan of either lambda. `kl_0` and
        `kl_1` are those of lambda 0 and 1 on `texts.report`, `edge_benefit` is kl_0 - kl_1, and
        `loss_benefit` the same of the loss on the text, the logarithm of perplexity: positive where
        edges help. `overlap` of the two plans is 1 where they are one and the same. `tried`
        counts the guards of the grid, `out_0` and `out_1` those that do not reach the ratio.
    """
    grid = guards_grid()
    settings = choice_marks(model, curvature, texts, ratios, options)
    settings["grid"] = [str(guards) for guards in grid]

    def compute(study: Study) -> Rows:
        plans: dict[_Name, Selection] = {}
        out: dict[_Name, int] = {}
        chosen_by = kept_beside(options, cache, model, texts.choose)
        for ratio in ratios:
            for strength in (0.0, 1.0):
                free = solved(curvature, ratio, strength, FREE)[0]
                if free is not None:
                    plans[ratio, NONE, strength] = free
                try:
                    choice = choose_guards(
                        model,
                        curvature,
                        ratio,
                        texts.choose,
                        interaction_strength=strength,
                        options=chosen_by,
                    )
                except InfeasibleError:
                    continue
                plans[ratio, OWN, strength] = choice.best
                out[ratio, OWN, strength] = len(choice.infeasible)
        table = study.measure(list(plans.values()))
        drawn = study.redraw(lambda h: {name: again(plan, h) for name, plan in plans.items()})
        places = {name: place for place, name in enumerate(plans)}
        rows: Rows = []
        for ratio in ratios:
            for search in (NONE, OWN):
                zero, one = ((ratio, search, strength) for strength in (0.0, 1.0))
                if {zero, one} <= places.keys():
                    head: Row = {"requested_ratio": ratio, "search": search}
                    head |= {"tried": len(grid) if search == OWN else 1}
                    head |= {"out_0": out.get(zero, 0), "out_1": out.get(one, 0)}
                    rows.append(head | _difference(table, drawn, zero, one, places))
        return rows

    study = Study(model, texts.report, curvature, draws, cache, options.progress)
    return study.table("diagonal", settings, compute)


def _difference(
    table: PlanTable, drawn: Redrawn, zero: _Name, one: _Name, places: dict[_Name, int]
) -> Row:
    first, second = places[zero], places[one]
    row: Row = {}
    for name, place in (("0", first), ("1", second)):
        row[f"guards_{name}"] = str(table.selections[place].guards)
        row[f"kl_{name}"] = table.mean[place]
        row[f"kl_{name}_error"] = table.standard_error[place]
        row[f"perplexity_{name}"] = table.perplexity[place]
    row["overlap"] = plan_overlap(table.selections[second], table.selections[first])
    benefit, over_rows = table.paired(first, second)
    assert table.nll is not None  # measure_plans always has it
    loss = table.nll[first] - table.nll[second]
    row |= {"edge_benefit": benefit} | drawn.columns("edge_benefit", over_rows, zero, one)
    error = float(standard_error(loss))
    row |= {"loss_benefit": float(np.mean(loss))}
    return row | drawn.columns("loss_benefit", error, zero, one, "nll")


def plot_diagonal(table: Table) -> Figure:
    """Plot what the edges save by ratio, without guards and with; above 0 they help."""
    figure, hover = empty(), "%{x:.0%} removed: %{y:.4f} nats<br>%{text}<extra></extra>"
    for number, search in enumerate((NONE, OWN)):
        rows = pick(table, search=search)
        words = [f"diagonal {row['guards_0']}, edges {row['guards_1']}" for row in rows]
        x = "requested_ratio"
        add(figure, rows, x, "edge_benefit", search, number, line="solid", text=words, hover=hover)
    title = "KL that edges save against the diagonal (± s.e. over rows and draws of H)"
    x_axis = {"title_text": "share removed", "tickformat": ".0%"}
    return chart(figure, title, x_axis, "KL(λ 0) - KL(λ 1)<br>nats per token", across=0)
