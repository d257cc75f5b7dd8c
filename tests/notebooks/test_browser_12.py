"""Notebooks 12 and 13, the appendices: they measure, and a second run measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cocurve_lab.models.identity import demo_folder
from cocurve_studies.bake_off.contenders import all_methods
from helpers.lab import SMALL
from helpers.notebooks import BAR, NOTEBOOKS, Ran, cold, findings_of, require_shown, text_of

EDGES = SMALL | {
    "RATIOS": (0.2, 0.4),
    "PAIRS": 2,
    "FEW_ROWS": 1,
    "REDRAWS": 2,
    # as if it were another model: found under another name, and not measured again
    "CHECKPOINTS": (str(demo_folder()),),
    "TUNED": str(demo_folder()),
}
PLANS = SMALL | {"RATIOS": (0.2,), "PLANS": 2, "REDRAWS": 2, "ASKED": 1, "QUESTIONS": 1}
CASES = {  # notebook, parameters, pictures, and what a finding there says
    "12": (NOTEBOOKS[11], EDGES, 1, "Here: 2 models are too few for a rank correlation"),
    "13": (NOTEBOOKS[12], PLANS, 5, "2SSP"),
}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module", params=CASES)
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    notebook, values, *_ = CASES[request.param]
    yield from cold(request, notebook, values)


def test_it_says_what_was_measured(ran: Ran) -> None:
    found = findings_of(ran.text)
    assert all(line.endswith(("Agrees.", "Does not agree.", "Cannot be told.")) for line in found)
    assert CASES[ran.notebook.stem[:2]][3] in "\n".join(found)
    assert len(set(found)) > 4
    if ran.notebook.stem.startswith("13"):
        assert ran.text.count("not overlapping") >= 3
        files = (ran.kept / "bake_off").glob("study_cell_*.json")
        rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
        refitted = {f"{name}, refitted" for name in ("CoCurve", "SlimGPT", "Magnitude")}
        assert {row["method"] for row in rows} == {"Dense", *all_methods(), *refitted}
        assert "no rows" not in ran.text


def test_in_jupyterlab(ran: Ran) -> None:
    require_shown(ran.shown_in_lab(), CASES[ran.notebook.stem[:2]][2])


def test_a_second_run_measures_nothing(ran: Ran) -> None:
    before = {file: file.stat().st_mtime_ns for file in ran.kept.rglob("study_*.json")}
    again = text_of(ran.again())
    assert findings_of(again) == findings_of(ran.text)
    if not ran.notebook.stem.startswith("13"):  # a comparison has a bar over cells it only reads
        assert BAR not in again
    assert {file: file.stat().st_mtime_ns for file in ran.kept.rglob("study_*.json")} == before
