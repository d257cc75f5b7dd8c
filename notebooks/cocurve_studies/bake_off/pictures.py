"""Pictures of a bake-off. Plotly is imported when drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.extensions.figures import (
    DASHES,
    DEEP,
    GUIDE,
    PALETTE,
    SYMBOLS,
    finish,
    graph_objects,
    legend_beside,
)
from cocurve_lab.extensions.judging.answers import wilson
from cocurve_lab.solver.selection import Selection

from ..tables import Rows, Table, pick
from .comparison import OURS, Comparison

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PATTERNS = ("", "/", "x", ".", "-", "\\", "|")
TITLES = {"none": "without guards", "searched": "each with its own best guards"}
GRAY = GUIDE["color"]


def plot_perplexity(
    comparison: Comparison, search: str = "searched", methods: Sequence[str] | None = None
) -> Figure:
    """Draw perplexity (log axis) against the share removed: a line per method, dense dotted.

    Error bars are the standard deviation over calibrations, if there are several. Every cell is
    drawn at the ratio it realized; failed cells are omitted.

    Args:
        comparison: of `compare`.
        search: "none" or "searched".
        methods: labels to draw; None draws all.
    """
    figure, dense = graph_objects().Figure(), comparison.dense()["perplexity"]
    for name, style in styles(comparison, methods).items():
        rows = [row for row in _rows(comparison, search, [name]) if row["perplexity"] is not None]
        if not rows:
            continue
        spread = [row["perplexity_spread"] for row in rows]
        figure.add_scatter(
            x=[row["realized_ratio"] for row in rows],
            y=[row["perplexity"] for row in rows],
            error_y={"array": spread} if any(spread) else None,
            mode="lines+markers",
            name=name,
            line={key: style[key] for key in ("color", "dash", "width")},
            marker={"symbol": style["symbol"], "size": 9, "color": style["color"]},
            hovertemplate=f"{name}<br>%{{x:.1%}} removed<br>perplexity %{{y:.3f}}<extra></extra>",
        )
    ends = [end(x for trace in figure.data for x in trace.x) for end in (min, max)]
    figure.add_scatter(x=ends, y=[dense] * 2, mode="lines", name=f"dense, {dense:.2f}", line=GUIDE)
    figure.update_xaxes(title_text="share of removable parameters removed", tickformat=".1~%")
    _perplexity_axis(figure)
    finish(figure, f"Perplexity against ratio, {TITLES.get(search, search)}", height=560)
    return legend_beside(figure)


def plot_capabilities(
    comparison: Comparison,
    ratio: float,
    questions: int,
    methods: Sequence[str] | None = None,
    search: str = "searched",
) -> Figure:
    """Draw the share of right answers by family: a bar per method, the dense model as a line.

    Args:
        comparison: of `compare` with questions.
        ratio: one of its ratios.
        questions: number asked of each family; error bars are the 95 % Wilson interval, which
            takes the mean of several calibrations as one run.
        methods: labels to draw; None draws all.
        search: "none" or "searched".
    """
    families = [name for name in comparison.metrics if name.startswith("accuracy ")]
    families = [name for name in families if name != "accuracy all"]
    if not families:
        raise InputError("this bake-off asked no questions. Give Judges some, or omit the picture.")
    figure, dense = graph_objects().Figure(), comparison.dense()
    looks = styles(comparison, methods)
    rows = {row["method"]: row for row in _rows(comparison, search, list(looks), ratio)}
    for number, (name, style) in enumerate(looks.items()):
        if name not in rows or rows[name][families[0]] is None:
            continue
        shares = np.array([rows[name][family] for family in families])
        ends = np.array([wilson(round(share * questions), questions) for share in shares])
        reach = np.clip(np.stack([ends[:, 1] - shares, shares - ends[:, 0]]), 0, None)
        figure.add_bar(
            x=[family.removeprefix("accuracy ") for family in families],
            y=shares,
            name=name,
            error_y={"array": reach[0], "arrayminus": reach[1], "color": GRAY, "width": 2},
            marker={"color": style["color"], "pattern": {"shape": PATTERNS[number % 7]}},
            hovertemplate=f"{name}, %{{x}}: %{{y:.0%}}<extra></extra>",
        )
    for place, family in enumerate(families):
        ends_x, height = {"x0": place - 0.45, "x1": place + 0.45}, dense[family]
        figure.add_shape(type="line", y0=height, y1=height, line={"color": GRAY}, **ends_x)
    figure.update_yaxes(title_text="right answers", tickformat=".0%", range=[0, 1.05])
    title = f"Right answers by family, {ratio:.0%} removed (gray lines: dense model)"
    return legend_beside(finish(figure, title, height=460))


def plot_guards(comparison: Comparison, ratio: float) -> Figure:
    """Draw KL of every method without guards (open) and with its own best ones (filled), log axis.

    Methods are sorted by KL with their own guards, best on top. A method that ignores guards has
    one filled point.
    """
    cells = {s: {r["method"]: r for r in _rows(comparison, s, None, ratio)} for s in TITLES}
    found = [name for name, row in cells["searched"].items() if row["kl"] is not None]
    names = sorted(found, key=lambda name: -float(cells["searched"][name]["kl"]))
    figure = graph_objects().Figure()
    for name in names:
        pair = [cells[search][name]["kl"] for search in TITLES]
        line = {"mode": "lines", "line": {"color": GRAY, "width": 1}}
        figure.add_scatter(x=pair, y=[name] * 2, showlegend=False, hoverinfo="skip", **line)
    looks = {"none": ("diamond-open", PALETTE[1]), "searched": ("circle", PALETTE[0])}
    for search, (symbol, color) in looks.items():
        figure.add_scatter(
            x=[cells[search][name]["kl"] for name in names],
            y=names,
            mode="markers",
            name=TITLES[search],
            text=[cells[search][name]["guards"] for name in names],
            marker={"symbol": symbol, "color": color, "size": 10},
            hovertemplate="%{y}: KL %{x:.4f}<br>%{text}<extra></extra>",
        )
    figure.update_xaxes(title_text="KL on test text, nats per token", type="log", dtick="D1")
    figure.update_yaxes(categoryorder="array", categoryarray=names, automargin=True)
    title = f"Effect of guards on each method, {ratio:.0%} removed"
    return finish(figure, title, height=140 + 24 * len(names))


def plot_layers(plans: Mapping[str, Selection]) -> Figure:
    """Draw the share of each layer's removable parameters that each plan removes, as a heatmap.

    `plans` are label -> plan, of one model.
    """
    if not plans:
        raise InputError("there is no plan to draw. Give at least one plan.")
    go = graph_objects()
    first = next(iter(plans.values()))
    values = np.array([layer_shares(plan) for plan in plans.values()])
    few = values.shape[1] <= 16
    heatmap = go.Heatmap(
        z=np.round(values, 4),
        x=[f"{layer}" for layer in range(values.shape[1])],
        y=list(plans),
        zmin=0,
        zmax=float(values.max()) or 1.0,
        colorscale=DEEP,
        texttemplate="%{z:.0%}" if few else None,
        textfont={"color": "white"},
        showscale=not few,  # few layers have their numbers written in
        colorbar={"title": {"text": "removed"}, "tickformat": ".0%"},
        hovertemplate="%{y}, layer %{x}: %{z:.1%} removed<extra></extra>",
    )
    figure = go.Figure(heatmap)
    figure.update_xaxes(title_text="layer", type="category")
    figure.update_yaxes(autorange="reversed", automargin=True)
    title = f"Share of each layer removed by each plan, {first.requested_ratio:.0%} in all"
    return finish(figure, title, height=140 + 26 * len(plans))


def layer_shares(plan: Selection) -> np.ndarray:
    """Return the share of each layer's removable parameters that a plan removes [layers]."""
    units = plan.units
    count = units.num_layers
    total = np.bincount(units.layers, units.costs, minlength=count)
    gone = plan.indicator
    removed = np.bincount(units.layers[gone], units.costs[gone], minlength=count)
    return np.divide(removed, total, out=np.zeros(count), where=total > 0)


