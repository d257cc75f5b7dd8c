"""CurvatureMap: what is sent, orders, links, steps and files; and its page without a kernel."""

from __future__ import annotations

import base64
import csv
import json
import re
import struct
import zlib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traitlets import TraitError

import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, CurvatureMap, Session
from cocurve_widgets.curvature_map import cluster_order
from cocurve_widgets.packing import plain
from helpers.lab import Lab, in_browser
from helpers.pages import page_of
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually


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


# What is sent -----------------------------------------------------------------------------------


def test_pairs_are_the_matrix_to_three_digits(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature)
    found = sent_correlation(picture)
    # half a step of the root scale, doubled by the square
    bound = 1.01 * np.sqrt(np.abs(found) * picture.peak) / 32_767 + 1e-9
    assert (np.abs(found - curvature.correlation()) <= bound).all()
    matrix = found * np.outer(picture.roots, picture.roots)
    strong = np.abs(curvature.correlation()) > 0.01
    assert matrix[strong] == pytest.approx(curvature.matrix[strong], rel=1e-3)
    pairs = np.triu_indices(len(picture.roots), 1)
    assert picture.ends["curvature"] == np.quantile(np.abs(curvature.matrix[pairs]), 0.995)


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


# Orders -----------------------------------------------------------------------------------------


def test_every_order_holds_every_unit_once(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature))
    plan = cl.solve_greedy(curvature, 0.3)
    picture.session.selection = plan
    size = len(curvature.units)
    orders = {}
    for picture.order in ("layer", "saliency", "clustering", "plan"):
        orders[picture.order] = picture.places()
        assert sorted(orders[picture.order]) == list(range(size))
    assert orders["layer"] == list(range(size))
    assert (np.diff(curvature.saliency[orders["saliency"]]) <= 0).all()
    assert orders["plan"][: len(plan)] == list(plan.pruned)


def test_clustering_puts_tied_units_together_whatever_their_sign() -> None:
    size = 12
    blocks = np.arange(size) % 3  # units 0, 3, 6, 9 are tied, and so on
    signs = np.where(np.arange(size) < 6, 1.0, -1.0)
    matrix = np.eye(size) + 0.8 * (blocks[:, None] == blocks) * np.outer(signs, signs)
    order = cluster_order(cl.Curvature(matrix, make_units(2, 2, 4)))
    assert [len(set(blocks[order[k : k + 4]])) for k in (0, 4, 8)] == [1, 1, 1]


def test_clustering_is_computed_when_it_is_asked_for(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature))
    assert picture.clustered == []
    picture.order = "clustering"
    assert picture.session.worker.join(30)
    assert picture.clustered == cluster_order(curvature)
    assert picture.error == ""


# Traits and links -------------------------------------------------------------------------------


def test_a_brush_selects_units_everywhere(curvature: cl.Curvature) -> None:
    session = Session(curvature)
    picture = CurvatureMap(curvature, session=session)
    bridges = BridgeExplorer(curvature, session=session)
    picture.set_state({"brushed": [7, 3, 3]})  # as the page does
    assert picture.brushed == bridges.brushed == session.brushed == [3, 7]
    bridges.set_state({"brushed": [1]})
    assert picture.brushed == session.brushed == [1]
    later = CurvatureMap(curvature, session=session)
    assert later.brushed == [1]
    session.brushed = []
    assert picture.brushed == bridges.brushed == later.brushed == []
    later.close()
    session.brushed = [2]
    assert later.brushed == []
    with pytest.raises(TraitError, match="brushed holds 32"):
        session.brushed = [32]
    bridges.selected_unit = 9
    assert picture.selected_unit == 9


def test_the_chosen_pair_is_told_from_h_itself(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature))
    assert picture.status == "Estimated from H, not measured."
    picture.selected_unit, picture.partner = 4, 6
    names = [curvature.units[u].name for u in (4, 6)]
    edge, rho = curvature.matrix[4, 6], curvature.correlation()[4, 6]
    assert picture.status.startswith(f"{names[0]} and {names[1]}: H_uv {edge:.4g} nats per token")
    assert f"rho {rho:.4g}." in picture.status
    picture.partner = 4
    assert picture.status.startswith(f"{names[0]}: H_uu {curvature.saliency[4]:.4g} nats")


