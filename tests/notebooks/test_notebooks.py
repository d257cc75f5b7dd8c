"""Every notebook runs from top to bottom; 01 leaves H beside it and loads it the second time."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from helpers.lab import CHROMIUM, FEW, IN_LAB, KEPT, SMALL
from helpers.notebooks import (
    NOTEBOOK,
    NOTEBOOKS,
    figures,
    require_built,
    require_loaded,
    run,
    text_of,
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_notebook_01_builds_saves_and_loads(tmp_path: Path) -> None:
    require_built(run(NOTEBOOK, tmp_path, FEW), tmp_path)
    require_loaded(tmp_path)


@pytest.mark.slow
def test_notebook_01_streams_up_to_the_measured_plans(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    content = nbformat.read(NOTEBOOK, as_version=4)
    cut = next(i for i, cell in enumerate(content.cells) if "cl.prune(" in cell.source)
    del content.cells[cut:]
    nbformat.write(content, tmp_path / NOTEBOOK.name)
    done = run(tmp_path / NOTEBOOK.name, tmp_path, FEW | {"STREAM": True})
    assert "of weights are read for each sequence" in " ".join(text_of(done).split())
    assert len(figures(done)) == 3
    assert list((tmp_path / KEPT).glob("H_demo_*.pkl"))


def own_tests(notebook: Path) -> str:
    """The test file named after a notebook, which runs it in JupyterLab; empty where none is."""
    own = Path(__file__).with_name(f"test_browser_{notebook.stem[:2]}.py")
    return own.read_text(encoding="utf-8") if own.exists() else ""


def has_own_run(notebook: Path) -> bool:
    """Whether its test file also runs it without a browser, with parameters of its own."""
    return "from helpers.notebooks import" in own_tests(notebook)


def in_lab(notebook: Path) -> bool:
    """Whether JupyterLab runs it on this machine."""
    return CHROMIUM.exists() and own_tests(notebook) != ""


PLAIN = [
    pytest.param(p, marks=pytest.mark.skipif(in_lab(p), reason=IN_LAB))
    for p in NOTEBOOKS
    if p != NOTEBOOK and not has_own_run(p)
]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", PLAIN, ids=lambda p: p.stem)
def test_other_notebooks_run_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    done = run(notebook, tmp_path, SMALL)
    shown = [o for cell in done.cells for o in cell.get("outputs", [])]
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in shown)
    assert list((tmp_path / KEPT).glob("H_demo_*.pkl"))
    assert "Warning" not in "".join(o.text for o in shown if o.get("name") == "stderr")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_clean_files_with_short_cells_and_prose(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert notebook.stat().st_size < 200_000
    assert content.metadata.kernelspec.name == "python3"
    assert "widgets" not in content.metadata
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert not [c for c in code if c.outputs or c.execution_count is not None]
    assert max(len(cell.source.splitlines()) for cell in code) <= 6
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert len(prose) >= 0.6 * len(code)
    assert prose[0].startswith(f"# {int(notebook.stem[:2])} · ")
    assert "**Needs**" in prose[0]
    assert sum("parameters" in c.metadata.get("tags", []) for c in content.cells) == 1
    if notebook != NOTEBOOK:
        text = "\n".join(prose)
        assert "redict" in text  # the reader guesses before dragging
        assert "## Exercise" in text or "xercise" in text


@pytest.mark.parametrize("notebook", NOTEBOOKS[1:5], ids=lambda p: p.stem)
def test_a_notebook_of_the_class_asks_one_question_in_at_most_25_cells(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    assert len(cells) <= 25
    asked = "\n".join(cell.source for cell in cells).count("**Question**: ")
    assert asked == cells[0].source.count("**Question**: ") == 1
