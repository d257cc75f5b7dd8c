"""The common look of pictures."""

from __future__ import annotations

import numpy as np
import pytest

from cocurve_lab.figures import DEEP, finish, graph_objects, log_axis


@pytest.mark.parametrize(
    ("names", "orientation"),
    [(["attention", "FFN"], "h"), ([f"overlap of halves, λ = {k}" for k in range(6)], "v")],
)
def test_a_legend_that_would_reach_over_the_title_stands_at_the_right(
    names: list[str], orientation: str
) -> None:
    figure = graph_objects().Figure()
    for name in names:
        figure.add_scatter(x=[0, 1], y=[0, 1], name=name)
    layout = finish(figure, "Stability of plans").layout
    assert layout.legend.orientation == orientation
    # the buttons are at the right, or above: never on the legend
    assert layout.modebar.orientation == {"h": "v", "v": "h"}[orientation]


@pytest.mark.parametrize(
    ("values", "step"), [([2, 9], None), ([0.0, 0.02, 0.5], "D2"), ([-1.0, 1e-5, 2.0], 1)]
)
def test_a_long_logarithmic_axis_has_few_ticks(values: list[float], step: str | int | None) -> None:
    assert log_axis(values)["dtick"] == step


def test_white_numbers_can_be_read_on_deep_colors() -> None:
    for _, color in DEEP:
        parts = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        brightness = float(linear @ (0.2126, 0.7152, 0.0722))
        assert 1.05 / (brightness + 0.05) >= 4.5  # WCAG 2
