"""Every notebook is a clean file of its size that opens with one question."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from helpers.notebooks import NOTEBOOKS

CELLS, WORDS, LINES = 35, 1500, 8  # at most: of a notebook, and of a cell of code


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_clean_file_of_its_size_with_one_question(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert content.metadata.kernelspec.name == "python3"
    assert "widgets" not in content.metadata
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    assert max(len(cell.source.splitlines()) for cell in code) <= LINES
    assert len(content.cells) <= CELLS
    words = sum(len(cell.source.split()) for cell in content.cells)
    assert words <= WORDS
    (parameters,) = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert all(name in parameters.source for name in ("MODEL", "DEVICE", "ROWS, HELD_OUT"))
    asked = [cell.source.count("**Question**: ") for cell in content.cells]
    assert asked[0] == sum(asked) == 1
    assert sum(cell.source.startswith("## What was seen") for cell in content.cells) == 1
