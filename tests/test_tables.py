"""Tables of studies: kept, read back, never mixed up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.tables import Table, cached_table, column, pick

ROWS = [
    {"ratio": np.float64(0.2), "units": np.int64(3), "name": "a", "left": None, "best": np.True_},
    {"ratio": math.nan, "units": 4, "name": "b", "left": math.inf, "best": False},
]


class Counted:
    def __init__(self, rows: Table) -> None:
        self.rows, self.calls = rows, 0

    def __call__(self) -> Table:
        self.calls += 1
        return self.rows


def test_a_table_is_computed_once_and_read_back_whole(tmp_path: Path) -> None:
    compute = Counted(ROWS)
    first = cached_table(tmp_path, "edges", {"seed": 0}, compute)
    again = cached_table(tmp_path, "edges", {"seed": 0}, compute)
    assert compute.calls == 1
    assert str(first) == str(again)  # NaN is not equal to itself
    assert type(again[0]["ratio"]) is float
    assert type(again[0]["best"]) is bool
    assert again[0]["left"] is None
    assert math.isinf(again[1]["left"])


def test_other_settings_and_names_have_files_of_their_own(tmp_path: Path) -> None:
    compute = Counted(ROWS)
    for name, seed in (("edges", 0), ("edges", 1), ("bridges", 0)):
        cached_table(tmp_path, name, {"seed": seed}, compute)
    assert compute.calls == 3
    assert len(list(tmp_path.glob("study_*.json"))) == 3


def test_without_a_folder_nothing_is_kept() -> None:
    compute = Counted(ROWS)
    for _ in range(2):
        table = cached_table(None, "edges", {}, compute)
    assert compute.calls == 2
    assert type(table[0]["units"]) is int


def test_a_broken_or_foreign_file_is_refused(tmp_path: Path) -> None:
    cached_table(tmp_path, "edges", {"seed": 0}, Counted(ROWS))
    (path,) = tmp_path.glob("study_*.json")
    whole = path.read_text()
    for content in (whole[:40], whole.replace('"version": 1', '"version": 2'), "[]"):
        path.write_text(content)
        with pytest.raises(cl.FileFormatError, match="Delete it"):
            cached_table(tmp_path, "edges", {"seed": 0}, Counted(ROWS))


def test_cells_and_names_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(cl.InputError, match="'set'"):
        cached_table(None, "edges", {}, Counted([{"set": {1, 2}}]))
    with pytest.raises(cl.InputError, match="letters"):
        cached_table(tmp_path, "../edges", {}, Counted(ROWS))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    table = cached_table(blocked, "edges", {}, Counted(ROWS))
    assert len(table) == 2


def test_rows_and_columns_are_picked() -> None:
    assert pick(ROWS, name="b") == ROWS[1:]
    assert pick(ROWS, name="c") == []
    assert np.isnan(column(ROWS, "left")[0])
    assert column(ROWS, "units").tolist() == [3, 4]


def test_settings_are_written_beside_the_rows(tmp_path: Path) -> None:
    cached_table(tmp_path, "edges", {"seed": 7}, Counted(ROWS))
    (path,) = tmp_path.glob("study_edges_*.json")
    assert json.loads(path.read_text())["settings"] == {"seed": 7}
