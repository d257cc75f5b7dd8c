"""What stays of the instruments in a saved notebook: a picture and a table, without a kernel."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from nbconvert import HTMLExporter

from cocurve_widgets.still import ROWS, plot_html, table_html
from helpers.lab import Lab, in_browser, notebook_of
from helpers.waiting import eventually

EVERY = """
import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, BuildMonitor, CurvatureMap, FidelityScatter
from cocurve_widgets import GenerationCompare, LambdaExplorer
from cocurve_lab.models.identity import demo_folder
H = cl.Curvature.load(demo_folder() / "H_16_rows.npz")
model, tokenizer = cl.load_model("demo")
_, held_out = cl.default_calibration(
    "demo", tokenizer, 2, 2, seq_len=32, positions_per_sequence="all"
)
plan = cl.solve_greedy(H, 0.2)
monitor = BuildMonitor()
compare = GenerationCompare(model, tokenizer, H, selection=plan)
scatter = FidelityScatter(H, model, held_out)
display(monitor, LambdaExplorer(H), BridgeExplorer(H), CurvatureMap(H), compare, scatter)
"""
LATER = """
monitor.overlap = [[2, 0.5], [4, 0.75]]
monitor.status = "4 of 4 sequences"
compare.generate()
_ = scatter.measure_ratio_sweep(1.0, [0.1, 0.2])
"""


def test_a_plot_has_its_points_in_order_and_its_ends_in_words() -> None:
    drawn = plot_html([(1, 5, "#111"), (10, 50, "#222"), (100, 5, "#333"), (0, 1, "#444")], "ab")
    found = re.search(r"base64,([^\"]+)", drawn)
    assert found
    tree = ElementTree.fromstring(base64.b64decode(found[1]))
    dots = [node for node in tree if node.tag.endswith("circle")]
    assert [dot.get("fill") for dot in dots] == ["#111", "#222", "#333"]  # log axes have no 0
    x, y = ([float(dot.attrib[name]) for dot in dots] for name in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] == y[2] > y[1]  # y grows downwards in a picture
    words = [node.text for node in tree if node.tag.endswith("text")]
    assert words == ["1", "100", "a, log", "5", "50", "b, log"]
    assert plot_html([(0, 1, "#444")], "ab") == ""


def test_a_table_is_short_and_escaped() -> None:
    rows = [{"unit": f"<{k}>", "risk": k / 3} for k in range(ROWS + 1)]
    text = table_html(rows)
    assert f"{ROWS} of {ROWS + 1} rows" in text
    assert text.count("<tr>") == ROWS + 1
    assert "<td>&lt;1&gt;</td><td>0.3333</td>" in text
    assert table_html([]) == ""


def notes(found: nbformat.NotebookNode) -> list[str]:
    outputs = found.cells[0].outputs
    return [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]


@in_browser
def test_every_instrument_outlives_its_kernel_and_leaves_picture_and_table(
    lab: Lab, tmp_path: Path
) -> None:
    with lab.open(notebook_of(tmp_path / "first.ipynb", EVERY, LATER)) as visit:
        visit.run_all()
        visit.page.locator(".cocurve h3").nth(5).wait_for()
        assert visit.page.locator(".cocurve-still").first.is_hidden()
        # the state of now, not that of the moment when the cell ran
        eventually(
            visit.content,
            lambda found: all(
                "<details>" in note and ("<img" in note or ">B</th>" in note)
                for note in notes(found)
            ),
        )
        visit.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")  # and trusted
        saved = visit.folder / "first.ipynb"
        eventually(lambda: len(notes(nbformat.read(saved, as_version=4))), lambda n: n == 6)
        shutil.copy(saved, tmp_path / "again.ipynb")
        visit.restart_kernel()
        exports_work_or_say_why_not(visit.page)
        assert not visit.errors
    with lab.open(tmp_path / "again.ipynb") as visit:
        page = visit.page
        page.locator(".cocurve-still").nth(5).wait_for()
        page.get_by_text("Error displaying widget").first.wait_for()  # what JupyterLab says
        names = page.locator(".cocurve-still b").all_inner_texts()
        wanted = ["BuildMonitor", "LambdaExplorer", "BridgeExplorer", "CurvatureMap"]
        assert names == [*wanted, "GenerationCompare", "FidelityScatter"]
        for note in page.locator(".cocurve-still").all():
            assert "scripts are blocked" in note.inner_text()
            note.locator("img, table").first.wait_for()
            note.locator("summary").click()
            note.locator("details td").first.wait_for()
    exported, _ = HTMLExporter(template_name="lab").from_filename(str(tmp_path / "again.ipynb"))
    (tmp_path / "page.html").write_text(exported)
    context = lab.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert [note.is_visible() for note in page.locator(".cocurve-still").all()] == [True] * 6
    context.close()


def exports_work_or_say_why_not(page: Any) -> None:
    """Data and picture are in the page, and the plan that it solves; the rest is the kernel's."""
    for title in ("Pruning plan by lambda", "Bridges", "Map of H"):
        root = page.get_by_role("region", name=title)
        if (more := root.locator(".cc-more > summary")).count():
            more.click()  # the files are folded
        names = root.locator(".cc-files button").all_text_contents()
        assert {"CSV", "PNG"} < {*names}
        for name in names:
            button = root.get_by_role("button", name=name, exact=True)
            if name in ("CSV", "PNG") or (title.startswith("Pruning") and name == "JSON"):
                with page.expect_download() as download:
                    button.click()
                assert Path(download.value.path()).stat().st_size > 100, (title, name)
            else:
                button.click()
                root.locator(".cc-error", has_text="does not answer").wait_for()
