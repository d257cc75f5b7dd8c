"""What stays of the instruments in a saved notebook: a picture and a table, without a kernel."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from typing import Any
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
from nbconvert import HTMLExporter

import cocurve_lab as cl
import cocurve_widgets as cw
from cocurve_widgets.still import ROWS, plot_html, table_html
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

MODEL = tiny_model()
CURVATURE = random_curvature(cl.enumerate_units(MODEL, 4), seed=3)


def test_a_plot_has_its_points_in_order_and_its_ends_in_words() -> None:
    drawn = plot_html([(1, 5, "#111"), (10, 50, "#222"), (100, 5, "#333"), (0, 1, "#444")], "ab")
    tree = ElementTree.fromstring(base64.b64decode(re.search(r"base64,([^\"]+)", drawn)[1]))
    dots = [node for node in tree if node.tag.endswith("circle")]
    assert [dot.get("fill") for dot in dots] == ["#111", "#222", "#333"]  # log axes have no 0
    x, y = ([float(dot.attrib[name]) for dot in dots] for name in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] == y[2] > y[1]  # y grows downwards in a picture
    assert plot_html([(0, 1, "#444")], "ab") == ""


def test_a_table_is_short_and_escaped() -> None:
    rows = [{"unit": f"<{k}>", "risk": k / 3} for k in range(ROWS + 1)]
    text = table_html(rows)
    assert text.count("<tr>") == ROWS + 1
    assert "<td>&lt;1&gt;</td><td>0.3333</td>" in text
    assert table_html([]) == ""


def every() -> list[Any]:
    """One of each instrument, with something to show."""
    session = cw.Session(CURVATURE, MODEL, word_tokenizer())
    session.selection = cl.solve_greedy(CURVATURE, 0.3)
    monitor = cw.BuildMonitor()
    monitor.overlap, monitor.status = [[2, 0.5], [4, 0.75]], "<script>"
    compare = cw.GenerationCompare(MODEL, word_tokenizer(), CURVATURE, session=session, prompt="w1")
    compare.generate()
    scatter = cw.FidelityScatter(CURVATURE, MODEL, tiny_text(2), session=session)
    scatter.measure_ratio_sweep(1.0, [0.1, 0.2])
    explorers = (cw.LambdaExplorer, cw.BridgeExplorer, cw.CurvatureMap)
    return [*(make(CURVATURE, session=session) for make in explorers), monitor, compare, scatter]


def test_every_instrument_leaves_picture_and_table_in_a_notebook_and_its_html(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    instruments = every()
    for instrument in instruments:
        instrument._ipython_display_()
        note, widget = shown[-2:]
        text = note["text/html"]
        assert f"<b>{type(instrument).__name__}</b>" in text
        assert "<img" in text or "<table" in text
        assert "<script" not in text
        assert "application/vnd.jupyter.widget-view+json" in widget
        instrument.close()
    data = [nbformat.v4.new_output("display_data", dict(data)) for data in shown]
    cell = nbformat.v4.new_code_cell("made", outputs=data)
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count('<div class="cocurve-still">') == len(instruments)


def test_the_picture_of_a_plan_has_its_units_dark(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    explorer = cw.LambdaExplorer(CURVATURE, session=cw.Session(CURVATURE), ratio=0.3)
    explorer._ipython_display_()
    png = base64.b64decode(shown[0]["text/html"].split("base64,")[1].split('"')[0])
    width, height = struct.unpack(">II", png[16:24])
    rows = np.frombuffer(zlib.decompress(png[41:-16]), np.uint8).reshape(height, width + 1)
    dark = (rows[4::8, 1 + 8 :: 16] == 70).sum()  # of each unit the middle
    assert dark == len(explorer.selection.pruned)
    explorer.close()
