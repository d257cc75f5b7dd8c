"""BridgeExplorer without kernel and browser: what is sent, plans, code and files."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, Session
from helpers.problems import llama_8b_units, make_units, random_curvature


@pytest.fixture
def curvature() -> cl.Curvature:
    return random_curvature(make_units(4, 3, 5), seed=3)


@pytest.fixture
def explorer(curvature: cl.Curvature) -> BridgeExplorer:
    return BridgeExplorer(curvature, session=Session(curvature))


def sent_edges(explorer: BridgeExplorer) -> list[tuple[int, int, float]]:
    """What the page reads from the bytes."""
    ends = np.frombuffer(explorer.edge_ends, np.uint32).reshape(-1, 2)
    rho = np.frombuffer(explorer.edge_correlation, np.float32)
    return [(int(u), int(v), float(r)) for (u, v), r in zip(ends, rho, strict=True)]


def test_nodes_edges_and_partners_are_the_curvatures(
    explorer: BridgeExplorer, curvature: cl.Curvature
) -> None:
    assert explorer.nodes["name"] == [unit.name for unit in curvature.units]
    assert explorer.nodes["saliency"] == curvature.saliency.tolist()
    assert explorer.nodes["connectivity"] == curvature.connectivity.tolist()
    rho, size = curvature.correlation(), len(curvature.units)
    expected = [(u, v, rho[u, v]) for u in range(size) for v in range(u + 1, size)]
    expected.sort(key=lambda edge: -abs(edge[2]))
    found = sent_edges(explorer)
    assert [edge[:2] for edge in found] == [edge[:2] for edge in expected]
    assert [edge[2] for edge in found] == pytest.approx([edge[2] for edge in expected], rel=1e-6)
    partners = np.frombuffer(explorer.partners, np.uint32).reshape(-1, 5)
    sent = np.frombuffer(explorer.partner_correlation, np.float32).reshape(-1, 5)
    for unit in range(size):
        row = np.abs(curvature.matrix[unit])
        row[unit] = -1
        assert partners[unit].tolist() == np.argsort(-row, kind="stable")[:5].tolist()
        assert sent[unit] == pytest.approx(rho[unit, partners[unit]], rel=1e-6)


@pytest.mark.parametrize("layers", [2, 32])
def test_the_graph_opens_with_a_few_edges_of_the_bridges(layers: int) -> None:
    curvature = random_curvature(make_units(layers, 8, 16), seed=1)
    explorer = BridgeExplorer(curvature, session=Session(curvature))
    listed = set(explorer.bridges["indices"])
    shown = [{u, v} for u, v, rho in sent_edges(explorer) if abs(rho) >= explorer.threshold]
    near = [edge for edge in shown if edge & listed]
    assert explorer.edges_of == "bridges"
    assert 24 <= len(near) < 30
    # a threshold of one's own is about all edges, as it always was
    assert BridgeExplorer(curvature, threshold=0.2, session=Session(curvature)).edges_of == "all"


def test_the_flow_of_a_bridge_is_its_edges_by_layer(
    explorer: BridgeExplorer, curvature: cl.Curvature
) -> None:
    flow = explorer.bridges["flow"]
    for place, unit in enumerate(explorer.bridges["indices"]):
        row = curvature.matrix[unit].copy()
        row[unit] = 0
        for layer in range(curvature.units.num_layers):
            mine = row[curvature.units.layers == layer]
            assert flow["positive"][place][layer] == pytest.approx(mine[mine > 0].sum())
            assert flow["negative"][place][layer] == pytest.approx(mine[mine < 0].sum())


def test_ten_thousand_strongest_edges_are_sent() -> None:
    curvature = random_curvature(llama_8b_units(), seed=1)
    explorer = BridgeExplorer(curvature, threshold=0.0)
    assert len(sent_edges(explorer)) == 10_000
    assert explorer.edge_total == 294_528  # of so many
    size = len(json.dumps({k: v for k, v in explorer.state().items() if k == "nodes"}))
    size += sum(len(getattr(explorer, n)) for n in ("edge_ends", "edge_correlation", "partners"))
    assert size < 500_000


def test_quantiles_run_bridge_units_again(
    explorer: BridgeExplorer, curvature: cl.Curvature
) -> None:
    explorer.saliency_quantile, explorer.connectivity_quantile = 0.9, 0.1
    found = cl.bridge_units(curvature, 0.9, 0.1)
    assert explorer.bridges["indices"] == list(found)
    assert explorer.bridges["saliency_threshold"] == found.saliency_threshold
    assert not explorer.bridges["ranked"]
    assert len(found) > 5
    listed = [row["unit"] for row in explorer.table() if row["bridge"]]
    assert listed == [curvature.units[u].name for u in sorted(found)]
    assert explorer.table()[0]["residual"] == found.residual[0]
    explorer.saliency_quantile, explorer.connectivity_quantile = 0.0, 1.0
    assert explorer.bridges["ranked"]  # a model without bridges has a note
    assert explorer.bridges["note"]


def test_plans_follow_the_session(explorer: BridgeExplorer, curvature: cl.Curvature) -> None:
    session, opening = explorer.session, cl.opening_guards(curvature.units)
    assert (explorer.plans["present"], explorer.plans["ratio"]) == (None, 0.2)

    def orders(ratio: float) -> list[list[int]]:
        """The plans of both runs at a ratio, as the page reads them off."""
        runs = [explorer.plans["runs"][name] for name in ("diagonal", "edge_aware")]
        return [
            run["order"][: sum(share < ratio * (1 - 1e-12) for share in run["share"]) + 1]
            for run in runs
        ]

    def solved(ratio: float, guards: cl.Guards) -> list[list[int]]:
        plans = [cl.solve_greedy(curvature, ratio, strength, guards) for strength in (0.0, 1.0)]
        return [list(plan.pruned) for plan in plans]

    assert orders(0.2) == solved(0.2, opening)
    guards = cl.Guards(protect_first=1)
    session.selection = plan = cl.solve_greedy(curvature, 0.4, 0.5, guards)
    assert explorer.plans["present"] == list(plan.pruned)
    assert orders(0.4) == solved(0.4, guards)
    gone = [row["unit"] for row in explorer.table() if row["removed"]]
    assert gone == [curvature.units[u].name for u in sorted(plan.pruned)]

    guards = cl.Guards(layer_cap=0.1)
    session.selection = cl.Selection.from_pruned(
        curvature.units, range(20), requested_ratio=0.6, guards=guards
    )
    assert explorer.plans["runs"]["diagonal"]["share"][-1] < 0.6  # out of reach, and not raised
    assert explorer.error == ""
    session.selection = None
    assert explorer.plans["present"] is None


@pytest.mark.parametrize("size", [2, 3, 16])
def test_units_that_do_nothing_and_a_graph_without_edges(size: int, tmp_path: Path) -> None:
    saliency = np.arange(size) * 1.0
    curvature = cl.Curvature(np.diag(saliency), make_units(1, 1, size - 1))
    explorer = BridgeExplorer(curvature, session=Session(curvature))
    assert explorer.nodes["residual"][0] is None
    assert np.frombuffer(explorer.partners, np.uint32)[:5].tolist() == [0] * 5
    assert (explorer.threshold, explorer.edge_total) == (0, 0)
    assert len(nx.read_gexf(explorer.save(tmp_path / "none.gexf"))) == size
    json.dumps([explorer.nodes, explorer.bridges], allow_nan=False)


def test_gexf_holds_the_strongest_edges_and_the_plan(
    tmp_path: Path, explorer: BridgeExplorer, curvature: cl.Curvature
) -> None:
    explorer.session.selection = cl.solve_greedy(curvature, 0.2)
    graph = nx.read_gexf(explorer.save(tmp_path / "all.gexf"), node_type=int)
    assert graph.number_of_edges() == explorer.edge_total
    assert len(graph) == len(curvature.units)
    removed = sorted(explorer.session.selection.pruned)
    assert [u for u, gone in graph.nodes(data="removed") if gone] == removed
    assert {u for u, is_one in graph.nodes(data="bridge") if is_one} == set(
        explorer.bridges["indices"]
    )