def plot_frontier(
    comparison: Comparison,
    speeds: Table,
    quantity: str = "prefill",
    batch_size: int = 1,
    search: str = "searched",
) -> Figure:
    """Draw perplexity against speed relative to the dense model: a point per plan, quartile bars.

    Better is to the right and down. Each symbol is a method, and a line joins its ratios.

    Args:
        comparison: of `compare`, for the perplexity.
        speeds: of `speed_table`, several ratios one after another.
        quantity, batch_size: the speed to draw.
        search: the search of the plans timed, "none" or "searched".
    """
    timed = pick(speeds, quantity=quantity, batch_size=batch_size)
    if not timed:
        raise InputError(f"{quantity!r} at batch size {batch_size} was not timed. Choose another.")
    figure = graph_objects().Figure()
    looks = styles(comparison, list(dict.fromkeys(row["method"] for row in timed)))
    for name, style in looks.items():
        mine = pick(timed, method=name)
        cells = [_rows(comparison, search, [name], row["requested_ratio"])[0] for row in mine]
        speed, low, high = (
            np.array([row[column] for row in mine]) for column in ("ratio", "low", "high")
        )
        figure.add_scatter(
            x=speed,
            y=[cell["perplexity"] for cell in cells],
            error_x={"array": high - speed, "arrayminus": speed - low, "thickness": 1},
            mode="lines+markers+text",
            text=[f"{row['requested_ratio']:.0%}" for row in mine],
            textposition="top center",
            name=name,
            line={"color": style["color"], "width": 1, "dash": "dot"},
            marker={"symbol": style["symbol"], "size": 11, "color": style["color"]},
            hovertemplate=f"{name}: %{{x:.2f}}x, perplexity %{{y:.3f}}<extra></extra>",
        )
    dense = [comparison.dense()["perplexity"]]
    marker = {"symbol": "cross", "size": 12, "color": GRAY}
    figure.add_scatter(x=[1.0], y=dense, mode="markers", name="Dense", marker=marker)
    figure.update_xaxes(title_text=f"{quantity} speed at batch {batch_size}, dense = 1")
    _perplexity_axis(figure)
    title = "Perplexity against speed (right and down is better)"
    return legend_beside(finish(figure, title, height=480))


