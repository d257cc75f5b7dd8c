"""The lines of each room, docstrings, comments and blanks included: no room grows past its number.

A number follows its room down. A raise names its reason, or what left, in the CHANGELOG.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_LINES = {".md", ".png", ".npz", ".pyc"}
BUDGETS = {
    "cocurve_lab": 37_180,
    "cocurve_lab/base": 2_084,
    "cocurve_lab/models": 3_555,
    "cocurve_lab/curvature": 1_891,
    "cocurve_lab/estimator": 2_619,
    "cocurve_lab/solver": 3_085,
    "cocurve_lab/measuring": 2_867,
    "cocurve_lab/pruner": 2_241,
    "cocurve_lab/extensions": 9_972,
    "cocurve_lab/extensions/pretrained": 521,
    "cocurve_lab/methods": 2_447,
    "cocurve_lab/evaluation": 2_575,
    "cocurve_lab/cli": 2_554,
    "notebooks/cocurve_studies": 12_378,
    "widgets/cocurve_widgets": 10_208,
    "tests": 52_577,
}
CORE_PATH = (
    *("models/units", "models/masking", "estimator/algorithm1", "estimator/teacher"),
    *("estimator/replay", "curvature/matrix", "solver/guards", "solver/greedy"),
    *("solver/selection", "pruner/slicing", "pruner/cutting", "pruner/equivalence"),
)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_lines(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*") if path.is_file()]
    counted = [p for p in files if p.suffix not in NOT_LINES and p.parent.name != "__pycache__"]
    assert sum(map(lines_of, counted)) <= BUDGETS[room]


def test_the_instruments_keep_to_their_languages() -> None:
    room = ROOT / "widgets/cocurve_widgets"
    python, front = (sum(map(lines_of, room.rglob(f"*.{kind}"))) for kind in ("py", "js"))
    assert (python <= 5_400, front <= 5_200, python + front <= 10_000) == (True, True, True)


def test_the_core_is_read_in_an_hour() -> None:
    files = [ROOT / "cocurve_lab" / f"{name}.py" for name in CORE_PATH]
    assert sum(map(lines_of, files)) <= 3_200
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.py`" in readme for name in CORE_PATH)
