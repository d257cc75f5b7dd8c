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
from html import escape
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
    read_json,
    reading,
    require_fields,
)
from .storage import fingerprint, seal_json, unseal_json

log = logging.getLogger(__name__)

FORMAT, VERSION = "cocurve-study", 1
# how a text begins that a spreadsheet may take for a formula: a sign, also a wide one, after blanks
_FORMULA = re.compile(r"[\t\r]|[\s\x00-\x1f\u200b-\u200f\u2060\ufeff]*[-=+@＝＋－＠]")

Row = dict[str, Any]
Table = list[Row]  # one flat dict per observation; `shown` makes it readable
Columns = Mapping[str, str]  # column -> its heading; "" stands for the column's own name
Folder = str | os.PathLike[str] | None  # where results are kept; None keeps nothing

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
        The rows. NaN and infinities survive; numpy numbers become Python's.
    """
    if not re.fullmatch(r"\w+", name):
        raise InputError(f"the study is named {name!r}. Use letters, digits and underscores.")
    if folder is None:
        return plain_table(compute())
    path, mark = _place(folder, name, settings)
    if path.exists():
        return _read(path, mark)
    table = plain_table(compute())
    header = {"format": FORMAT, "version": VERSION, "fingerprint": mark, "settings": dict(settings)}
    try:
        content = seal_json(header | {"rows": table})
        write_atomically(path, json.dumps(content, indent=1).encode())
    except OSError as error:  # minutes of work: hand them over, whatever the disk says
        log.warning(
            "%s could not be written (%s). The table is returned but not kept.", path, error
        )
    return table


def is_kept(folder: Folder, name: str, settings: Mapping[str, Any]) -> bool:
    """Whether `cached_table` would find a table of these settings in `folder`."""
    return folder is not None and _place(folder, name, settings)[0].exists()


def _place(folder: Any, name: str, settings: Mapping[str, Any]) -> tuple[Path, str]:
    """The file of a kept table, and the fingerprint of its settings."""
    mark = fingerprint(dict(settings))
    return Path(folder) / f"study_{name}_{mark[:10]}.json", mark


def plain_table(rows: Table) -> Table:
    """Convert numpy numbers to Python's; InputError for a cell that is not plain."""
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
        content = read_json(path, nan=True)
        unseal_json(content, "Nothing of it was used")
        require_fields(content, _FIELDS)
        found = (content["format"], content["version"], content["fingerprint"])
        if found != (FORMAT, VERSION, mark):
            raise FileFormatError("it is of another study or format")
    return list(content["rows"])


def pick(table: Table, **wanted: Any) -> Table:
    """The rows whose columns have the given values."""
    return [row for row in table if all(row.get(name) == value for name, value in wanted.items())]


def column(table: Table, name: str) -> np.ndarray:
    """One column [rows] as an array; None becomes NaN among numbers."""
    return np.array([np.nan if row[name] is None else row[name] for row in table])


class Shown(list[Row]):
    """Rows ready to read: a table in a notebook, Markdown in `print`; no index, no raw floats."""

    def __repr__(self) -> str:
        rows = [[_text(v).replace("\n", " ") for v in row.values()] for row in self]
        return as_markdown(self._heads, rows)

    def _repr_html_(self) -> str:
        """Words stand left, numbers right, below their headings."""
        columns = [[row[head] for row in self] for head in self._heads]
        left = [any(map(_is_words, values)) for values in columns]
        rows = [
            [
                escape(_text(value) if words else typeset(_text(value)))
                for words, value in zip(left, row.values(), strict=True)
            ]
            for row in self
        ]
        return as_html([escape(head) for head in self._heads], rows, left)

    @property
    def _heads(self) -> list[str]:
        return list(self[0]) if self else ["no rows"]


def shown(
    table: Iterable[Row], columns: Columns | Sequence[str] | None = None, digits: int = 3
) -> Shown:
    """Prepare a table for reading: some columns, under headings, rounded, with their errors.

    A value whose row has `<column>_error` becomes "value ± error", unless that error is itself one
    of the columns. A `requested_ratio` or `realized_ratio` becomes a percentage, None an empty
    cell, and any other float a text of `brief`.

    Args:
        table: of a study; it keeps all digits.
        columns: column -> its heading ("" for its own name), or the columns alone; None for all.
        digits: significant digits of a number without an error.
    """
    rows = list(table)
    if columns is None:
        columns = list(rows[0]) if rows else []
    headings = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "")
    return Shown(
        {
            heading or _words(name): _cell(
                name,
                row[name],
                None if f"{name}_error" in headings else row.get(f"{name}_error"),
                digits,
            )
            for name, heading in headings.items()
        }
        for row in rows
    )


