"""Tables of studies: kept, read back, never mixed up, and shown to a reader."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import (
    WIDTH,
    Table,
    as_csv,
    brief,
    cached_table,
    column,
    fold,
    pick,
    plus_minus,
    shown,
    spread,
    typeset,
)
from cocurve_studies.trust.choices import FITTING_COLUMNS
from helpers.problems import make_units, random_curvature

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


def test_long_lines_are_broken_between_words_and_others_kept() -> None:
    text = "  - " + "word " * 40 + "\nshort   line\n\n" + "x" * 130
    folded = fold(text)
    lines = folded.splitlines()
    assert folded.split() == text.split()
    assert max(len(line) for line in lines if "x" not in line) <= WIDTH < 105
    assert lines[0].startswith("  - word")
    assert lines[1].startswith("    word")
    assert "short   line" in lines
    assert lines[-1] == "x" * 130  # one word, such as a path


def test_a_plan_is_printed_in_lines_that_a_notebook_does_not_break() -> None:
    plan = cl.solve_greedy(random_curvature(make_units()), 0.2)
    shown = str(plan)
    assert len(repr(plan)) > WIDTH
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert " ".join(shown.split()) == repr(plan)


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


# Tables for reading -------------------------------------------------------------------------------


def test_columns_for_reading_are_named_and_rounded() -> None:
    table: Table = [{"knob": "rows", "kl": 0.0123456, "n": 4096, "se": None}]
    assert shown(table, ["n", "kl"]) == [{"n": 4096, "kl": "0.0123"}]
    (row,) = shown(table, {"kl": "KL", "se": ""}, digits=2)
    assert list(row.items()) == [("KL", "0.012"), ("se", "")]
    assert table[0]["kl"] == 0.0123456
    with pytest.raises(KeyError, match="harm"):
        shown(table, ["harm"])


def test_a_table_for_reading_has_errors_beside_values_and_empty_cells_for_none() -> None:
    row = {"requested_ratio": 0.2, "edge_mass": 0.00123456, "printed": None}
    row |= {"remainder": 0.5, "remainder_error": 0.0123, "fitting": None, "fitting_error": None}
    (line,) = shown([row], FITTING_COLUMNS)
    assert list(line) == list(FITTING_COLUMNS.values())
    assert line["removed"] == "20%"
    assert line["edge mass E"] == "0.00123"
    assert line["remainder b"] == "0.500 ± 0.012"
    assert line["1 + b/E, fits"] == line["1 − b/E, printed"] == ""


def test_an_error_can_have_a_column_of_its_own() -> None:
    table: Table = [{"kl": 0.5, "kl_error": 0.0123}, {"kl": 0.5, "kl_error": math.nan}]
    assert shown(table, ["kl"]) == [{"kl": "0.500 ± 0.012"}, {"kl": "0.5"}]
    assert shown(table[:1], {"kl": "KL", "kl_error": "±"}) == [{"KL": "0.5", "±": "0.0123"}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.12e-18, "2.12e-18"),
        (0.0001, "0.0001"),
        (-0.00123456, "-0.00123"),
        (1234.5, "1230"),
        (8.0, "8"),
        (-0.0, "0"),
        (999_999.0, "1.00e+6"),
        (-math.inf, "-inf"),
        (math.nan, ""),
    ],
)
def test_numbers_are_brief(value: float, text: str) -> None:
    assert brief(value) == text


def test_a_minus_is_as_wide_as_a_plus_and_a_hyphen_stays() -> None:
    assert typeset("(-0.5 ± 0.1) to -.2, a - b = -1") == "(−0.5 ± 0.1) to −.2, a − b = −1"
    hyphens = "2.12e-18, Llama-3.1-8B, 2026-11-23, leave-one-out"
    assert typeset(hyphens) == hyphens


def test_a_table_for_reading_shows_itself() -> None:
    table: Table = [
        {
            "plan": "<Q8_0>",
            "requested_ratio": 0.2,
            "realized_ratio": 0.2042,
            "kl": -2e-18,
            "n": 12345,
        },
        {"plan": "block_means", "requested_ratio": 0.2, "realized_ratio": 0.2, "kl": None, "n": 1},
    ]
    view = shown(table)
    assert list(view[0].values()) == ["<Q8_0>", "20%", "20.4%", "-2.00e-18", 12345]
    head = "| plan | requested ratio | realized ratio | kl | n |"
    assert repr(view).splitlines()[::2] == [head, "| <Q8_0> | 20% | 20.4% | -2.00e-18 | 12,345 |"]
    assert view[1]["plan"] == "block means"
    page = view._repr_html_()
    cells = re.findall(r'<t[hd] style="text-align: (left|right)[^>]*>([^<]*)</t[hd]>', page)
    assert [side for side, _ in cells] == 3 * ["left", *4 * ["right"]]
    assert cells[5:10] == [
        ("left", "&lt;Q8_0&gt;"),
        *(("right", text) for text in ("20%", "20.4%", "−2.00e-18", "12,345")),
    ]
    assert "no rows" in shown([], ["kl"])._repr_html_()


def test_one_sequence_has_no_error() -> None:
    assert plus_minus(0.12345, float("nan")) == "0.123"
    assert plus_minus(None) == "unknown"
    assert [spread(error, ".2g") for error in (None, float("nan"), 0.123)] == ["", "", " ± 0.12"]


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (111.3, 16.2, "111 ± 16"),
        (-0.00544, 0.00254, "-0.0054 ± 0.0025"),
        (-0.0004, 0.022, "0.000 ± 0.022"),
        (0.0, 0.0, "0 ± 0"),
        (-0.1, 1.4e-17, "-0.1 ± 0"),
        (2.0, 0.5, "2.00 ± 0.50"),
    ],
)
def test_a_value_has_the_places_of_its_error(value: float, error: float, expected: str) -> None:
    assert plus_minus(value, error) == expected


def test_no_cell_of_a_csv_begins_a_formula() -> None:
    texts = ["=1+1", "+1", "-a", "@x", "\tx", "\rx", "a=b", 'a,"b"']
    table: Table = [{"=name": text, "value": -2.5} for text in texts] + [{"more": None}]
    heads, *rows = csv.reader(io.StringIO(as_csv(table), newline=""))
    assert heads == ["'=name", "value", "more"]
    assert [row[0] for row in rows] == [f"'{t}" for t in texts[:6]] + texts[6:] + [""]
    assert {row[1] for row in rows[:-1]} == {"-2.5"}
    assert as_csv([]) == ""
