"""Notebook 06: runs from top to bottom, its numbers are measured ones, a second run measures none;
and it opens and runs in a real JupyterLab and browser."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import pick, plus_minus
from cocurve_lab.models.loading import demo_folder
from cocurve_studies.shared import resampled
from helpers.lab import CHROMIUM, IN_LAB, KEPT, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook
from helpers.notebooks import BAR, findings_of, run, text_of, written

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "06_when_to_trust_the_edges.ipynb"
VALUES = SMALL | {
    "RATIOS": (0.2, 0.4),
    "SWEEP": (0.1, 0.3),
    "POOL": 5,
    "PAIRS": 2,
    "PLANS": 2,
    "FEW_ROWS": 1,
    "STEP_ROWS": 2,
    "REDRAWS": 2,
    "ASKED": 1,
    # as if it were another model: found under another name, and not measured again
    "CHECKPOINTS": (str(demo_folder()),),
}
browser = pytest.mark.browser
with_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)


def test_notebook_06_has_short_cells_and_prose() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert max(len(source.splitlines()) for source in code) <= 6
    assert sum("**Predict first**" in text for text in prose) >= 4
    assert len(prose) >= 0.6 * len(code)
    tagged = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    for section in range(1, 8):  # every study ends with what it found
        assert any(text.startswith(f"## {section} · ") for text in prose)
    assert sum(source.startswith("tell(") for source in code) >= 7


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a small run, and what it printed."""
    folder = tmp_path_factory.mktemp("notebook")
    return folder, text_of(run(NOTEBOOK, folder, VALUES))


@pytest.mark.slow
def test_notebook_06_says_what_was_measured(done: tuple[Path, str]) -> None:
    folder, first = done
    found = findings_of(first)
    verdicts = ("Agrees.", "Does not agree.", "Cannot be told.")
    assert len(found) > 20
    assert all(line.endswith(verdicts) for line in found)
    assert "not yet: 0 of " in first  # the exercise is the reader's
    assert "Here: 2 models are too few for a rank correlation" in "\n".join(found)

    # two numbers of section 2, measured again
    model, tokenizer = cl.load_model("demo")
    units = cl.enumerate_units(model, ffn_groups=16)
    every = {"seq_len": SMALL["LENGTH"], "positions_per_sequence": "all"}
    calibration, judge = cl.default_calibration("demo", tokenizer, 3, 4, **every)
    curvature = cl.load_or_estimate(folder / KEPT, model, units, calibration, progress=False)
    plans = [cl.solve_greedy(curvature, 0.4, strength) for strength in (0.0, 1.0)]
    table = cl.measure_plans(model, plans, judge.rows(2, 4), progress=False)
    value, over_rows = table.paired(0, 1)
    gaps = []  # of two draws of H, each from three groups
    for drawn in resampled(curvature, 2):
        pair = [cl.solve_greedy(drawn, 0.4, strength) for strength in (0.0, 1.0)]
        other = cl.measure_plans(model, pair, judge.rows(2, 4), progress=False)
        gaps.append(other.paired(0, 1)[0])
    over_draws = np.std(gaps, ddof=1) * np.sqrt(3 / 2)
    benefit = plus_minus(value, np.hypot(over_rows, over_draws))
    # where it is found, and in the table at the end
    (line,) = {line for line in found if "at 40% the edges help" in line}
    assert f"KL(λ 0) - KL(λ 1) = {benefit} nats per token" in line
    assert f"(rows {over_rows:.2g}, 2 draws of H {over_draws:.2g})" in line
    expected = (table.mean[1] - plans[1].node_risk) / plans[1].edge_risk
    (file,) = (folder / KEPT).glob("study_strength_*.json")
    kept = json.loads(file.read_text())["rows"]
    (one,) = pick(kept, role="lambda 1", requested_ratio=0.4)
    assert one["fitting"] == pytest.approx(expected, rel=1e-3)


def require_nothing_measured(first: str, second: str) -> None:
    assert findings_of(second) == findings_of(first)
    assert BAR in first
    assert BAR not in second


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_a_second_run_measures_nothing(done: tuple[Path, str]) -> None:
    folder, first = done
    before = written(folder)
    require_nothing_measured(first, text_of(run(NOTEBOOK, folder, VALUES)))
    assert written(folder) == before


@browser
@with_chromium
@pytest.mark.slow
def test_notebook_06_in_jupyterlab(lab: Lab, done: tuple[Path, str]) -> None:
    folder = lab.bring(done[0])
    before = written(folder)
    with lab.open(NOTEBOOK, VALUES, inside=folder) as visit:
        visit.run_all()
        require_nothing_measured(done[1], text_of(visit.content()))
        assert written(folder) == before
        visit.page.locator("td", has_text="Conclusion, as an outlook").first.wait_for()
        assert int(visit.ask("len(all_findings)")) > 20
        visit.picture("06_light")
        require_readable_notebook(visit.page)
        visit.require_clean()
