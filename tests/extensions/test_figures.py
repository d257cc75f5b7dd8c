"""The common look of pictures."""

from __future__ import annotations

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.figures import (
    LABELS,
    plot_correlation,
)
from helpers.problems import make_units, random_curvature


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


def test_the_units_of_a_plan_stand_first() -> None:
    curvature = random_curvature(make_units(3, 2, 4), seed=1)
    plan, names = cl.solve_greedy(curvature, 0.3), [unit.name for unit in curvature.units]
    (heatmap,) = plot_correlation(curvature, plan=plan).data
    assert set(heatmap.x[: len(plan)]) == {names[u] for u in plan.pruned}
    assert sorted(heatmap.x) == sorted(names)
    u, v = (names.index(name) for name in heatmap.x[:2])
    assert heatmap.z[0, 1] == pytest.approx(curvature.correlation()[u, v], abs=1e-4)
    with pytest.raises(cl.MismatchError):
        plot_correlation(curvature, plan=cl.Selection.from_pruned(make_units(2, 2, 2), [0]))
