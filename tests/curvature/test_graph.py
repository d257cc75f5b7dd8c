"""The edge graph and the bridge units, against loops and planted structure."""

from __future__ import annotations

import math
import time
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
from helpers.problems import gram_curvature, llama_8b_units, make_units, random_curvature

UNITS = make_units()
CURVATURE = random_curvature(UNITS)


def pairs(curvature: Curvature) -> list[tuple[int, int]]:
    size = len(curvature.units)
    return [(u, v) for u in range(size) for v in range(u + 1, size)]


# The graph ----------------------------------------------------------------------------------------


def test_every_pair_with_curvature_is_an_edge() -> None:
    matrix = CURVATURE.matrix.copy()
    matrix[3, 7] = matrix[7, 3] = 0.0
    graph = edge_graph(Curvature(matrix, UNITS))
    assert list(graph) == list(range(15))
    assert not graph.has_edge(3, 7)
    assert graph.number_of_edges() == 15 * 14 // 2 - 1


def test_attributes_are_the_papers_quantities_in_plain_python() -> None:
    graph = edge_graph(CURVATURE)
    for number, unit in enumerate(UNITS):
        data = graph.nodes[number]
        assert data["name"] == unit.name
        assert (data["kind"], data["layer"], data["index"]) == (unit.kind, unit.layer, unit.index)
        assert data["cost"] == unit.cost
        assert data["saliency"] == CURVATURE.matrix[number, number]
        others = [abs(CURVATURE.matrix[number, v]) for v in range(15) if v != number]
        assert data["connectivity"] == pytest.approx(sum(others))
    for u, v, data in graph.edges(data=True):
        h = CURVATURE.matrix
        assert data["curvature"] == h[u, v]
        assert data["correlation"] == pytest.approx(h[u, v] / math.sqrt(h[u, u] * h[v, v]))
    values = [
        value
        for element in (*graph.nodes(data=True), *((u, d) for u, _, d in graph.edges(data=True)))
        for value in element[1].values()
    ]
    assert {type(value) for value in values} == {str, int, float}
    assert min(d["curvature"] for _, _, d in graph.edges(data=True)) < 0  # signs are kept


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [None, 0, 5, 20, 10_000])
def test_threshold_and_top_k_against_a_loop(threshold: float, top_k: int | None) -> None:
    rho = CURVATURE.correlation()
    kept = [pair for pair in pairs(CURVATURE) if abs(rho[pair]) >= threshold]
    if top_k is not None:
        kept = sorted(kept, key=lambda pair: -abs(rho[pair]))[:top_k]
    graph = edge_graph(CURVATURE, threshold, top_k)
    assert {tuple(sorted(edge)) for edge in graph.edges} == set(kept)


def test_ties_of_top_k_go_to_the_lowest_pairs() -> None:
    curvature = Curvature(np.full((15, 15), 0.5) + 0.5 * np.eye(15), UNITS)
    assert sorted(edge_graph(curvature, top_k=16).edges) == pairs(curvature)[:16]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), levels=st.integers(1, 4), top_k=st.integers(0, 110))
def test_top_k_is_what_a_full_sort_keeps(seed: int, levels: int, top_k: int) -> None:
    upper = np.triu(np.random.default_rng(seed).integers(-levels, levels + 1, (15, 15)), 1) / 64
    curvature = Curvature(upper + upper.T + np.eye(15), UNITS)  # few values, so many ties
    drawn = [(u, v) for u, v in pairs(curvature) if upper[u, v]]
    kept = sorted(drawn, key=lambda pair: (-abs(upper[pair]), pair))[:top_k]
    found = edge_graph(curvature, top_k=top_k).edges
    assert sorted(tuple(sorted(edge)) for edge in found) == sorted(kept)


def test_gephi_can_read_it(tmp_path: Path) -> None:
    graph = edge_graph(CURVATURE, top_k=10)
    nx.write_gexf(graph, tmp_path / "graph.gexf")
    again = nx.read_gexf(tmp_path / "graph.gexf", node_type=int)
    assert {frozenset(edge) for edge in again.edges} == {frozenset(edge) for edge in graph.edges}
    assert again.nodes[4]["name"] == "L0.ffn[2]"
    u, v = next(iter(graph.edges))
    assert again.edges[u, v]["curvature"] == graph.edges[u, v]["curvature"]


def test_the_papers_size_is_quick() -> None:
    curvature = random_curvature(llama_8b_units())
    start = time.perf_counter()
    graph = edge_graph(curvature, top_k=2000)
    assert graph.number_of_edges() == 2000
    assert time.perf_counter() - start < 5  # about 0.1 s; a Python loop over pairs would fail


# Bridges ------------------------------------------------------------------------------------------


def planted() -> tuple[Curvature, set[int]]:
    """60 units: 6 weak ones that share a direction with everything, the rest independent."""
    units = make_units(6, 4, 6)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 400)) * np.exp(rng.normal(size=(60, 1)))
    features[:30] *= 0.3  # the weak half
    bridges = {1, 5, 9, 13, 17, 21}
    for u in bridges:
        features[u] = 0.02 * features[30:].sum(axis=0)
    return gram_curvature(units, features), bridges


def test_planted_bridges_are_found() -> None:
    curvature, expected = planted()
    for measure in ("sum", "relative"):
        found = bridge_units(curvature, 0.5, 0.7, connectivity=measure)
        assert expected <= set(found)
        assert not found.ranked


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
    assert f"{len(expected)} of 64 units" in repr(found)


def test_too_few_bridges_are_ranked_instead() -> None:
    curvature = random_curvature(make_units(8, 4, 4), 2)
    found = bridge_units(curvature, 0.02, 0.98)
    assert found.ranked
    assert found.note.startswith("Only 0 units")
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
    with pytest.raises(InputError, match=next(iter(bad))):
        call(CURVATURE, **bad)
