"""The tables of the studies, kept in a folder, picked from, and laid out for reading.

A study returns a DataFrame with a row per observation. Where rows are judged one by one they are
dicts (`pick`), and an unknown value is None.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.errors import FileFormatError
from cocurve_lab.base.schema import (
    COUNT,
    OBJECT,
    TEXT,
    Field,
    Schema,
    dict_of,
    is_plain,
    list_of,
    read_json,
    reading,
    require_fields,
)
from cocurve_lab.base.storage import fingerprint, seal_json, unseal_json
from cocurve_lab.extensions.writing import brief, plus_minus

from .lazy import DataFrame, Styler

log = logging.getLogger(__name__)

FORMAT, VERSION = "cocurve-study", 1
Row = dict[str, Any]
Rows = list[Row]  # one flat dict per observation
Table: TypeAlias = "DataFrame | Rows"  # what is judged, drawn and shown may be either
Columns = Mapping[str, str]  # column -> its heading; "" stands for the column's own name
Folder = str | os.PathLike[str] | None  # where results are kept; None keeps nothing
WIDTH = 100  # characters of a line of text; a cell's output in JupyterLab has 105 at 1280 pixels


# Tables and rows ----------------------------------------------------------------------------------
def table_of(rows: Iterable[Row]) -> DataFrame:
    """Make a table of rows; whole numbers stay whole where some are unknown."""
    from pandas import DataFrame

    found = [{name: _plain(value) for name, value in row.items()} for row in rows]
    types = {name: {type(row.get(name)) for row in found} for row in found for name in row}
    gaps = [name for name, some in types.items() if some == {int, type(None)}]
    return DataFrame(found).astype(dict.fromkeys(gaps, "Int64"))


def pick(table: Table, **wanted: Any) -> Rows:
    """Return the rows of a table whose columns have the given values; None is an unknown value."""
    rows = table
    if not isinstance(table, list):
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def column(table: Table, name: str) -> np.ndarray:
    """Return one column [rows] as an array; None becomes NaN among numbers."""
    return np.array([np.nan if row[name] is None else row[name] for row in pick(table)])


def _plain(value: Any) -> Any:
    """A numpy number as one of Python's."""
    return value.item() if isinstance(value, np.generic) else value


# Kept tables --------------------------------------------------------------------------------------
def kept_table(
    folder: Folder, name: str, settings: Mapping[str, Any], compute: Callable[[], Rows]
) -> DataFrame:
    """Read the table of a study from `folder`; compute and keep it if it is not there.

    The file is `study_<name>_<mark>.json`. The mark is a fingerprint of the settings, so another
    model, text or option has a file of its own.

    Args:
        folder: where tables are kept; None computes and keeps nothing.
        name: of the study.
        settings: everything that decides the outcome, as JSON-able values (fingerprints of model,
            curvature and text among them).
        compute: makes the rows: flat dicts of numbers, strings, bools and None.
    """
    return table_of(kept_rows(folder, name, settings, compute))


def kept_rows(
    folder: Folder, name: str, settings: Mapping[str, Any], compute: Callable[[], Rows]
) -> Rows:
    """`kept_table` as rows. NaN and infinities survive; numpy numbers become Python's."""
    if is_kept(folder, name, settings):
        return _read(*_place(folder, name, settings))
    rows = [{name: _plain(value) for name, value in row.items()} for row in compute()]
    if folder is None:
        return rows
    path, mark = _place(folder, name, settings)
    header = {"format": FORMAT, "version": VERSION, "fingerprint": mark, "settings": dict(settings)}
    try:
        content = seal_json(header | {"rows": rows})
        write_atomically(path, json.dumps(content, indent=1).encode())
    except OSError as error:  # minutes of work: hand them over, whatever the disk says
        log.warning(
            "%s could not be written (%s). The table is returned but not kept.", path, error
        )
    return rows


def is_kept(folder: Folder, name: str, settings: Mapping[str, Any]) -> bool:
    """Whether `kept_table` would find a table of these settings in `folder`."""
    return folder is not None and _place(folder, name, settings)[0].exists()


def _place(folder: Any, name: str, settings: Mapping[str, Any]) -> tuple[Path, str]:
    """The file of a kept table, and the fingerprint of its settings."""
    mark = fingerprint(dict(settings))
    return Path(folder) / f"study_{name}_{mark[:10]}.json", mark


_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "fingerprint": TEXT,
    "settings": OBJECT,
    "rows": Field("a list of rows of numbers, texts, bools and nulls", list_of(dict_of(is_plain))),
}


def _read(path: Path, mark: str) -> Rows:
    with reading(path, "Delete it and run again."):
        content = read_json(path, nan=True)
        unseal_json(content, "Nothing of it was used")
        require_fields(content, _FIELDS)
        found = (content["format"], content["version"], content["fingerprint"])
        if found != (FORMAT, VERSION, mark):
            raise FileFormatError("it is of another study or format")
    return list(content["rows"])


# For reading --------------------------------------------------------------------------------------
def shown(table: Table, columns: Columns | None = None, digits: int = 3) -> Styler:
    """Lay out a table for reading: some columns, under headings, rounded, with their errors.

    A value whose row has `<column>_error` becomes "value ± error".

    Args:
        table: of a study; it keeps all digits.
        columns: column -> its heading ("" for its own name); None for all.
        digits: significant digits of a number without an error.
    """
    rows = pick(table)
    headings = columns or dict.fromkeys(rows[0] if rows else (), "")
    cells = [
        {
            heading or name.replace("_", " "): _cell(row, name, digits)
            for name, heading in headings.items()
        }
        for row in rows
    ]
    safe = table_of(cells).style.format(escape="html", thousands=",")
    return styled(safe.format_index(escape="html", axis="columns"))


def _cell(row: Row, name: str, digits: int) -> Any:
    value, error = row[name], row.get(f"{name}_error")
    if value is None:
        return ""
    if error is not None:
        return plus_minus(value, error)
    if name in ("requested_ratio", "realized_ratio"):
        return f"{100 * value:.{digits}g}%"
    return brief(value, digits) if isinstance(value, float) else value


def styled(table: Styler) -> Styler:
    """Hide the index, and show texts whole; equal tables give equal HTML."""
    rules = "text-align: left; vertical-align: top; white-space: pre-wrap"
    table.cell_ids = False
    table.set_uuid(hashlib.sha256(table.data.to_json().encode()).hexdigest()[:8])
    table.set_table_styles([{"selector": "th, td", "props": rules}])
    return table.hide(axis="index")


def fold(text: object, width: int = WIDTH) -> str:
    """A text for `print`, its lines broken between words at `width` characters.

    JupyterLab breaks a longer line anywhere, also inside words.
    """
    broken = (
        textwrap.fill(
            line,
            width,
            subsequent_indent="  ",
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in str(text).splitlines()
    )
    return "\n".join(broken)
