"""Notebook 11: its numbers are measured ones, a second run measures none; also in JupyterLab."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

import cocurve_lab as cl
from helpers.lab import CHROMIUM, IN_LAB, KEPT, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook
from helpers.notebooks import figures, run, text_of, written

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "11_the_best_plan.ipynb"
# Q and F are priced on one group in four, so there are more rows than elsewhere
VALUES = SMALL | {
    "ROWS": 8,
    "SKETCH": 64,
    "RATIOS": (0.2, 0.3),
    "SEARCH_ROWS": 4,
    "EVALUATIONS": 40,
    "TRAIN_ROWS": 4,
    "EPOCHS": 1,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nbformat.NotebookNode]:
    """The folder of a small run, and the notebook as it was executed there."""
    folder = tmp_path_factory.mktemp("notebook")
    return folder, run(NOTEBOOK, folder, VALUES)


@pytest.mark.slow
def test_notebook_11_measures_every_way(done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder, text = done[0] / KEPT / "best_plan", text_of(done[1])
    assert len(figures(done[1])) == 1
    assert "not yet: 0 of 4 cases are right" in text  # the exercise is the reader's
    assert text.count("nothing is swapped") == 2
    assert len(re.findall(r"PlanSearch: KL", text)) == 2
    for made in ("refitted", "trained"):
        assert re.search(rf"{made}: KL \d\.\d{{4}} nats per token", text)

    # two numbers of the last table, measured again
    model, tokenizer = cl.load_model("demo")
    every = {"seq_len": SMALL["LENGTH"], "positions_per_sequence": "all"}
    _, judge = cl.default_calibration("demo", tokenizer, VALUES["ROWS"], 4, **every)
    curvature = cl.Curvature.load(next(folder.glob("H_demo_*.pkl")))
    assert len(curvature.require_shifts()) == 64
    shown = next(cell for cell in done[1].cells if "way_table" in cell.source)["outputs"][-1]
    page = shown["data"]["text/html"]
    assert page.count("<tr") == 8  # a heading and seven ways
    for name, plan in {
        "H, λ 0": cl.solve_greedy(curvature, 0.3, 0.0),
        "F": curvature.additive().solve(0.3, part="fit"),
    }.items():
        cells = re.search(rf">{name}</td><td[^>]*>([\d.]+) ± ([\d.]+)</td>", page)
        measured = cl.pruning_risk(model, plan, judge.rows(2, 4))
        value, error = map(float, cells.groups())
        assert value == pytest.approx(measured, abs=0.06 * error)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_a_second_run_measures_nothing(done: tuple[Path, nbformat.NotebookNode]) -> None:
    before = written(done[0])
    again = text_of(run(NOTEBOOK, done[0], VALUES))
    assert "nothing was rebuilt" in again
    assert written(done[0]) == before


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_notebook_11_in_jupyterlab(lab: Lab, done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder = lab.bring(done[0])
    before = written(folder)
    with lab.open(NOTEBOOK, VALUES, inside=folder) as visit:
        visit.run_all()
        assert "nothing was rebuilt" in text_of(visit.content())
        assert written(folder) == before
        visit.page.locator(".js-plotly-plot").first.wait_for()
        visit.picture("11_light")
        require_readable_notebook(visit.page)
        visit.require_clean()