# Shared parts -------------------------------------------------------------------------------------
def _rows(
    comparison: Comparison, search: str, names: Sequence[str] | None, ratio: float | None = None
) -> Rows:
    """Return summary rows of some methods at one ratio, or at all ratios in rising order."""
    ratios = sorted(comparison.ratios) if ratio is None else [ratio]
    rows = [row for r in ratios for row in pick(comparison.summary(r, search))]
    return [row for row in rows if names is None or row["method"] in names]


def styles(comparison: Comparison, methods: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Choose color, symbol, dash and width of each label; CoCurve's are always the same."""
    known = comparison.methods
    names = list(known if methods is None else methods)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"no cells of {unknown[0]!r}. Choose one of {', '.join(known)}.")
    looks = {OURS: {"color": PALETTE[0], "symbol": SYMBOLS[0], "dash": "solid", "width": 4.0}}
    hues, symbols = PALETTE[1:], SYMBOLS[1:]
    for number, name in enumerate(name for name in names if name != OURS):
        looks[name] = {
            "color": hues[number % len(hues)],
            "symbol": symbols[number % len(symbols)],
            "dash": DASHES[(number // len(hues)) % len(DASHES)],
            "width": 1.5,
        }
    return {name: looks[name] for name in names}


def _perplexity_axis(figure: Any) -> None:
    """Make a log axis with round perplexities as ticks, also if it spans less than a decade."""
    values = np.concatenate([np.asarray(trace.y, dtype=float) for trace in figure.data])
    low, high = float(values.min()), float(values.max())
    if high / low < 3:
        steps = (unit * 10.0**power for power in range(-4, 300) for unit in (1, 2, 5))
        step = next(step for step in steps if high - low < 9 * step)
        ticks = np.arange(np.floor(low / step), high / step + 1) * step
    else:
        decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        ticks = np.outer(decades, (1, 1.5, 2, 3, 5, 7)).ravel()
    axis = {"tickvals": ticks, "ticktext": [f"{tick:.6g}" for tick in ticks], "type": "log"}
    figure.update_yaxes(title_text="perplexity, per token", **axis)
