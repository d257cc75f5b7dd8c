"""BridgeExplorer without kernel and browser: traits, links, errors, files, and its JavaScript."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from traitlets import TraitError

import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, Session
from helpers.lab import Lab, in_browser
from helpers.pages import page_of
from helpers.problems import llama_8b_units, make_units, random_curvature
from helpers.waiting import eventually

FRONT = Path(__file__).resolve().parents[2] / "widgets" / "cocurve_widgets" / "front"


@pytest.fixture
def curvature() -> cl.Curvature:
    return random_curvature(make_units(4, 3, 5), seed=3)


def sent_edges(explorer: BridgeExplorer) -> list[tuple[int, int, float]]:
    """What the page reads from the bytes."""
    ends = np.frombuffer(explorer.edge_ends, np.uint32).reshape(-1, 2)
    rho = np.frombuffer(explorer.edge_correlation, np.float32)
    return [(int(u), int(v), float(r)) for (u, v), r in zip(ends, rho, strict=True)]


# What is sent -----------------------------------------------------------------------------------


def test_nodes_and_edges_are_the_curvatures(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature)
    assert explorer.nodes["name"] == [unit.name for unit in curvature.units]
    assert explorer.nodes["saliency"] == curvature.saliency.tolist()
    assert explorer.nodes["connectivity"] == curvature.connectivity.tolist()
    rho, size = curvature.correlation(), len(curvature.units)
    expected = [(u, v, rho[u, v]) for u in range(size) for v in range(u + 1, size)]
    expected.sort(key=lambda edge: -abs(edge[2]))
    found = sent_edges(explorer)
    assert len(found) == explorer.edge_total == size * (size - 1) // 2
    for (u, v, value), (x, y, want) in zip(found, expected, strict=True):
        assert (u, v) == (x, y)
        assert value == pytest.approx(want, rel=1e-6)


def test_partners_are_the_largest_entries_of_the_row(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature)
    partners = np.frombuffer(explorer.partners, np.uint32).reshape(-1, 5)
    rho = np.frombuffer(explorer.partner_correlation, np.float32).reshape(-1, 5)
    for unit in range(len(curvature.units)):
        row = np.abs(curvature.matrix[unit])
        row[unit] = -1
        assert partners[unit].tolist() == np.argsort(-row, kind="stable")[:5].tolist()
        assert rho[unit] == pytest.approx(curvature.correlation()[unit, partners[unit]], rel=1e-6)


@pytest.mark.parametrize("layers", [2, 32])
def test_the_graph_opens_with_a_few_edges_of_the_bridges(layers: int) -> None:
    curvature = random_curvature(make_units(layers, 8, 16), seed=1)
    explorer = BridgeExplorer(curvature, session=Session(curvature))
    listed = set(explorer.bridges["indices"])
    near = [abs(rho) for u, v, rho in sent_edges(explorer) if listed & {u, v}]
    assert explorer.edges_of == "bridges"
    assert 24 <= sum(rho >= explorer.threshold for rho in near) < 30
    assert len(explorer.table()) == sum(rho >= explorer.threshold for rho in near)
    explorer.edges_of = "all"
    assert len(explorer.table()) == sum(
        abs(rho) >= explorer.threshold for _, _, rho in sent_edges(explorer)
    )
    # a threshold of one's own is about all edges, as it always was
    assert BridgeExplorer(curvature, threshold=0.2, session=Session(curvature)).edges_of == "all"


def test_compared_plans_differ_on_the_bridges_where_they_can(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature, session=Session(curvature))
    listed = set(explorer.bridges["indices"])

    def differ(ratio: float) -> bool:
        plans = [set(cl.solve_greedy(curvature, ratio, s).pruned) & listed for s in (0.0, 1.0)]
        return plans[0] != plans[1]

    shown, tried = explorer.plans["ratio"], [0.2, *(n / 20 for n in range(1, 13))]
    good = [ratio for ratio in tried if differ(ratio)]
    assert good  # else this H tests nothing
    assert shown == min(good, key=lambda r: (round(abs(r - 0.2), 9), r))
    assert bool(explorer.plans["note"]) == (shown != 0.2)
    explorer.compared_ratio = 0.1
    assert (explorer.plans["ratio"], explorer.plans["note"]) == (0.1, "")
    with pytest.raises(TraitError, match=r"compared_ratio is 0\.7"):
        explorer.compared_ratio = 0.7
    without = cl.Curvature(np.diag(curvature.saliency), curvature.units)
    alike = BridgeExplorer(without, session=Session(without))
    alike.bridges = alike.bridges | {"indices": [0, 1]}
    alike._compare_plans()
    assert "At every ratio tried" in alike.plans["note"]
    assert alike.plans["ratio"] == 0.2


def test_the_flow_of_a_bridge_is_its_edges_by_layer(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature, session=Session(curvature))
    flow = explorer.bridges["flow"]
    for place, unit in enumerate(explorer.bridges["indices"]):
        row = curvature.matrix[unit].copy()
        row[unit] = 0
        for layer in range(curvature.units.num_layers):
            mine = row[curvature.units.layers == layer]
            assert flow["positive"][place][layer] == pytest.approx(mine[mine > 0].sum())
            assert flow["negative"][place][layer] == pytest.approx(mine[mine < 0].sum())


def test_ten_thousand_strongest_edges_and_a_status_that_says_so() -> None:
    curvature = random_curvature(llama_8b_units(), seed=1)
    start = time.perf_counter()
    explorer = BridgeExplorer(curvature, threshold=0.0)
    assert time.perf_counter() - start < 3
    assert len(sent_edges(explorer)) == 10_000
    assert "the 10,000 strongest of 294,528 edges" in explorer.status
    size = len(json.dumps({k: v for k, v in explorer.state().items() if k == "nodes"}))
    size += sum(len(getattr(explorer, n)) for n in ("edge_ends", "edge_correlation", "partners"))
    assert size < 500_000
    explorer.threshold = 0.9
    assert "strongest of" not in explorer.status
    assert "Shown: 0 of 294,528 edges" in explorer.status


# Traits -----------------------------------------------------------------------------------------


def test_lists_are_put_in_order(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature, blocks=["ffn", "attention"], brushed=[5, 2, 5])
    assert explorer.blocks == ["attention", "ffn"]
    assert explorer.brushed == [2, 5]


def test_filters_agree_with_edge_graph_and_a_plain_loop(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature, threshold=0.1)
    graph = cl.edge_graph(curvature, threshold=0.1)
    names = [unit.name for unit in curvature.units]
    rows = explorer.table()
    assert {(r["first"], r["second"]) for r in rows} == {
        (names[u], names[v]) for u, v in graph.edges
    }
    assert f"Shown: {len(rows)} of" in explorer.status
    explorer.set_state({"sign": "negative", "blocks": ["cross"], "ego": True, "selected_unit": 4})
    want = {
        (names[u], names[v])
        for u, v, rho in graph.edges(data="correlation")
        if rho < 0 and curvature.units.kinds[u] != curvature.units.kinds[v] and 4 in (u, v)
    }
    assert want
    rows = explorer.table()
    assert {(row["first"], row["second"]) for row in rows} == want
    for row in rows:
        u, v = names.index(row["first"]), names.index(row["second"])
        assert row["curvature"] == curvature.matrix[u, v]
    assert f"Shown: {len(want)} of" in explorer.status


def test_setting_from_code_equals_setting_from_the_page(curvature: cl.Curvature) -> None:
    one = BridgeExplorer(curvature, session=Session(curvature))
    two = BridgeExplorer(curvature, session=Session(curvature))
    values = {"threshold": 0.05, "sign": "positive", "saliency_quantile": 0.7, "selected_unit": 3}
    for name, value in values.items():
        setattr(one, name, value)
    two.set_state(values)
    timeless = [w.status.split(" took")[0] for w in (one, two)]
    assert timeless[0] == timeless[1]
    assert one.table() == two.table()
    assert one.bridges == two.bridges
    assert two.session.selected_unit == 3


# Bridges and plans ------------------------------------------------------------------------------


def test_quantiles_run_bridge_units_again(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature)
    explorer.saliency_quantile, explorer.connectivity_quantile = 0.9, 0.1
    found = cl.bridge_units(curvature, 0.9, 0.1)
    assert explorer.bridges["indices"] == list(found)
    assert explorer.bridges["saliency_threshold"] == found.saliency_threshold
    assert not explorer.bridges["ranked"]
    assert len(found) > 5
    explorer.table_of = "bridges"
    assert [row["unit"] for row in explorer.table()] == [curvature.units[u].name for u in found]
    assert explorer.table()[0]["residual"] == found.residual[found.indices[0]]


def test_a_model_without_bridges_says_so(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature, saliency_quantile=0.0, connectivity_quantile=1.0)
    assert explorer.bridges["ranked"]
    assert "Only 0 units have low saliency" in explorer.bridges["note"]


def test_a_ratio_that_rounding_moved_is_the_first_that_is_tried() -> None:
    curvature = random_curvature(make_units(6, 3, 5), seed=2)
    session = Session(curvature)
    explorer = BridgeExplorer(curvature, session=session)
    session.selection = cl.solve_greedy(curvature, 0.1 + 0.2)
    plans = explorer.plans
    assert (plans["ratio"] == 0.1 + 0.2) == (plans["note"] == "")
    assert plans["ratio"] != 0.3


def test_plans_follow_the_session(curvature: cl.Curvature) -> None:
    session = Session(curvature)
    explorer = BridgeExplorer(curvature, session=session, table_of="units")
    explorer.compared_ratio = 0.2
    diagonal, aware = (cl.solve_greedy(curvature, 0.2, strength) for strength in (0.0, 1.0))
    assert explorer.plans["diagonal"] == list(diagonal.pruned)
    assert explorer.plans["edge_aware"] == list(aware.pruned)
    assert explorer.plans["present"] is None
    assert {row["present_plan"] for row in explorer.table()} == {"no plan"}

    plan = cl.solve_greedy(curvature, 0.4, 0.5, cl.Guards(protect_first=1))
    session.selection = plan
    explorer.compared_ratio = 0.4
    assert explorer.plans["present"] == list(plan.pruned)
    guarded = cl.solve_greedy(curvature, 0.4, 1.0, plan.guards)
    assert explorer.plans["edge_aware"] == list(guarded.pruned)
    rows = explorer.table()
    for step, unit in enumerate(plan.pruned):
        assert rows[unit]["present_plan"] == f"removed at step {step + 1}"
    assert sum(row["present_plan"] == "kept" for row in rows) == len(plan.kept)

    session.selection = cl.Selection.from_pruned(curvature.units, [4, 2])
    assert explorer.table()[4]["present_plan"] == "removed"
    session.selection = None
    assert explorer.plans["present"] is None


def test_a_plan_out_of_reach_is_said_and_not_raised(curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature)
    guards = cl.Guards(layer_cap=0.1)
    explorer.session.selection = cl.Selection.from_pruned(
        curvature.units, range(20), requested_ratio=0.6, guards=guards
    )
    assert explorer.plans["diagonal"] is None
    assert "0.6" in explorer.plans["problem"] or "60" in explorer.plans["problem"]
    assert explorer.error == ""
    explorer.table_of = "bridges"
    assert explorer.table()[0]["diagonal_plan"] == "no plan"


# Odd matrices -----------------------------------------------------------------------------------


def test_a_unit_that_does_nothing() -> None:
    curvature = random_curvature(make_units(2, 2, 3))
    matrix = curvature.matrix.copy()
    matrix[4] = matrix[:, 4] = 0
    explorer = BridgeExplorer(cl.Curvature(matrix, curvature.units), threshold=0.0)
    assert explorer.nodes["saliency"][4] == 0
    assert explorer.nodes["residual"][4] is None
    assert explorer.edge_total == 9 * 8 // 2
    partners = np.frombuffer(explorer.partners, np.uint32).reshape(-1, 5)
    assert partners[4].tolist() == [4] * 5
    json.dumps(explorer.nodes, allow_nan=False)
    json.dumps(explorer.bridges, allow_nan=False)


@pytest.mark.parametrize("size", [2, 3])
def test_a_graph_without_edges(size: int, tmp_path: Path) -> None:
    curvature = cl.Curvature(np.diag(np.arange(size) + 1.0), make_units(1, 1, size - 1))
    explorer = BridgeExplorer(curvature)
    assert explorer.threshold == 0
    assert explorer.edge_total == 0
    assert explorer.table() == []
    assert explorer.save(tmp_path / "none.csv").read_text() == ""
    assert len(nx.read_gexf(explorer.save(tmp_path / "none.gexf"))) == size
    assert "Shown: 0 of 0 edges" in explorer.status
    json.dumps(explorer.bridges, allow_nan=False)


# Code and files ---------------------------------------------------------------------------------


def test_code_reproduces_the_screen(curvature: cl.Curvature) -> None:
    session = Session.of(curvature)
    session.selection = cl.solve_greedy(curvature, 0.3, 0.5, cl.Guards(protect_last=1))
    explorer = BridgeExplorer(
        curvature, threshold=0.2, sign="negative", ego=True, selected_unit=5, brushed=[1, 2],
        blocks=["cross"], saliency_quantile=0.75, table_of="units",
    )  # fmt: skip
    code, state = explorer.code(), explorer.state()
    plan = session.selection
    session.selection = None
    explorer.close()
    space: dict[str, Any] = {"curvature": curvature}
    exec(code, space)
    again = space["explorer"]
    assert again.state() | {"status": ""} == state | {"status": ""}
    assert again.session.selection.pruned == plan.pruned
    assert again.session.selection.guards == plan.guards
    assert list(space["bridges"]) == again.bridges["indices"]
    assert space["graph"].number_of_edges() >= len(again.table())
    again.session.selection = None


def test_gexf_holds_the_shown_graph(tmp_path: Path, curvature: cl.Curvature) -> None:
    explorer = BridgeExplorer(curvature, threshold=0.1, session=Session(curvature))
    explorer.session.selection = cl.solve_greedy(curvature, 0.2)
    graph = nx.read_gexf(explorer.save(tmp_path / "all.gexf"), node_type=int)
    assert graph.number_of_edges() == len(explorer.table())
    assert len(graph) == len(curvature.units)
    assert [u for u, gone in graph.nodes(data="removed") if gone] == sorted(
        explorer.session.selection.pruned
    )
    explorer.ego, explorer.selected_unit = True, 0
    graph = nx.read_gexf(explorer.save(tmp_path / "ego.gexf"), node_type=int)
    assert graph.number_of_edges() == len(explorer.table()) == len(graph) - 1
    assert all(0 in edge for edge in graph.edges)


def test_state_is_what_a_page_without_kernel_needs(curvature: cl.Curvature) -> None:
    state = BridgeExplorer(curvature).state()
    assert state["kernel"] is False
    assert not [name for name in state if name.startswith("_") or name in ("layout", "tooltip")]
    binary = ("edge_ends", "edge_correlation", "partners", "partner_correlation")
    assert all(isinstance(state[name], bytes) for name in binary)
    json.dumps({k: v for k, v in state.items() if k not in binary}, allow_nan=False)
    asked = set()
    for part in ("kit.js", "bridge.js"):
        text = (FRONT / part).read_text(encoding="utf-8")
        asked |= {piece.split('"')[1] for piece in text.split("model.get(")[1:] if piece[0] == '"'}
    assert asked
    assert asked <= set(state) | {"kernel"}


# In a page without a kernel ---------------------------------------------------------------------


def bridge_page(explorer: BridgeExplorer, folder: Path) -> Path:
    return page_of(folder / "b.html", "bridge.js", "renderBridge", explorer.state())


@in_browser
def test_the_page_answers_without_a_kernel_and_can_be_closed(lab: Lab, tmp_path: Path) -> None:
    curvature = random_curvature(make_units(6, 3, 5), seed=4)
    explorer = BridgeExplorer(curvature, session=Session(curvature), saliency_quantile=0.8)
    with lab.page(bridge_page(explorer, tmp_path)) as page:
        root, graph = page.locator(".cocurve"), page.locator("canvas").first
        page.wait_for_selector("canvas[data-draws]")
        assert root.get_by_text("low saliency quantile").count() == 0
        assert root.get_by_role("button", name="GEXF").count() == 0
        before = int(graph.get_attribute("data-edges"))
        root.locator("input[type=range]").focus()
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        eventually(lambda: int(graph.get_attribute("data-edges")), lambda now: now < before)
        graph.focus()
        page.keyboard.press("ArrowDown")
        page.locator(".cc-card", has_text="L0.").wait_for()
        root.get_by_role("button", name="Brush the bridge region").click()
        brushed = page.evaluate("() => model.get('brushed').length")
        assert brushed == len(explorer.bridges["indices"]) > 4
        page.evaluate("() => stop()")
        assert root.count() == 0
        assert page.evaluate("() => heard") == 0


@in_browser
def test_ten_thousand_edges_of_a_thousand_units_are_drawn(lab: Lab, tmp_path: Path) -> None:
    curvature = random_curvature(make_units(40, 9, 16))
    explorer = BridgeExplorer(curvature, session=Session(curvature), threshold=0.0)
    with lab.page(bridge_page(explorer, tmp_path)) as page:
        graph = page.locator("canvas[data-edges]").first
        assert graph.get_attribute("data-edges") == "10000"
        text = page.locator(".cocurve").text_content()
        assert "the 10,000 strongest of 499,500 edges" in text
        page.get_by_label("threshold as number").fill("0.5")
        page.get_by_label("threshold as number").press("Enter")
        shown = sum(abs(rho) >= 0.5 for _, _, rho in sent_edges(explorer))
        eventually(lambda: graph.get_attribute("data-edges"), lambda n: n == str(shown))
