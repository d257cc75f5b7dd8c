"""Tidy tables: the result of every study. Kept on disk, picked from, and shown to a reader."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .atomic import write_atomically
from .errors import FileFormatError, InputError
from .schema import (
    COUNT,
    OBJECT,
    TEXT,
    Field,
    Schema,
    dict_of,
    is_plain,
    list_of,
    parse_json,
    reading,
    require_fields,
)
from .storage import fingerprint

log = logging.getLogger(__name__)

FORMAT, VERSION = "cocurve-study", 1
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with these a text begins like a formula

Row = dict[str, Any]
Table = list[Row]  # one flat dict per observation; `pandas.DataFrame(table)` shows it
Columns = Mapping[str, str]  # column -> its heading; "" stands for the column's own name
Folder = str | os.PathLike[str] | None  # where results are kept; None keeps nothing

# Columns that had another name in tables kept by earlier versions, by study. In these studies a
# standard error also ended in "_se".
_RENAMED: dict[str, dict[str, str]] = {
    "single_units": {
        "ratio": "measured_over_predicted",
        "ratio_error": "measured_over_predicted_error",
    },
    "fidelity": {"standard_error": "measured_error", "ratio": "measured_over_predicted"},
    "strength": {"standard_error": "kl_error"},
    "guards": {"standard_error": "kl_error"},
    "gains": {"standard_error": "kl_error"},
    "infinitesimal": {"ratio": "requested_ratio"},
    "redundancy": {"ratio": "requested_ratio"},
    "iterative": {"ratio": "requested_ratio"},
    "bridge_thresholds": {"ratio": "requested_ratio"},
    "causal": {"ratio": "requested_ratio", "standard_error": "difference_error"},
    "edges": {"standard_error": "measured_error"},
    "budgets": {"error": "share_error"},
    "propositions": {"ratio": "requested_ratio", "standard_error": "value_error"},
    "coverage": {},
    "stability": {"ratio": "requested_ratio"},
    "sensitivity": {},
}


WIDTH = 100  # characters of a line of text; a cell's output in JupyterLab has 105 at 1280 pixels


def fold(text: str, width: int = WIDTH) -> str:
    """A text for `print`, its lines broken between words at `width` characters.

    JupyterLab breaks a longer line anywhere, also inside words.
    """
    found = []
    for line in text.splitlines():
        if len(line) <= width:
            found.append(line)
            continue
        start = line[: len(line) - len(line.lstrip())]
        found += textwrap.wrap(
            line.lstrip(),
            width,
            initial_indent=start,
            subsequent_indent=start + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(found)


class Folded:
    """A class whose repr is one line; `print` and a notebook show it broken between words."""

    def __str__(self) -> str:
        return fold(repr(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows of the last value of a cell."""
        printer.text(str(self))


def cached_table(
    folder: Folder,
    name: str,
    settings: Mapping[str, Any],
    compute: Callable[[], Table],
) -> Table:
    """Read the table of a study from `folder`; compute and keep it if it is not there.

    The file is `study_<name>_<mark>.json`. The mark is a fingerprint of the settings, so another
    model, text or option has a file of its own.

    Args:
        folder: where tables are kept; None computes and keeps nothing.
        name: of the study: letters, digits and underscores.
        settings: everything that decides the outcome, as JSON-able values (fingerprints of model,
            curvature and text among them).
        compute: makes the table; its rows are flat dicts of numbers, strings, bools and None.

    Returns:
        The rows. NaN and infinities survive; numpy numbers become Python's. Columns of a table
        that an earlier version kept have today's names.

    Raises:
        InputError: a name or a cell that cannot be kept.
        FileFormatError: the file is there but is not a table of these settings.
    """
    if not re.fullmatch(r"\w+", name):
        raise InputError(f"the study is named {name!r}. Use letters, digits and underscores.")
    if folder is None:
        return plain_table(compute())
    path, mark = _place(folder, name, settings)
    if path.exists():
        return [_renamed(name, row) for row in _read(path, mark)]
    table = plain_table(compute())
    header = {"format": FORMAT, "version": VERSION, "fingerprint": mark, "settings": dict(settings)}
    try:
        write_atomically(path, json.dumps(header | {"rows": table}, indent=1).encode())
    except OSError as error:  # minutes of work: hand them over, whatever the disk says
        log.warning(
            "%s could not be written (%s). The table is returned but not kept.", path, error
        )
    return table


