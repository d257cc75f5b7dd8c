"""Notebooks run without a browser, and what they showed and left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from helpers.lab import red_boxes, set_parameters

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
README = NOTEBOOKS[0].with_name("README.md").read_text(encoding="utf-8")
# number of a notebook -> the solution of its exercise
SOLUTIONS = dict(
    re.findall(r"^# notebook (\d\d)\n(.*?)(?=\n\n\n# notebook|^```)", README, re.M | re.S)
)


def run(
    notebook: Path, folder: Path, values: dict[str, Any], timeout: int = 600
) -> nbformat.NotebookNode:
    """Execute a notebook in a kernel of its own, with other parameters; seconds are of a cell."""
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
    assert red_boxes(done) == []
    return done


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Everything the cells printed or showed as text."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(shown)