# The plan ---------------------------------------------------------------------------------------


def test_steps_follow_the_sessions_plan(curvature: cl.Curvature) -> None:
    session = Session(curvature)
    session.selection = plan = cl.solve_greedy(curvature, 0.4, 0.5)
    picture = CurvatureMap(curvature, session=session, step=3)
    assert picture.step == 3
    assert picture.plan["order"] == list(plan.pruned)
    assert sum(picture.plan["node"]) + sum(picture.plan["edge"]) == pytest.approx(
        plan.predicted_risk
    )
    assert picture.plan["gone"][-1] == pytest.approx(plan.realized_ratio)
    picture.playing = True
    shorter = cl.solve_greedy(curvature, 0.1)
    session.selection = shorter
    assert (picture.step, picture.playing) == (len(shorter), False)
    session.selection = None
    assert (picture.plan, picture.step) == ({}, 0)


def test_terms_are_of_this_h_whatever_made_the_plan(curvature: cl.Curvature) -> None:
    other = random_curvature(curvature.units, seed=8)
    picture = CurvatureMap(curvature, session=Session(curvature))
    picture.session.selection = plan = cl.solve_greedy(other, 0.3)
    before = [plan.pruned[:k] for k in range(len(plan))]
    terms = [
        (0.5 * curvature.matrix[u, u], sum(curvature.matrix[u, v] for v in gone))
        for u, gone in zip(plan.pruned, before, strict=True)
    ]
    assert picture.plan["node"] == pytest.approx([node for node, _ in terms])
    assert picture.plan["edge"] == pytest.approx([edge for _, edge in terms])


def test_a_mask_has_no_order_to_play(curvature: cl.Curvature) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature))
    picture.session.selection = cl.Selection.from_pruned(curvature.units, [4, 2])
    assert not picture.plan["ordered"]
    with pytest.raises(TraitError, match="the plan has no removal order"):
        picture.playing = True


# Code and files ---------------------------------------------------------------------------------


