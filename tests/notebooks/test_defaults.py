"""Notebook 08 with the short rows that it ships with, which its other tests make smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.notebooks import NOTEBOOKS, findings_of, run, text_of


@pytest.mark.slow
def test_notebook_08_runs_at_its_defaults(tmp_path: Path) -> None:
    # only the H of notebook 01 is smaller: its 64 rows are ten minutes of a test, and cut no text
    said = text_of(run(NOTEBOOKS[7], tmp_path, {"ROWS": 4}, timeout=900))
    purposes = [line for line in findings_of(said) if "a plan is for any text" in line]
    assert len(set(purposes)) == 2  # one per lambda
    assert all("mixed on arithmetic" in line for line in purposes)
