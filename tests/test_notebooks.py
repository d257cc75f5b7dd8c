"""Notebook 01 runs from top to bottom, leaves H beside it, and loads it the second time."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import cocurve_lab as cl

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_build_H.ipynb"
SMALL = {"ROWS, HELD_OUT": "3, 2"}


def run(notebook: Path, folder: Path, values: dict[str, str]) -> nbformat.NotebookNode:
    """Execute a notebook in `folder` with some values of its parameters cell replaced."""
    content = nbformat.read(notebook, as_version=4)
    cell = next(c for c in content.cells if "parameters" in c.metadata.get("tags", []))
    for name, value in values.items():
        cell.source, count = re.subn(
            rf"^{name} = [^#\n]*", f"{name} = {value}  ", cell.source, flags=re.MULTILINE
        )
        assert count == 1, f"the parameters cell has no line for {name}"
    client = NotebookClient(
        content,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
    )
    return client.execute()


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Everything the cells printed or showed as text."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(shown)


@pytest.mark.slow
def test_notebook_01_builds_saves_and_loads(tmp_path: Path) -> None:
    first = run(NOTEBOOK, tmp_path, SMALL)
    (saved,) = tmp_path.glob("H_demo_*.pkl")
    assert not list(tmp_path.glob("*.ckpt*"))
    curvature = cl.Curvature.load(saved)
    assert curvature.provenance["sequences_done"] == 3
    figures = [
        output
        for cell in first.cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(figures) == 3
    assert f"Saved H to {saved.name}" in text_of(first)
    assert "masked = pruned" in text_of(first)

    stamp = saved.stat().st_mtime_ns
    second = run(NOTEBOOK, tmp_path, SMALL)
    assert f"Loaded H from {saved.name}" in text_of(second)
    assert saved.stat().st_mtime_ns == stamp


def test_notebook_01_has_short_cells_and_prose() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    prose = [cell for cell in content.cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(code) - 2
    assert max(len(source.splitlines()) for source in code) <= 6
