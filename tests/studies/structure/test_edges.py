"""Edge ablations: every variant against its own solve, paired differences, rows without a plan."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_studies.structure.edges import EdgeOptions, edge_study
from cocurve_studies.tables import Table, pick
from helpers.tiny_models import GROUPS, naive_risk, tiny_model, tiny_text, units_by_hand

MODEL = tiny_model()
HELD_OUT = tiny_text(3, 16, seed=7)
CURVATURE = cl.estimate_curvature(
    MODEL, cl.enumerate_units(MODEL, GROUPS), tiny_text(4, 16), 97, progress=False
)
# attention is 38 % of the removable cost, so 0.5 is beyond head-only pruning
OPTIONS = EdgeOptions(ratios=(0.2, 0.5))


@pytest.fixture(scope="module")
def table() -> Table:
    return edge_study(MODEL, CURVATURE, HELD_OUT, OPTIONS, progress=False)


def row_of(table: Table, variant: str, ratio: float = 0.2, **more: Any) -> dict[str, Any]:
    return pick(table, variant=variant, requested_ratio=ratio, **more)[0]


def test_every_axis_is_there_at_every_ratio(table: Table) -> None:
    counts = {"structure": 9, "reach": 3, "sign": 4, "kinds": 3, "rule": 2, "lambda": 3}
    for ratio in OPTIONS.ratios:
        assert Counter(row["axis"] for row in pick(table, requested_ratio=ratio)) == counts


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("diagonal", {"structure": "diagonal"}),
        ("cross block, no diagonal", {"structure": "cross", "keep_diagonal": False}),
        ("within layer", {"reach": "within_layer"}),
        ("absolute", {"sign": "absolute"}),
    ],
)
def test_a_variant_is_solved_on_its_own_h_and_priced_on_the_full_one(
    table: Table, variant: str, changes: dict[str, Any]
) -> None:
    row = row_of(table, variant)
    solved = cl.solve_greedy(cl.edge_variant(CURVATURE, **changes), 0.2)
    full = cl.solve_greedy(CURVATURE, 0.2)
    assert row["predicted_risk"] == pytest.approx(CURVATURE.risk(solved.pruned))
    assert row["realized_ratio"] == solved.realized_ratio
    assert row["units"] == len(solved)
    assert row["common"] == len(set(solved.pruned) & set(full.pruned))
    mine, other = (
        naive_risk(MODEL, [units_by_hand(MODEL)[u] for u in plan.pruned], HELD_OUT)
        for plan in (solved, full)
    )
    assert row["measured"] == pytest.approx(mine.mean(), rel=1e-4)
    assert row["difference"] == pytest.approx((mine - other).mean(), abs=1e-5)
    error = (mine - other).std(ddof=1) / math.sqrt(3)
    assert row["difference_error"] == pytest.approx(error, abs=1e-5)


def test_the_method_differs_from_itself_by_nothing(table: Table) -> None:
    same = ("full H", "all layers", "signed", "correlation clipped", "joint", "per cost")
    for name in (*same, "lambda 1"):
        for row in pick(table, variant=name):
            assert (row["difference"], row["difference_error"]) == (0, 0)
            assert (row["perplexity_difference"], row["perplexity_difference_error"]) == (0, 0)
            assert row["common"] == row["units"]
    diagonal, none = row_of(table, "diagonal"), row_of(table, "lambda 0")
    assert diagonal["measured"] == none["measured"]
    assert any(row["difference"] not in (None, 0) for row in pick(table))


def test_perplexity_comes_from_the_loss_on_the_text(table: Table) -> None:
    plans = [cl.solve_greedy(CURVATURE, 0.2, strength) for strength in (0.0, 1.0)]
    measured = cl.measure_plans(MODEL, plans, HELD_OUT, progress=False)
    assert measured.nll is not None
    assert measured.dense_nll is not None
    row = row_of(table, "lambda 0")
    assert row["perplexity"] == pytest.approx(math.exp(measured.nll[0].mean()))
    assert row["dense_perplexity"] == pytest.approx(math.exp(measured.dense_nll.mean()))
    spread = (measured.nll[0] - measured.nll[1]).std(ddof=1) / math.sqrt(3)
    # other plans shared its batch: losses of 5 rounded to 1e-7, whose differences spread over 0.03
    assert row["perplexity_difference_error"] == pytest.approx(
        spread * math.exp(measured.nll[0].mean()), rel=1e-5
    )


def test_a_variant_without_a_plan_keeps_its_row_and_its_reason(table: Table) -> None:
    row = row_of(table, "head-only", 0.5)
    assert row["measured"] is None
    assert row["difference"] is None
    assert "ratio" in row["note"]
    assert row_of(table, "head-only", 0.2)["note"] == ""


def test_a_ratio_no_method_reaches_leaves_one_row() -> None:
    guards = cl.Guards(layer_cap=0.5)
    both, only = (
        edge_study(MODEL, CURVATURE, HELD_OUT, EdgeOptions(ratios, guards=guards), progress=False)
        for ratios in ((0.1, 0.9), (0.9,))
    )
    (row,) = pick(only)
    assert [row["note"] for row in pick(both, requested_ratio=0.9)] == [row["note"]]
    assert (row["axis"], row["variant"], row["measured"]) == ("structure", "full H", None)
    assert row["note"]
    assert set(row) <= set(both)
