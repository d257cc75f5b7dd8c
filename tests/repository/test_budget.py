"""The house may only shrink: the statements of each room against the lowest mark in its history."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT.parent / "shared" / "tools" / "size.py"


@pytest.mark.skipif(not TOOL.is_file(), reason="the tool that counts statements is not here")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the marks are read from git")
def test_no_room_grows_past_its_mark() -> None:
    measured = subprocess.run([sys.executable, TOOL], cwd=ROOT, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stdout + measured.stderr
