"""Notebook 09: short cells, a run from top to bottom, and the same in a real JupyterLab."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import pick
from cocurve_studies.bake_off.contenders import all_methods
from helpers.lab import CHROMIUM, IN_LAB, KEPT, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook
from helpers.notebooks import SOLUTIONS, figures, run, text_of, written

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "09_bake_off.ipynb"
VALUES = SMALL | {"RATIOS": (0.2,), "QUESTIONS": 1, "REPEATS": 2}


def test_notebook_09_has_short_cells_and_prose() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert max(len(source.splitlines()) for source in code) <= 6
    assert sum("Predict first" in text for text in prose) >= 4
    text = "\n".join(prose)
    assert [f"## {n} · " in text for n in range(1, 10)] == [True] * 9


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nbformat.NotebookNode]:
    """The folder of a small run, and the notebook as it was executed there."""
    folder = tmp_path_factory.mktemp("notebook")
    return folder, run(NOTEBOOK, folder, VALUES)


def cells_in(folder: Path) -> list[dict[str, Any]]:
    files = (folder / KEPT / "bake_off").glob("study_cell_*.json")
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def html_of(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return [o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})]


@pytest.mark.slow
def test_cells_are_measured_and_shown(done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder, shown = done[0], html_of(done[1])
    rows = cells_in(folder)
    refitted = {f"{name}, refitted" for name in ("CoCurve", "SlimGPT", "Magnitude")}
    assert {row["method"] for row in rows} == {"Dense", *all_methods(), *refitted}
    # H of notebook 01 serves the bake-off: there is no second one
    assert len(list((folder / KEPT).glob("H_demo_*.pkl"))) == 1
    assert not list((folder / KEPT / "bake_off").glob("H_*.pkl"))
    # one cell by hand
    model, tokenizer = cl.load_model("demo")
    every = {"seq_len": SMALL["LENGTH"], "positions_per_sequence": "all"}
    _, rest = cl.default_calibration("demo", tokenizer, 3, 4, **every)
    curvature = cl.Curvature.load(next((folder / KEPT).glob("H_demo_*.pkl")))
    plan = cl.solve_greedy(curvature, 0.2, 1.0)
    (row,) = pick(rows, method="CoCurve", search="none")
    assert row["kl"] == pytest.approx(cl.pruning_risk(model, plan, rest.rows(2, 4)), rel=1e-3)
    assert f"{row['kl']:.3f}" in next(page for page in shown if "Best bold" in page)


@pytest.mark.slow
def test_findings_have_verdicts(done: tuple[Path, nbformat.NotebookNode]) -> None:
    last = html_of(done[1])[-1]
    verdicts = re.findall("[✓✗?] (agrees|does not agree|cannot be told)<", last)
    assert len(verdicts) == 6
    text = text_of(done[1])
    printed = re.findall(r"(Agrees|Does not agree|Cannot be told)\.", " ".join(text.split()))
    # each where it is found, and all at the end
    assert sorted(word.lower() for word in printed) == sorted(2 * verdicts)
    assert verdicts[0] == "cannot be told"  # five questions
    assert text.count("20% removed, ") == 4
    assert "not yet: " in text  # the exercise is the reader's


def require_nothing_measured(first: nbformat.NotebookNode, again: nbformat.NotebookNode) -> None:
    assert "ablations per batch" not in text_of(again)  # what a build says first
    assert html_of(again) == html_of(first)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_a_second_run_measures_nothing(done: tuple[Path, nbformat.NotebookNode]) -> None:
    before = written(done[0])
    require_nothing_measured(done[1], run(NOTEBOOK, done[0], VALUES))
    assert written(done[0]) == before


@pytest.mark.slow
def test_the_solution_of_the_exercise_runs(done: tuple[Path, nbformat.NotebookNode]) -> None:
    names: dict[str, Any] = {}
    exec(SOLUTIONS["09"], names)
    curvature = cl.Curvature.load(next((done[0] / KEPT).glob("H_demo_*.pkl")))
    order = names["my_order"](curvature.units, curvature)
    gains = (curvature.single_unit_risk / curvature.units.costs)[order]
    assert sorted(order) == list(range(len(curvature.units)))
    assert (gains[1:] >= gains[:-1]).all()


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_notebook_09_in_jupyterlab(lab: Lab, done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder = lab.bring(done[0])
    before = written(folder)
    with lab.open(NOTEBOOK, VALUES, inside=folder) as visit:
        visit.run_all()
        require_nothing_measured(done[1], visit.content())
        assert written(folder) == before
        page = visit.page
        assert len(figures(visit.content())) == 8
        assert visit.ask("len(result.rows), result.metrics[-1]") == "(34, 'accuracy all')"
        table = page.get_by_role("table").filter(has_text="SlimLLM").first
        table.wait_for(timeout=60_000)
        table.scroll_into_view_if_needed()
        assert page.locator("td b").count() > 0  # the best of a column
        visit.picture("09_table_light", table)
        require_readable_notebook(page)
        visit.require_clean()
