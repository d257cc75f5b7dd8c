"""Plot where predicted and measured risk of a plan differ; see `split_risk`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from cocurve_lab.extensions.figures import COLORS, finish, graph_objects
from cocurve_lab.extensions.judging.gap import RiskSplit

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_AXES: dict[Literal["p_max", "shift"], str] = {
    "p_max": "probability of the teacher's first choice",
    "shift": "predicted ½ dzᵀF dz at the position, nats",
}
_BARS = {  # column of `RiskSplit.bins`: name, color, pattern
    "predicted": ("predicted", COLORS["attention"], ""),
    "kl_of_sum": ("KL of the summed shifts", COLORS["ffn"], "."),
    "measured": ("measured", COLORS["bridge"], "/"),
}


def plot_split(split: RiskSplit) -> Figure:
    """Plot the risk of a plan by confidence of the teacher and by size of the shift.

    Predicted, measured, and between them the exact KL of the summed shifts, on the same positions.
    Bars are parts of the whole, nats per token, so those of one color add up to the same total in
    both panels; above them stands the share of positions in the bin.
    """
    figure: Any = graph_objects().Figure()
    for place, by in enumerate(_AXES):
        bins, axis = split.bins(by), {"xaxis": f"x{place + 1}", "yaxis": f"y{place + 1}"}
        for name, (label, color, pattern) in _BARS.items():
            spread = {"array": bins["measured_error"], "thickness": 1, "color": "#808080"}
            figure.add_bar(
                x=bins["bin"],
                y=bins[name],
                name=label,
                legendgroup=name,
                showlegend=place == 0,
                marker={"color": color, "pattern": {"shape": pattern}},
                error_y=spread if name == "measured" else None,
                text=[f"{share:.0%}" for share in bins["share"]],
                textposition="outside" if name == "predicted" else "none",
                hovertemplate="%{x}: %{y:.3g} nats per token<br>%{text} of positions"
                f"<extra>{label}</extra>",
                **axis,
            )
    figure.update_layout(
        barmode="group",
        xaxis={"domain": [0, 0.46], "title": {"text": _AXES["p_max"]}, "type": "category"},
        xaxis2={"domain": [0.54, 1], "title": {"text": _AXES["shift"]}, "type": "category"},
        yaxis={"title": {"text": "part of the KL, nats per token"}},
        yaxis2={"anchor": "x2", "matches": "y"},
    )
    removed = split.selection.realized_ratio
    title = f"Risk by position, {removed:.1%} removed; above the bars the share of positions"
    return finish(figure, title)
