"""Pictures of a bake-off: perplexity by ratio, and the layers that plans take from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.extensions.figures import DASHES, DEEP, PALETTE, SYMBOLS, legend_beside
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty, log_scale, share_axis
from ..tables import pick
from .comparison import OURS, Comparison

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def plot_perplexity(
    comparison: Comparison, search: str = "searched", methods: Sequence[str] | None = None
) -> Figure:
    """Draw perplexity (log axis) against the share removed: a line per method; dotted is dense.

    Args:
        comparison: of `compare`; every cell is drawn at the ratio it realized.
        search: "none" or "searched".
        methods: labels to draw; None draws all. CoCurve's color is always the same.
    """
    figure, dense = empty(), comparison.dense()["perplexity"]
    names = list(comparison.methods if methods is None else methods)
    rows = [row for r in sorted(comparison.ratios) for row in pick(comparison.summary(r, search))]
    rows = [row for row in rows if row["perplexity"] is not None]
    for number, name in enumerate(sorted(names, key=lambda name: name != OURS)):
        looks = {"color": PALETTE[number % len(PALETTE)], "symbol": SYMBOLS[number % len(SYMBOLS)]}
        dash = DASHES[(number // len(PALETTE)) % len(DASHES)]
        mine = pick(rows, method=name)
        add(figure, mine, "realized_ratio", "perplexity", name, looks, line=dash, size=9)
    x = share_axis("share of removable parameters removed")
    y = log_scale("perplexity, per token", [dense, *(row["perplexity"] for row in rows)])
    return legend_beside(chart(figure, "Perplexity against ratio", x, y, across=dense, height=560))


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
