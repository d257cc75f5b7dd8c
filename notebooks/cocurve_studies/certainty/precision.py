"""The interval of the saliency of every unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import jackknife, relative
from cocurve_lab.extensions.figures import COLORS, LABELS, SYMBOLS

from ..chart import add, chart, empty, log_scale
from ..tables import DataFrame, Table, column, pick, table_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


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
