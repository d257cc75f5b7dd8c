"""Notebook 07: its numbers are measured ones, a second run measures none; also in JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import cocurve_lab as cl
from cocurve_studies.structure import geometry
from cocurve_studies.structure.bridges import bridge_table
from cocurve_studies.tables import pick
from helpers.lab import SMALL
from helpers.notebooks import (
    BAR,
    NOTEBOOKS,
    SOLUTIONS,
    Ran,
    cold,
    figures,
    findings_of,
    require_shown,
    text_of,
)

VALUES = SMALL | {
    "EDGE_RATIOS": (0.2,),
    "REDRAWS": 2,
    "QUESTIONS": 1,
    "ASKED": 1,
    "FAMILY_ROWS": 1,
    "SEEDS": (0,),
}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[6], VALUES)


def h_of(ran: Ran) -> cl.Curvature:
    return cl.Curvature.load(next(ran.kept.glob("H_demo_*.pkl")))


def test_it_says_what_was_measured(ran: Ran) -> None:
    text, curvature = ran.text, h_of(ran)
    found = cl.bridge_units(curvature)
    names = " ".join(curvature.units[u].name for u in found)
    assert f"{len(found)} of 160 units: {names}" in text
    middle = pick(bridge_table(curvature), saliency_quantile=0.5, connectivity_quantile=0.5)[0]
    assert f"{middle['bridges']} of 160 at median and median" in text
    rank = geometry.spectrum_table(curvature)["effective_rank"][0]
    assert f"effective rank {rank:.1f} ± " in text
    assert "one and the same fill in both arms: True" in text
    for study in ("causal", "edges", "abilities", "blocks", "budgets", "spectrum"):
        assert list(ran.kept.glob(f"study_{study}_*.json"))
    assert len(re.findall(r"(Agrees|Does not agree|Cannot be told)\.$", text, re.M)) >= 30
    assert [bool(figure["data"]) for figure in figures(ran.content)] == [True] * 9
    assert BAR in text
    assert "not yet: " in text  # the exercise is the reader's


def test_in_jupyterlab(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    assert visit.ask(f"exec({SOLUTIONS['07']!r}, globals())") == "None"
    assert len(cl.bridge_units(h_of(ran))) > 0
    solved = visit.ask("exercises.control_of(my_control, curvature, found, match_controls)")
    assert solved == "'right'"
    visit.page.get_by_text("does not agree").first.wait_for()
    require_shown(visit, 9)


def test_a_second_run_measures_nothing(ran: Ran) -> None:
    again = text_of(ran.again())
    assert again.count(BAR) == 1  # of the activations: no plan is measured
    assert findings_of(again) == findings_of(ran.text) != []
