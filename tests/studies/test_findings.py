"""Findings: a sentence, a row, and a verdict that respects the error bar."""

from __future__ import annotations

import math
from functools import partial

import pytest
from IPython.lib.pretty import pretty

from cocurve_studies.findings import (
    ABOVE,
    BELOW,
    NOT_ABOVE,
    NOT_BELOW,
    Finding,
    Findings,
    Judge,
    Verdict,
    every,
    judged,
    strict,
    told,
    within,
)


@pytest.mark.parametrize(
    ("agrees", "verdict"),
    [(True, "agrees"), (False, "does not agree"), (None, "cannot be told")],
)
def test_a_finding_says_what_was_found(agrees: bool | None, verdict: str) -> None:
    finding = Finding("edges", "edges cut perplexity from 13.3 to 8.1", "Table 3", "2.1", agrees)
    assert str(finding).endswith(f"Here: 2.1. {verdict.capitalize()}.")
    assert "Paper (Table 3): edges cut" in str(finding)
    page = Findings([finding])._repr_html_()
    sign = {True: "✓", False: "✗", None: "?"}[agrees]
    assert f">{sign} {verdict}<" in page
    assert all(f">{text}<" in page for text in ("edges", "Table 3", "2.1"))


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


@pytest.mark.parametrize("value", [None, float("nan")])
def test_an_unknown_number_has_no_verdict(value: float | None) -> None:
    assert judged(value, 0.1, *ABOVE) is None
    assert judged(1.0, value, *ABOVE) is None


def test_no_difference_at_all_is_neither_a_gain_nor_a_loss() -> None:
    for allowed, expected in ((ABOVE, None), (BELOW, None), (NOT_BELOW, True), (NOT_ABOVE, True)):
        assert judged(0.0, 0.0, *allowed) is expected
    assert judged(-0.1, 0.0, *ABOVE) is False  # exact, and not equal


# One verdict of several ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([True, True], True),
        ([True, None], None),
        ([False, None], False),
        ([True, False], False),  # a contradiction is a failure: the claim is about every number
        ([None, False, True], False),
        ([None], None),
        ([], None),
    ],
)
def test_one_failure_is_enough(verdicts: list[Verdict], expected: Verdict) -> None:
    assert every(lambda _, told=told: told for told in verdicts) is expected


def judges(*values: float) -> list[Judge]:
    return [partial(judged, value, 1.0, *ABOVE) for value in values]


def test_a_failure_among_many_numbers_must_be_clear() -> None:
    assert every(judges(-2.1)) is False
    assert every(judges(3.0, -2.1)) is None  # of two numbers one is beyond two errors more often
    assert every(judges(3.0, -2.3)) is False
    assert every(judges(*[3.0] * 5, -2.3)) is None
    assert every(judges(*[3.0] * 5, -2.7)) is False
    assert every(judges(*[2.1] * 6)) is True  # all at once beyond two errors is rarer, not commoner


def test_more_comparisons_ask_for_more_standard_errors() -> None:
    assert strict(1) == pytest.approx(2.0)
    assert strict(0) == pytest.approx(2.0)
    # the chance that any of six normal values exceeds it by luck is at most that of one at two
    assert 6 * math.erfc(strict(6) / math.sqrt(2)) == pytest.approx(math.erfc(math.sqrt(2)))


# Words --------------------------------------------------------------------------------------------


def test_findings_are_a_table_in_a_notebook_and_lines_elsewhere() -> None:
    found = Findings([Finding("s", "a < b & c", "Table 1", "0.1 ± 0.2", None)])
    assert ">a &lt; b &amp; c<" in found._repr_html_()
    assert found._repr_html_().count("<tr>") == 2  # the heading and one row
    assert pretty(found) == repr(found) == told(found)
    assert Findings()._repr_html_().count("<tr>") == 1


def test_claims_of_the_lab_stand_in_a_table_of_their_own() -> None:
    paper, lab = Finding("s", "one", "w", "o", True), Finding("s", "two", "w", "o", False, lab=True)
    assert str(lab).startswith("Lab (w): two.")
    first, second = Findings([lab, paper])._repr_html_().split("</table>")[:2]
    assert ">the paper<" in first
    assert ">the lab<" in second
    assert ">one<" in first
    assert ">two<" not in first
    assert ">two<" in second
    assert ">the paper<" not in Findings([lab])._repr_html_()


def test_findings_are_told_in_lines_that_fit_and_lose_no_word() -> None:
    found = [Finding("s", "claim " * 30, "here", "ours", None)] * 2
    lines = told(found, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("- Paper (here)") for line in lines) == 2
    assert " ".join(" ".join(lines).split()) == " ".join(f"- {found[0]} - {found[1]}".split())
