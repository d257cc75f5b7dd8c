"""Notebook 09: its numbers are measured ones, a second run measures none; also in JupyterLab."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

import cocurve_lab as cl
from cocurve_studies.bake_off.contenders import all_methods
from cocurve_studies.tables import pick
from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, SOLUTIONS, Ran, cold, judge_of, require_shown, text_of

VALUES = SMALL | {"RATIOS": (0.2,), "QUESTIONS": 1, "REPEATS": 2}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[8], VALUES)


def html_of(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return [o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})]


def test_cells_are_measured_and_shown(ran: Ran) -> None:
    files = (ran.kept / "bake_off").glob("study_cell_*.json")
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    assert {row["method"] for row in rows} == {"Dense", *all_methods()}
    # H of notebook 01 serves the bake-off: there is no second one
    assert not list((ran.kept / "bake_off").glob("H_*.pkl"))
    # one cell by hand
    model, _, judge = judge_of(VALUES)
    plan = cl.solve_greedy(ran.curvature, 0.2, 1.0)
    (row,) = pick(rows, method="CoCurve", search="none")
    assert row["kl"] == pytest.approx(cl.pruning_risk(model, plan, judge), rel=1e-3)
    assert f"{row['kl']:.3f}" in next(page for page in html_of(ran.content) if "Best bold" in page)


def test_findings_have_verdicts(ran: Ran) -> None:
    verdicts = re.findall("[✓✗?] (agrees|does not agree|cannot be told)<", html_of(ran.content)[-1])
    assert len(verdicts) == 5
    printed = re.findall(r"(Agrees|Does not agree|Cannot be told)\.", " ".join(ran.text.split()))
    # each where it is found, and all at the end
    assert sorted(word.lower() for word in printed) == sorted(2 * verdicts)
    assert verdicts[0] == "cannot be told"  # five questions
    assert ran.text.count("20% removed, ") == 4
    assert "not yet: " in ran.text  # the exercise is the reader's


def test_the_solution_of_the_exercise_runs(ran: Ran) -> None:
    names: dict[str, Any] = {}
    exec(SOLUTIONS["09"], names)
    curvature = ran.curvature
    order = names["my_order"](curvature.units, curvature)
    gains = (curvature.single_unit_risk / curvature.units.costs)[order]
    assert sorted(order) == list(range(len(curvature.units)))
    assert (gains[1:] >= gains[:-1]).all()


def test_in_jupyterlab(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    assert visit.ask("len(result.rows), result.metrics[-1]") == "(34, 'accuracy all')"
    table = visit.page.get_by_role("table").filter(has_text="SlimLLM").first
    table.wait_for(timeout=60_000)
    assert visit.page.locator("td b").count() > 0  # the best of a column
    require_shown(visit, 6)


def test_a_second_run_measures_nothing(ran: Ran) -> None:
    again = ran.again()
    assert "ablations per batch" not in text_of(again)  # what a build says first
    assert html_of(again) == html_of(ran.content)
