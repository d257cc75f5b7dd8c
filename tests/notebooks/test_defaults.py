"""Every notebook runs at its defaults; `make notebooks` runs those of the studies, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.lab import NOTEBOOKS, run, text_of

STUDIES = [pytest.param(path, marks=pytest.mark.notebooks) for path in NOTEBOOKS[5:]]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [*NOTEBOOKS[:5], *STUDIES], ids=lambda path: path.stem)
def test_a_notebook_runs_at_its_defaults(notebook: Path, tmp_path: Path) -> None:
    done = run(notebook, tmp_path, {})  # no line is too long, and no cell fails
    assert text_of(done)
    last = done.cells[-1]
    assert last.cell_type == "code"  # what was seen, computed
    assert last.outputs
