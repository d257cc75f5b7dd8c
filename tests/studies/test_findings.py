"""A claim is judged by the interval of its number; several numbers must all bear it out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, t

import cocurve_lab as cl
from cocurve_studies.draws import Redrawn
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
from cocurve_studies.shared import resampled
from cocurve_studies.structure.edges import edge_study
from cocurve_studies.tables import (
    Rows,
    Table,
    kept_rows,
    kept_table,
    pick,
)
from cocurve_studies.trust.choices import NONE, diagonal_study
from helpers.studies import QUIET, Problem, forbidden

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
    assert ">✓ agrees<" in Findings([found])._repr_html_()


def test_the_paper_is_compared_at_its_own_ratio() -> None:
    rows = [{"requested_ratio": ratio} for ratio in (0.1, 0.25, 0.4, 0.25)]
    assert nearest(rows) == [rows[1], rows[3]]
    assert nearest([]) == []


def test_two_variances_are_added_and_the_draws_of_one_h_are_not_averaged() -> None:
    kl = {"a": np.array([0.3, 0.5, 0.1, 0.3]), "b": np.array([0.1, 0.1, 0.1, 0.1])}
    drawn = Redrawn(4, kl, {}, rows=10, groups=5)
    row = {"difference": 0.2} | drawn.columns("difference", 0.05, "a", "b")
    over_draws = np.var([0.2, 0.4, 0.0, 0.2], ddof=1) * 5 / 4
    assert row["difference_draws_error"] == pytest.approx(math.sqrt(over_draws))
    assert row["difference_rows_error"] == 0.05
    assert row["difference_error"] == pytest.approx(math.sqrt(0.05**2 + over_draws))
    doubt = 0.05**4 / 9 + over_draws**2 * (1 / 3 + 1 / 4)
    assert row["difference_degrees"] == pytest.approx((0.05**2 + over_draws) ** 2 / doubt)
    assert row["difference_draws"] == 4
    assert Redrawn().columns("x", 0.05, "a", "b") == {"x_error": 0.05}


def test_an_error_that_is_unknown_in_part_gives_no_verdict() -> None:
    nan = np.array([math.nan, math.nan, 1.0])  # greedy stalled in two of the three draws
    drawn = Redrawn(3, {"a": nan, "b": nan}, {}, rows=4, groups=4)
    for pair in (("a", "b"), ("stopped", "b")):
        row = {"d": 0.2} | drawn.columns("d", 0.01, *pair)
        assert (row["d_error"], row["d_draws_error"]) == (0.01, None)
        assert column_of(row, "d").judged(ABOVE) is None


def ends(h: cl.Curvature, problem: Problem) -> float:
    """KL(lambda 0) - KL(lambda 1) of one H."""
    plans = [cl.solve_greedy(h, 0.4, strength) for strength in (0.0, 1.0)]
    table = cl.measure_plans(problem.model, plans, problem.texts.report, progress=False)
    return table.paired(0, 1)[0]


def run(name: str, p: Problem, draws: int, cache: Path | None) -> Table:
    if name == "edges":
        how: dict[str, Any] = {"draws": draws, "cache": cache, "progress": False}
        return edge_study(p.model, p.curvature, p.texts.report, (0.4,), **how)
    how = {"options": QUIET, "draws": draws, "cache": cache}
    return diagonal_study(p.model, p.curvature, p.texts, (0.4,), **how)


@pytest.mark.parametrize("name", ["edges", "diagonal"])
def test_every_difference_carries_both_errors(name: str, problem: Problem, tmp_path: Path) -> None:
    plain, table = (pick(run(name, problem, draws, tmp_path)) for draws in (0, 3))
    column = "difference" if name == "edges" else "edge_benefit"
    wanted = {"variant": "diagonal"} if name == "edges" else {"search": NONE}
    (before,), (after,) = pick(plain, **wanted), pick(table, **wanted)
    parts = [after[f"{column}_{part}_error"] for part in ("rows", "draws")]
    assert after[f"{column}_error"] == pytest.approx(math.hypot(*parts))
    assert parts[0] == pytest.approx(before[f"{column}_error"])
    gaps = [ends(h, problem) for h in resampled(problem.curvature, 3)]
    assert parts[1] == pytest.approx(float(np.std(gaps, ddof=1)) * math.sqrt(4 / 3), rel=1e-3)
    with forbidden(problem.model):  # the table is kept
        assert pick(run(name, problem, 3, tmp_path)) == table
    with pytest.raises(cl.InputError, match="draws is 1"):
        run(name, problem, 1, tmp_path)


ROWS = [
    {"ratio": np.float64(0.2), "units": np.int64(3), "name": "a", "left": None, "best": np.True_},
    {"ratio": math.nan, "units": 4, "name": "b", "left": math.inf, "best": False},
]


def never() -> Rows:
    raise AssertionError("it was computed again")


def test_a_table_is_computed_once_and_read_back_whole(tmp_path: Path) -> None:
    first = kept_rows(tmp_path, "edges", {"seed": 0}, lambda: ROWS)
    again = kept_rows(tmp_path, "edges", {"seed": 0}, never)
    assert str(first) == str(again)  # NaN is not equal to itself
    assert [type(again[0][name]) for name in ("ratio", "units", "best")] == [float, int, bool]
    assert again[0]["left"] is None
    assert math.isinf(again[1]["left"])
    assert kept_table(tmp_path, "edges", {"seed": 0}, never)["units"].tolist() == [3, 4]
    for name, seed in (("edges", 1), ("bridges", 0)):  # files of their own
        with pytest.raises(AssertionError):
            kept_rows(tmp_path, name, {"seed": seed}, never)
    with pytest.raises(AssertionError):  # nothing is kept without a folder
        kept_rows(None, "edges", {"seed": 0}, never)
