"""The picture of FidelityScatter: a plotly FigureWidget with a fixed number of traces.

The number is fixed because restyling is one small message, while adding and removing traces takes
many. The legend consists of empty traces: color is the ratio, the symbol the method and lambda.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.serializers import custom_serializers
from traitlets import Dict, Unicode

from cocurve_lab.figures import ORDERED, PALETTE, finish
from cocurve_lab.measuring.agreement import POOL_METHODS

from .instrument import front

GRAY = PALETTE[-1]
RATIOS = [  # upper end of the realized ratio, name, color
    (0.075, "up to 7.5 %", ORDERED[0]),
    (0.15, "7.5 to 15 %", ORDERED[1]),
    (0.25, "15 to 25 %", ORDERED[2]),
    (0.35, "25 to 35 %", ORDERED[3]),
    (0.45, "35 to 45 %", ORDERED[4]),
    (np.inf, "above 45 %", ORDERED[5]),
]
EDGE_AWARE, DIAGONAL, RANDOM, SWAP = POOL_METHODS
OTHER = "other plan"
MARKERS = {
    "diagonal, λ = 0": "circle",
    "edge-aware, λ < 0.1": "diamond",
    "edge-aware, 0.1 ≤ λ < 1": "square",
    "edge-aware, λ ≥ 1": "triangle-up",
    SWAP: "cross",
    RANDOM: "x",
    OTHER: "star",
}
DESCRIPTION = (
    "Scatter of plans on log axes: predicted risk to the right, measured KL upwards. On the dashed "
    "line the two are equal. The table below the figure holds the same points."
)


def color(ratio: float) -> str:
    """The color of a realized ratio."""
    return next(c for upper, _, c in RATIOS if ratio <= upper)


def symbol(method: str, interaction_strength: float | None) -> str:
    """The marker of a method and its lambda."""
    if method == EDGE_AWARE and interaction_strength is not None:
        names = list(MARKERS)[1:4]
        return MARKERS[names[int(interaction_strength >= 0.1) + int(interaction_strength >= 1)]]
    return MARKERS["diagonal, λ = 0"] if method == DIAGONAL else MARKERS.get(method, "star")


class QuietFigure(go.FigureWidget):
    """A FigureWidget that starts at once, can be collected, has a name, and offers no upload."""

    _esm = front("figure.js", "figure_main.js")
    # a string: widgets that hold code by its path are never garbage-collected
    _plotly = Unicode(str(go.FigureWidget._esm)).tag(sync=True)
    _description = Unicode(DESCRIPTION).tag(sync=True)
    # after every change the page reports 24 kB, which ipywidgets would echo back to it
    _js2py_traceDeltas = Dict(allow_none=True).tag(
        sync=True, echo_update=False, **custom_serializers
    )
    _js2py_layoutDelta = Dict(allow_none=True).tag(
        sync=True, echo_update=False, **custom_serializers
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = {
            "responsive": True,  # else it keeps its width when the window gets another one
            "showSendToCloud": False,
            "plotlyServerURL": "",
            "displaylogo": False,
            "displayModeBar": True,
            "toImageButtonOptions": {"filename": "predicted_and_measured", "scale": 2},
        }

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The state for a page that comes later (reloaded, opened again, embedded in HTML).

        plotly keeps that of the beginning: later changes reach the page as messages alone.
        """
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "_layout_obj" not in vars(self):  # plotly is still making it
            return state
        now = {"_widget_data": self._data, "_widget_layout": self._layout_obj._props}
        for name in now.keys() & state.keys():
            state[name] = self.trait_metadata(name, "to_json")(deepcopy(now[name]), self)
        return state


