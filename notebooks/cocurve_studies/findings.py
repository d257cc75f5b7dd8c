"""A finding: a claim of the paper or of the lab beside its measurement, and the rules of a verdict.

A verdict on the paper needs its claim, its quantity and an error. Everything else that is tested is
a claim of the lab and stands in a table of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from scipy.special import stdtrit
from scipy.stats import norm

from cocurve_lab.extensions.writing import brief, plus_minus, typeset

from .sections import link_to
from .tables import WIDTH, Row, fold, styled

Verdict = bool | None  # agrees, does not agree, or cannot be told
Judge = Callable[[float], Verdict]  # the verdict on one number at so many standard errors

MIME = "application/vnd.cocurve.findings+json"  # of the bare values in a notebook's output
_SIGNS: dict[Verdict, str] = {True: "✓", False: "✗", None: "?"}
_LEAST = math.ulp(0.0)  # ends of a range are part of it, and a difference of exactly 0 is no gain
ABOVE, BELOW = (_LEAST, math.inf), (-math.inf, -_LEAST)
NOT_BELOW, NOT_ABOVE = (0.0, math.inf), (-math.inf, 0.0)


# One finding --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Finding:
    """One claim beside its measurement on the model at hand.

    Attributes:
        study: the study it belongs to; sections.py says where it stands.
        claim: the paper's claim, with its number; or the lab's.
        where: the section, table or figure that makes it; of the lab's, what it is about.
        ours: the measured value, with its error and unit.
        agrees: whether the two agree; None where the measurement cannot tell.
        lab: whether the lab claims it, because the paper has no such claim or another quantity.
    """

    study: str
    claim: str
    where: str
    ours: str
    agrees: Verdict
    lab: bool = False

    @property
    def verdict(self) -> str:
        """ "agrees", "does not agree" or "cannot be told"."""
        if self.agrees is None:
            return "cannot be told"
        return "agrees" if self.agrees else "does not agree"

    @property
    def said(self) -> str:
        """The verdict as a sign and in words, "✓ agrees"."""
        return f"{_SIGNS[self.agrees]} {self.verdict}"

    def __str__(self) -> str:
        who = "Lab" if self.lab else "Paper"
        return (
            f"{who} ({self.where}): {self.claim}. Here: {self.ours}. {self.verdict.capitalize()}."
        )


class Findings(list[Finding]):
    """Findings for the end of a cell: a table in a notebook, broken lines in `print`."""

    def __repr__(self) -> str:
        return told(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(told(self))

    def _repr_html_(self) -> str:
        """A table of the paper's claims and one of the lab's; the study is a link to its place."""
        from pandas import DataFrame

        tables = []
        for who, found in self.sides():
            rows = [
                [
                    _linked(f.study),
                    *(escape(typeset(t)) for t in (f.claim, f.where, f.ours, f.said)),
                ]
                for f in found
            ]
            table = DataFrame(rows, columns=["study", who, "where", "here", "verdict"])
            tables.append(styled(table.style).to_html())
        return "".join(tables)

    def sides(self) -> list[tuple[str, list[Finding]]]:
        """Return the claims of the paper and those of the lab, under who claims them."""
        sides = [("the paper", [f for f in self if not f.lab])]
        sides.append(("the lab", [f for f in self if f.lab]))
        return [side for side in sides if side[1]] or sides[:1]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Beside table and text the bare values, for who collects them; no page shows them."""
        return {MIME: [asdict(finding) for finding in self]}


def _linked(study: str) -> str:
    link, name = link_to(study), escape(study)
    return name if link is None else f'<a href="{link}">{name}</a>'


def told(findings: Iterable[Finding], width: int = WIDTH) -> str:
    """Return the findings as a list for `print`, broken between words at `width` characters."""
    return fold("\n".join(f"- {finding}" for finding in findings), width)


