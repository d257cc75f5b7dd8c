"""Notebook 03 in a real JupyterLab: every control by keyboard and mouse, and how fast it draws."""

from __future__ import annotations

import json
import re
import statistics
import time
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
import networkx as nx
import pytest

from cocurve_widgets import BridgeExplorer, Session
from helpers.lab import CHROMIUM, KEPT, NO_BROWSER, SMALL, Lab, Visit
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "03_bridges.ipynb"
FIRST_PICTURE = """async () => {
  const start = performance.now();
  jupyterapp.shell.currentWidget.content.activeCellIndex = 1;
  jupyterapp.commands.execute('notebook:run-cell');
  while (!document.querySelector('.cocurve canvas[data-draws]')) {
    await new Promise(done => requestAnimationFrame(done));
  }
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
}"""
# one threshold step: from the input event until after the frame that paints it
STEPS = """async thresholds => {
  const slider = document.querySelector('.cocurve input[type=range]');
  const graph = document.querySelector('.cocurve canvas');
  const found = [];
  for (const value of thresholds) {
    const start = performance.now();
    slider.value = value;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    found.push([Number(graph.dataset.edges), performance.now() - start]);
  }
  return found;
}"""

# the least that an exported page offers instead of a kernel's model
PAGE = """<!doctype html><meta charset="utf-8"><style>@css@</style><body><div id="here"></div>
<script type="module">
@esm@
const values = window.values = @state@;
for (const [name, value] of Object.entries(values)) {
  if (!value || !value.bytes) continue;
  values[name] = new DataView(Uint8Array.from(atob(value.bytes), c => c.charCodeAt(0)).buffer);
}
const listeners = window.listeners = {};
const model = {
  get: name => values[name],
  set: (name, value) => {
    values[name] = value;
    (listeners[`change:${name}`] ?? []).forEach(run => run());
  },
  on: (event, run) => (listeners[event] ??= []).push(run),
  off: (event, run) => { listeners[event] = listeners[event].filter(other => other !== run); },
  save_changes() {},
  send() { throw new Error("there is no kernel"); },
};
window.stop = bridge.render({ model, el: document.getElementById("here") });
</script></body>"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]


class Instrument:
    """The explorer of the opened notebook, seen from page and kernel."""

    def __init__(self, visit: Visit) -> None:
        self.page = visit.page
        self.root = self.page.locator(".cocurve").first
        self.graph, self.plane = (
            self.root.locator("canvas").nth(0),
            self.root.locator("canvas").nth(1),
        )
        self.graph.wait_for(timeout=60_000)

    def edges(self) -> int:
        return int(self.graph.get_attribute("data-edges"))

    def redrawn(self, canvas: Any, act: Callable[[], Any]) -> None:
        """Do something that must change the pixels of a picture."""
        before = canvas.evaluate("c => c.toDataURL()")
        act()
        self.page.wait_for_function(
            "([canvas, before]) => canvas.toDataURL() !== before",
            arg=[canvas.element_handle(), before],
            timeout=10_000,
        )

    def at(self, unit: int) -> dict[str, float]:
        """Where a unit of the embedded model stands: 8 layers of 4 heads and 16 groups."""
        box = self.graph.bounding_box()
        layer, rank = divmod(unit, 20)
        row = rank if rank < 4 else rank + 1.5
        width, height = box["width"] - 46, min(430, 20 * 21.5)
        return {"x": 34 + (layer + 0.5) * width / 8, "y": 10 + (row + 0.5) * height / 21.5}


def wide_screen_and_second_run_of_the_cell(visit: Visit, it: Instrument) -> None:
    page = visit.page
    page.set_viewport_size({"width": 1920, "height": 1500})
    page.wait_for_timeout(500)
    for theme in ("Dark", "Light"):
        visit.theme(theme)
        visit.picture(f"03_{theme.lower()}_1920", it.root)
    graph, plane = it.graph.bounding_box(), it.plane.bounding_box()
    assert graph["x"] + graph["width"] < plane["x"]
    inside = it.root.bounding_box()
    assert plane["x"] + plane["width"] <= inside["x"] + inside["width"]
    # the same cell again closes what its first run made
    widgets = "__import__('ipywidgets').widgets.widget._instances.values()"
    count = f"len([w for w in {widgets} if 'Bridge' in type(w).__name__])"
    before = visit.ask(count)
    page.evaluate(
        """async () => {
          const notebook = jupyterapp.shell.currentWidget.content;
          notebook.activeCellIndex = notebook.widgets.findIndex(
            c => c.model.sharedModel.getSource().startsWith('explorer = BridgeExplorer'));
          await jupyterapp.commands.execute('notebook:run-cell');
        }"""
    )
    visit.becomes(count, before)
    page.wait_for_function(
        "() => document.querySelectorAll('.cocurve canvas[data-draws]').length >= 2"
    )
    visit.require_clean()


def test_notebook_03_in_jupyterlab(lab: Lab, tmp_path: Path) -> None:
    folder = lab.bring(tmp_path)  # empty
    with lab.open(NOTEBOOK, SMALL, inside=folder) as visit:
        visit.run_all()
        page, it = visit.page, Instrument(visit)
        it.root.scroll_into_view_if_needed()
        visit.becomes("explorer.blocks", "['attention', 'cross', 'ffn']")
        visit.becomes("explorer.edges_of", "'bridges'")  # after Run All it stands as it opened
        # the reader sets it to cross edges alone
        cross = "explorer.set_trait('edges_of', 'all'), explorer.set_trait('blocks', ['cross'])"
        it.redrawn(it.graph, lambda: visit.ask(cross))
        it.redrawn(it.graph, lambda: visit.ask("setattr(explorer, 'threshold', 0.1)"))
        keyboard, root = page.keyboard, it.root

        # threshold: keyboard, mouse, typed
        slider, box = root.locator("input[type=range]"), root.locator("input[type=number]").first
        slider.focus()
        it.redrawn(it.graph, lambda: keyboard.press("ArrowRight"))
        visit.becomes("round(explorer.threshold, 6)", "0.105")
        place = slider.bounding_box()
        page.mouse.move(place["x"] + 0.1 * place["width"], place["y"] + place["height"] / 2)
        page.mouse.down()
        for step in range(60):
            x = place["x"] + (0.1 + 0.3 * step / 59) * place["width"]
            page.mouse.move(x, place["y"] + place["height"] / 2)
        page.mouse.up()
        visit.becomes("round(explorer.threshold, 6)", str(float(slider.input_value())))
        it.redrawn(it.graph, lambda: (box.fill("0.15"), box.press("Enter")))
        visit.becomes("explorer.threshold", "0.15")
        assert visit.ask("len(explorer.table())") == str(it.edges())
        assert f"{it.edges():,} of" in root.locator("h4").first.text_content()

        # sign and blocks, behind "More"
        root.locator(".cc-more summary").click()
        sign = root.get_by_label("sign of the edges")
        sign.focus()
        it.redrawn(it.graph, lambda: keyboard.press("ArrowDown"))
        visit.becomes("explorer.sign", "'positive'")
        it.redrawn(it.graph, lambda: sign.select_option("both"))
        it.redrawn(it.graph, lambda: root.get_by_label("attention", exact=True).click())
        visit.becomes("explorer.blocks", "['attention', 'cross']")
        ffn = root.get_by_label("FFN", exact=True)
        ffn.focus()
        it.redrawn(it.graph, lambda: keyboard.press("Space"))
        visit.becomes("explorer.blocks", "['attention', 'cross', 'ffn']")

        # units: arrow keys, mouse, ego view, Escape
        it.graph.focus()
        it.redrawn(it.graph, lambda: keyboard.press("ArrowDown"))
        visit.becomes("explorer.session.selected_unit", "0")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            keyboard.press(key)
        visit.becomes("explorer.selected_unit", "41")
        root.locator(".cc-card", has_text="L2.attention[1]").wait_for()
        it.redrawn(it.plane, lambda: it.graph.click(position=it.at(66)))
        visit.becomes("explorer.selected_unit", "66")
        it.graph.hover(position=it.at(85))
        card = root.locator(".cc-card", has_text="L4.ffn[1]")
        card.filter(has_text="strongest partners").wait_for()
        everything = it.edges()
        ego = root.get_by_role("checkbox", name="ego view")
        ego.focus()
        it.redrawn(it.graph, lambda: keyboard.press("Space"))
        assert it.edges() < everything
        visit.becomes("len(explorer.table())", str(it.edges()))
        visit.picture("03_ego", root)
        ego.click()
        it.graph.focus()
        keyboard.press("Escape")
        visit.becomes("explorer.selected_unit", "None")

        # the plane: rectangle, click, buttons, quantiles
        it.plane.scroll_into_view_if_needed()
        frame = it.plane.bounding_box()
        page.mouse.move(frame["x"] + 62, frame["y"] + 12)
        page.mouse.down()
        page.mouse.move(frame["x"] + 150, frame["y"] + 90)
        page.mouse.move(frame["x"] + frame["width"] - 2, frame["y"] + frame["height"] - 30)
        it.redrawn(it.graph, page.mouse.up)
        visit.becomes("len(explorer.brushed)", "160")
        clear = root.get_by_role("button", name="Clear brush")
        clear.focus()
        it.redrawn(it.plane, lambda: keyboard.press("Enter"))
        visit.becomes("explorer.brushed", "[]")
        visit.page.mouse.move(0, 0)
        it.plane.scroll_into_view_if_needed()  # the focus may have scrolled it away
        frame = it.plane.bounding_box()
        name, card = "", root.locator(".cc-card h4")
        for step in range(3000):  # along the diagonal and beside it until a point answers
            along, beside = step % 200 / 199, 8 * (step // 200)
            x = 62 + (frame["width"] - 80) * along
            y = frame["height"] - 50 - beside - (frame["height"] - 70) * along
            page.mouse.move(frame["x"] + x, frame["y"] + max(4, y))
            if card.text_content().startswith("L"):
                page.wait_for_timeout(100)  # the card is drawn with the next frame
                name = card.text_content().split(",")[0]
                if name.startswith("L"):
                    break
        page.mouse.down()
        page.mouse.up()
        visit.becomes("units[explorer.selected_unit].name", repr(name))
        listed = root.locator("table[data-table=bridges] tbody tr")
        bridges = int(visit.ask("len(explorer.bridges['indices'])"))
        eventually(listed.count, lambda count: count == bridges)
        low = root.get_by_label("low saliency quantile")
        low.focus()
        keyboard.press("Control+a")
        keyboard.type("0.9")
        it.redrawn(it.plane, lambda: keyboard.press("Enter"))
        rows = visit.ask("len(list(cl.bridge_units(curvature, 0.9, 0.5)))")
        visit.becomes("len(explorer.bridges['indices'])", rows)
        page.wait_for_function(
            "n => document.querySelector('table[data-table=bridges] tbody').rows.length === n",
            arg=int(rows),
        )
        region = root.get_by_role("button", name="Brush the bridge region")
        region.focus()
        it.redrawn(it.graph, lambda: keyboard.press("Enter"))
        visit.becomes("explorer.brushed == sorted(explorer.bridges['indices'])", "True")
        button = listed.nth(1).locator("button")
        button.focus()
        keyboard.press("Enter")
        visit.becomes("units[explorer.selected_unit].name", repr(button.text_content()))
        page.wait_for_timeout(200)
        assert button.evaluate("b => b === document.activeElement")  # the list was made anew

        # another plan, from another widget
        plan = page.get_by_role("button", name="lambda 1, ratio 0.4")
        it.redrawn(it.graph, plan.click)
        visit.becomes(
            "explorer.plans['present'] == list(explorer.session.selection.pruned)", "True"
        )
        visit.ask("setattr(explorer, 'compared_ratio', 0.4)")
        root.get_by_text("Plans at ratio 0.4").first.wait_for()
        removed = root.locator("table[data-table=bridges]", has_text="present plan")
        removed.filter(has_text=re.compile(r"removed at step \d+|kept")).wait_for()

        # table and files
        root.locator(".cc-table summary").click()
        root.get_by_label("table and CSV of").select_option("units")
        page.wait_for_function(
            "() => document.querySelectorAll('.cocurve details tbody tr').length === 160"
        )
        visit.becomes("explorer.table_of", "'units'")
        for name in ("CSV", "GEXF", "PNG"):
            with page.expect_download() as download:
                root.get_by_role("button", name=name).click()
            data = Path(download.value.path()).read_bytes()
            assert download.value.suggested_filename == f"bridges.{name.lower()}"
            if name == "CSV":
                assert len(data.splitlines()) == 161
            elif name == "PNG":
                assert data.startswith(b"\x89PNG")
            else:
                graph = nx.read_gexf(BytesIO(data))
                assert graph.number_of_edges() == it.edges()
        root.locator(".cc-table summary").click()

        # themes
        page.set_viewport_size({"width": 1280, "height": 1600})
        it.redrawn(it.graph, lambda: visit.theme("Dark"))
        visit.picture("03_dark_1280", root)
        visit.theme("Light")
        visit.picture("03_light_1280", root)
        assert root.locator(".cc-error").is_hidden()
        visit.require_clean()
        wide_screen_and_second_run_of_the_cell(visit, it)
        assert list((folder / KEPT).glob("H_demo_*.pkl"))


def test_a_page_without_kernel(lab: Lab, tmp_path: Path) -> None:
    curvature = random_curvature(make_units(6, 3, 5), seed=4)
    state = BridgeExplorer(curvature, session=Session(curvature), saliency_quantile=0.8).state()
    page_file = tmp_path / "page.html"
    parts = {
        "@css@": BridgeExplorer._css,
        "@esm@": BridgeExplorer._esm.replace("export default", "const bridge ="),
        "@state@": json.dumps(state, default=lambda b: {"bytes": b64encode(b).decode()}),
    }
    page_file.write_text(re.sub("@[a-z]+@", lambda found: parts[found[0]], PAGE))
    page = lab.browser.new_page(viewport={"width": 1280, "height": 1400})
    visit = Visit(page)
    visit.listen("file:")
    try:
        page.context.set_offline(True)
        page.goto(page_file.as_uri())
        root, graph = page.locator(".cocurve"), page.locator("canvas").first
        page.wait_for_selector("canvas[data-draws]")
        assert root.get_by_text("low saliency quantile").count() == 0
        assert root.get_by_role("button", name="GEXF").count() == 0
        before = int(graph.get_attribute("data-edges"))
        root.locator("input[type=range]").focus()
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "n => Number(document.querySelector('canvas').dataset.edges) < n", arg=before
        )
        graph.focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "() => document.querySelector('.cc-card').textContent.includes('L0.')"
        )
        root.get_by_role("button", name="Brush the bridge region").click()
        assert page.evaluate("() => values.brushed.length") == len(state["bridges"]["indices"]) > 4
        visit.picture("03_page", root)
        page.evaluate("() => stop()")
        assert root.count() == 0
        assert page.evaluate("() => Object.values(listeners).flat().length") == 0
        assert not visit.outside
        assert not visit.errors
    finally:
        page.context.set_offline(False)
        page.close()


def test_a_thousand_units_and_ten_thousand_edges(lab: Lab, tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    cells = [
        f"import sys; sys.path.insert(0, {tests!r})\n"
        "from helpers.problems import make_units, random_curvature\n"
        "from cocurve_widgets import BridgeExplorer\n"
        "H = random_curvature(make_units(40, 9, 16))",
        "explorer = BridgeExplorer(H, threshold=0.0)\nexplorer",
    ]
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    content.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(content, tmp_path / "thousand.ipynb")
    with lab.open(tmp_path / "thousand.ipynb") as visit:
        page = visit.page
        page.evaluate(
            """() => {
              jupyterapp.shell.currentWidget.content.activeCellIndex = 0;
              return jupyterapp.commands.execute('notebook:run-cell');
            }"""
        )
        received = visit.received
        first = page.evaluate(FIRST_PICTURE)
        time.sleep(1)
        payload = visit.received - received
        assert "the 10,000 strongest of 499,500 edges" in page.locator(".cocurve").text_content()
        all_edges = page.evaluate(STEPS, [0.01 * (i % 2) for i in range(20)])
        assert {count for count, _ in all_edges} == {10_000}
        drag = page.evaluate(STEPS, [0.3 + 0.005 * i for i in range(40)])
        assert drag[0][0] > drag[-1][0]
        medians = [statistics.median(ms for _, ms in steps) for steps in (all_edges, drag)]
        worst = [max(ms for _, ms in steps) for steps in (all_edges, drag)]
        print(f"M = 1,000: first picture {first:.0f} ms after the cell started, {payload:,} bytes")
        print(f"  redraw with 10,000 edges: median {medians[0]:.0f} ms, worst {worst[0]:.0f} ms")
        print(f"  threshold drag, 0.3 to 0.5: median {medians[1]:.0f} ms, worst {worst[1]:.0f} ms")
        visit.picture("03_thousand", page.locator(".cocurve"))
        assert payload < 3_000_000
        # how fast is what bench_widgets.py measures: on a busy machine a time says little
        visit.require_clean()
