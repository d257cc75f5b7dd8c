"""The chart of every study: series of rows with error bars, two axes, and the common look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cocurve_lab.extensions.figures import GUIDE, finish, graph_objects, log_axis, look

from .lazy import Figure
from .tables import Row, Table, pick

Values = str | Callable[[Row], Any] | Sequence[Any]  # a column, a function of a row, or the values
Axis = str | Mapping[str, Any]  # its title, or its settings


def empty() -> Any:
    """Return a figure without series."""
    return graph_objects().Figure()


def add(
    figure: Any,
    table: Table,
    x: Values,
    y: Values,
    name: str,
    style: int | Mapping[str, Any],
    *,
    bars: str = "y",
    line: str = "",
    size: int = 8,
    hover: str | None = None,
    **more: Any,
) -> None:
    """Add one series: a marker per row, with the standard error of a column as its bar.

    Args:
        figure: from `empty`.
        table: with a row per marker.
        x, y: what is drawn.
        name: in the legend.
        style: number of the series, or its color and symbol.
        bars: the axes, "x", "y" or "xy", whose column `<name>_error` is drawn, if there is one.
        line: "solid", "dash", ... joins the markers.
        size: of a marker, pixels.
        hover: template of the text beside the mouse.
        more: settings of plotly's scatter.
    """
    rows, looks = pick(table), look(style) if isinstance(style, int) else dict(style)
    drawn: dict[str, Any] = {"x": _values(rows, x), "y": _values(rows, y)}
    drawn["marker"] = looks | {"size": size}
    drawn["mode"] = "lines+markers" if line else "markers"
    for axis, column in (("x", x), ("y", y)):
        if axis in bars and isinstance(column, str) and any(f"{column}_error" in r for r in rows):
            errors = [row[f"{column}_error"] or 0.0 for row in rows]
            drawn[f"error_{axis}"] = {"type": "data", "array": errors, "thickness": 1}
    if line:
        drawn["line"] = {"color": looks["color"], "dash": line}
    figure.add_scatter(name=name, hovertemplate=hover, **(drawn | more))


def _values(rows: Sequence[Row], what: Values) -> list[Any]:
    if isinstance(what, str):
        return [row[what] for row in rows]
    return [what(row) for row in rows] if callable(what) else list(what)


def chart(
    figure: Any,
    title: str,
    x: Axis,
    y: Axis,
    *,
    across: float | None = None,
    height: int = 440,
) -> Figure:
    """Return the figure with titles, axes and the common look.

    Args:
        figure: from `empty`, with its series.
        title: of the whole.
        x, y: titles of the axes, or their settings (`share_axis`, `log_scale`).
        across: where a dotted line to compare with is drawn.
        height: pixels.
    """
    if across is not None:
        figure.add_hline(y=across, line=GUIDE)
    figure.update_xaxes(**({"title_text": x} if isinstance(x, str) else x))
    figure.update_yaxes(**({"title_text": y} if isinstance(y, str) else y))
    return finish(figure, title, height=height)


def share_axis(title: str, **more: Any) -> dict[str, Any]:
    """Return the settings of an axis of percentages."""
    return {"title_text": title, "tickformat": ".0%", **more}


def log_scale(title: str, values: Iterable[float]) -> dict[str, Any]:
    """Return the settings of a logarithmic axis for these values."""
    return {"title_text": title, **log_axis(values)}
