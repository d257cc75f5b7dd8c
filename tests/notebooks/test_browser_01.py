"""Notebook 01 builds H, shows pictures and plays the plan; nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from helpers.lab import FEW, KEPT
from helpers.layout import require_readable_notebook
from helpers.notebooks import NOTEBOOKS, Ran, cold, figures, run, text_of
from helpers.waiting import eventually

NOTEBOOK = NOTEBOOKS[0]
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOK, FEW)


def test_h_is_built_and_kept(ran: Ran) -> None:
    assert not list(ran.kept.glob("*.ckpt*"))
    assert ran.curvature.provenance["sequences_done"] == 3
    assert len(figures(ran.content)) == 3
    assert f"Saved H to {KEPT}/H_demo_" in ran.text
    assert "masked = pruned" in ran.text


def test_pictures_appear_and_can_be_read(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    titles = visit.page.locator(".js-plotly-plot .gtitle").all_text_contents
    found = eventually(titles, lambda titles: len(titles) == 3, 60)
    assert any("orrelation" in title for title in found)
    visit.require_no_upload()
    visit.require_clean()
    require_readable_notebook(visit.page)


def test_the_map_plays_the_plan(ran: Ran) -> None:
    """Page and kernel agree on order, brush and step."""
    visit = ran.shown_in_lab()
    page = visit.page
    root = page.get_by_role("region", name="Map of H").last  # the first is of the shipped H
    canvas = root.locator("canvas[data-draws]")
    canvas.wait_for(timeout=60_000)
    visit.becomes("heat.step == len(plan) > 0", "True")
    root.get_by_label("order of rows and columns").select_option("clustering")
    visit.becomes("sorted(heat.clustered) == list(range(len(units)))", "True")
    root.get_by_role("button", name="Brush the plan").click()
    visit.becomes("heat.session.brushed == sorted(plan.pruned)", "True")
    canvas.focus()
    page.keyboard.press("p")
    visit.becomes("heat.playing", "True")
    visit.becomes("2 <= heat.step < len(plan)", "True")
    page.keyboard.press("p")
    visit.becomes("heat.playing", "False")
    page.keyboard.press("ArrowDown")
    visit.becomes("heat.selected_unit == heat.partner == heat.clustered[0]", "True")
    visit.require_clean()


def test_a_second_run_reads_the_h_of_the_first(ran: Ran) -> None:
    assert f"Loaded H from {KEPT}/H_demo_" in text_of(ran.again())


def test_it_streams_up_to_the_measured_plans(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    content = nbformat.read(NOTEBOOK, as_version=4)
    cut = next(i for i, cell in enumerate(content.cells) if "cl.prune(" in cell.source)
    del content.cells[cut:]
    nbformat.write(content, tmp_path / NOTEBOOK.name)
    done = run(tmp_path / NOTEBOOK.name, tmp_path, FEW | {"STREAM": True})
    assert len(figures(done)) == 3
    assert list((tmp_path / KEPT).glob("H_demo_*.pkl"))
