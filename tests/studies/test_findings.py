"""A claim is judged by the interval of its number; several numbers must all bear it out."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm, t

from cocurve_studies.findings import (
    ABOVE,
    BELOW,
    NOT_BELOW,
    Claim,
    Finding,
    Findings,
    Measured,
    column_of,
    judged,
    longer,
    nearest,
    strict,
)

CLAIM = Claim("edges", "edges save {what}", "Table 3", (0.0, 1.0))


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (0.5, 0.1, True),  # the bar reaches from 0.3 to 0.7
        (0.5, 0.3, None),  # from -0.1 on
        (1.5, 0.1, False),
        (1.1, 0.1, None),
        (-0.3, 0.1, False),
        (None, 0.1, None),
        (0.5, None, None),
        (math.nan, 0.1, None),
    ],
)
def test_a_bar_across_an_end_cannot_tell(
    value: float | None, error: float | None, expected: bool | None
) -> None:
    assert CLAIM.on(Measured(value, error), what="KL").agrees is expected


def test_no_difference_at_all_is_neither_a_gain_nor_a_loss() -> None:
    for allowed, expected in ((ABOVE, None), (BELOW, None), (NOT_BELOW, True)):
        assert judged(0.0, 0.0, *allowed) is expected
    assert judged(-0.1, 0.0, *ABOVE) is False  # exact, and not equal


def test_few_degrees_of_freedom_ask_for_a_longer_bar() -> None:
    assert longer(2.0, math.inf) == 2.0
    assert longer(2.0, 4) == pytest.approx(t.isf(norm.sf(2.0), 4))
    row = {"x": 2.2, "x_error": 1.0, "x_degrees": 4.0}
    assert column_of(row, "x").judged(ABOVE) is None
    assert column_of(row | {"x_degrees": math.inf}, "x").judged(ABOVE) is True
    assert column_of(row | {"x_degrees": None}, "x").judged(ABOVE) is None  # unknown in part


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 0.4], True),
        ([0.5, 0.05], None),
        ([0.5, -0.5], False),
        ([0.5, -0.11], None),  # 2.2 errors below: by chance, among so many
        ([], None),
    ],
)
def test_several_numbers_must_all_agree(values: list[float], expected: bool | None) -> None:
    claim = Claim("edges", "they help", "Table 3")
    found = claim.on(*(Measured(value, 0.05) for value in values))
    assert found.agrees is expected
    assert strict(1) == pytest.approx(2.0)
    assert norm.sf(strict(4)) == pytest.approx(norm.sf(2.0) / 4)


def test_a_finding_has_the_number_beside_the_claim() -> None:
    found = CLAIM.on(Measured(0.5, 0.1), ours="{} of {what}", what="KL")
    assert found == Finding("edges", "edges save KL", "Table 3", "0.50 ± 0.10 of KL", True)
    page = Findings([found, Finding("x", "<b>", "lab", "1", None, lab=True)])._repr_html_()
    assert ">✓ agrees<" in page
    assert "&lt;b&gt;" in page
    assert page.index("the paper") < page.index("the lab")


def test_the_paper_is_compared_at_its_own_ratio() -> None:
    rows = [{"requested_ratio": ratio} for ratio in (0.1, 0.25, 0.4, 0.25)]
    assert nearest(rows) == [rows[1], rows[3]]
    assert nearest([]) == []
