"""Claims as rows: `evaluate` words and judges each against the rows of a table.

    Claim("gains", "gains lower the KL ({plan})", 'Section "..."', "{change}", "difference", BELOW)

A study names its claims so. Where a claim is about a number that no table has, its function makes a
row of it first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .findings import Finding, Verdict, covered, every, judged, percent
from .tables import Row, Rows, Table, pick, plus_minus


@dataclass(frozen=True)
class Claim:
    """One claim about one column of a table: a finding per row, or with `each` one on all rows.

    `claim`, `ours` and `each` are templates. Their names are columns; {ratio} and {plan}, the
    ratio of the row, alone and with its lambda; {plain}, the value with its error, {covered}, what
    that error covers (draws of H), and {change}, both.

    Attributes:
        study, claim, where, ours, lab: as in `Finding`.
        value: the column that the claim is about, with its error in `<value>_error`. Without
            `holds` it is the verdict itself.
        holds: the range in which the claim holds; a name is a column with the end of the range.
        rows: columns and their values that select the rows.
        needs: columns without which (None) the row's words and verdict are these instead.
        error: the column of the error, where it is another one; "" for an exact value.
        each: words of one row, if the claim must hold for every row; `ours` has them as {each}.
        between: text between the words of two rows.
        nothing: the words if no row is there ("": `ours` without them); None for no finding then.
        judge: the verdict on a row at so many standard errors, where it is not by a range.
    """

    study: str
    claim: str
    where: str
    ours: str
    value: str = ""
    holds: tuple[float | str, float | str] | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, tuple[str, Verdict]] = field(default_factory=dict)
    error: str | None = None
    each: str = ""
    between: str = ", "
    nothing: str | None = ""
    judge: Callable[[Row, float], Verdict] | None = None
    lab: bool = False


def evaluate(claims: Claim | Iterable[Claim], table: Table, **more: Any) -> list[Finding]:
    """Return the findings on each claim, one per row that it is about or one on all of them.

    Args:
        claims: one claim or several.
        table: rows of all claims; a claim about rows that are not there has no finding, unless
            it says what then.
        more: further names for the templates.
    """
    found = []
    for claim in [claims] if isinstance(claims, Claim) else claims:
        rows = pick(table, **claim.rows)
        if claim.each:
            if rows or claim.nothing is not None:
                found.append(_on_all(claim, rows, more))
            continue
        for row in rows:
            ours, verdict = claim.ours, _verdict(claim, row)
            for name, instead in claim.needs.items():
                if row[name] is None:
                    ours, verdict = instead
            found.append(_finding(claim, ours, _words(claim, row) | more, verdict))
    return found


def _on_all(claim: Claim, rows: Rows, more: Mapping[str, Any]) -> Finding:
    told = claim.between.join(claim.each.format_map(_words(claim, row)) for row in rows)
    ours = claim.ours if rows else claim.nothing or claim.ours
    verdict = every(partial(_verdict, claim, row) for row in rows)
    return _finding(claim, ours, {"each": told, **more}, verdict)


def _finding(claim: Claim, ours: str, words: Mapping[str, Any], verdict: Verdict) -> Finding:
    return Finding(
        claim.study,
        claim.claim.format_map(words),
        claim.where,
        ours.format_map(words),
        verdict,
        claim.lab,
    )


def _verdict(claim: Claim, row: Row, factor: float = 2.0) -> Verdict:
    if claim.judge is not None:
        return claim.judge(row, factor)
    if claim.holds is None:
        verdict: Verdict = row[claim.value]
        return verdict
    low, high = (row[end] if isinstance(end, str) else end for end in claim.holds)
    degrees = row.get(f"{claim.value}_degrees", math.inf)
    return judged(row[claim.value], _error(claim, row, 0.0), low, high, factor, degrees)


def _error(claim: Claim, row: Row, exact: float | None) -> float | None:
    name = f"{claim.value}_error" if claim.error is None else claim.error
    error: float | None = row[name] if name else exact
    return error


def _words(claim: Claim, row: Row) -> dict[str, Any]:
    words = dict(row)
    if claim.holds is not None:
        plain, over = (
            plus_minus(row[claim.value], _error(claim, row, None)),
            covered(row, claim.value),
        )
        words |= {"plain": plain, "covered": over, "change": plain + over}
    if row.get("requested_ratio") is not None:
        words["ratio"] = percent(row["requested_ratio"])
        if row.get("interaction_strength") is not None:
            words["plan"] = name_plan(row)
    return words


def name_plan(row: Row) -> str:
    """Name the plan of a row by its ratio and lambda, "20%, λ 1"."""
    return f"{percent(row['requested_ratio'])}, λ {row['interaction_strength']:g}"
