"""The common look of pictures."""

from __future__ import annotations

import numpy as np
import pytest

from cocurve_lab.extensions.figures import (
    DEEP,
    LABELS,
    finish,
    graph_objects,
    log_axis,
    plot_correlation,
    plot_saliency,
)
from cocurve_widgets import BridgeExplorer
from helpers.problems import make_units, random_curvature


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


def test_the_map_by_layer_is_the_mean_of_its_pairs() -> None:
    """Figure "evidence" (a) of the paper: |rho_uv| averaged within (kind, layer) blocks."""
    curvature = random_curvature(make_units(3, 2, 4), seed=1)
    rho, units = curvature.correlation(), curvature.units
    (heatmap,) = plot_correlation(curvature, by_layer=True).data
    blocks = [(kind, layer) for kind in ("attention", "ffn") for layer in range(3)]
    assert list(heatmap.x) == [f"L{n} {LABELS[kind]}" for kind, n in blocks]
    for row, first in enumerate(blocks):
        for place, second in enumerate(blocks):
            pairs = [
                abs(rho[u, v])
                for u in range(len(units))
                for v in range(len(units))
                if u != v
                and (units[u].kind, units[u].layer) == first
                and (units[v].kind, units[v].layer) == second
            ]
            assert heatmap.z[row, place] == pytest.approx(np.mean(pairs), abs=1e-4)
    (single,) = plot_correlation(curvature).data
    assert np.shape(single.z) == (len(units), len(units))


def test_the_picture_of_an_unfinished_h_says_how_far_it_is() -> None:
    facts = {"complete": False, "sequences_done": 3, "num_sequences": 64}
    curvature = random_curvature(make_units(3, 2, 4)).with_provenance(**facts)
    for figure in (plot_correlation(curvature), plot_saliency(curvature)):
        assert "3 of 64 rows" in figure.layout.title.text.replace("<br>", " ")
    assert "3 of 64 rows" in BridgeExplorer(curvature).model_name
