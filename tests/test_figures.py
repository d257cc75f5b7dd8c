"""The common look of pictures."""

from __future__ import annotations

import pytest

from cocurve_lab.figures import finish, graph_objects


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
    assert finish(figure, "Stability of plans").layout.legend.orientation == orientation
