"""The three pictures of notebook 01, and the look of all others. Plotly is imported when drawing.

Backgrounds are transparent and text mid-gray, so a figure reads in JupyterLab's light and dark
theme. Colors are from the Okabe-Ito set, which color-blind readers can tell apart; every series
also has a symbol of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ..curvature.graph import Bridges, bridge_units
from ..curvature.matrix import Curvature
from ..models.architectures import UNIT_KINDS, kind_number
from ..solver.selection import Selection

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


# Okabe-Ito without its yellow and black, each of which vanishes on
# one of the two themes, and a gray. Lengths without a common divisor give the most pairs.
PALETTE = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#56B4E9", "#CC79A7", "#808080")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
# one color has one meaning in figures and instruments: kind of a unit, bridge, sign of an edge
_OF_KINDS = (PALETTE[0], PALETTE[1], "#8C564B")
COLORS = dict[str, str](zip(UNIT_KINDS, _OF_KINDS, strict=False)) | {
    "bridge": "#D55E00",
    "positive": "#8E5BB5",
    "negative": "#009E73",
}
FONT = "system-ui, sans-serif"  # that of the instruments
# a correlation from -1 to 1, in the colors of the two signs
SIGNED = ((0.0, COLORS["negative"]), (0.5, "#F7F7F7"), (1.0, COLORS["positive"]))
# a share that grows, from light to dark: the middle of viridis, which both themes can show
ORDERED = ("#A5DB36", "#4AC16D", "#1FA187", "#277F8E", "#365C8D", "#46327E")
DEEP = tuple((place / 2, color) for place, color in enumerate(ORDERED[3:]))  # below white numbers
LABELS: dict[str, str] = {kind: declared.label for kind, declared in UNIT_KINDS.items()}
DASHES = ("solid", "dash", "dot", "dashdot")
GUIDE = {"color": "#808080", "width": 1, "dash": "dot"}  # a line to compare with, not a series

_QUIET = {"showSendToCloud": False, "plotlyServerURL": "", "displaylogo": False}
_MOST_CELLS = 320  # above this a heatmap of single units is megabytes and unreadable


def plot_correlation(
    curvature: Curvature, by_layer: bool | None = None, plan: Selection | None = None
) -> Figure:
    """Curvature correlation rho_uv in blocks: attention, cross, FFN; layers in order within each.

    Args:
        by_layer: False: a cell is a pair of units, signed. True: it is the mean |rho| over the
            pairs u != v of two (kind, layer) blocks, as in the paper's figure "evidence" (a). None
            takes pairs of units up to 320 of them.
        plan: its units stand first, before those that stay; a cell is then a pair of units.
    """
    go = graph_objects()
    gone: frozenset[int] = frozenset()
    if plan is not None:
        plan.require_curvature(curvature)
        gone = frozenset(plan.pruned)
    # the plan's units, then kind by kind; layers in order
    group = [
        0 if u in gone else kind_number(unit.kind) + (plan is not None)
        for u, unit in enumerate(curvature.units)
    ]
    order = sorted(range(len(group)), key=group.__getitem__)
    units = [curvature.units[u] for u in order]
    names = [unit.name for unit in units]
    blocks = [(group[u], curvature.units[u].layer) for u in order]
    values = curvature.correlation()[np.ix_(order, order)]
    np.fill_diagonal(values, np.nan)  # a unit with itself is 1 and would hide the rest
    signed = len(names) <= _MOST_CELLS if by_layer is None else not by_layer
    signed = signed or plan is not None
    if not signed:
        values, blocks = _average_blocks(np.abs(values), blocks)
        names = [f"L{layer} {LABELS[list(UNIT_KINDS)[kind]]}" for kind, layer in blocks]
    # after each kind but the last that there is
    boundaries = {sum(kind <= last for kind, _ in blocks) for last in range(blocks[-1][0])}
    limit = float(np.nanquantile(np.abs(values), 0.995)) if np.isfinite(values).any() else 1.0
    figure = go.Figure(
        go.Heatmap(
            z=np.round(values, 4),
            x=names,
            y=names,
            zmin=-limit if signed else 0.0,
            zmax=limit,
            colorscale=SIGNED if signed else "Viridis",
            colorbar={"title": {"text": "ρ" if signed else "mean |ρ|"}},
            hovertemplate="%{y}<br>%{x}<br>ρ = %{z:.3f}<extra></extra>",
        )
    )
    line = {"color": "#808080", "width": 1.5, "dash": "dot"}
    for boundary in boundaries:
        figure.add_hline(y=boundary - 0.5, line=line)
        figure.add_vline(x=boundary - 0.5, line=line)
    means = curvature.block_means()
    text = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    ticks = _layer_ticks(blocks)
    axis = {
        "title_text": ("layer of the plan's units, then of " if gone else "layer of ")
        + ", then of ".join(UNIT_KINDS[kind].plural for kind in UNIT_KINDS if kind in means),
        "tickvals": [names[place] for place in ticks],
        "ticktext": list(ticks.values()),
        "tickangle": 0,
        "constrain": "domain",
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(autorange="reversed", scaleanchor="x", **axis)
    title = f"Curvature correlation; mean |ρ|: {text}"
    return finish(figure, _over_rows(title, curvature), 680, 620)


def plot_saliency(curvature: Curvature, bridges: Bridges | None = None) -> Figure:
    """Saliency against connectivity, log axes, bridge units ringed (appendix "Mechanism Analysis").

    Units below 1e-6 of the largest value are drawn at that floor, so that the axes stay readable.
    """
    go = graph_objects()
    bridges = bridges if bridges is not None else bridge_units(curvature)
    units, figure = curvature.units, go.Figure()
    saliency = np.maximum(curvature.saliency, 1e-6 * curvature.saliency.max(initial=1e-300))
    connectivity = np.maximum(
        curvature.connectivity, 1e-6 * curvature.connectivity.max(initial=1e-300)
    )
    for kind, symbol in zip(LABELS, SYMBOLS, strict=False):
        mine = np.flatnonzero(units.kinds == kind)
        if not len(mine):
            continue
        figure.add_scatter(
            x=saliency[mine],
            y=connectivity[mine],
            mode="markers",
            name=LABELS[kind],
            text=[units.units[i].name for i in mine],
            marker={"color": COLORS[kind], "symbol": symbol, "size": 8, "opacity": 0.8},
            hovertemplate="%{text}<br>saliency %{x:.3g}<br>connectivity %{y:.3g}<extra></extra>",
        )
    chosen = list(bridges)
    figure.add_scatter(
        x=saliency[chosen],
        y=connectivity[chosen],
        mode="markers",
        name=f"{'most connected' if bridges.ranked else 'bridge units'} ({len(chosen)})",
        text=[units.units[i].name for i in chosen],
        marker={
            "color": "rgba(0,0,0,0)",
            "size": 15,
            "line": {"color": COLORS["bridge"], "width": 2.5},
        },
        hovertemplate="%{text}: bridge<extra></extra>",
    )
    x_title, y_title = "saliency H<sub>uu</sub>", "connectivity Σ|H<sub>uv</sub>|"
    figure.update_xaxes(title_text=f"{x_title}, nats per token", **log_axis(saliency))
    figure.update_yaxes(title_text=f"{y_title}, nats per token", **log_axis(connectivity))
    title = "Cheap alone, tied to many: bridge units are top left"
    if bridges.ranked:
        title = "Few bridge units; ringed are the most connected for their saliency"
    return finish(figure, _over_rows(title, curvature))


def plot_budget(selection: Selection) -> Figure:
    """Share of each layer's attention and FFN cost that a plan removes."""
    go = graph_objects()
    figure = go.Figure()
    layers = list(range(selection.units.num_layers))
    for kind, share in selection.layer_budget().items():
        figure.add_bar(
            x=layers,
            y=share,
            name=LABELS[kind],
            marker={
                "color": COLORS[kind],
                "pattern": {"shape": ("", "/", "x", "+", "-")[kind_number(kind)]},
            },
            hovertemplate=f"layer %{{x}}, {LABELS[kind]}: %{{y:.0%}} removed<extra></extra>",
        )
    figure.update_xaxes(title_text="layer", dtick=1 if len(layers) <= 16 else None)
    figure.update_yaxes(
        title_text="share of the layer's parameters removed", tickformat=".0%", range=[0, 1.02]
    )
    strength = selection.interaction_strength
    title = f"Where {selection.realized_ratio:.1%} of removable parameters go" + (
        "" if strength is None else f", λ = {strength:g}"
    )
    return finish(figure, title)


