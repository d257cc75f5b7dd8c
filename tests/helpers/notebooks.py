"""Notebooks run without a browser, and what they showed and left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

import cocurve_lab as cl
from helpers.lab import FEW, KEPT, red_boxes, set_parameters

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
NOTEBOOK = NOTEBOOKS[0]
README = NOTEBOOK.with_name("README.md").read_text(encoding="utf-8")
# number of a notebook -> the solution of its exercise
SOLUTIONS = dict(
    re.findall(r"^# notebook (\d\d)\n(.*?)(?=\n\n\n# notebook|^```)", README, re.M | re.S)
)
BAR = "(a bar that is gone)"  # what `text_of` says where something was measured or built
OUTPUT = 105  # characters of a line of output in JupyterLab at 1280 pixels


def run(
    notebook: Path, folder: Path, values: dict[str, Any], timeout: int = 600
) -> nbformat.NotebookNode:
    """Execute a notebook in `folder` with some values of its parameters cell replaced.

    Every cell has `timeout` seconds.
    """
    content = nbformat.read(notebook, as_version=4)
    set_parameters(content, values)
    client = NotebookClient(
        content,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        coalesce_streams=True,  # one print can arrive in several messages
    )
    done = client.execute()
    assert broken_lines(done) == []
    assert red_boxes(done) == []
    return done


def broken_lines(notebook: nbformat.NotebookNode) -> list[str]:
    """Printed lines that JupyterLab would break inside a word at 1280 pixels."""
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", []))
    printed = [o.text for o in outputs if o.output_type == "stream" and o.name == "stdout"]
    lines = "\n".join(printed).splitlines()
    return [line for line in lines if len(line) > OUTPUT and " " in line.strip()]


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Everything the cells printed or showed as text."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data")
            gone = BAR if data == {} else ""
            shown.append(output.get("text", "") or (data or {}).get("text/plain", gone))
    return "\n".join(shown)


def findings_of(text: str) -> list[str]:
    """The findings that cells showed, each on one line; `told` breaks them."""
    found = re.findall(
        r"^- (Paper \(.*?(?:Agrees|Does\s+not\s+agree|Cannot\s+be\s+told)\.)$", text, re.M | re.S
    )
    return [" ".join(finding.split()) for finding in found]


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
    (saved,) = (folder / KEPT).glob("H_demo_*.pkl")
    assert not list((folder / KEPT).glob("*.ckpt*"))
    curvature = cl.Curvature.load(saved)
    assert curvature.provenance["sequences_done"] == 3
    assert len(figures(first)) == 3
    assert f"Saved H to {KEPT}/{saved.name}" in text_of(first)
    assert "masked = pruned" in text_of(first)


def require_loaded(folder: Path) -> None:
    """A second run reads the H of the first."""
    (saved,) = (folder / KEPT).glob("H_demo_*.pkl")
    before = written(folder)
    assert f"Loaded H from {KEPT}/{saved.name}" in text_of(run(NOTEBOOK, folder, FEW))
    assert written(folder) == before
