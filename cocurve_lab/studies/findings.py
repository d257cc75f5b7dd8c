"""A finding: what the paper says, what was measured here, and whether the two agree."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from ..tables import Table

Verdict = bool | None  # agrees, does not, or cannot be told


@dataclass(frozen=True)
class Finding:
    """One claim of the paper beside its measurement on the model at hand.

    Attributes:
        study: which study it belongs to.
        claim: what the paper says, with its number.
        where: where it says so: a section, table or figure.
        ours: what was measured, with its error and unit.
        agrees: whether the two agree; None where the measurement cannot tell.
    """

    study: str
    claim: str
    where: str
    ours: str
    agrees: bool | None

    @property
    def verdict(self) -> str:
        """ "agrees", "does not agree" or "cannot be told"."""
        if self.agrees is None:
            return "cannot be told"
        return "agrees" if self.agrees else "does not agree"

    def __str__(self) -> str:
        return (
            f"Paper ({self.where}): {self.claim}. Here: {self.ours}. {self.verdict.capitalize()}."
        )


def findings_table(findings: Iterable[Finding]) -> Table:
    """The findings as rows, one per claim, ready for a DataFrame."""
    return [asdict(finding) | {"agrees": finding.verdict} for finding in findings]


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """False if one is, True if all are, None otherwise and without any."""
    known = list(verdicts)
    if any(verdict is False for verdict in known):
        return False
    return True if known and all(known) else None


def within(ours: float, error: float, low: float, high: float, factor: float = 2.0) -> bool | None:
    """Whether a measured value lies in [low, high]; None where its error bar reaches across an end.

    Args:
        ours, error: the value and its standard error.
        low, high: what would agree; infinite for an open end.
        factor: standard errors that the bar is long.
    """
    reach = factor * error
    if low <= ours - reach and ours + reach <= high:
        return True
    if ours + reach < low or ours - reach > high:
        return False
    return None


_BELOW_ZERO = float(np.nextafter(0, -1))


def strict(count: int) -> float:
    """Standard errors at which one of `count` comparisons errs as rarely as one does at two."""
    return float(norm.isf(norm.sf(2.0) / max(count, 1)))


def below_zero(value: float, error: float, factor: float = 2.0) -> bool | None:
    """Whether a value is negative; None within its error, or where nothing varied at all."""
    return within(value, error, -math.inf, _BELOW_ZERO, factor) if error > 0 else None


def combined(verdicts: Iterable[bool | None]) -> bool | None:
    """One verdict of several tests of one claim: None where they contradict, or none can tell."""
    told = {verdict for verdict in verdicts if verdict is not None}
    return told.pop() if len(told) == 1 else None


def number(value: Any) -> float:
    """A cell as a float; None is NaN."""
    return math.nan if value is None else float(value)


ABOVE, BELOW = (0.0, math.inf), (-math.inf, 0.0)


def judged(value: float | None, error: float | None, low: float, high: float) -> Verdict:
    """`within`; None where value or error is unknown."""
    if value is None or error is None or not math.isfinite(value) or not math.isfinite(error):
        return None
    return within(value, error, low, high)


def percent(ratio: float) -> str:
    return f"{ratio:.0%}"


def told(findings: Iterable[Finding], width: int = 110) -> str:
    """Findings as a list for `print`, broken between words at `width` characters."""
    lines = (textwrap.fill(f"- {finding}", width, subsequent_indent="  ") for finding in findings)
    return "\n".join(lines)
