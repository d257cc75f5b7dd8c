"""Notebook 07: runs from top to bottom, resumes from its tables, and opens in a real JupyterLab."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import pick
from cocurve_studies.structure import geometry
from cocurve_studies.structure.bridges import bridge_table
from helpers.lab import CHROMIUM, IN_LAB, KEPT, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook
from helpers.notebooks import BAR, SOLUTIONS, figures, findings_of, run, text_of, written

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "07_bridges_and_structure.ipynb"
VALUES = SMALL | {
    "EDGE_RATIOS": (0.2,),
    "REDRAWS": 2,
    "QUESTIONS": 1,
    "ASKED": 1,
    "FAMILY_ROWS": 1,
    "SEEDS": (0,),
}
browser = pytest.mark.browser
with_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)


def test_notebook_07_has_short_cells_and_prose() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert max(len(source.splitlines()) for source in code) <= 6
    assert sum("**Predict first**" in text for text in prose) >= 4
    tagged = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    for name in ("MODEL", "DEVICE", "ROWS, HELD_OUT", "POSITIONS", "TOP_R", "TEXT_FILE"):
        assert name in tagged[0].source


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nbformat.NotebookNode]:
    """The folder of a small run, and the notebook as it was executed there."""
    folder = tmp_path_factory.mktemp("notebook")
    return folder, run(NOTEBOOK, folder, VALUES)


@pytest.mark.slow
def test_notebook_07_runs(done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder, first = done
    text = text_of(first)
    curvature = cl.Curvature.load(next((folder / KEPT).glob("H_demo_*.pkl")))
    found = cl.bridge_units(curvature)
    names = " ".join(curvature.units[u].name for u in found)
    assert f"{len(found)} of 160 units: {names}" in text
    middle = pick(bridge_table(curvature), saliency_quantile=0.5, connectivity_quantile=0.5)[0]
    assert f"{middle['bridges']} of 160 at median and median" in text
    rank = geometry.spectrum_table(curvature)[0]["effective_rank"]
    assert f"effective rank {rank:.1f} ± " in text
    assert "one and the same fill in both arms: True" in text
    saved = [
        f"study_{name}_"
        for name in ("causal", "edges", "abilities", "blocks", "budgets", "spectrum")
    ]
    assert all(list((folder / KEPT).glob(f"{name}*.json")) for name in saved)
    assert len(re.findall(r"(Agrees|Does not agree|Cannot be told)\.$", text, re.M)) >= 30
    assert {len(figure["data"]) > 0 for figure in figures(first)} == {True}
    assert len(figures(first)) == 8
    assert "not yet: " in text  # the exercise is the reader's


def require_nothing_measured(first: nbformat.NotebookNode, second: nbformat.NotebookNode) -> None:
    # no plan is measured, so no bar is shown
    assert BAR in text_of(first)
    assert BAR not in text_of(second)
    told = [findings_of(text_of(done)) for done in (first, second)]
    assert told[0] == told[1] != []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_a_second_run_measures_nothing(done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder, first = done
    before = written(folder)
    require_nothing_measured(first, run(NOTEBOOK, folder, VALUES))
    assert written(folder) == before


@browser
@with_chromium
@pytest.mark.slow
def test_notebook_07_in_jupyterlab(lab: Lab, done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder = lab.bring(done[0])
    before = written(folder)
    with lab.open(NOTEBOOK, VALUES, inside=folder) as visit:
        visit.run_all()
        require_nothing_measured(done[1], visit.content())
        assert written(folder) == before
        page = visit.page
        page.locator(".js-plotly-plot").first.wait_for()
        assert visit.ask(f"exec({SOLUTIONS['07']!r}, globals())") == "None"
        (saved,) = (folder / KEPT).glob("H_demo_*.pkl")
        assert len(cl.bridge_units(cl.Curvature.load(saved))) > 0
        solved = visit.ask("exercises.control_of(my_control, curvature, found, match_controls)")
        assert solved == "'right'"
        page.get_by_text("All findings").last.scroll_into_view_if_needed()
        page.get_by_text("does not agree").first.wait_for()
        visit.picture("07_findings")
        require_readable_notebook(page)
        visit.require_clean()
