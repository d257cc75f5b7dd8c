"""Every notebook is a clean file with short cells, prose, guesses before results and a question."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from helpers.notebooks import NOTEBOOKS

GUESSES = {"01": 0, "04": 4, "05": 4, "06": 4, "07": 4, "08": 4, "09": 4}  # at least; else 1
LONG = ("07", "08")  # studies without an appendix
SECTIONS = {"06": 3, "08": 5, "09": 8, "11": 4, "12": 4, "13": 6}  # of studies


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_clean_files_with_short_cells_and_prose(notebook: Path) -> None:
    number, content = notebook.stem[:2], nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert notebook.stat().st_size < 200_000
    assert content.metadata.kernelspec.name == "python3"
    assert "widgets" not in content.metadata
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert not [c for c in code if c.outputs or c.execution_count is not None]
    assert max(len(cell.source.splitlines()) for cell in code) <= 6
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert len(prose) >= 0.6 * len(code)
    assert prose[0].startswith(f"# {int(number)} · ")
    assert "**Needs**" in prose[0]
    (parameters,) = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert all(name in parameters.source for name in ("MODEL", "DEVICE", "ROWS, HELD_OUT"))
    # the reader guesses before dragging
    assert sum("redict" in text for text in prose) >= GUESSES.get(number, 1)
    assert number == "01" or "xercise" in "\n".join(prose)
    assert number in LONG or len(content.cells) < 45
    for section in range(1, SECTIONS.get(number, 0) + 1):
        assert re.search(rf"^## {section} · ", "\n".join(prose), re.M)


@pytest.mark.parametrize("notebook", NOTEBOOKS[1:5], ids=lambda p: p.stem)
def test_a_notebook_of_the_class_asks_one_question_in_at_most_25_cells(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    assert len(cells) <= 25
    asked = "\n".join(cell.source for cell in cells).count("**Question**: ")
    assert asked == cells[0].source.count("**Question**: ") == 1
