"""The picture of FidelityScatter: a plotly FigureWidget of two equal axes, with the diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from plotly.graph_objects import FigureWidget, Scatter

from cocurve_lab.extensions.figures import GUIDE, ORDERED, finish
from cocurve_lab.extensions.judging.agreement import DIAGONAL, EDGE_AWARE, RANDOM, SWAP
from cocurve_lab.extensions.writing import brief, plus_minus, typeset

from .fidelity_points import OTHER, SINGLE, Row, Rows
from .instrument import counted

# name in the legend -> its method, the lambdas that it begins and ends at, and its mark
MARKS: dict[str, tuple[str, float, float, str]] = {
    "diagonal, λ = 0": (DIAGONAL, 0.0, 0.0, "circle"),
    "edge-aware, λ < 0.1": (EDGE_AWARE, 0.0, 0.1, "diamond"),
    "edge-aware, 0.1 ≤ λ < 1": (EDGE_AWARE, 0.1, 1.0, "square"),
    "edge-aware, λ ≥ 1": (EDGE_AWARE, 1.0, float("inf"), "triangle-up"),
    "local swap": (SWAP, 0.0, 0.0, "cross"),
    "random": (RANDOM, 0.0, 0.0, "x"),
    "other plan": (OTHER, 0.0, 0.0, "star"),
}
EQUAL, TWICE, WAITING, CHOSEN = "measured = predicted", "factor 2", "chosen, not measured", "chosen"
QUIET = {  # no cloud, and no more buttons than zoom, pan, whole picture and PNG
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "resetScale2d"],
    "toImageButtonOptions": {"filename": "predicted_and_measured", "scale": 2},
}


class Picture(FigureWidget):
    """Measured KL over predicted KL, both in nats per token, on axes of one range and scale.

    Args:
        choose: called with the row of a point that is clicked.
        hide: called with the methods that the legend hides, whenever these change.
    """

    _esm = str(FigureWidget._esm)  # of a path it would never be garbage-collected

    def __init__(self, choose: Callable[[Row], None], hide: Callable[[set[str]], None]) -> None:
        lines = [
            Scatter(name=EQUAL, mode="lines", line=GUIDE | {"dash": "dash", "width": 1.5}),
            Scatter(name=TWICE, mode="lines", line=GUIDE),
            Scatter(name=WAITING, mode="lines", line=GUIDE | {"dash": "dashdot", "width": 1.5}),
        ]
        ring = {"symbol": "circle-open", "size": 20, "color": "#808080", "line": {"width": 2.5}}
        super().__init__([*lines, _marks(SINGLE, SINGLE, "circle", 5)])
        for name, (method, _, _, symbol) in MARKS.items():
            self.add_trace(_marks(name, method, symbol, 11))
        self.add_trace(Scatter(name=CHOSEN, mode="markers", marker=ring, hoverinfo="skip"))
        self.update_traces(hoverinfo="skip", selector={"mode": "lines"})
        finish(self, "", height=720)
        axis = {"exponentformat": "power", "showline": True, "linecolor": "#808080"}
        self.update_xaxes(title_text="predicted ½ sᵀHs, nats per token", **axis)
        self.update_yaxes(title_text="measured KL(dense ‖ pruned), nats per token", **axis)
        self.update_xaxes(constrain="domain", constraintoward="left")
        self.update_yaxes(constrain="domain", scaleanchor="x")
        self.update_layout(
            title=None,
            autosize=True,
            margin={"l": 70, "r": 10, "t": 60, "b": 60},
            legend={"orientation": "h", "x": 0.0, "y": -0.1, "itemsizing": "constant"},
            coloraxis={"colorscale": list(ORDERED), "cmin": 0.0, "cmax": 0.6, "colorbar": _BAR},
        )
        self._config = {**self._config, **QUIET}  # type: ignore[has-type]
        self._rows: dict[str, Rows] = {}
        self._choose, self._hide = choose, hide
        for trace in self.data[len(lines) : -1]:
            trace.on_click(self._clicked)
            trace.on_change(self._hidden, "visible")

    def _clicked(self, trace: Any, points: Any, _: Any) -> None:
        for number in points.point_inds:
            self._choose(self._rows[trace.name][number])

    def _hidden(self, *_: Any) -> None:
        self._hide({trace.legendgroup for trace in self.data if trace.visible == "legendonly"})

    def show_points(
        self, plans: Rows, units: Rows, chosen: Iterable[str], waiting: float | None, axes: str
    ) -> None:
        """Show these rows, and nothing else.

        Args:
            plans, units: rows of `FidelityScatter.points`.
            chosen: names of the rows to ring.
            waiting: prediction of a plan that is not measured; None for none.
            axes: "log" or "linear".
        """
        rows = [*plans, *units]
        values = [row[key] for row in rows for key in ("predicted_risk", "measured_risk")]
        drawn = [x for x in (*values, waiting or 0.0) if x > 0 or axes == "linear"] or [1e-4, 1.0]
        low, high = min(drawn), max(drawn)
        room = 1.3 if axes == "log" else 1.05
        low, high = low / room, high * room
        self._rows = {SINGLE: units} | {name: [] for name in MARKS}
        for row in plans:
            self._rows[mark_of(row)].append(row)
        ringed = [row for row in rows if row["name"] in chosen]
        lines = {
            EQUAL: ([low, high], [low, high]),
            TWICE: ([low, high / 2, None, 2 * low, high], [2 * low, high, None, low, high / 2]),
            WAITING: ([waiting, waiting], [low, high]) if waiting else ([], []),
            CHOSEN: _columns(ringed, "predicted_risk", "measured_risk"),
        }
        with self.batch_update():
            ends = [low, high] if axes == "linear" else [math.log10(low), math.log10(high)]
            self.update_xaxes(type=axes, range=ends)
            self.update_yaxes(type=axes, range=ends)
        for trace in self.data:
            with self.batch_update():  # of one trace: plotly loses what others have not changed
                if trace.name in lines:
                    trace.x, trace.y = lines[trace.name]
                else:
                    _fill(trace, self._rows[trace.name])


_BAR = {
    "title": {"text": "removed", "side": "top"},
    "tickformat": ".0%",
    "thickness": 10,
    "orientation": "h",
    "len": 0.5,
    "x": 0.0,
    "xanchor": "left",
    "y": 1.0,
    "yanchor": "bottom",
}


def _marks(name: str, method: str, symbol: str, size: int) -> Scatter:
    """An empty trace of points; a method is shown and hidden as a whole."""
    look: dict[str, Any] = {"symbol": symbol, "size": size}
    if name == SINGLE:
        look |= {"color": "#808080", "opacity": 0.5}
    else:
        look |= {"coloraxis": "coloraxis", "line": {"color": "#808080", "width": 1}}
    error = {"color": "#808080", "thickness": 1, "width": 0}
    kinds = {"mode": "markers", "marker": look, "error_y": error, "hoverinfo": "text"}
    return Scatter(name=name, legendgroup=method, **kinds)


def _columns(rows: Rows, *keys: str) -> list[list[Any]]:
    return [[row[key] for row in rows] for key in keys]


def _fill(trace: Any, rows: Rows) -> None:
    trace.x, trace.y = _columns(rows, "predicted_risk", "measured_risk")
    trace.hovertext = [words_of(row) for row in rows]
    if trace.name != SINGLE:
        trace.error_y.array, trace.marker.color = _columns(
            rows, "measured_risk_error", "realized_ratio"
        )


def mark_of(row: Row) -> str:
    """The name in the legend of a measured plan."""
    strength = row["interaction_strength"] or 0.0
    for name, (method, start, stop, _) in MARKS.items():
        if row["method"] == method and (start == stop or start <= strength < stop):
            return name
    return OTHER


def words_of(row: Row) -> str:
    """What a point says of itself."""
    predicted, measured = row["predicted_risk"], row["measured_risk"]
    times = f" ({brief(measured / predicted)} x)" if predicted > 0 else ""
    lines = [
        f"<b>{row['name']}</b> ({row['method']})",
        f"removes {100 * row['realized_ratio']:.2f} % of removable cost, "
        f"{counted(row['units'], 'unit')}",
        f"predicted {brief(predicted)}",
        f"measured {plus_minus(measured, row['measured_risk_error'])}{times}",
        f"on {row['text']}",
    ]
    return typeset("<br>".join(lines))
