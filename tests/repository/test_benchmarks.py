"""The commands of tests/benchmarks start, and the pages of results say what their numbers say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from helpers.benchmarks import RESULTS

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_a_command_explains_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])  # as for a command
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    assert path.name in capsys.readouterr().out


@pytest.mark.parametrize("name", ["findings", "gemma", "smollm2"])
def test_a_page_has_the_tables_of_its_kept_numbers(name: str) -> None:
    command = runpy.run_path(str(FOLDER / f"bench_{name}.py"))
    pages = command["pages"]()
    assert pages
    for page, text in pages.items():
        assert page.parent in (RESULTS, RESULTS.parents[1])  # README has a table, too
        assert page.read_text(encoding="utf-8") == text, f"run bench_{name}.py, with --write"
