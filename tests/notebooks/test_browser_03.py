"""Notebook 03 in JupyterLab: the bridge explorer by keyboard and mouse, one with the kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from helpers.lab import SMALL, Visit
from helpers.layout import require_readable_notebook
from helpers.notebooks import NOTEBOOKS, Ran, cold, require_shown
from helpers.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]


class Instrument:
    """The explorer of the opened notebook, seen from page and kernel."""

    def __init__(self, visit: Visit) -> None:
        self.visit, self.page, self.keyboard = visit, visit.page, visit.page.keyboard
        self.root = self.page.locator(".cocurve").first
        self.graph = self.root.locator("canvas")
        self.plane = self.root.get_by_label(re.compile("^Saliency against"))
        # the reader sets it to cross edges alone
        opening = {"edges_of": "all", "blocks": ["cross"], "threshold": 0.1, "sign": "both"}
        visit.set("explorer", **opening, ego=False, selected_unit=None, brushed=[])
        self.graph.scroll_into_view_if_needed()

    def edges(self) -> int:
        return int(self.graph.get_attribute("data-edges"))

    def redrawn(self, picture: Any, act: Callable[[], Any]) -> None:
        """Do something that must change the pixels or the paths of a picture."""
        look = "p => p.toDataURL?.() ?? p.innerHTML"
        before = picture.evaluate(look)
        act()
        eventually(lambda: picture.evaluate(look), lambda now: now != before)

    def at(self, unit: int) -> dict[str, float]:
        """Where a unit of the embedded model stands: 8 layers of 4 heads and 16 groups."""
        box = self.graph.bounding_box()
        layer, rank = divmod(unit, 20)
        cell = min(110, (box["width"] - 70) / 8)
        tall = max(250, min(430, 0.72 * box["width"])) / 20
        return {
            "x": 64 + (layer + 0.5) * cell,
            "y": 4 + (rank + 0.5) * tall + (0 if rank < 4 else 8),
        }


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[2], SMALL)


@pytest.fixture
def it(ran: Ran) -> Instrument:
    visit = ran.shown_in_lab()
    visit.page.locator(".cocurve canvas[data-draws]").first.wait_for(timeout=60_000)
    return Instrument(visit)


def test_after_run_all_it_stands_as_it_opened_and_can_be_read(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    visit.becomes(
        "explorer.blocks, explorer.edges_of", "(['attention', 'cross', 'ffn'], 'bridges')"
    )
    assert len(ran.curvature.units) == 160
    require_shown(visit, 0)
    # a fault is seen here, too: words that may break anywhere, in a narrow line
    prose = visit.page.locator(".jp-MarkdownOutput p").first
    prose.evaluate("text => { text.style.width = '30px'; text.style.wordBreak = 'break-all' }")
    with pytest.raises(AssertionError, match="breaks inside a word"):
        require_readable_notebook(visit.page)


def test_the_threshold_by_keyboard_mouse_and_typed(it: Instrument) -> None:
    slider, box = it.root.locator("input[type=range]"), it.root.locator("input[type=number]").first
    slider.focus()
    it.redrawn(it.graph, lambda: it.keyboard.press("ArrowRight"))
    it.visit.becomes("round(explorer.threshold, 6)", "0.105")
    place, mouse = slider.bounding_box(), it.page.mouse
    mouse.move(place["x"] + 0.1 * place["width"], place["y"] + place["height"] / 2)
    mouse.down()
    for step in range(30):
        mouse.move(place["x"] + (0.1 + step / 97) * place["width"], place["y"] + 8)
    mouse.up()
    it.visit.becomes("round(explorer.threshold, 6)", str(float(slider.input_value())))
    it.redrawn(it.graph, lambda: (box.fill("0.15"), box.press("Enter")))
    it.visit.becomes("explorer.threshold", "0.15")
    assert it.visit.ask("len(explorer.table())") == str(it.edges())
    assert f"{it.edges():,} of" in it.root.locator("h4").first.text_content()


def test_sign_and_blocks(it: Instrument) -> None:
    it.root.locator(".cc-more summary").click()
    it.root.get_by_label("sign of the edges").focus()
    it.redrawn(it.graph, lambda: it.keyboard.press("ArrowDown"))
    it.visit.becomes("explorer.sign", "'positive'")
    it.redrawn(it.graph, lambda: it.root.get_by_label("attention", exact=True).click())
    it.visit.becomes("explorer.blocks", "['attention', 'cross']")
    it.root.get_by_label("FFN", exact=True).focus()
    it.redrawn(it.graph, lambda: it.keyboard.press("Space"))
    it.visit.becomes("explorer.blocks", "['attention', 'cross', 'ffn']")


def test_units_by_arrow_keys_and_mouse_and_the_ego_view(it: Instrument) -> None:
    it.graph.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown"):
        it.keyboard.press(key)
    it.visit.becomes("explorer.session.selected_unit", "41")
    it.root.locator(".cc-card", has_text="L2.attention[1]").wait_for()
    it.redrawn(it.plane, lambda: it.graph.click(position=it.at(66)))
    it.visit.becomes("explorer.selected_unit", "66")
    it.graph.hover(position=it.at(85))
    card = it.root.locator(".cc-card", has_text="L4.ffn[1]")
    card.filter(has_text="strongest partners").wait_for()
    everything = it.edges()
    it.root.get_by_role("checkbox", name="ego view").focus()
    it.redrawn(it.graph, lambda: it.keyboard.press("Space"))
    assert it.edges() < everything
    it.visit.becomes("len(explorer.table())", str(it.edges()))
    it.graph.focus()
    it.keyboard.press("Escape")
    it.visit.becomes("explorer.selected_unit", "None")


def test_a_rectangle_and_a_click_on_the_plane(it: Instrument) -> None:
    mouse = it.page.mouse
    it.plane.scroll_into_view_if_needed()
    frame = it.plane.bounding_box()
    mouse.move(frame["x"] + 62, frame["y"] + 12)
    mouse.down()
    mouse.move(frame["x"] + frame["width"] - 2, frame["y"] + frame["height"] - 30, steps=2)
    it.redrawn(it.graph, mouse.up)
    it.visit.becomes("len(explorer.brushed)", "160")
    it.root.get_by_role("button", name="Clear brush").focus()
    it.redrawn(it.plane, lambda: it.keyboard.press("Enter"))
    it.visit.becomes("explorer.brushed", "[]")
    mouse.move(0, 0)
    it.plane.scroll_into_view_if_needed()  # the focus may have scrolled it away
    frame = it.plane.bounding_box()
    name, card = "", it.root.locator(".cc-card h4")
    for step in range(3000):  # along the diagonal and beside it until a point answers
        along, beside = step % 200 / 199, 8 * (step // 200)
        x = 62 + (frame["width"] - 80) * along
        y = frame["height"] - 50 - beside - (frame["height"] - 70) * along
        mouse.move(frame["x"] + x, frame["y"] + max(4, y))
        if card.text_content().startswith("L"):
            it.page.wait_for_timeout(100)  # the card is drawn with the next frame
            name = card.text_content().split(",")[0]
            if name.startswith("L"):
                break
    mouse.down()
    mouse.up()
    it.visit.becomes("units[explorer.selected_unit].name", repr(name))


def test_quantiles_the_region_and_the_list(it: Instrument) -> None:
    listed = it.root.locator("table[data-table=bridges] tbody tr")
    if not it.root.get_by_label("low saliency quantile").is_visible():
        it.root.locator(".cc-more summary").click()
    it.root.get_by_label("low saliency quantile").focus()
    it.keyboard.press("Control+a")
    it.keyboard.type("0.9")
    it.redrawn(it.plane, lambda: it.keyboard.press("Enter"))
    rows = it.visit.ask("len(list(cl.bridge_units(curvature, 0.9, 0.5)))")
    it.visit.becomes("len(explorer.bridges['indices'])", rows)
    eventually(listed.count, lambda count: count == int(rows))
    it.root.get_by_role("button", name="Brush the bridge region").focus()
    it.redrawn(it.graph, lambda: it.keyboard.press("Enter"))
    it.visit.becomes("explorer.brushed == sorted(explorer.bridges['indices'])", "True")
    button = listed.nth(1).locator("button")
    button.focus()
    it.keyboard.press("Enter")
    it.visit.becomes("units[explorer.selected_unit].name", repr(button.text_content()))
    it.page.wait_for_timeout(200)
    assert button.evaluate("b => b === document.activeElement")  # the list was made anew


def test_a_plan_of_another_widget(it: Instrument) -> None:
    it.redrawn(it.graph, it.page.get_by_role("button", name="lambda 1, ratio 0.4").click)
    same = "explorer.plans['present'] == list(explorer.session.selection.pruned)"
    it.visit.becomes(same, "True")
    it.visit.set("explorer", compared_ratio=0.4)
    it.root.get_by_text("Plans at ratio 0.4").first.wait_for()
    removed = it.root.locator("table[data-table=bridges]", has_text="present plan")
    removed.filter(has_text=re.compile(r"removed at step \d+|kept")).wait_for()


def test_table_and_files(it: Instrument) -> None:
    it.root.locator(".cc-table summary").click()
    it.root.get_by_label("table and CSV of").select_option("units")
    eventually(it.root.locator("details tbody tr").count, lambda count: count == 160)
    it.visit.becomes("explorer.table_of", "'units'")
    found = {}
    for name in ("CSV", "GEXF", "PNG"):
        with it.page.expect_download() as download:
            it.root.get_by_role("button", name=name).click()
        found[name] = Path(download.value.path()).read_bytes()
        assert download.value.suggested_filename == f"bridges.{name.lower()}"
    assert len(found["CSV"].splitlines()) == 161
    assert found["PNG"].startswith(b"\x89PNG")
    assert nx.read_gexf(BytesIO(found["GEXF"])).number_of_edges() == it.edges()


def test_themes_widths_and_a_second_run_of_the_cell(it: Instrument) -> None:
    it.redrawn(it.graph, lambda: it.visit.theme("Dark"))
    it.visit.theme("Light")
    it.page.set_viewport_size({"width": 1920, "height": 1500})
    inside = it.root.bounding_box
    eventually(inside, lambda box: box["width"] > 1280)
    graph, plane = it.graph.bounding_box(), it.plane.bounding_box()
    assert graph["x"] + graph["width"] < plane["x"]
    assert plane["x"] + plane["width"] <= inside()["x"] + inside()["width"]
    assert it.root.locator(".cc-error").is_hidden()
    # the same cell again closes what its first run made
    widgets = "__import__('ipywidgets').widgets.widget._instances.values()"
    count = f"len([w for w in {widgets} if 'Bridge' in type(w).__name__])"
    before = it.visit.ask(count)
    it.visit.run_cell("explorer = BridgeExplorer")
    it.visit.becomes(count, before)
    eventually(it.page.locator(".cocurve canvas[data-draws]").count, lambda n: n >= 1)
    it.page.get_by_label(re.compile("^Saliency against")).locator("svg").first.wait_for()
    it.visit.require_clean()
