"""Every notebook runs from top to bottom; 01 leaves H beside it and loads it the second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab import CHROMIUM, FEW, IN_LAB, SMALL, set_parameters
from nbclient import NotebookClient

import cocurve_lab as cl

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
NOTEBOOK = NOTEBOOKS[0]


def run(notebook: Path, folder: Path, values: dict[str, Any]) -> nbformat.NotebookNode:
    """Execute a notebook in `folder` with some values of its parameters cell replaced."""
    content = nbformat.read(notebook, as_version=4)
    set_parameters(content, values)
    client = NotebookClient(
        content,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        coalesce_streams=True,  # one print can arrive in several messages
    )
    return client.execute()


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Everything the cells printed or showed as text."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(shown)


def figures(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Every Plotly figure that the cells showed."""
    kind = "application/vnd.plotly.v1+json"
    shown = [o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


def written(folder: Path) -> dict[str, int]:
    """When each file a notebook left was written; the notebook itself and checkpoints aside."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.suffix not in (".ipynb", ".lock"))
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in kept}


def require_built(first: nbformat.NotebookNode, folder: Path) -> None:
    """A first run of notebook 01 left an H, and showed three pictures."""
    (saved,) = folder.glob("H_demo_*.pkl")
    assert not list(folder.glob("*.ckpt*"))
    curvature = cl.Curvature.load(saved)
    assert curvature.provenance["sequences_done"] == 3
    assert len(figures(first)) == 3
    assert f"Saved H to {saved.name}" in text_of(first)
    assert "masked = pruned" in text_of(first)


def require_loaded(folder: Path) -> None:
    """A second run reads the H of the first."""
    (saved,) = folder.glob("H_demo_*.pkl")
    before = written(folder)
    assert f"Loaded H from {saved.name}" in text_of(run(NOTEBOOK, folder, FEW))
    assert written(folder) == before


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_notebook_01_builds_saves_and_loads(tmp_path: Path) -> None:
    require_built(run(NOTEBOOK, tmp_path, FEW), tmp_path)
    require_loaded(tmp_path)


def own_tests(notebook: Path) -> str:
    """The test file named after a notebook, which runs it in JupyterLab; empty where none is."""
    own = Path(__file__).with_name(f"test_browser_{notebook.stem[:2]}.py")
    return own.read_text(encoding="utf-8") if own.exists() else ""


def has_own_run(notebook: Path) -> bool:
    """Whether its test file also runs it without a browser, with parameters of its own."""
    return "from test_notebooks import" in own_tests(notebook)


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
    assert list(tmp_path.glob("H_demo_*.pkl"))


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
