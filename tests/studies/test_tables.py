"""Tables of studies: kept, read back, never mixed up, and shown to a reader."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_studies.tables import (
    WIDTH,
    Rows,
    column,
    fold,
    kept_rows,
    kept_table,
    pick,
    shown,
    table_of,
)

ROWS = [
    {"ratio": np.float64(0.2), "units": np.int64(3), "name": "a", "left": None, "best": np.True_},
    {"ratio": math.nan, "units": 4, "name": "b", "left": math.inf, "best": False},
]


def never() -> Rows:
    raise AssertionError("it was computed again")


def test_a_table_is_computed_once_and_read_back_whole(tmp_path: Path) -> None:
    first = kept_rows(tmp_path, "edges", {"seed": 0}, lambda: ROWS)
    again = kept_rows(tmp_path, "edges", {"seed": 0}, never)
    assert str(first) == str(again)  # NaN is not equal to itself
    assert [type(again[0][name]) for name in ("ratio", "units", "best")] == [float, int, bool]
    assert again[0]["left"] is None
    assert math.isinf(again[1]["left"])
    assert kept_table(tmp_path, "edges", {"seed": 0}, never)["units"].tolist() == [3, 4]
    for name, seed in (("edges", 1), ("bridges", 0)):  # files of their own
        with pytest.raises(AssertionError):
            kept_rows(tmp_path, name, {"seed": seed}, never)
    with pytest.raises(AssertionError):  # nothing is kept without a folder
        kept_rows(None, "edges", {"seed": 0}, never)


def test_a_broken_or_foreign_file_is_refused(tmp_path: Path) -> None:
    kept_rows(tmp_path, "edges", {"seed": 0}, lambda: ROWS)
    (path,) = tmp_path.glob("study_*.json")
    whole = path.read_text()
    for content in (whole[:40], whole.replace('"version": 1', '"version": 2'), "[]"):
        path.write_text(content)
        with pytest.raises(cl.FileFormatError, match="Delete it"):
            kept_rows(tmp_path, "edges", {"seed": 0}, never)


def test_a_disk_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert len(kept_rows(blocked, "edges", {}, lambda: ROWS)) == 2


def test_a_table_gives_back_its_rows() -> None:
    """Whole numbers stay whole where some are unknown, and what is unknown is None."""
    rows: Rows = [
        {"count": 3, "risk": 0.5, "name": "a", "holds": True, "value": 64},
        {"count": None, "risk": None, "name": None, "holds": None, "value": "all"},
    ]
    assert pick(table_of(rows)) == rows
    assert type(pick(table_of(rows))[0]["count"]) is int
    assert pick(table_of(ROWS), name="b")[0]["units"] == 4
    assert np.isnan(column(ROWS, "left")[0])


def test_a_table_for_reading_rounds_and_has_errors_beside_values() -> None:
    table: Rows = [
        {"plan": "<Q8_0>", "realized_ratio": 0.2042, "n": 12345, "kl": 0.5, "kl_error": 0.0123},
        {"plan": "none", "realized_ratio": None, "n": 1, "kl": 0.0123456, "kl_error": math.nan},
    ]
    page = shown(table, {"plan": "", "realized_ratio": "removed", "n": "", "kl": "KL"}).to_html()
    assert re.findall(r"<th [^>]*>([^<]*)</th>", page) == ["plan", "removed", "n", "KL"]
    assert re.findall(r"<td [^>]*>([^<]*)</td>", page) == [
        *("&lt;Q8_0&gt;", "20.4%", "12,345", "0.500 ± 0.012"),
        *("none", "", "1", "0.0123"),
    ]
    with pytest.raises(KeyError, match="harm"):
        shown(table, {"harm": ""})


def test_long_lines_are_broken_between_words() -> None:
    text = "  - " + "word " * 40 + "\nshort   line\n\n" + "x" * 130
    lines = fold(text).splitlines()
    assert fold(text).split() == text.split()
    assert max(len(line) for line in lines if "x" not in line) <= WIDTH < 105
    assert lines[-1] == "x" * 130  # one word, such as a path
