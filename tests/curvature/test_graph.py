"""The edge graph and the bridge units, against loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr

from cocurve_lab.base.errors import InputError
from cocurve_lab.curvature.graph import bridge_units, edge_graph
from cocurve_lab.curvature.matrix import Curvature
from helpers.problems import make_units, random_curvature

UNITS = make_units()
CURVATURE = random_curvature(UNITS)


def pairs(curvature: Curvature) -> list[tuple[int, int]]:
    size = len(curvature.units)
    return [(u, v) for u in range(size) for v in range(u + 1, size)]


# The graph ----------------------------------------------------------------------------------------


def test_attributes_are_the_papers_quantities(tmp_path: Path) -> None:
    graph, h = edge_graph(CURVATURE), CURVATURE.matrix
    for number, unit in enumerate(UNITS):
        data = graph.nodes[number]
        found = [data[name] for name in ("name", "kind", "layer", "index", "cost", "saliency")]
        assert found == [unit.name, unit.kind, unit.layer, unit.index, unit.cost, h[number, number]]
        others = [abs(h[number, v]) for v in range(15) if v != number]
        assert data["connectivity"] == pytest.approx(sum(others))
    for u, v, data in graph.edges(data=True):
        assert data["curvature"] == h[u, v]
        assert data["correlation"] == pytest.approx(h[u, v] / math.sqrt(h[u, u] * h[v, v]))
    assert min(d["curvature"] for _, _, d in graph.edges(data=True)) < 0  # signs are kept
    nx.write_gexf(graph, tmp_path / "graph.gexf")  # Gephi's format takes plain numbers alone
    again = nx.read_gexf(tmp_path / "graph.gexf", node_type=int)
    assert {frozenset(edge) for edge in again.edges} == {frozenset(edge) for edge in graph.edges}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    levels=st.integers(1, 4),
    top_k=st.none() | st.integers(0, 110),
    threshold=st.sampled_from([0.0, 1 / 64, 2 / 64, 0.3, 1.0]),
)
def test_edges_are_what_a_full_sort_keeps(
    seed: int, levels: int, top_k: int | None, threshold: float
) -> None:
    upper = np.triu(np.random.default_rng(seed).integers(-levels, levels + 1, (15, 15)), 1) / 64
    curvature = Curvature(upper + upper.T + np.eye(15), UNITS)  # few values, so many ties
    drawn = [(u, v) for u, v in pairs(curvature) if upper[u, v] and abs(upper[u, v]) >= threshold]
    kept = sorted(drawn, key=lambda pair: (-abs(upper[pair]), pair))[:top_k]
    found = edge_graph(curvature, threshold, top_k).edges
    assert sorted(tuple(sorted(edge)) for edge in found) == sorted(kept)


# Bridges ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["sum", "relative"])
def test_bridges_are_what_the_docstring_says(measure: Any) -> None:
    curvature = random_curvature(make_units(8, 4, 4), 1)
    h = np.abs(curvature.matrix if measure == "sum" else curvature.correlation())
    degree = np.array([sum(h[u, v] for v in range(64) if v != u) for u in range(64)])
    low, high = np.quantile(curvature.saliency, 0.6), np.quantile(degree, 0.4)
    found = bridge_units(curvature, 0.6, 0.4, measure)
    expected = [u for u in range(64) if curvature.saliency[u] <= low and degree[u] >= high]
    assert len(expected) >= 5
    assert (list(found), len(found), found.ranked) == (expected, len(expected), False)
    assert found.indices == tuple(expected)
    assert expected[0] in found
    assert found.saliency_threshold == low
    assert found.connectivity_threshold == pytest.approx(high)
    assert found.saliency_connectivity_correlation == pytest.approx(
        pearsonr(curvature.saliency, degree).statistic
    )
    assert found.saliency_connectivity_rank_correlation == pytest.approx(
        spearmanr(curvature.saliency, degree).statistic
    )
    slope, offset = np.polyfit(np.log(curvature.saliency), np.log(degree), 1)
    line = slope * np.log(curvature.saliency) + offset
    np.testing.assert_allclose(found.residual, np.log(degree) - line, atol=1e-9)


def test_too_few_bridges_are_ranked_instead() -> None:
    curvature = random_curvature(make_units(8, 4, 4), 2)
    found = bridge_units(curvature, 0.02, 0.98)
    assert found.ranked
    order = np.argsort(-found.residual)[:5]
    assert found.indices == tuple(order.tolist())
    assert (found.residual[order] > 0).all()


def test_matrices_without_edges_or_saliency_have_no_bridges() -> None:
    matrix = CURVATURE.matrix.copy()
    matrix[[2, 6], :] = matrix[:, [2, 6]] = 0.0
    found = bridge_units(Curvature(matrix, UNITS), 0.1, 0.9)
    assert found.ranked
    assert not {2, 6} & set(found)
    assert np.flatnonzero(np.isnan(found.residual)).tolist() == [2, 6]
    for matrix in (np.zeros((15, 15)), np.ones((15, 15))):
        found = bridge_units(Curvature(matrix, UNITS), 0.0, 1.0)
        assert math.isnan(found.saliency_connectivity_correlation)
        assert math.isnan(found.saliency_connectivity_rank_correlation)
    ranked = bridge_units(Curvature(np.eye(4), make_units(1, 0, 4)))
    assert (ranked.indices, ranked.ranked) == ((), True)


@pytest.mark.parametrize(
    ("call", "bad"),
    [
        (edge_graph, {"threshold": -0.1}),
        (edge_graph, {"threshold": math.nan}),
        (edge_graph, {"top_k": -1}),
        (bridge_units, {"saliency_quantile": 1.2}),
        (bridge_units, {"connectivity_quantile": math.nan}),
        (bridge_units, {"connectivity": "mean"}),
    ],
)
def test_bad_arguments_are_named(call: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        call(CURVATURE, **bad)