class FidelityFigure:
    """The picture of the scatter, which follows the points.

    Args:
        singles: rows of `points` of the single units; `draw_singles` changes what predicts them.
        preview: the note beside anything but the H of ablations; empty on that one.
        source: what predicts, where there is a note: "a preview of H".

    Attributes:
        widget: the FigureWidget.
    """

    def __init__(self, singles: list[dict[str, Any]], preview: str = "", source: str = "") -> None:
        self.widget = QuietFigure(_legend())
        self._sent: dict[str, str] = {}  # what each part of the picture was last made of
        add = self.widget.add_scatter
        line = {"color": GRAY, "width": 1.5}
        add(name="measured = predicted", mode="lines", line=line | {"dash": "dash"})
        add(name="within a factor of 2", mode="lines", line=line | {"dash": "dot", "width": 1})
        add(
            name="one unit alone",
            mode="markers",
            y=np.array([point["measured_risk"] for point in singles]),
            marker={"color": GRAY, "size": 5, "opacity": 0.55},
            showlegend=bool(singles),
        )
        add(
            mode="markers",
            showlegend=False,
            marker={"size": 11, "line": {"color": GRAY, "width": 0.7}},
            error_y={"type": "data", "color": GRAY, "thickness": 1, "width": 0},
        )
        ring = {"color": GRAY, "size": 20, "symbol": "circle-open", "line": {"width": 2.5}}
        add(name="chosen plan or unit", mode="markers", marker=ring, hoverinfo="skip")
        add(name="chosen, not measured yet", mode="lines", line=line | {"dash": "dashdot"})
        self.equal, self.band, self.singles, self.plans, self.ring, self.waiting = list(
            self.widget.data
        )[-6:]
        for trace in (self.equal, self.band, self.waiting):
            trace.update(hoverinfo="skip")
        for trace in (self.singles, self.plans):
            trace.update(hovertemplate="%{text}<extra></extra>")
        _lay_out(self.widget)
        if preview:
            self.widget._description = f"{DESCRIPTION} {preview}"
            self.widget.layout.title.text += f"; predictions are from {source}"

    def on_click(self, plan: Callable[[int], None], single: Callable[[int], None]) -> None:
        """Call `plan` or `single` with the index of a clicked point."""
        for trace, handler in ((self.plans, plan), (self.singles, single)):
            trace.on_click(lambda _, points, __, handler=handler: _first(points, handler))

    def draw(
        self,
        points: list[dict[str, Any]],
        text: list[str],
        *,
        show_singles: bool,
        rings: list[tuple[float, float]],
        waiting: float | None,
    ) -> None:
        """Show plans, rings around the chosen points, and a line for a plan not measured yet.

        Args:
            points: rows of FidelityScatter.points whose two risks are above 0.
            text: their hover texts.
            show_singles: whether the single units are shown.
            rings: (predicted, measured) of the chosen plan and unit.
            waiting: predicted risk of the chosen plan if it is not measured; None for no line.
        """
        low, high = self._range(points, show_singles, waiting)
        ends = [low, high]
        wait = [] if waiting is None else [(waiting, low), (waiting, high)]
        # Each batch sets the same properties on all its traces: where a batch gives a trace only
        # some of them, the page of plotly 7.1 resets the others to their defaults.
        places = {
            "equal": (ends, ends),
            "band": ([*ends, np.nan, *ends], [2 * low, 2 * high, np.nan, low / 2, high / 2]),
        }
        self._place("lines", places)
        self._place("chosen", {"ring": _columns(rings), "waiting": _columns(wait)})
        self._show_plans(points, text)
        if self.singles.visible != show_singles:
            self.singles.visible = show_singles

    def draw_singles(self, singles: list[dict[str, Any]], text: list[str], axis: str) -> None:
        """Show the single units as another surrogate predicts them.

        Args:
            singles: the rows of the constructor, with other predicted risks.
            text: their hover texts.
            axis: the title of the axis of predictions.
        """
        x = [point["predicted_risk"] for point in singles]
        if self._changes("singles", (x, text)):
            with self.widget.batch_update():
                self.singles.x, self.singles.text = np.array(x), text
        if self.widget.layout.xaxis.title.text != axis:
            self.widget.layout.xaxis.title.text = axis

    def _changes(self, part: str, content: Any) -> bool:
        """Whether this part differs from the page's; a click must not resend all plans."""
        if self._sent.get(part) == repr(content):
            return False
        self._sent[part] = repr(content)
        return True

    def _place(self, part: str, places: dict[str, tuple[list[float], list[float]]]) -> None:
        """Move traces, by name, to x and y."""
        if self._changes(part, places):
            with self.widget.batch_update():
                for name, (x, y) in places.items():
                    trace = getattr(self, name)
                    trace.x, trace.y = np.array(x), np.array(y)

    def _show_plans(self, points: list[dict[str, Any]], text: list[str]) -> None:
        x, y = _columns([(p["predicted_risk"], p["measured_risk"]) for p in points])
        if self._changes("plans", (x, y, text)):
            with self.widget.batch_update():
                self.plans.x, self.plans.y, self.plans.text = np.array(x), np.array(y), text
                self.plans.error_y.array = np.array(
                    [_finite(p["measured_risk_error"]) for p in points]
                )
                self.plans.marker.color = [color(p["realized_ratio"]) for p in points]
                self.plans.marker.symbol = [
                    symbol(p["method"], p["interaction_strength"]) for p in points
                ]

    def _range(
        self, points: list[dict[str, Any]], show_singles: bool, waiting: float | None
    ) -> tuple[float, float]:
        """The smallest and largest value drawn on either axis."""
        values = [point[name] for point in points for name in ("predicted_risk", "measured_risk")]
        values += [] if waiting is None else [waiting]
        if show_singles:
            values += [*self.singles.x, *self.singles.y]
        values = [value for value in values if value > 0]  # not NaN either
        return (min(values), max(values)) if values else (1e-4, 1.0)


def _first(points: Any, handler: Callable[[int], None]) -> None:
    if points.point_inds:
        handler(int(points.point_inds[0]))


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x and y of some points."""
    return [x for x, _ in points], [y for _, y in points]


def _finite(error: float) -> float:
    return error if np.isfinite(error) else 0.0


def _legend() -> list[go.Scatter]:
    """Empty traces that make the legend of colors and symbols."""
    entries = [("ratio", "Removed (color)", name, shade, "square") for _, name, shade in RATIOS]
    entries += [("method", "Method (symbol)", name, GRAY, mark) for name, mark in MARKERS.items()]
    return [
        go.Scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=name,
            legendgroup=group,
            legendgrouptitle={"text": title},
            marker={"color": shade, "symbol": mark, "size": 10},
        )
        for group, title, name, shade, mark in entries
    ]


def _lay_out(figure: go.FigureWidget) -> None:
    finish(figure, "Predicted and measured risk of plans", height=600)
    # replaced as a whole: beside the plot, because its groups do not fit in a row above it
    figure.layout.legend = {"itemclick": False, "itemdoubleclick": False, "traceorder": "grouped"}
    figure.update_layout(autosize=True, margin={"l": 80, "t": 50}, hoverlabel={"align": "left"})
    axis = {"type": "log", "exponentformat": "power", "dtick": 1}
    figure.update_xaxes(**axis)
    figure.update_yaxes(title_text="measured KL(dense ‖ pruned), nats per token", **axis)