def _layer_ticks(blocks: list[tuple[int, int]]) -> dict[int, str]:
    """Place -> layer in the middle of each (kind, layer) block, as far as the labels fit."""
    found: dict[int, str] = {}
    for block in sorted(set(blocks)):
        place = blocks.index(block) + (blocks.count(block) - 1) // 2
        if not found or place - max(found) >= len(blocks) / 45:
            found[place] = str(block[1])
    return found


def _average_blocks(
    values: np.ndarray, keys: list[tuple[int, int]]
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Mean over (kind, layer) blocks, and the blocks in order."""
    blocks = sorted(set(keys))
    member = np.array([[key == block for key in keys] for block in blocks], dtype=float)
    present = np.isfinite(values).astype(float)
    counts = member @ present @ member.T
    sums = member @ np.nan_to_num(values) @ member.T
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return means, blocks


def look(number: int) -> dict[str, str]:
    """Color and symbol of the n-th series of a picture, from 0: for `marker=look(n) | {...}`."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "symbol": SYMBOLS[number % len(SYMBOLS)],
    }


def _over_rows(title: str, curvature: Curvature) -> str:
    rows = curvature.rows_of_unfinished
    return f"{title} (H of {rows})" if rows else title


def finish(figure: Any, title: str, width: int | None = None, height: int = 440) -> Figure:
    """Give a figure the common look: transparent, readable in both themes, no cloud button."""
    lines = wrap(title, ((width or 850) - 250) // 8)  # the buttons stand beside the title
    title, more = "<br>".join(lines), 20 * (len(lines) - 1)
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        width=width,
        height=height + more,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808080", "family": FONT},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#808080"},
        margin={"l": 70, "r": 20, "t": 60 + more, "b": 60},
    )
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    _place_legend(figure, max(lines, key=len, default=""))
    return figure