def test_tables(curvature: cl.Curvature, tmp_path: Path) -> None:
    picture = CurvatureMap(curvature, session=Session(curvature), order="saliency", brushed=[2])
    picture.session.selection = plan = cl.solve_greedy(curvature, 0.3)
    names = [unit.name for unit in curvature.units]
    rows = picture.table()
    assert [row["unit"] for row in rows] == [names[u] for u in picture.places()]
    steps = {row["unit"]: row["removed_at_step"] for row in rows}
    assert steps[names[plan.pruned[1]]] == 2
    assert [row["unit"] for row in rows if row["brushed"]] == [names[2]]

    picture.table_of = "ledger"
    rows = picture.table()
    assert [row["unit"] for row in rows] == [names[u] for u in plan.pruned]
    assert rows[-1]["risk"] == pytest.approx(plan.predicted_risk)

    picture.table_of, picture.order, picture.window = "pairs", "layer", [0, 8, 4]
    rows = picture.table()
    assert {(r["first"], r["second"]) for r in rows} == {
        (names[u], names[v]) for u in range(4) for v in range(8, 12)
    }
    sizes = [abs(row["correlation"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    saved = picture.save(tmp_path / "pairs.csv").read_text()
    assert len(list(csv.DictReader(StringIO(saved)))) == 16
    again = cl.Selection.from_json(picture.save(tmp_path / "plan.json").read_text())
    assert again.pruned == plan.pruned


def test_code_reproduces_the_screen(curvature: cl.Curvature) -> None:
    session = Session(curvature)
    session.selection = cl.solve_greedy(curvature, 0.3, 0.5)
    given = {"order": "plan", "window": [2.0, 3.0, 10.5], "only_plan": True, "step": 2}
    picture = CurvatureMap(curvature, session=session, brushed=[1, 2], **given)
    found: dict[str, Any] = {"curvature": random_curvature(make_units(4, 3, 5), seed=3)}
    exec(picture.code(), found)
    again = found["picture"]
    assert {name: getattr(again, name) for name in given} == given
    assert again.brushed == [1, 2]
    assert again.plan == picture.plan


@pytest.mark.parametrize(("shape", "wide"), [((4, 3, 5), 64), ((40, 8, 16), 480)])
def test_a_saved_notebook_keeps_a_picture(shape: tuple[int, ...], wide: int) -> None:
    curvature = random_curvature(make_units(*shape), seed=3)
    picture = CurvatureMap(curvature, order="saliency")
    found = re.search(r'src="data:image/png;base64,([^"]+)"', picture._still())
    data = base64.b64decode(found[1])
    assert struct.unpack(">II", data[16:24]) == (wide, wide)
    size = int(struct.unpack(">I", data[33:37])[0])
    pixels = np.frombuffer(zlib.decompress(data[41 : 41 + size]), np.uint8).reshape(wide, -1)
    shades = pixels[:, 1:].astype(int)  # a byte of each row tells its filter
    assert (shades == shades.T).all()
    if wide == 64:  # two pixels to a unit
        order = picture.places()
        rho = np.abs(curvature.correlation())[np.ix_(order, order)]
        np.fill_diagonal(rho, 0)
        ranks = np.argsort(rho, axis=None)
        assert (np.diff(shades[::2, ::2].ravel()[ranks]) <= 0).all()


# In a page without a kernel ---------------------------------------------------------------------


class Page:
    """The map in a browser, and its traits there."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.map = page.locator("canvas.cc-picture")
        page.wait_for_selector("canvas[data-draws]", timeout=30_000)

    def get(self, name: str) -> Any:
        return self.page.evaluate("name => window.model.get(name)", name)

    def becomes(self, name: str, wanted: Any) -> None:
        eventually(lambda: self.get(name), lambda found: found == wanted)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def redrawn(self, act: Any) -> None:
        """Do something that must change the pixels."""
        before = self.map.evaluate("canvas => canvas.toDataURL()")
        act()
        self.page.wait_for_function(
            "([canvas, before]) => canvas.toDataURL() !== before",
            arg=[self.map.element_handle(), before],
            timeout=10_000,
        )


@pytest.fixture(scope="module")
def lone(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The map of a small H with its plan."""
    curvature = random_curvature(make_units(4, 3, 5), seed=3)
    session = Session(curvature)
    session.selection = cl.solve_greedy(curvature, 0.4)
    state = CurvatureMap(curvature, session=session).state()
    file = page_of(tmp_path_factory.mktemp("map") / "map.html", "map.js", "renderMap", state)
    with lab.page(file) as page:
        yield Page(page)


@pytest.fixture
def it(lone: Page) -> Page:
    """The same, opened anew."""
    lone.page.emulate_media(reduced_motion="no-preference")
    lone.page.reload()
    lone.page.wait_for_selector("canvas[data-draws]")
    return lone


@in_browser
def test_keyboard(it: Page, curvature: cl.Curvature) -> None:
    page, size = it.page, len(curvature.units)
    it.map.focus()
    it.redrawn(lambda: it.press("ArrowDown"))
    assert (it.get("selected_unit"), it.get("partner")) == (0, 0)
    it.press("ArrowDown", "ArrowDown", "ArrowRight")
    assert (it.get("selected_unit"), it.get("partner")) == (2, 1)
    names = [curvature.units[u].name for u in (2, 1)]
    card = page.locator(".cc-card")
    card.get_by_text(f"{names[0]} and {names[1]}").wait_for()
    rho = f"{curvature.correlation()[2, 1]:.2f}"[:4].replace("-", "−")
    card.get_by_text(rho).first.wait_for()
    it.redrawn(lambda: it.press("Space"))
    assert it.get("brushed") == [1, 2]
    it.redrawn(lambda: it.press("+"))
    assert it.get("window")[2] == pytest.approx(size / 1.6)
    it.redrawn(lambda: it.press("Shift+ArrowRight"))
    assert it.get("window")[0] > 0
    it.redrawn(lambda: it.press("0"))
    assert it.get("window") == [0, 0, size]
    it.press("Escape")
    assert (it.get("selected_unit"), it.get("partner"), it.get("brushed")) == (None, None, [])
    order = page.get_by_label("order of rows and columns")
    for name in ("saliency", "clustering", "plan"):
        it.redrawn(lambda: (order.focus(), it.press("ArrowDown")))
        assert it.get("order") == name
    it.redrawn(lambda: page.get_by_label("color").select_option("curvature"))
    it.redrawn(lambda: page.get_by_label("only pairs of the plan").click())


@in_browser
def test_mouse(it: Page) -> None:
    page, box = it.page, it.map.bounding_box()
    left, top = box["x"] + 118, box["y"] + 24
    cell = (box["width"] - 124) / 32

    def drag(start: tuple[float, float], end: tuple[float, float]) -> None:
        page.mouse.move(left + start[0] * cell, top + start[1] * cell)
        page.mouse.down()
        page.mouse.move(left + end[0] * cell, top + end[1] * cell, steps=4)
        page.mouse.up()

    page.mouse.move(left + 5.5 * cell, top + 3.5 * cell)
    page.locator(".cc-card").get_by_text("L0.ffn[0] and L0.ffn[2]").wait_for()
    page.mouse.down()
    page.mouse.up()
    it.becomes("partner", 5)
    assert it.get("selected_unit") == 3
    it.redrawn(lambda: drag((10.2, 20.2), (11.8, 22.8)))
    assert it.get("brushed") == [10, 11, 20, 21, 22]
    page.get_by_label("drag to").select_option("zoom")
    it.redrawn(lambda: drag((8, 8), (16, 16)))
    assert it.get("window") == pytest.approx([8, 8, 8], abs=0.2)
    page.get_by_label("drag to").select_option("move")
    it.redrawn(lambda: drag((8, 8), (0, 16)))
    assert it.get("window") == pytest.approx([10, 6, 8], abs=0.2)
    it.map.focus()
    page.mouse.move(left + 16 * cell, top + 16 * cell)
    it.redrawn(lambda: page.mouse.wheel(0, 2000))
    it.becomes("window", [0, 0, 32])


@in_browser
def test_play_and_pause(it: Page, curvature: cl.Curvature) -> None:
    plan = cl.solve_greedy(curvature, 0.4)
    it.map.focus()
    it.press("p")
    it.page.get_by_role("button", name="Pause").wait_for()
    eventually(lambda: it.get("step"), lambda step: 2 <= step < len(plan))
    it.press("p")
    held = it.get("step")
    it.page.wait_for_timeout(1500)  # longer than any pause between steps
    assert it.get("step") == held
    it.page.get_by_role("button", name="step ▶").click()
    assert it.get("step") == held + 1
    name = curvature.units[plan.pruned[held]].name
    it.page.locator(".cc-card").get_by_text(f"Step {held + 1} of {len(plan)}: {name}").wait_for()
    it.page.get_by_role("button", name="Play").click()
    it.becomes("step", len(plan))
    it.becomes("playing", False)
    it.page.locator(".cc-card").get_by_text(f"Step {len(plan)} of").wait_for()


@in_browser
def test_less_motion(it: Page) -> None:
    it.page.emulate_media(reduced_motion="reduce")
    it.page.reload()
    play = it.page.get_by_role("button", name="Play")
    assert play.is_disabled()
    assert "less motion" in play.get_attribute("title")
    it.page.get_by_role("button", name="◀ step").click()
    last = len(it.get("plan")["order"])
    it.becomes("step", last - 1)
    it.page.evaluate("window.model.set('playing', true); window.model.save_changes()")
    it.becomes("playing", False)
    assert it.get("step") == last - 1


@in_browser
def test_files(it: Page, curvature: cl.Curvature) -> None:
    it.page.get_by_label("table and CSV of").select_option("pairs")
    with it.page.expect_download() as caught:
        it.page.get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(StringIO(Path(caught.value.path()).read_text("utf-8"))))
    size = len(curvature.units)
    assert len(rows) == size * (size - 1) // 2
    for row in rows[:50]:
        u, v = (curvature.units.index(row[end]) for end in ("first", "second"))
        assert float(row["curvature"]) == pytest.approx(curvature.matrix[u, v], rel=6e-3)
    with it.page.expect_download() as caught:
        it.page.get_by_role("button", name="PNG").click()
    assert caught.value.suggested_filename == "map.png"
    assert Path(caught.value.path()).read_bytes().startswith(b"\x89PNG")
