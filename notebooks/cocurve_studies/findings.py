"""A claim of the paper beside what was measured, and its verdict.

A `Claim` names the range in which it holds. `Claim.on` sets measured numbers, each with its
standard error, beside it: it agrees where the interval of two errors lies in the range, does not
where it lies outside, and cannot be told where it reaches across an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from typing import Any, NamedTuple

from scipy.special import stdtrit
from scipy.stats import norm

from cocurve_lab.extensions.writing import brief, plus_minus, typeset

from .tables import WIDTH, Row, fold, styled

Verdict = bool | None  # agrees, contradicts, or cannot be told
Range = tuple[float, float]

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
        study: the study it belongs to.
        claim: the paper's claim, with its number.
        where: the section, table or figure that makes it.
        ours: the measured value, with its error and unit.
        agrees: whether the two agree; None where the measurement cannot tell.
    """

    study: str
    claim: str
    where: str
    ours: str
    agrees: Verdict

    @property
    def verdict(self) -> str:
        """ "agrees", "contradicts" or "cannot be told"."""
        if self.agrees is None:
            return "cannot be told"
        return "agrees" if self.agrees else "contradicts"

    @property
    def said(self) -> str:
        """The verdict as a sign and in words, "✓ agrees"."""
        return f"{_SIGNS[self.agrees]} {self.verdict}"

    def __str__(self) -> str:
        return (
            f"Paper ({self.where}): {self.claim}. Here: {self.ours}. {self.verdict.capitalize()}."
        )


class Findings(list[Finding]):
    """Findings for the end of a cell: a table in a notebook, broken lines in `print`."""

    def __repr__(self) -> str:
        return told(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(told(self))

    def _repr_html_(self) -> str:
        """A table with a row per claim."""
        from pandas import DataFrame

        rows = [
            [escape(typeset(t)) for t in (f.study, f.claim, f.where, f.ours, f.said)] for f in self
        ]
        table = DataFrame(rows, columns=["study", "the paper", "where", "here", "verdict"])
        return str(styled(table.style).to_html())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Beside table and text the bare values, for who collects them; no page shows them."""
        return {MIME: [asdict(finding) for finding in self]}


def told(findings: Iterable[Finding], width: int = WIDTH) -> str:
    """Return the findings as a list for `print`, broken between words at `width` characters."""
    return fold("\n".join(f"- {finding}" for finding in findings), width)


# Claims -------------------------------------------------------------------------------------------
class Measured(NamedTuple):
    """A number that a claim is about.

    Attributes:
        value, error: with its standard error; None where one is unknown, 0 where it is exact.
        degrees: of freedom of the error, for Student's t; None: a part of the error is unknown.
        words: the number for reading; "" for "value ± error".
    """

    value: float | None
    error: float | None = 0.0
    degrees: float | None = math.inf
    words: str = ""

    def __str__(self) -> str:
        return self.words or plus_minus(self.value, self.error)

    def judged(self, holds: Range, factor: float = 2.0) -> Verdict:
        """Tell whether the number lies in a range, by so many standard errors."""
        return judged(self.value, self.error, *holds, factor, self.degrees)


def column_of(row: Row, name: str, before: str = "") -> Measured:
    """Return a column of differences, its error over rows and draws of H, and what it covers.

    `before` says what it is of: "20%".
    """
    words = f"{before}: " if before else ""
    words += plus_minus(row[name], row[f"{name}_error"]) + covered(row, name)
    return Measured(row[name], row[f"{name}_error"], row.get(f"{name}_degrees", math.inf), words)


@dataclass(frozen=True)
class Claim:
    """What the paper says, where, and the range of the number in which it holds."""

    study: str
    claim: str
    where: str
    holds: Range = ABOVE

    def on(
        self, *measured: Measured, ours: str = "{}", holds: Range | None = None, **words: Any
    ) -> Finding:
        """Judge the claim on one number, or on several that must all bear it out.

        Args:
            measured: the numbers.
            ours: what is said of them; {} stands for the numbers.
            holds: the range, where it depends on the model.
            words: further names of `ours` and of the claim.
        """
        judges = [partial(each.judged, holds or self.holds) for each in measured]
        listed = "; ".join(map(str, measured)) or "nothing was measured"
        return self.given(ours.format(listed, **words), every(judges), **words)

    def given(self, ours: str, agrees: Verdict, **words: Any) -> Finding:
        """Return the finding whose verdict is known otherwise, by a test of its own."""
        claim = self.claim.format(**words) if words else self.claim
        return Finding(self.study, claim, self.where, ours, agrees)


# Verdicts -----------------------------------------------------------------------------------------
def judged(
    value: float | None,
    error: float | None,
    low: float,
    high: float,
    factor: float = 2.0,
    degrees: float | None = math.inf,
) -> Verdict:
    """Judge whether a value lies in [low, high]; None where its bar reaches across an end.

    The bar has `factor` standard errors on either side, and is longer with few `degrees` of
    freedom. The verdict is None where the value, its error or a part of that is unknown. Equal
    plans differ by 0 without an error. That is no gain and no loss, so whether there is one
    (`ABOVE`, `BELOW`) cannot be told.
    """
    if value is None or error is None or not math.isfinite(value) or not math.isfinite(error):
        return None
    if degrees is None or (value == error == 0 and (low, high) in (ABOVE, BELOW)):
        return None
    reach = longer(factor, degrees) * error
    if low <= value - reach and value + reach <= high:
        return True
    return False if value + reach < low or value - reach > high else None


def longer(factor: float, degrees: float) -> float:
    """Return the factor of Student's t that leaves the same tail as `factor` of the normal."""
    return -float(stdtrit(degrees, norm.sf(factor))) if math.isfinite(degrees) else factor


def every(judges: Iterable[Callable[[float], Verdict]]) -> Verdict:
    """Judge a claim about several numbers, each of which must bear it out.

    It holds if each number agrees at two standard errors. It fails if one number contradicts it
    clearly: by `strict` standard errors, because among many numbers one is far off by chance.
    Otherwise, and without any number, it cannot be told.
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
def covered(row: Row, name: str) -> str:
    """Return the parts of an error in brackets, "(rows 0.005, 8 draws of H 0.0075)".

    Empty where no draws of H were asked for.
    """
    if f"{name}_draws" not in row or row[f"{name}_rows_error"] is None:
        return ""
    if row[f"{name}_draws_error"] is None:
        return " (over rows alone; other draws of H are unknown)"
    rows, draws = row[f"{name}_rows_error"], row[f"{name}_draws_error"]
    count = row[f"{name}_draws"]
    return f" (rows {brief(rows, 2)}, {count} draws of H {brief(draws, 2)})"


def number(value: Any) -> float:
    """Return a cell of a table as a float; None is NaN."""
    return math.nan if value is None else float(value)


def percent(ratio: float) -> str:
    """Return a share as a whole percentage, "20%"."""
    return f"{ratio:.0%}"


def nearest(rows: Iterable[Row], ratio: float = 0.2) -> list[Row]:
    """Return the rows of the ratio nearest to the paper's, 20 %."""
    found = list(rows)
    if not found:
        return []
    ratios = {row["requested_ratio"] for row in found}
    best = min(ratios, key=lambda each: abs(each - ratio))
    return [row for row in found if row["requested_ratio"] == best]
