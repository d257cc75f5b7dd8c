"""Tables of studies: kept, read back, never mixed up, and shown to a reader."""

from __future__ import annotations

import json
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
from cocurve_studies.trust.choices import FITTING_COLUMNS

ROWS = [
    {"ratio": np.float64(0.2), "units": np.int64(3), "name": "a", "left": None, "best": np.True_},
    {"ratio": math.nan, "units": 4, "name": "b", "left": math.inf, "best": False},
]


class Counted:
    def __init__(self, rows: Rows) -> None:
        self.rows, self.calls = rows, 0

    def __call__(self) -> Rows:
        self.calls += 1
        return self.rows


def test_long_lines_are_broken_between_words_and_others_kept() -> None:
    text = "  - " + "word " * 40 + "\nshort   line\n\n" + "x" * 130
    folded = fold(text)
    lines = folded.splitlines()
    assert folded.split() == text.split()
    assert max(len(line) for line in lines if "x" not in line) <= WIDTH < 105
    assert lines[0].startswith("  - word")
    assert lines[1].startswith("  word")
    assert "short   line" in lines
    assert lines[-1] == "x" * 130  # one word, such as a path


def test_a_table_is_computed_once_and_read_back_whole(tmp_path: Path) -> None:
    compute = Counted(ROWS)
    first = kept_rows(tmp_path, "edges", {"seed": 0}, compute)
    again = kept_rows(tmp_path, "edges", {"seed": 0}, compute)
    assert compute.calls == 1
    assert str(first) == str(again)  # NaN is not equal to itself
    assert type(again[0]["ratio"]) is float
    assert type(again[0]["best"]) is bool
    assert again[0]["left"] is None
    assert math.isinf(again[1]["left"])
    table = kept_table(tmp_path, "edges", {"seed": 0}, compute)
    assert compute.calls == 1
    assert table["units"].tolist() == [3, 4]


def test_other_settings_and_names_have_files_of_their_own(tmp_path: Path) -> None:
    compute = Counted(ROWS)
    for name, seed in (("edges", 0), ("edges", 1), ("bridges", 0)):
        kept_rows(tmp_path, name, {"seed": seed}, compute)
    assert compute.calls == 3
    assert len(list(tmp_path.glob("study_*.json"))) == 3


def test_without_a_folder_nothing_is_kept() -> None:
    compute = Counted(ROWS)
    for _ in range(2):
        table = kept_rows(None, "edges", {}, compute)
    assert compute.calls == 2
    assert type(table[0]["units"]) is int


def test_a_broken_or_foreign_file_is_refused(tmp_path: Path) -> None:
    kept_rows(tmp_path, "edges", {"seed": 0}, Counted(ROWS))
    (path,) = tmp_path.glob("study_*.json")
    whole = path.read_text()
    for content in (whole[:40], whole.replace('"version": 1', '"version": 2'), "[]"):
        path.write_text(content)
        with pytest.raises(cl.FileFormatError, match="Delete it"):
            kept_rows(tmp_path, "edges", {"seed": 0}, Counted(ROWS))


def test_a_disk_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    table = kept_rows(blocked, "edges", {}, Counted(ROWS))
    assert len(table) == 2


def test_rows_and_columns_are_picked() -> None:
    for table in (ROWS, table_of(ROWS)):
        (row,) = pick(table, name="b")
        assert (row["units"], row["left"]) == (4, math.inf)
        assert pick(table, name="c") == []
        assert np.isnan(column(table, "left")[0])
        assert column(table, "units").tolist() == [3, 4]


def test_a_table_gives_back_its_rows() -> None:
    """Whole numbers stay whole where some are unknown, and what is unknown is None."""
    rows: Rows = [
        {"count": 3, "risk": 0.5, "name": "a", "holds": True, "value": 64, "nothing": None},
        {"count": None, "risk": None, "name": None, "holds": None, "value": "all", "more": 1},
    ]
    again = pick(table_of(rows))
    assert again[0] == rows[0] | {"more": None}
    assert again[1] == rows[1] | {"nothing": None}
    assert [type(again[0][name]) for name in ("count", "risk", "holds", "value")] == [
        *(int, float, bool, int),
    ]


def test_settings_are_written_beside_the_rows(tmp_path: Path) -> None:
    kept_rows(tmp_path, "edges", {"seed": 7}, Counted(ROWS))
    (path,) = tmp_path.glob("study_edges_*.json")
    assert json.loads(path.read_text())["settings"] == {"seed": 7}


# Tables for reading -------------------------------------------------------------------------------


def test_columns_for_reading_are_named_and_rounded() -> None:
    table: Rows = [{"knob": "rows", "kl": 0.0123456, "n": 4096, "se": None}]
    (row,) = pick(shown(table, {"n": "", "kl": ""}).data)
    assert row == {"n": 4096, "kl": "0.0123"}
    (row,) = pick(shown(table, {"kl": "KL", "se": ""}, digits=2).data)
    assert list(row.items()) == [("KL", "0.012"), ("se", "")]
    assert table[0]["kl"] == 0.0123456
    with pytest.raises(KeyError, match="harm"):
        shown(table, {"harm": ""})


def test_a_table_for_reading_has_errors_beside_values_and_empty_cells_for_none() -> None:
    row = {"requested_ratio": 0.2, "edge_mass": 0.00123456, "printed": None}
    row |= {"remainder": 0.5, "remainder_error": 0.0123, "fitting": None, "fitting_error": None}
    (line,) = pick(shown([row], FITTING_COLUMNS).data)
    assert list(line) == list(FITTING_COLUMNS.values())
    assert line["removed"] == "20%"
    assert line["edge mass E"] == "0.00123"
    assert line["remainder b"] == "0.500 ± 0.012"
    assert line["1 + b/E, fits"] == line["1 − b/E, printed"] == ""


def test_an_unknown_error_is_left_out() -> None:
    table: Rows = [{"kl": 0.5, "kl_error": 0.0123}, {"kl": 0.5, "kl_error": math.nan}]
    assert shown(table, {"kl": ""}).data["kl"].tolist() == ["0.500 ± 0.012", "0.5"]


def test_a_table_for_reading_shows_itself() -> None:
    table: Rows = [
        {"plan": "<Q8_0>", "requested_ratio": 0.2, "realized_ratio": 0.2042, "n": 12345},
        {"plan": "none", "requested_ratio": 0.2, "realized_ratio": None, "n": 1},
    ]
    page = shown(table).to_html()
    assert re.findall(r"<th [^>]*>([^<]*)</th>", page) == [
        *("plan", "requested ratio", "realized ratio", "n"),
    ]
    assert re.findall(r"<td [^>]*>([^<]*)</td>", page) == [
        *("&lt;Q8_0&gt;", "20%", "20.4%", "12,345"),
        *("none", "20%", "", "1"),
    ]
    assert "<td" not in shown([]).to_html()
