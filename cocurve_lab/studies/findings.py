"""A finding: what the paper says, what was measured here, and whether the two agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .tables import Table

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
