"""Notebook 08: short cells, a run from top to bottom, and the same in a real JupyterLab."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import column, pick
from helpers.lab import CHROMIUM, IN_LAB, KEPT, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook
from helpers.notebooks import BAR, SOLUTIONS, figures, run, text_of, written

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "08_how_sure_is_H.ipynb"
VALUES = SMALL | {"SHORT_ROWS": 16, "SHORT_LENGTH": 32, "DRAWS": 5, "REDRAWS": 2}
STUDIES = ("coverage", "stability", "stopping", "sensitivity", "infinitesimal")


def test_notebook_08_has_short_cells_and_prose() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert max(len(source.splitlines()) for source in code) <= 6
    assert sum("Predict first" in text for text in prose) >= 4
    text = "\n".join(prose)
    assert [f"## {n} · " in text for n in range(1, 7)] == [True] * 6


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nbformat.NotebookNode]:
    """The folder of a small run, and the notebook as it was executed there."""
    folder = tmp_path_factory.mktemp("notebook")
    return folder, run(NOTEBOOK, folder, VALUES)


def study(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = (folder / KEPT).glob(f"study_{name}_*.json")
    return list(json.loads(path.read_text())["rows"])


def full_build(folder: Path) -> tuple[Path, cl.Curvature]:
    """The file and the H of the rows of notebook 01; the other builds are of shorter rows."""
    builds = ((path, cl.Curvature.load(path)) for path in (folder / KEPT).glob("H_demo_*.pkl"))
    return next(pair for pair in builds if pair[1].provenance["seq_len"] == SMALL["LENGTH"])


@pytest.mark.slow
def test_error_bars_and_coverage(done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder, text = done[0], text_of(done[1])
    _, curvature = full_build(folder)
    # groups of equal size: the textbook jackknife
    without = []
    for group in range(3):
        rest = np.delete(curvature.group_grams, group, axis=0).sum(axis=0)
        without.append(cl.Curvature(rest / (2 * 255), curvature.units).ffn_redundancy)
    error = np.sqrt(2 / 3 * np.square(np.array(without) - np.mean(without)).sum())
    shown = re.search(r"ffn_redundancy: ([\d.]+) ± ([\d.]+)", text)
    assert float(shown[1]) == pytest.approx(curvature.ffn_redundancy, rel=1e-3)
    assert float(shown[2]) == pytest.approx(error, rel=0.05)
    table = study(folder, "coverage")
    assert {(row["size"], row["groups"], row["draws"]) for row in table} == {(4, 4, 5)}
    for row in table:
        words = f"{row['statistic'].replace('_', ' ')}: {row['coverage']:.1%} ±"
        assert words in text


@pytest.mark.slow
def test_knobs_and_the_preview(done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder, text = done[0], text_of(done[1])
    table = pick(study(folder, "sensitivity"), interaction_strength=1.0)
    found = column(pick(table, knob="rows"), "perplexity")
    assert len(found) == 4
    band = found.max() / found.min() - 1
    seeds = column(pick(table, knob="seed"), "perplexity")
    error = np.sqrt(2) * seeds.std(ddof=1) / seeds.mean()
    assert f"Here: {band:.1%} ± {error:.1%} over 2 to 16" in text
    assert {row["knob"] for row in table} == {
        "temperature",
        "top_r",
        "positions",
        "ffn_groups",
        "source",
        "rows",
        "seed",
    }
    worst = pick(study(folder, "infinitesimal"), requested_ratio=0.4, interaction_strength=1.0)[0]
    assert worst["exact_method"] == "probe"
    assert f"lambda 1: KL of the preview's plan {worst['difference']:+.3f} ±" in text
    assert "The gate says nothing on it" in " ".join(text.split())
    looks = study(folder, "stopping")
    assert looks[-1]["rows"] == 16
    assert "16 of 16 rows were needed; stopped early: False" in text
    assert "not yet: " in text  # the exercise is the reader's


@pytest.mark.slow
def test_every_finding_has_a_verdict(done: tuple[Path, nbformat.NotebookNode]) -> None:
    last = done[1].cells[-1].outputs[-1]["data"]["text/html"]
    verdicts = re.findall("[✓✗?] (agrees|does not agree|cannot be told)<", last)
    assert len(verdicts) == 1 + 4 + 1 + 1 + 6 + 3
    # 3 rows of text cannot tell what 16 groups could
    assert verdicts[0] == "cannot be told"
    text = " ".join(text_of(done[1]).split())
    printed = re.findall(r"Here: .*? (Agrees|Does not agree|Cannot be told)\.", text)
    # each where it is found, and all at the end
    assert sorted(word.lower() for word in printed) == sorted(2 * verdicts)


def require_nothing_measured(again: str, before: dict[str, int]) -> None:
    assert "ablations per batch" not in again  # what a build says first
    assert BAR not in again
    assert all(any(f"study_{study}_" in name for name in before) for study in STUDIES)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_a_second_run_builds_and_measures_nothing(
    done: tuple[Path, nbformat.NotebookNode],
) -> None:
    before = written(done[0])
    require_nothing_measured(text_of(run(NOTEBOOK, done[0], VALUES)), before)
    assert written(done[0]) == before


def test_the_solution_of_the_exercise_is_right() -> None:
    names: dict[str, Any] = {"np": np}
    exec(SOLUTIONS["08"], names)
    rng = np.random.default_rng(0)
    values = rng.gamma(1.0, size=(16, 5))
    positions = np.full(16, 10)
    means = values / 10
    expected = means.std(axis=0, ddof=1) / 4  # of a mean, the jackknife is the textbook error
    assert names["my_error"](values, positions) == pytest.approx(expected)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_notebook_08_in_jupyterlab(lab: Lab, done: tuple[Path, nbformat.NotebookNode]) -> None:
    folder = lab.bring(done[0])
    before = written(folder)
    with lab.open(NOTEBOOK, VALUES, inside=folder) as visit:
        visit.run_all()
        require_nothing_measured(text_of(visit.content()), before)
        assert written(folder) == before
        page = visit.page
        assert len(figures(visit.content())) == 6
        root = page.locator(".cocurve").filter(has=page.get_by_role("note")).first
        root.wait_for(timeout=60_000)
        root.scroll_into_view_if_needed()
        assert "Preview: H from 3 probes" in root.get_by_role("note").inner_text()
        assert root.get_by_label("lambda, typed").input_value() == "0.5"
        assert visit.ask("explorer.interaction_strength, explorer.ratio") == "(0.5, 0.2)"
        visit.picture("08_preview_light", root)
        require_readable_notebook(page)
        # anywidget complains where a busy page took 2 s to start a widget, though it came up after
        late = "Failed to initialize model"
        visit.errors = [text for text in visit.errors if late not in text]
        visit.require_clean()
