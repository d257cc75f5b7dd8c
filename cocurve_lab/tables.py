"""What every study returns, a tidy table, and how it is kept: computed once, then read back."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import FileFormatError, InputError
from .storage import fingerprint, write_atomically

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)


FORMAT, VERSION = "cocurve-study", 1


Row = dict[str, Any]


Folder = str | os.PathLike[str] | None  # where results are kept; None keeps nothing


Table = list[Row]  # one flat dict per observation; `pandas.DataFrame(table)` shows it


def cached_table(
    folder: Folder,
    name: str,
    settings: Mapping[str, Any],
    compute: Callable[[], Table],
) -> Table:
    """The table of a study, read from `folder` if this very study is there, else computed and kept.

    The file is `study_<name>_<mark>.json`, where the mark is a fingerprint of the settings: another
    model, text or option never overwrites it.

    Args:
        folder: where tables are kept; None computes and keeps nothing.
        name: of the study: letters, digits and underscores.
        settings: everything that decides the outcome, as JSON-able values (fingerprints of model,
            curvature and text among them).
        compute: makes the table; its rows are flat dicts of numbers, strings, bools and None.

    Returns:
        The rows. NaN and infinities survive; numpy numbers become Python's.

    Raises:
        InputError: a name or a cell that cannot be kept.
        FileFormatError: the file is there but is not a table of these settings.
    """
    if not re.fullmatch(r"\w+", name):
        raise InputError(f"the study is named {name!r}; use letters, digits and underscores.")
    if folder is None:
        return plain_table(compute())
    mark = fingerprint(dict(settings))
    path = Path(folder) / f"study_{name}_{mark[:10]}.json"
    if path.exists():
        return _read(path, mark)
    table = plain_table(compute())
    header = {"format": FORMAT, "version": VERSION, "fingerprint": mark, "settings": dict(settings)}
    try:
        write_atomically(path, json.dumps(header | {"rows": table}, indent=1).encode())
    except OSError as error:  # minutes of work: hand them over, whatever the disk says
        log.warning(
            "%s could not be written (%s). The table is returned all the same.", path, error
        )
    return table


def plain_table(rows: Table) -> Table:
    """The rows with numpy numbers as Python's.

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
        f"column {name!r} holds a {type(value).__name__}; a tidy table has numbers, strings, bools "
        "and None."
    )


def _read(path: Path, mark: str) -> Table:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = (content["format"], content["version"], content["fingerprint"])
        rows = content["rows"]
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Delete it and run again."
        ) from None
    if found != (FORMAT, VERSION, mark):
        raise FileFormatError(f"{path} is of another study or format. Delete it and run again.")
    return list(rows)


def pick(table: Table, **wanted: Any) -> Table:
    """The rows whose columns have the given values."""
    return [row for row in table if all(row.get(name) == value for name, value in wanted.items())]


def column(table: Table, name: str) -> np.ndarray:
    """One column [rows] as an array; None becomes NaN among numbers."""
    return np.array([np.nan if row[name] is None else row[name] for row in table])


def shown(table: Table, columns: Mapping[str, str] | Sequence[str], digits: int = 3) -> Table:
    """Some columns of a table for reading: in this order, under these names, numbers rounded.

    Args:
        table: of a study.
        columns: column -> its heading, or the columns alone.
        digits: significant digits of a float; the table itself keeps them all.

    Raises:
        KeyError: a column that the table lacks.
    """
    headings = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
    return [
        {heading or name: _rounded(row[name], digits) for name, heading in headings.items()}
        for row in table
    ]


def _rounded(value: Any, digits: int) -> Any:
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
