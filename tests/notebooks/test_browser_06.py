"""Notebook 06: its numbers are measured ones, a second run measures none; also in JupyterLab."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.writing import plus_minus
from cocurve_studies.shared import resampled
from cocurve_studies.tables import pick
from helpers.lab import SMALL
from helpers.notebooks import (
    BAR,
    NOTEBOOKS,
    Ran,
    cold,
    findings_of,
    judge_of,
    require_shown,
    text_of,
)

VALUES = SMALL | {
    "RATIOS": (0.2, 0.4),
    "SWEEP": (0.1, 0.3),
    "POOL": 5,
    "PAIRS": 2,
    "PLANS": 2,
    "FEW_ROWS": 1,
    "REDRAWS": 2,
}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[5], VALUES)


def test_it_says_what_was_measured(ran: Ran) -> None:
    found = findings_of(ran.text)
    assert len(found) > 20
    assert all(line.endswith(("Agrees.", "Does not agree.", "Cannot be told.")) for line in found)
    assert BAR in ran.text
    assert "not yet: 0 of " in ran.text  # the exercise is the reader's

    # two numbers of section 2, measured again
    model, rows, judge = judge_of(VALUES)
    units = cl.enumerate_units(model, ffn_groups=16)
    curvature = cl.load_or_estimate(ran.kept, model, units, rows, progress=False)
    plans = [cl.solve_greedy(curvature, 0.4, strength) for strength in (0.0, 1.0)]
    table = cl.measure_plans(model, plans, judge, progress=False)
    value, over_rows = table.paired(0, 1)
    gaps = []  # of two draws of H, each from three groups
    for drawn in resampled(curvature, 2):
        pair = [cl.solve_greedy(drawn, 0.4, strength) for strength in (0.0, 1.0)]
        gaps.append(cl.measure_plans(model, pair, judge, progress=False).paired(0, 1)[0])
    over_draws = np.std(gaps, ddof=1) * np.sqrt(3 / 2)
    benefit = plus_minus(value, np.hypot(over_rows, over_draws))
    # where it is found, and in the table at the end
    (line,) = {line for line in found if "at 40% the edges help" in line}
    assert f"KL(λ 0) - KL(λ 1) = {benefit} nats per token" in line
    assert f"(rows {over_rows:.2g}, 2 draws of H {over_draws:.2g})" in line
    (file,) = ran.kept.glob("study_strength_*.json")
    (one,) = pick(json.loads(file.read_text())["rows"], role="lambda 1", requested_ratio=0.4)
    expected = (table.mean[1] - plans[1].node_risk) / plans[1].edge_risk
    assert one["fitting"] == pytest.approx(expected, rel=1e-3)


def test_in_jupyterlab(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    visit.page.locator("td", has_text="Trust-Region View").first.wait_for()
    require_shown(visit, 5)


def test_a_second_run_measures_nothing(ran: Ran) -> None:
    again = text_of(ran.again())
    assert findings_of(again) == findings_of(ran.text)
    assert BAR not in again
