"""Numbers as people write them, and tables as files for spreadsheets."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# how a text begins that a spreadsheet may take for a formula: a sign, also a wide one, after blanks
_FORMULA = re.compile(r"[\t\r]|[\s\x00-\x1f\u200b-\u200f\u2060\ufeff]*[-=+@＝＋－＠]")


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


def typeset(text: str) -> str:
    """A text with the minus sign of the instruments, as wide as a plus, where it has a hyphen.

    A hyphen is a minus before a number, and between spaces.
    """
    return re.sub(r"(?<![\w.\-)])-(?=\.?\d)|(?<= )-(?= )", "−", text)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows of a table as CSV text; "" if there are none.

    A spreadsheet would run a text that begins like a formula, so such a text gets an apostrophe in
    front, which spreadsheets do not show.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for cells in [columns, *([row.get(name, "") for name in columns] for row in rows)]:
        writer.writerow([_no_formula(cell) for cell in cells])
    return text.getvalue() if columns else ""


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def duration(seconds: float) -> str:
    """Write seconds in a readable unit: "45 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