def _place_legend(figure: Any, title: str) -> None:
    """Beside the title while both fit there (about 7 pixels a letter, 45 a symbol), else right."""
    names = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    if not names or 8 * len(title) + sum(45 + 7 * len(name) for name in names) > 950:
        legend_beside(figure)
        return
    above = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"}
    figure.update_layout(legend=above, modebar={"orientation": "v"})


def legend_beside(figure: Any) -> Figure:
    """Put the legend in a column beside the picture, where many names fit.

    The buttons, which come with the mouse, then lie above it and not on it.
    """
    side = {"orientation": "v", "y": 1, "yanchor": "top", "x": 1.01, "xanchor": "left"}
    return figure.update_layout(legend=side, modebar={"orientation": "h"})


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """Settings of a logarithmic axis: ticks at 2 and 5 too, or at powers of ten alone.

    On a long axis the small digits of plotly would run into the powers of ten.
    """
    positive = [value for value in values if value > 0]
    ratio = max(positive) / min(positive) if positive else 1.0
    step = 1 if ratio >= 1000 else "D2" if ratio >= 10 else None
    return {"type": "log", "exponentformat": "power", "dtick": step}


def graph_objects() -> Any:
    """plotly.graph_objects, set up to keep data on this machine."""
    import plotly.graph_objects as go
    import plotly.io as pio

    renderer = pio.renderers["plotly_mimetype"]
    # plotly offers to upload the figure to its cloud by default; a user's data stays here
    renderer.config = {**(renderer.config or {}), **_QUIET}
    if "plotly_mimetype" in pio.renderers.default:
        pio.renderers.default = (
            "plotly_mimetype"  # the other default embeds 5 MB of script a figure
        )
    return go
