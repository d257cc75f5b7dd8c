"""Notebook 08: its numbers are measured ones, a second run measures none; also in JupyterLab."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_studies.tables import column, pick
from helpers.lab import SMALL
from helpers.notebooks import BAR, NOTEBOOKS, SOLUTIONS, Ran, cold, require_shown, text_of

VALUES = SMALL | {"SHORT_ROWS": 16, "SHORT_LENGTH": 32, "DRAWS": 5}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[7], VALUES)


def study(ran: Ran, name: str) -> list[dict[str, Any]]:
    (path,) = ran.kept.glob(f"study_{name}_*.json")
    return list(json.loads(path.read_text())["rows"])


def test_error_bars_and_coverage(ran: Ran) -> None:
    builds = [cl.Curvature.load(path) for path in ran.kept.glob("H_demo_*.pkl")]
    # that of the rows of notebook 01; the others are of shorter rows
    curvature = next(c for c in builds if c.provenance["seq_len"] == SMALL["LENGTH"])
    # groups of equal size: the textbook jackknife
    without = []
    for group in range(3):
        rest = np.delete(curvature.group_grams, group, axis=0).sum(axis=0)
        without.append(cl.Curvature(rest / (2 * 255), curvature.units).ffn_redundancy)
    error = np.sqrt(2 / 3 * np.square(np.array(without) - np.mean(without)).sum())
    words = " ".join(ran.text.split())
    shown = re.search(r"standard errors on either side (-?[\d.]+) to (-?[\d.]+)", words)
    assert shown is not None, words[:2000]
    low = min(curvature.ffn_redundancy, curvature.ffn_redundancy_corrected)
    assert float(shown[1]) == pytest.approx(max(0.0, low - 2 * error), abs=6e-4)
    assert float(shown[2]) == pytest.approx(curvature.ffn_redundancy + 2 * error, abs=6e-4)
    table = study(ran, "coverage")
    assert {(row["size"], row["groups"], row["draws"]) for row in table} == {(4, 4, 5)}
    for row in table:
        assert f"{row['statistic'].replace('_', ' ')}: {row['coverage']:.1%} ±" in ran.text


def test_knobs_and_the_end_of_a_build(ran: Ran) -> None:
    table = pick(study(ran, "sensitivity"), interaction_strength=1.0)
    found = column(pick(table, knob="rows"), "perplexity")
    assert len(found) == 4
    seeds = column(pick(table, knob="seed"), "perplexity")
    error = np.sqrt(2) * seeds.std(ddof=1) / seeds.mean()
    assert f"Here: {found.max() / found.min() - 1:.1%} ± {error:.1%} over 2 to 16" in ran.text
    knobs = {"top_r", "positions", "ffn_groups", "source", "rows", "seed"}
    assert {row["knob"] for row in table} == knobs
    assert study(ran, "stopping")[-1]["rows"] == 16
    assert "16 of 16 rows were needed; stopped early: False" in ran.text
    assert "not yet: " in ran.text  # the exercise is the reader's


def test_every_finding_has_a_verdict(ran: Ran) -> None:
    last = ran.content.cells[-1].outputs[-1]["data"]["text/html"]
    verdicts = re.findall("[✓✗?] (agrees|does not agree|cannot be told)<", last)
    assert len(verdicts) == 1 + 5 + 1 + 1 + 6 + 2
    # the paper's claims first: two bands, top-r, seeds and the source
    first = last.split("</table>")[0]
    assert len(re.findall("[✓✗?] (?:agrees|does not agree|cannot be told)<", first)) == 5
    text = " ".join(ran.text.split())
    printed = re.findall(r"Here: .*? (Agrees|Does not agree|Cannot be told)\.", text)
    # each where it is found, and all at the end
    assert sorted(word.lower() for word in printed) == sorted(2 * verdicts)


def test_the_solution_of_the_exercise_is_right() -> None:
    names: dict[str, Any] = {"np": np}
    exec(SOLUTIONS["08"], names)
    values = np.random.default_rng(0).gamma(1.0, size=(16, 5))
    expected = (values / 10).std(axis=0, ddof=1) / 4  # of a mean: the textbook error
    assert names["my_error"](values, np.full(16, 10)) == pytest.approx(expected)


def test_in_jupyterlab(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    # anywidget complains where a busy page took 2 s to start a widget, though it came up after
    visit.errors = [text for text in visit.errors if "Failed to initialize model" not in text]
    require_shown(visit, 7)


def test_a_second_run_builds_and_measures_nothing(ran: Ran) -> None:
    again = text_of(ran.again())
    assert "ablations per batch" not in again  # what a build says first
    assert BAR not in again
