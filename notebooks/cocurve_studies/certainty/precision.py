"""The precision of H: intervals of its units, and a build that stops once precise enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.settings import BuildOptions
from cocurve_lab.curvature.uncertainty import jackknife, relative
from cocurve_lab.estimator.build import Build
from cocurve_lab.estimator.estimate import estimate_curvature
from cocurve_lab.extensions.analysis.stability import StopWhenConverged
from cocurve_lab.extensions.figures import (
    COLORS,
    GUIDE,
    LABELS,
    SYMBOLS,
)
from cocurve_lab.models.identity import fingerprint_model, model_dtype
from cocurve_lab.models.units import UnitSet

from ..chart import add, chart, empty, log_scale, share_axis
from ..shared import Recipe, marks
from ..tables import DataFrame, Rows, Table, column, kept_table, pick, table_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


_ERRORS = {
    "risk_error": "predicted risk of the plan",
    "saliency_error": "median saliency",
    "optimism": "optimism of the plan",
}


# Intervals ----------------------------------------------------------------------------------------
def interval_table(curvature: Curvature, confidence: float = 0.95) -> DataFrame:
    """Return the saliency of every unit with its interval from `jackknife`, in the order of H.

    Returns:
        A row per unit: `unit`, `kind`, `layer`; `saliency` H_uu with `low` and `high` (`low` may be
        negative: the interval is symmetric); `relative_error`, standard error over saliency, NaN of
        a dead unit; `groups`.
    """
    found = jackknife(curvature, "saliency", confidence)
    low, high = found.interval
    shares = relative(found.standard_error, found.estimate)
    return table_of(
        {
            "unit": unit.name,
            "kind": unit.kind,
            "layer": unit.layer,
            "saliency": float(found.estimate[u]),
            "low": float(low[u]),
            "high": float(high[u]),
            "relative_error": float(shares[u]),
            "groups": found.groups,
        }
        for u, unit in enumerate(curvature.units)
    )


def plot_intervals(table: Table) -> Figure:
    """Plot the saliency of every unit with its interval, smallest first, log axis.

    An interval that reaches to 0 or below is drawn down to a twentieth of the saliency.
    """
    figure = empty()
    ranked = sorted(pick(table), key=lambda row: row["saliency"])
    ranked = [row | {"place": place} for place, row in enumerate(ranked, 1) if row["saliency"] > 0]
    for number, kind in enumerate(("attention", "ffn")):
        rows = pick(ranked, kind=kind)
        values = column(rows, "saliency")
        # 0 and below have no place on a log axis
        below = np.minimum(values - column(rows, "low"), 0.95 * values)
        bars = {"array": column(rows, "high") - values, "arrayminus": below, "thickness": 1}
        add(
            figure,
            rows,
            "place",
            "saliency",
            LABELS[kind],
            {"color": COLORS[kind], "symbol": SYMBOLS[number]},
            size=6,
            error_y=bars,
            text=[f"{r['unit']}: ± {r['relative_error']:.0%}" for r in rows],
            hover="%{text}<br>%{y:.2g} nats per token<extra></extra>",
        )
    title, x = "Saliency of every unit, with 95% intervals", "units, least salient first"
    y = "saliency H<sub>uu</sub>, nats per token"
    return chart(figure, title, x, log_scale(y, column(table, "saliency")))


# Stopping -----------------------------------------------------------------------------------------
def stopping_study(
    model: PreTrainedModel,
    units: UnitSet,
    recipe: Recipe,
    stop: StopWhenConverged,
    watch: Callable[[Build], None] | None = None,
) -> DataFrame:
    """Build H until a criterion is met, and keep the readouts of the criterion after every row.

    Args:
        recipe: text, top r, groups (16 or more), and the folder of the table.
        stop: the criterion and its patience; its history plays no part.
        watch: called after every sequence too, such as a BuildMonitor.

    Returns:
        A row per look: `rows` done of `rows_given`; the errors `risk_error`, `saliency_error`,
        `optimism` (relative) and `overlap` of `is_converged`, NaN while a single group is there;
        `tolerance`, `converged`, and `stopped`, whether the build ended here before its text did.
    """
    text = recipe.calibration
    built = [fingerprint_model(model), model_dtype(model), units.fingerprint]
    criterion = [*stop.criterion, stop.patience]
    # one mark of three parts under the key "model", unlike elsewhere: kept tables have it so
    settings = marks(recipe=recipe.mark, criterion=criterion) | {"model": built}

    def compute() -> Rows:
        fresh = StopWhenConverged(*stop.criterion, patience=stop.patience)

        def look(build: Build) -> str | None:
            if watch is not None:
                watch(build)
            return fresh(build)

        options = BuildOptions(groups=recipe.groups, on_sequence=look)
        curvature = estimate_curvature(
            model, units, text, recipe.top_r, progress=recipe.progress, options=options
        )
        stopped = any("stopped early" in event for event in curvature.provenance["events"])
        last = len(fresh.history) - 1
        return [
            {
                "rows": done,
                "rows_given": len(text),
                "risk_error": readout.risk_error,
                "saliency_error": readout.saliency_error,
                "optimism": readout.optimism,
                "overlap": readout.overlap,
                "tolerance": readout.tolerance,
                "converged": readout.converged,
                "stopped": stopped and number == last,
            }
            for number, (done, readout) in enumerate(fresh.history)
        ]

    return kept_table(recipe.cache, "stopping", settings, compute)


def plot_stopping(table: Table) -> Figure:
    """Plot the three errors of the criterion by rows done; dotted: the tolerance and the stop."""
    figure, hover = empty(), "%{x} rows: %{y:.1%}<extra>%{fullData.name}</extra>"
    for number, (name, label) in enumerate(_ERRORS.items()):
        add(figure, table, "rows", name, label, number, line="solid", size=6, hover=hover)
    for row in pick(table, stopped=True):
        figure.add_vline(x=row["rows"], line=GUIDE)
    title = "Relative errors after every row of the build"
    y = share_axis("relative error", range=[0, 1.5])
    return chart(figure, title, "rows done", y, across=column(table, "tolerance")[0])
