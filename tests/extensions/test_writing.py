"""Numbers as people write them, tables as CSV, and the common look of pictures."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.figures import LABELS, plot_correlation
from cocurve_lab.extensions.writing import as_csv, brief, plus_minus
from helpers.problems import make_units, random_curvature


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.12e-18, "2.12e-18"),
        (0.0001, "0.0001"),
        (-0.00123456, "-0.00123"),
        (1234.5, "1230"),
        (8.0, "8"),
        (-0.0, "0"),
        (999_999.0, "1.00e+6"),
        (-math.inf, "-inf"),
        (math.nan, ""),
    ],
)
def test_numbers_are_brief(value: float, text: str) -> None:
    assert brief(value) == text


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (111.3, 16.2, "111 ± 16"),
        (-0.00544, 0.00254, "-0.0054 ± 0.0025"),
        (-0.0004, 0.022, "0.000 ± 0.022"),
        (0.0, 0.0, "0 ± 0"),
        (-0.1, 1.4e-17, "-0.1 ± 0"),
        (2.0, 0.5, "2.00 ± 0.50"),
        (0.12345, math.nan, "0.123"),
        (None, None, "unknown"),
    ],
)
def test_a_value_has_the_places_of_its_error(
    value: float | None, error: float | None, expected: str
) -> None:
    assert plus_minus(value, error) == expected


def test_no_cell_of_a_csv_begins_a_formula() -> None:
    texts = ["=1+1", "+1", "-a", "@x", "\tx", "\rx", "a=b", 'a,"b"']
    rows = [{"=name": text, "value": -2.5} for text in texts]
    heads, *cells = csv.reader(io.StringIO(as_csv([*rows, {"more": None}]), newline=""))
    assert heads == ["'=name", "value", "more"]
    assert [row[0] for row in cells] == [f"'{t}" for t in texts[:6]] + texts[6:] + [""]
    assert {row[1] for row in cells[:-1]} == {"-2.5"}


# The common look of pictures ----------------------------------------------------------------------


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