# Verdicts -----------------------------------------------------------------------------------------
def within(ours: float, error: float, low: float, high: float, factor: float = 2.0) -> Verdict:
    """Judge whether a value lies in [low, high]; None where its error bar reaches across an end.

    The bar has `factor` standard errors on either side; an open end of the range is infinite.
    """
    reach = factor * error
    if low <= ours - reach and ours + reach <= high:
        return True
    if ours + reach < low or ours - reach > high:
        return False
    return None


def judged(
    value: float | None,
    error: float | None,
    low: float,
    high: float,
    factor: float = 2.0,
    degrees: float | None = math.inf,
) -> Verdict:
    """Judge as `within`, and None where the value or its error is unknown (None or not finite).

    `degrees` of freedom of the error lengthen the bar; None is an error that is unknown in part.
    Equal plans differ by 0 without an error. That is no gain and no loss, so whether there is one
    (`ABOVE`, `BELOW`) cannot be told.
    """
    if value is None or error is None or not math.isfinite(value) or not math.isfinite(error):
        return None
    if value == error == 0 and (low, high) in (ABOVE, BELOW):
        return None
    return None if degrees is None else within(value, error, low, high, longer(factor, degrees))


def judged_column(row: Row, name: str, low: float, high: float, factor: float = 2.0) -> Verdict:
    """`judged` for a column of differences: over rows and draws of H where the row has both.

    If draws were asked for and the error over them is unknown, the verdict is None.
    """
    degrees = row.get(f"{name}_degrees", math.inf)
    return judged(row[name], row[f"{name}_error"], low, high, factor, degrees)


def longer(factor: float, degrees: float) -> float:
    """Return the factor of Student's t that leaves the same tail as `factor` of the normal."""
    return -float(stdtrit(degrees, norm.sf(factor))) if math.isfinite(degrees) else factor


def every(judges: Iterable[Judge]) -> Verdict:
    """Judge a claim about several numbers, each of which must bear it out.

    It holds if each number agrees at two standard errors. It fails if one number contradicts it
    clearly: by `strict` standard errors, because among many numbers one is far off by chance.
    Otherwise, and without any number, it cannot be told. A judge is, for one number,
    `partial(judged, value, error, low, high)` or the like.
    """
    known = list(judges)
    level = strict(len(known))
    if any(judge(level) is False for judge in known):
        return False
    # no correction here: that all agree by chance is rarer than that any one of them does
    return True if known and all(judge(2.0) for judge in known) else None


def strict(count: int) -> float:
    """Standard errors at which one of `count` comparisons errs as rarely as a single one at two.

    Bonferroni's correction of a one-sided normal test.
    """
    return float(norm.isf(norm.sf(2.0) / max(count, 1)))


# Words and cells ----------------------------------------------------------------------------------
def with_error(row: Row, name: str) -> str:
    """Return a column of differences, its standard error, and what that error covers.

    "0.012 ± 0.005" over rows alone; "0.012 ± 0.009 (rows 0.005, 8 draws of H 0.0075)" over both.
    """
    return plus_minus(row[name], row[f"{name}_error"]) + covered(row, name)


def covered(row: Row, name: str) -> str:
    """Return the parts of an error in brackets; empty where no draws of H were asked for."""
    if f"{name}_draws" not in row or row[f"{name}_rows_error"] is None:
        return ""
    if row[f"{name}_draws_error"] is None:
        return f" (over rows alone; {row[f'{name}_note']}, so other draws of H are unknown)"
    rows, draws = row[f"{name}_rows_error"], row[f"{name}_draws_error"]
    count = row[f"{name}_draws"]
    return f" (rows {brief(rows, 2)}, {count} draws of H {brief(draws, 2)})"


def number(value: Any) -> float:
    """Return a cell of a table as a float; None is NaN."""
    return math.nan if value is None else float(value)


def percent(ratio: float) -> str:
    """Return a share as a whole percentage, "20%"."""
    return f"{ratio:.0%}"