def _cell(name: str, value: Any, error: float | None, digits: int) -> Any:
    if value is None:
        return ""
    if error is not None and math.isfinite(error):
        return plus_minus(value, error)
    if name == "requested_ratio":
        return f"{100 * value:.{digits}g}%"
    if name == "realized_ratio":
        return f"{value:.1%}"
    if isinstance(value, str):
        return _words(value)
    return brief(value, digits) if isinstance(value, float) else value


def _words(name: str) -> str:
    """A name from code, such as of a statistic, in words; other text as it is."""
    return name.replace("_", " ") if re.fullmatch("[a-z_]+", name) else name


def brief(value: float, digits: int = 3) -> str:
    """A number for people, as in the instruments: few digits, exponents only where they help.

    "0.0123", "1230", "2.12e-18"; "" for NaN.
    """
    if math.isnan(value):
        return ""
    rounded = float(f"{value:.{digits}g}") or 0.0  # no "-0"
    if rounded == 0 or 1e-4 <= abs(rounded) < 1e6:
        return f"{rounded:.10f}".rstrip("0").rstrip(".")
    mantissa, _, exponent = f"{rounded:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent):+d}" if exponent else mantissa  # infinity has none


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _is_words(value: Any) -> bool:
    """Whether a cell holds words; a text that begins with a digit or a sign is a number."""
    return isinstance(value, str) and bool(value) and not re.match(r"[-+]?(\d|inf)", value)


def typeset(text: str) -> str:
    """A text with the minus sign of the instruments, as wide as a plus, where it has a hyphen.

    A hyphen is a minus before a number, and between spaces.
    """
    return re.sub(r"(?<![\w.\-)])-(?=\.?\d)|(?<= )-(?= )", "−", text)


def as_html(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[bool]) -> str:
    """Lay out cells of HTML under heads as a table; a column is aligned to the left or the right.

    Args:
        heads: one per column.
        rows: cells, one per column.
        left: whether a column holds words.
    """
    number = "text-align: right; white-space: nowrap"
    words = "text-align: left; white-space: pre-wrap"
    sides = [f"{words if side else number}; vertical-align: top" for side in left]
    lines = [
        "".join(
            f'<{tag} style="{side}">{cell}</{tag}>' for cell, side in zip(cells, sides, strict=True)
        )
        for tag, cells in (("th", heads), *(("td", row) for row in rows))
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def spread(error: float | None, form: str = ".5f") -> str:
    """A standard error after its value, " ± 0.00120"; nothing if it is None or NaN."""
    return "" if error is None or math.isnan(error) else f" ± {error:{form}}"


def plus_minus(value: float | None, error: float | None = None) -> str:
    """A value and its standard error to two digits, "0.0123 ± 0.0045"; "unknown" for None."""
    if value is None:
        return "unknown"
    if error is None or not math.isfinite(error):  # one sequence has no spread
        return brief(value)
    if error < 1e-12 * abs(value):  # rounding of float64
        error = 0.0
    if not 1e-6 < error < 1e6:  # 0 among them: a plan against itself
        return f"{brief(value)} ± {brief(error, 2)}"
    places = max(0, 1 - math.floor(math.log10(error)))
    value = round(value, places) or 0.0  # no "-0.000"
    return f"{value:.{places}f} ± {error:.{places}f}"


def as_markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Lay out rows of cells under a head as a Markdown table, a line each."""
    table = ([" ".join(str(c).splitlines()).replace("|", "\\|") for c in r] for r in (head, *rows))
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def as_markdown_text(value: object) -> str:
    """Write a text as one line of Markdown that shows it as it is: no tag, link or emphasis."""
    shown = "".join(c if c.isprintable() else " " for c in str(value))
    return re.sub(r"([\\`*_\[\]<>&|~$#]|:(?=//))", r"\\\1", " ".join(shown.split()))


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
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell
