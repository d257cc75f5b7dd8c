"""Findings: a sentence, a row, and a verdict that respects the error bar."""

from __future__ import annotations

import math

import pytest

from cocurve_lab.studies.findings import Finding, findings_table, within


@pytest.mark.parametrize(
    ("agrees", "verdict"),
    [(True, "agrees"), (False, "does not agree"), (None, "cannot be told")],
)
def test_a_finding_says_what_was_found(agrees: bool | None, verdict: str) -> None:
    finding = Finding("edges", "edges cut perplexity from 13.3 to 8.1", "Table 3", "2.1", agrees)
    assert str(finding).endswith(f"Here: 2.1. {verdict.capitalize()}.")
    assert "Paper (Table 3): edges cut" in str(finding)
    (row,) = findings_table([finding])
    assert row["agrees"] == verdict
    assert set(row) == {"study", "claim", "where", "ours", "agrees"}


@pytest.mark.parametrize(
    ("ours", "error", "expected"),
    [
        (0.5, 0.1, True),  # the bar reaches from 0.3 to 0.7
        (0.5, 0.3, None),  # from -0.1 on
        (1.5, 0.1, False),
        (1.1, 0.1, None),
        (-0.3, 0.1, False),
    ],
)
def test_a_bar_across_an_end_cannot_tell(ours: float, error: float, expected: bool | None) -> None:
    assert within(ours, error, 0, 1) is expected


def test_open_ends() -> None:
    assert within(3, 1, 0, math.inf) is True
    assert within(-3, 1, 0, math.inf) is False
    assert within(math.nan, 1, 0, math.inf) is None
