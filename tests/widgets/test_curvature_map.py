"""CurvatureMap: what is sent, orders, links, the plan and tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
from traitlets import TraitError

import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, CurvatureMap, Session
from cocurve_widgets.curvature_map import cluster_order
from cocurve_widgets.packing import plain
from helpers.problems import make_units, random_curvature


@pytest.fixture
def curvature() -> cl.Curvature:
    return random_curvature(make_units(4, 3, 5), seed=3)


def sent_correlation(picture: CurvatureMap) -> np.ndarray:
    """What the page reads from the bytes as H_uv / (root_u root_v), [M, M]."""
    size = len(picture.roots)
    roots = np.frombuffer(picture.pairs, "<i2") / 32_767
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = np.sign(roots) * roots**2 * picture.peak
    return upper + np.triu(upper, 1).T


def test_pairs_are_the_matrix_to_three_digits(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature)
    found = sent_correlation(picture)
    # half a step of the root scale, doubled by the square
    bound = 1.01 * np.sqrt(np.abs(found) * picture.peak) / 32_767 + 1e-9
    assert (np.abs(found - curvature.correlation()) <= bound).all()
    matrix = found * np.outer(picture.roots, picture.roots)
    strong = np.abs(curvature.correlation()) > 0.01
    assert matrix[strong] == pytest.approx(curvature.matrix[strong], rel=1e-3)


def test_a_correlation_may_exceed_one_and_a_dead_unit_keeps_its_edges(
    curvature: cl.Curvature,
) -> None:
    matrix = curvature.matrix.copy()
    matrix[0, 1] = matrix[1, 0] = 3 * np.sqrt(matrix[0, 0] * matrix[1, 1])
    matrix[2, 2] = 0.0
    facts = {"surrogate": "measured KL"}
    picture = CurvatureMap(cl.Curvature(matrix, curvature.units, facts=facts))
    found = sent_correlation(picture) * np.outer(picture.roots, picture.roots)
    assert picture.peak >= 3
    assert found[0, 1] == pytest.approx(matrix[0, 1], rel=1e-3)
    assert found[2, 3] == pytest.approx(matrix[2, 3], rel=1e-2)


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), np.diag([1.0, 2.0, 0.0])])
def test_nothing_to_color(matrix: np.ndarray) -> None:
    picture = CurvatureMap(cl.Curvature(matrix, make_units(1, 1, 2)), order="clustering")
    json.dumps(plain(picture.state()), allow_nan=False)
    assert min(picture.ends.values()) > 0
    assert sorted(picture.places()) == [0, 1, 2]


def test_every_order_holds_every_unit_once(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature))
    picture.session.selection = plan = cl.solve_greedy(curvature, 0.3)
    orders = {}
    for picture.order in ("layer", "saliency", "clustering", "plan"):
        assert picture.session.worker.join(30)
        orders[picture.order] = picture.places()
        assert sorted(orders[picture.order]) == list(range(len(curvature.units)))
    assert orders["layer"] == list(range(len(curvature.units)))
    assert (np.diff(curvature.saliency[orders["saliency"]]) <= 0).all()
    assert orders["clustering"] == picture.clustered == cluster_order(curvature)
    assert orders["plan"][: len(plan)] == list(plan.pruned)


def test_clustering_puts_tied_units_together_whatever_their_sign() -> None:
    size = 12
    blocks = np.arange(size) % 3  # units 0, 3, 6, 9 are tied, and so on
    signs = np.where(np.arange(size) < 6, 1.0, -1.0)
    matrix = np.eye(size) + 0.8 * (blocks[:, None] == blocks) * np.outer(signs, signs)
    order = cluster_order(cl.Curvature(matrix, make_units(2, 2, 4)))
    assert [len(set(blocks[order[k : k + 4]])) for k in (0, 4, 8)] == [1, 1, 1]


def test_a_brush_selects_units_everywhere(curvature: cl.Curvature) -> None:
    session = Session(curvature)
    picture = CurvatureMap(curvature, session=session)
    bridges = BridgeExplorer(curvature, session=session)
    picture.set_state({"brushed": [7, 3, 3]})  # as the page does
    assert picture.brushed == bridges.brushed == session.brushed == [3, 7]
    later = CurvatureMap(curvature, session=session)
    session.brushed = [1]
    assert picture.brushed == bridges.brushed == later.brushed == [1]
    later.close()
    session.brushed = []
    assert (picture.brushed, later.brushed) == ([], [1])
    with pytest.raises(TraitError, match="brushed"):
        session.brushed = [32]


def test_tables(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature), order="saliency", brushed=[2])
    picture.session.selection = plan = cl.solve_greedy(curvature, 0.3)
    names = [unit.name for unit in curvature.units]
    rows = picture.table()
    assert [row["unit"] for row in rows] == [names[u] for u in picture.places()]
    steps = {row["unit"]: row["removed_at_step"] for row in rows}
    assert steps[names[plan.pruned[1]]] == 2
    assert [row["unit"] for row in rows if row["brushed"]] == [names[2]]

    picture.table_of, picture.order, picture.window = "pairs", "layer", [0, 8, 4]
    rows = picture.table()
    assert {(r["first"], r["second"]) for r in rows} == {
        (names[u], names[v]) for u in range(4) for v in range(8, 12)
    }
    sizes = [abs(row["correlation"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
