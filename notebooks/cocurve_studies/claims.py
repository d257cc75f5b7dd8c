"""Claims of the paper as rows: `evaluate` judges each against the rows of a study's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cocurve_lab.base.tables import Row, Table, pick

from .findings import Finding, judged_column, percent, with_error


@dataclass(frozen=True)
class Claim:
    """One claim about one column of a table, with one finding per row that it is about.

    `claim` and `ours` are templates: {plan} is the ratio and lambda of the row, {change} the value
    with its error, and any other name is a column.

    Attributes:
        study, claim, where: as in `Finding`.
        ours: the measurement in words.
        value: the column that the claim is about, with its error in `<value>_error`.
        holds: the range in which the claim holds.
        rows: columns and their values that select the rows.
        needs: columns without which (None) the row's words and verdict are these instead.
    """

    study: str
    claim: str
    where: str
    ours: str
    value: str
    holds: tuple[float, float]
    rows: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, tuple[str, bool | None]] = field(default_factory=dict)


def evaluate(claim: Claim, table: Table) -> list[Finding]:
    """Return the findings on a claim, one per row of the table that it is about."""
    found = []
    for row in pick(table, **claim.rows):
        ours, verdict = claim.ours, judged_column(row, claim.value, *claim.holds)
        for name, instead in claim.needs.items():
            if row[name] is None:
                ours, verdict = instead
        words = {**row, "plan": name_plan(row), "change": with_error(row, claim.value)}
        text = claim.claim.format(**words), claim.where, ours.format(**words)
        found.append(Finding(claim.study, *text, verdict))
    return found


def name_plan(row: Row) -> str:
    """Name the plan of a row by its ratio and lambda, "20%, λ 1"."""
    return f"{percent(row['requested_ratio'])}, λ {row['interaction_strength']:g}"
