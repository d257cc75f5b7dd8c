"""Findings on planted tables: what is claimed, what is written, and every verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cocurve_studies.findings import Finding
from cocurve_studies.structure import findings
from cocurve_studies.structure.bridges import bridge_edges, bridge_table
from cocurve_studies.structure.geometry import block_table, budget_table
from cocurve_studies.structure.propositions import proposition_table
from cocurve_studies.tables import Table, pick
from helpers.problems import make_units, random_curvature


def one(given: list[Finding], words: str) -> Finding:
    (found,) = [finding for finding in given if words in finding.claim]
    return found


# Rules of a verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [(-3, 1, True), (-1.5, 1, None), (3, 1, False), (0, 0, None), (-1, math.nan, None)],
)
def test_below_zero(value: float, error: float, expected: bool | None) -> None:
    assert findings.below_zero(value, error) is expected


# Bridges ------------------------------------------------------------------------------------------


def threshold_row(**changes: Any) -> dict[str, Any]:
    return {
        "saliency_quantile": 0.5,
        "connectivity_quantile": 0.5,
        "units": 100,
        "bridges": 11,
        "correlation": 0.3,
        "correlation_error": 0.05,
        "rank_correlation": 0.4,
        "pruned_by_diagonal": 9,
        "pruned_by_edges": 1,
    } | changes


def edge_row(to_saliency: float | None, cross: bool, rank: int = 1) -> dict[str, Any]:
    return {"rank": rank, "to_saliency": to_saliency, "cross_module": cross}


def test_bridges_as_in_the_paper_agree() -> None:
    low = threshold_row(saliency_quantile=0.2, bridges=0, pruned_by_diagonal=0, pruned_by_edges=0)
    table = [low, threshold_row(), threshold_row(saliency_quantile=0.7, bridges=40)]
    edges = [edge_row(0.7 + 0.01 * i, True) for i in range(8)]
    found = findings.bridge_findings(table, [*edges, edge_row(0.1, False, rank=2)])
    assert one(found, "87 of 768").agrees is None  # it gives no thresholds
    assert one(found, "87 of 768").ours == "11 of 100 at median and median, 0% to 40% by threshold"
    assert one(found, "decoupled").agrees is True
    assert one(found, "decoupled").ours.startswith("0.30 ± 0.05")
    assert one(found, "diagonal pruning").agrees is True
    assert "removes more 2 times, fewer 0 times" in one(found, "diagonal pruning").ours
    assert one(found, "comparable to its saliency").agrees is True
    assert one(found, "comparable to its saliency").ours.startswith("0.73 ± 0.01")
    assert one(found, "other module").agrees is True
    assert one(found, "other module").ours == "8 of 8 strongest edges do"


def test_bridges_unlike_the_paper_do_not() -> None:
    table = [threshold_row(bridges=1, correlation=0.9, pruned_by_diagonal=1, pruned_by_edges=9)]
    edges = [edge_row(0.1 + 0.01 * i, False) for i in range(8)]
    found = findings.bridge_findings(table, edges)
    assert [finding.agrees for finding in found] == [False] * 5


@pytest.mark.parametrize("counts", [(0, 0), (4, 4), (5, 1)], ids=["none", "as many", "few"])
def test_bridges_that_few_plans_remove_tell_nothing(counts: tuple[int, int]) -> None:
    diagonal, edges = counts
    table = [threshold_row(pruned_by_diagonal=diagonal, pruned_by_edges=edges)]
    found = findings.bridge_findings(table, [])
    assert one(found, "diagonal pruning").agrees is None


def test_without_bridges_or_groups_nothing_is_claimed() -> None:
    none = {"bridges": 0, "pruned_by_diagonal": 0, "pruned_by_edges": 0}
    table = [threshold_row(correlation_error=None, **none)]
    found = findings.bridge_findings(table, [edge_row(None, True)])
    assert [f.agrees for f in found] == [False, None, None, None, None]  # 0 % is not 11 %


# Causal test --------------------------------------------------------------------------------------


def arm_row(outcome: str, difference: float, error: float = 0.01, **changes: Any) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "family": "all",
        "fill": "greedy",
        "seed": None,
        "seeds": 1,
        "seed_spread": None,
        "pairs": 7,
        "difference": difference,
        "difference_error": error,
        "predicted_difference": 0.002,
    } | changes


def test_a_planted_causal_effect_is_told() -> None:
    table = [
        arm_row("accuracy", -0.105),
        arm_row("accuracy", -0.075, family="code"),
        arm_row("accuracy", -0.09, fill="random", seeds=4, seed_spread=0.02),
        arm_row("accuracy", 0.9, fill="random", seed=3),  # a single seed is not a test of its own
        arm_row("perplexity", -2.1, 0.5),
        arm_row("kl", 0.02, 0.005),
    ]
    found = findings.causal_findings(table)
    assert [finding.agrees for finding in found] == [True] * 5
    assert one(found, "MMLU").ours == "accuracy: -0.105 ± 0.010 (greedy, 7 pairs)"
    other = one(found, "another fill").ours
    assert other == f"accuracy: -0.090 ± {math.hypot(0.01, 0.01):.3f} (random, 7 pairs)"
    assert "H predicts +0.0020 to +0.0020" in one(found, "drives the damage").ours


def test_a_difference_within_its_error_or_its_seeds_cannot_be_told() -> None:
    found = findings.causal_findings(
        [
            arm_row("accuracy", -0.015),
            arm_row("accuracy", 0.0, 0.0, family="code"),  # no answer changed
            arm_row("accuracy", -0.09, fill="random", seeds=4, seed_spread=0.2),
            arm_row("perplexity", 0.5, 0.1),
            arm_row("kl", -0.03),
        ]
    )
    assert [finding.agrees for finding in found] == [None, None, None, False, False]


def test_two_thresholds_ask_for_more_than_two_errors() -> None:
    rows = [arm_row("accuracy", -0.021), arm_row("accuracy", -0.001)]
    assert one(findings.causal_findings(rows), "MMLU").agrees is None
    assert one(findings.causal_findings(rows[:1]), "MMLU").agrees is True
    for worst, expected in ((0.021, None), (0.03, False)):  # against the claim: 2.28 errors of two
        against = [arm_row("accuracy", -0.1), arm_row("accuracy", worst)]
        assert one(findings.causal_findings(against), "MMLU").agrees is expected


def test_arms_that_cannot_be_made_leave_no_verdict() -> None:
    found = findings.causal_findings([arm_row("kl", 0.0) | {"outcome": None, "fill": "greedy"}])
    assert {finding.agrees for finding in found} == {None}
    assert "no arms could be measured" in found[0].ours


# Edge variants ------------------------------------------------------------------------------------

PAPER = {  # perplexities of its tables, its 8B
    "full H": 12.91,
    "diagonal": 13.08,
    "within module": 15.01,
    "cross block, no diagonal": 2531.0,
    "ffn block, no diagonal": 924.0,
    "within layer": 12.21,
    "adjacent layers": 11.84,
    "clipped": 12.91,
    "absolute": 12.91,
    "head-only": 1526.0,
    "FFN-only": 14.0,
    "plain": 14.0,
    "cross block": 12.9,
    "ffn block": 12.9,
}


def variants(values: dict[str, float], ratio: float = 0.2, error: float = 0.001) -> Table:
    return [
        {
            "variant": name,
            "requested_ratio": ratio,
            "measured": 0.1,
            "perplexity": value,
            "perplexity_difference": value - values["full H"],
            "perplexity_difference_error": 0.0 if value == values["full H"] else error,
        }
        for name, value in values.items()
    ]


def test_the_papers_own_table_agrees_with_the_paper() -> None:
    found = findings.edge_findings(variants(PAPER))
    isolated = one(found, "mis-ranks")
    assert isolated.agrees is False  # with the diagonal kept nothing collapses in this table
    assert {f.agrees for f in found if f is not isolated} == {True}
    assert one(found, "beats the diagonal").ours == (
        "perplexity diagonal - full H: +0.17 ± 0.001 at 20%"
    )
    assert "+1.93 ± 0.002" in one(found, "than without any edge").ours  # errors add up, at most


def test_the_opposite_table_disagrees() -> None:
    turned = dict.fromkeys(PAPER, 5.0) | {"full H": 12.91} | {"diagonal": 6.0}
    found = findings.edge_findings(variants(turned))
    assert {finding.agrees for finding in found} == {False}


def test_the_verdict_is_at_the_papers_ratio_and_the_text_has_all() -> None:
    table = variants(PAPER | {"diagonal": 10.0}, 0.5) + variants(PAPER, 0.25)
    finding = one(findings.edge_findings(table), "beats the diagonal")
    assert finding.agrees is True
    assert finding.ours.endswith("-2.91 ± 0.001 at 50%, +0.17 ± 0.001 at 25%")


def test_variants_without_a_plan_and_equal_plans() -> None:
    table = variants(PAPER | {"diagonal": 12.91})
    for row in pick(table):
        if row["variant"] in ("head-only", "cross block, no diagonal", "ffn block, no diagonal"):
            row["measured"] = None
    found = findings.edge_findings(table)
    assert one(found, "beats the diagonal").agrees is None  # the very same plan says nothing
    assert one(found, "head-only").agrees is None
    assert "no plan at 20%" in one(found, "head-only").ours
    assert one(found, "collapses the model").agrees is None
    assert one(found, "collapses the model").ours.endswith("no plan")


# Structure ----------------------------------------------------------------------------------------


def block_rows(
    attention: float, cross: float, ffn: float, error: float | None, noise: float | None = None
) -> Table:
    values = {"attention": attention, "cross": cross, "ffn": ffn}
    return [
        {"block": name, "reach": "all", "mean_absolute": value, "mean_absolute_error": error}
        | {"corrected": None if noise is None else value - noise}
        for name, value in values.items()
    ]


def budget_rows(early: tuple[float, float], late: tuple[float, float]) -> Table:
    """(attention, ffn) shares of four layers, at lambda 1; nonsense at lambda 0."""
    rows = []
    for layer, pair in enumerate((early, early, late, late)):
        for kind, share in zip(("attention", "ffn"), pair, strict=True):
            row = {"layer": layer, "kind": kind, "share_error": 0.01, "note": ""}
            rows += [row | {"interaction_strength": 1.0, "share": share}]
            rows += [row | {"interaction_strength": 0.0, "share": 1 - share}]
    return rows


def test_blocks_and_budgets() -> None:
    found = findings.structure_findings(
        block_rows(0.10, 0.086, 0.07, 0.001), budget_rows((0.1, 0.4), (0.3, 0.2))
    )
    assert [finding.agrees for finding in found] == [True] * 4
    assert "cross over inside 1.01" in found[0].ours
    assert "λ = 1: ffn 40.0%, attention 10.0%, difference ± at most 2.0%" in found[2].ours
    found = findings.structure_findings(
        block_rows(0.10, 0.01, 0.2, 0.001), budget_rows((0.4, 0.1), (0.2, 0.3))
    )
    assert [finding.agrees for finding in found] == [False] * 4
    found = findings.structure_findings(
        block_rows(0.10, 0.086, 0.07, None), budget_rows((0.1, 0.11), (0.2, 0.2))
    )
    assert [finding.agrees for finding in found] == [None] * 4
    assert findings.structure_findings([], [{"note": "out of reach"}]) == []
    (_, redundancy) = findings.structure_findings(block_rows(0.1, 0.1, 0.11, 0.001, 0.02), [])
    assert redundancy.ours == "0.090 ± 0.001, with sampling noise 0.110"
    assert redundancy.agrees is True


def proposition(quantity: str, value: float, **changes: Any) -> dict[str, Any]:
    row = {"proposition": "", "quantity": quantity, "value": value, "value_error": 0.01}
    row |= dict.fromkeys(("requested_ratio", "interaction_strength", "units", "reference", "holds"))
    return row | changes


def planted(balance: float, holds: bool, share: float) -> Table:
    mean, plan = "edge over diagonal, by the mean correlation", {"requested_ratio": 0.2}
    full = plan | {"interaction_strength": 1.0}
    return [
        proposition("eigenvalue", -1.0, proposition="gram", holds=holds),
        proposition(mean, balance, reference=1.0, **plan),
        proposition("over", 0.01, proposition="overshoot", reference=0.02, holds=holds, **full),
        proposition("share of |H| off the diagonal", share),
        proposition("share of positive edges", share, **full),
        proposition(
            "share of positive edges", 1 - share, requested_ratio=0.5, interaction_strength=1.0
        ),
        proposition(
            "share of positive edges", 1 - share, requested_ratio=0.2, interaction_strength=0.0
        ),
        proposition("single-unit KL CV, FFN", share / 10),
    ]


def test_propositions() -> None:
    found = findings.proposition_findings(planted(1.4, True, 0.95))
    assert [f.agrees for f in found] == [True, True, True, True, True, None]  # 0.095 ± 0.01
    assert "1.40 for 1.00" in one(found, "2 |S|").ours
    found = findings.proposition_findings(planted(2.4, False, 0.2))
    assert [finding.agrees for finding in found] == [False] * 6
    assert one(findings.proposition_findings(planted(1.99, True, 0.9)), "2 |S|").agrees is None


def test_tables_of_the_studies_themselves_are_read() -> None:
    curvature = random_curvature(make_units(4, 2, 4), 1, shared=1.0, groups=6)
    found = findings.bridge_findings(bridge_table(curvature), bridge_edges(curvature))
    found += findings.structure_findings(block_table(curvature), budget_table(curvature, 0.3))
    found += findings.proposition_findings(proposition_table(curvature, (0.1, 0.3)))
    assert len(found) == 5 + 4 + 7
    assert one(found, "Gram matrix").agrees is True
    assert one(found, "overshoots").agrees is True
    assert "nan" not in " ".join(finding.ours for finding in found)