def is_kept(folder: Folder, name: str, settings: Mapping[str, Any]) -> bool:
    """Whether `cached_table` would find a table of these settings in `folder`."""
    return folder is not None and _place(folder, name, settings)[0].exists()


def _place(
    folder: str | os.PathLike[str], name: str, settings: Mapping[str, Any]
) -> tuple[Path, str]:
    """The file of a kept table, and the fingerprint of its settings."""
    mark = fingerprint(dict(settings))
    return Path(folder) / f"study_{name}_{mark[:10]}.json", mark


def plain_table(rows: Table) -> Table:
    """Convert numpy numbers to Python's.

    Raises:
        InputError: a cell is not a number, a string, a bool or None.
    """
    return [{str(name): _plain(name, value) for name, value in row.items()} for row in rows]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(
        f"column {name!r} holds a {type(value).__name__}. Use numbers, strings, bools and None."
    )


_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "fingerprint": TEXT,
    "settings": OBJECT,
    "rows": Field("a list of rows of numbers, texts, bools and nulls", list_of(dict_of(is_plain))),
}


def _read(path: Path, mark: str) -> Table:
    with reading(path, "Delete it and run again."):
        content = require_fields(parse_json(path.read_text(encoding="utf-8")), _FIELDS)
        found = (content["format"], content["version"], content["fingerprint"])
        if found != (FORMAT, VERSION, mark):
            raise FileFormatError("it is of another study or format")
    return list(content["rows"])


def _renamed(study: str, row: Row) -> Row:
    """A kept row under today's column names, in the same order."""
    if study not in _RENAMED:
        return row
    names = _RENAMED[study]
    return {names.get(old, re.sub("_se$", "_error", old)): value for old, value in row.items()}


def pick(table: Table, **wanted: Any) -> Table:
    """The rows whose columns have the given values."""
    return [row for row in table if all(row.get(name) == value for name, value in wanted.items())]


def column(table: Table, name: str) -> np.ndarray:
    """One column [rows] as an array; None becomes NaN among numbers."""
    return np.array([np.nan if row[name] is None else row[name] for row in table])


def shown(table: Table, columns: Columns | Sequence[str], digits: int = 3) -> Table:
    """Prepare a table for reading: some columns, under headings, rounded, with their errors.

    A value whose row has `<column>_error` becomes "value ± error", unless that error is itself one
    of the columns. A `requested_ratio` becomes a percentage, None an empty cell.

    Args:
        table: of a study; it keeps all digits.
        columns: column -> its heading ("" for its own name), or the columns alone.
        digits: significant digits of a number without an error.

    Returns:
        One row per row, ready for a DataFrame.

    Raises:
        KeyError: a column that the table lacks.
    """
    headings = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "")
    return [
        {
            heading or name: _cell(
                name,
                row[name],
                None if f"{name}_error" in headings else row.get(f"{name}_error"),
                digits,
            )
            for name, heading in headings.items()
        }
        for row in table
    ]


def _cell(name: str, value: Any, error: float | None, digits: int) -> Any:
    if value is None:
        return ""
    if error is not None and math.isfinite(error):
        return plus_minus(value, error)
    if name == "requested_ratio":
        return f"{100 * value:.{digits}g}%"
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def plus_minus(value: float | None, error: float | None = None) -> str:
    """A value and its standard error to two digits, "0.0123 ± 0.0045"; "unknown" for None."""
    if value is None:
        return "unknown"
    if error is None or not math.isfinite(error):  # one sequence has no spread
        return f"{value:.3g}"
    if not 1e-6 < error < 1e6:  # 0 among them: a plan against itself
        return f"{value:.3g} ± {error:.2g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def as_markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Lay out rows of cells under a head as a Markdown table, a line each."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


# Files for spreadsheets ---------------------------------------------------------------------------


def as_csv(table: Table) -> str:
    """Write a table as CSV text; "" if it is empty.

    A spreadsheet would run a text that begins like a formula, so such a text gets an apostrophe in
    front, which spreadsheets do not show.
    """
    columns = list(dict.fromkeys(name for row in table for name in row))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for cells in [columns, *([row.get(name, "") for name in columns] for row in table)]:
        writer.writerow([_no_formula(cell) for cell in cells])
    return text.getvalue() if columns else ""


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
