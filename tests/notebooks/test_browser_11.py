"""Notebook 11: its numbers are measured ones, a second run measures none; also in JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, Ran, cold, judge_of, require_shown, text_of

VALUES = SMALL | {"SEARCH_ROWS": 4, "EVALUATIONS": 40, "TRAIN_ROWS": 4, "EPOCHS": 1}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[10], VALUES)


def test_it_measures_every_way(ran: Ran) -> None:
    assert "not yet: 0 of 4 cases are right" in ran.text  # the exercise is the reader's
    assert ran.text.count("nothing is swapped") == 2
    assert ran.text.count("search_kl") == 2  # a table of each search
    for made in ("refitted", "trained"):
        assert re.search(rf"{made}: KL \d\.\d{{4}} nats per token", ran.text)

    # two numbers of the last table, measured again
    model, _, judge = judge_of(VALUES)
    curvature = ran.curvature  # the one that notebook 01 builds
    shown = next(cell for cell in ran.content.cells if "way_table" in cell.source)["outputs"][-1]
    page = shown["data"]["text/html"]
    assert page.count("<tr") == 7  # a heading and six ways
    for name, plan in {
        "H, λ 0": cl.solve_greedy(curvature, 0.3, 0.0),
        "each unit alone": cl.solve_greedy(measured_diagonal(curvature), 0.3, 0.0),
    }.items():
        cells = re.search(rf">{name}</td>\s*<td[^>]*>([\d.]+) ± ([\d.]+)</td>", page)
        value, error = map(float, cells.groups())
        assert value == pytest.approx(cl.pruning_risk(model, plan, judge), abs=0.06 * error)


def test_in_jupyterlab(ran: Ran) -> None:
    require_shown(ran.shown_in_lab(), 0)


def test_a_second_run_measures_nothing(ran: Ran) -> None:
    assert "nothing was rebuilt" in text_of(ran.again())
