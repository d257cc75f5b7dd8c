"""The plans behind the cells of a bake-off, and the errors of their order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.extensions.figures import DEEP
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.measuring.risk import measure_plans, standard_error
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.selection import Selection

from ..chart import chart, empty
from ..lazy import DataFrame, Figure, PreTrainedModel
from ..tables import Rows, table_of
from .bench import Bench
from .contenders import CompareOptions, Competitor, Judges, named


def chosen_plans(
    model: PreTrainedModel,
    methods: Mapping[str, Competitor],
    ratio: float,
    calibration: CalibrationSet,
    judges: Judges,
    options: CompareOptions | None = None,
) -> dict[str, Selection]:
    """Select the plans that `compare` measured, with the guards each method found best.

    With the folder of that run in the options, evidence and held-out KL are read from it. Methods
    that repair weights are omitted (their model is more than its plan), and so are those that do
    not reach the ratio.

    Args:
        model, methods, judges, options: as in that run; empty `options.guards` give the plans
            without guards.
        ratio: share of removable cost, [0, 1).
        calibration: the first calibration of that run.

    Returns:
        label -> Selection, in the order of `methods`.
    """
    options = options or CompareOptions()
    units = enumerate_units(model, options.ffn_groups)
    bench = Bench(model, units, judges, replace(options, progress=False))
    plans = {}
    for label, contender in named(methods).items():
        if contender.repairs:
            continue
        try:
            seen = bench.seen(contender, calibration, 0)
            plans[label] = bench.enter(contender, seen, ratio, bench.searches(contender)[-1]).plan
        except InfeasibleError:  # `Comparison.unreached` says which, and why
            continue
    return plans


def paired_table(
    model: PreTrainedModel,
    plans: Mapping[str, Selection],
    reference: str,
    text: CalibrationSet,
    folder: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """Compare every plan with one of them on the same rows of text.

    Text that is hard for one plan is hard for all, so a difference taken row by row has a far
    smaller error than the two perplexities it comes from.

    Args:
        model: the dense model.
        plans: label -> plan; all of one ratio, or the comparison says little.
        reference: the label that the others are compared with.
        text: rows that no method saw.
        folder: keeps what was measured; None keeps nothing.

    Returns:
        A row per plan, best perplexity first: method, realized_ratio, kl and kl_error (nats per
        token), perplexity, nll_behind and nll_behind_error (its negative log-likelihood minus the
        reference's, nats per token; above 0 it is worse), sequences. The reference's own is 0.
    """
    path = plans_file(folder, model, text)
    table = measure_plans(model, list(plans.values()), text, checkpoint=path, progress=False)
    assert table.nll is not None  # measure_plans fills it
    behind = table.nll - table.nll[list(plans).index(reference)]
    errors = standard_error(behind)
    rows: Rows = [
        {
            "method": name,
            "realized_ratio": plan.realized_ratio,
            "kl": float(table.mean[place]),
            "kl_error": float(table.standard_error[place]),
            "perplexity": float(table.perplexity[place]),
            "nll_behind": float(behind[place].mean()),
            "nll_behind_error": float(errors[place]),
            "sequences": len(text),
        }
        for place, (name, plan) in enumerate(plans.items())
    ]
    return table_of(sorted(rows, key=lambda row: float(row["perplexity"])))


# Pictures -----------------------------------------------------------------------------------------
def plot_layers(plans: Mapping[str, Selection]) -> Figure:
    """Draw the share of each layer's removable parameters that each plan removes, as a heatmap."""
    figure = empty()
    values = np.array([layer_shares(plan) for plan in plans.values()])
    few = values.shape[1] <= 16
    figure.add_heatmap(
        z=np.round(values, 4),
        x=[f"{layer}" for layer in range(values.shape[1])],
        y=list(plans),
        zmin=0,
        colorscale=DEEP,
        texttemplate="%{z:.0%}" if few else None,
        textfont={"color": "white"},
        showscale=not few,  # few layers have their numbers written in
        hovertemplate="%{y}, layer %{x}: %{z:.1%} removed<extra></extra>",
    )
    y = {"autorange": "reversed", "automargin": True}
    title, height = "Share of each layer removed by each plan", 140 + 26 * len(plans)
    return chart(figure, title, {"title_text": "layer", "type": "category"}, y, height=height)


def layer_shares(plan: Selection) -> np.ndarray:
    """Return the share of each layer's removable parameters that a plan removes [layers]."""
    units, gone = plan.units, plan.indicator
    count = units.num_layers
    total = np.bincount(units.layers, units.costs, minlength=count)
    removed = np.bincount(units.layers[gone], units.costs[gone], minlength=count)
    return np.divide(removed, total, out=np.zeros(count), where=total > 0)
