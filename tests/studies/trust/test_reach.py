"""How far an edge is true: interactions against naive passes, and tables of known answers."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, sem, spearmanr

import cocurve_lab as cl
from cocurve_studies.findings import Finding
from cocurve_studies.shared import sequence_columns
from cocurve_studies.tables import Table, pick
from cocurve_studies.trust import reach
from cocurve_studies.trust.findings import reach_findings
from helpers.studies import Problem
from helpers.tiny_models import full_logits, masked_by_hand, naive_risk, tiny_double, units_by_hand

OPTIONS = reach.ReachOptions((0.3, 0.7), pairs=3, sizes=(3, 4, 99), sets=4, blocks=3, layers=2)


@pytest.fixture(scope="module")
def table(problem: Problem) -> Table:
    inputs = (problem.model, problem.curvature, problem.texts.report, OPTIONS)
    return reach.edge_reach(*inputs, progress=False)


def members(units: cl.UnitSet, name: str) -> list[int]:
    """The units of a part by its name in the table: a unit, a block (L0.ffn) or a layer (L0)."""
    names = [(unit.name, f"L{unit.layer}.{unit.kind}", f"L{unit.layer}") for unit in units]
    return [number for number, known in enumerate(names) if name in known]


def test_interactions_are_those_of_naive_passes(problem: Problem, table: Table) -> None:
    units, matrix = problem.units, problem.curvature.matrix
    hand, text = units_by_hand(problem.model), problem.texts.report

    def naive(part: list[int]) -> np.ndarray:
        return naive_risk(problem.model, [hand[n] for n in part], text)

    scales = dict.fromkeys(row["scale"] for row in pick(table))
    assert list(scales) == [
        reach.STRONGEST,
        reach.ANY,
        "3 units",
        "4 units",
        "2 blocks",
        "2 layers",
    ]
    for scale in scales:
        row = pick(table, scale=scale)[-1]
        parts = [members(units, name) for name in row["parts"].split(", ")]
        together = [n for part in parts for n in part]
        assert row["units"] == len(together)
        edges = [matrix[u, v] for a, b in combinations(parts, 2) for u in a for v in b]
        assert row["predicted"] == pytest.approx(sum(edges))
        extra = naive(together) - sum(map(naive, parts))
        assert row["interaction"] == pytest.approx(extra.mean(), rel=1e-3, abs=1e-8)
        assert row["interaction_error"] == pytest.approx(sem(extra), rel=1e-2)


def test_what_is_drawn_lies_where_it_should(problem: Problem, table: Table) -> None:
    units, matrix = problem.units, problem.curvature.matrix
    plans = {
        ratio: [set(cl.solve_greedy(problem.curvature, ratio, s).pruned) for s in (0.0, 1.0)]
        for ratio in OPTIONS.ratios
    }
    inside = {p for plan in plans[0.3] for p in combinations(sorted(plan), 2)}
    edges = sorted(matrix[pair] for pair in inside)
    found = sorted(row["predicted"] for row in pick(table, scale=reach.STRONGEST))
    assert found == pytest.approx(sorted([*edges[:3], *edges[3:][-3:]]))
    assert len(pick(table, scale=reach.ANY)) == 6
    for size in (3, 4):  # none of 99: no plan has twice as many
        ratio = next(r for r in plans if min(map(len, plans[r])) >= 2 * size)
        drawn = [row["parts"].split(", ") for row in pick(table, scale=f"{size} units")]
        sets = [{n for name in names for n in members(units, name)} for names in drawn]
        assert [len(s) for s in sets] == [size] * 4
        for number, chosen in enumerate(sets):
            assert chosen <= plans[ratio][number % 2]


def test_the_gap_is_split_as_the_logits_say(problem: Problem, table: Table) -> None:
    """The first set of a size: its four risks from full passes in float64."""
    row, *others = pick(table, scale="3 units")
    assert {other["mostly"] for other in others} == {None}
    model, hand, text = (
        tiny_double(problem.model),
        units_by_hand(problem.model),
        problem.texts.report,
    )
    chosen = [hand[members(problem.units, name)[0]] for name in row["parts"].split(", ")]

    def logits(units: list[Any]) -> torch.Tensor:
        with masked_by_hand(model, units):
            rows = zip(text.input_ids, text.positions, strict=True)
            return torch.cat([full_logits(model, ids[None])[0, p] for ids, p in rows])

    dense = logits([])
    p = dense.softmax(-1)

    def quadratic(shift: torch.Tensor) -> float:
        return float(((p * shift**2).sum(-1) - (p * shift).sum(-1) ** 2).mean() / 2)

    def kl(shift: torch.Tensor) -> float:
        log_q = (dense + shift).log_softmax(-1)
        return float((p * (dense.log_softmax(-1) - log_q)).sum(-1).mean())

    each, joint = [logits([unit]) - dense for unit in chosen], logits(chosen) - dense
    a, b, c, d = quadratic(sum(each)), kl(sum(each)), quadratic(joint), kl(joint)  # type: ignore[arg-type]
    by_h, alone = sum(map(quadratic, each)), sum(map(kl, each))
    expected = {
        "other_text": a - by_h - row["predicted"],
        "expansion": ((b - alone) - (a - by_h) + (d - alone) - (c - by_h)) / 2,
        "adding_up": ((c - a) + (d - b)) / 2,
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-9)
    gap = row["interaction"] - row["predicted"]
    assert sum(row[name] for name in expected) == pytest.approx(gap, rel=1e-3)
    assert row["mostly"] == max(expected, key=lambda name: abs(expected[name]))


# Planted tables -----------------------------------------------------------------------------------
RNG = np.random.default_rng(0)
H = RNG.normal(size=30) * 1e-2


def planted(measured: np.ndarray, scale: str = reach.ANY, rows: int = 4) -> Table:
    """Cases of these measured interactions, with little noise over rows; each part costs 0.05."""
    noise = 1e-5 * RNG.normal(size=(len(measured), rows))
    return [
        {"scale": scale, "predicted": h, "interaction": float(value)}
        | sequence_columns(0.1 + value + noise[n])
        | sequence_columns(np.full(rows, 0.1), "alone")
        for n, (h, value) in enumerate(zip(H, measured, strict=False))
    ]


def test_the_summary_counts_and_correlates() -> None:
    measured = H + RNG.normal(size=30) * 1e-2
    (row,) = pick(reach.reach_summary(planted(measured)))
    assert row["cases"] == 30
    assert row["same_sign"] == np.mean(np.sign(H) == np.sign(measured))
    assert row["spearman"] == pytest.approx(spearmanr(H, measured).statistic)
    assert row["pearson"] == pytest.approx(pearsonr(H, measured).statistic, abs=1e-3)
    assert row["size"] == pytest.approx(np.abs(measured).mean() / np.abs(H).mean(), rel=1e-2)
    assert row["unseen"] == pytest.approx((measured < 0).mean() - (H < 0).mean())
    assert row["factor"] == pytest.approx(1 + measured.mean() / 0.1, rel=1e-3)


def test_errors_are_over_rows_and_over_cases() -> None:
    table = planted(H)
    for row in pick(table):
        row |= sequence_columns(0.1 + RNG.normal(size=4))
    kl = np.array([[row[f"kl_{n}"] for n in range(4)] for row in pick(table)]) / 0.1
    (row,) = pick(reach.reach_summary(table))
    assert row["factor_rows_error"] == pytest.approx(sem(kl.mean(axis=0)))  # it is linear in these
    both = np.hypot(sem(kl.mean(axis=0)), sem(kl.mean(axis=1)))
    assert row["factor_error"] == pytest.approx(both)
    (few,) = pick(reach.reach_summary(table[:5]))
    (one,) = pick(reach.reach_summary(planted(H, rows=1)))
    assert few["factor_error"] is None  # of five cases nothing is known
    assert few["factor_rows_error"] is not None
    assert one["same_sign_error"] is one["same_sign_rows_error"] is None


def test_a_share_of_all_cases_has_an_error() -> None:
    (row,) = pick(reach.reach_summary(planted(H)))
    assert row["same_sign"] == 1
    assert 0.03 < row["same_sign_error"] < 0.1


def verdict(found: list[Finding], words: str) -> bool | None:
    (finding,) = [finding for finding in found if words in finding.claim]
    return finding.agrees


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (H, (True, True, True, True)),
        (-H, (False, False, True, None)),
        (20 * H, (True, True, False, True)),
        (H - 0.05, (None, True, False, False)),
    ],
    ids=["as H says", "the other way", "twenty times", "saturated"],
)
def test_the_verdicts(measured: np.ndarray, expected: tuple[bool | None, ...]) -> None:
    found = reach_findings(planted(measured))
    words = ("the sign", "the larger", "are the extra harm", "sees saturation")
    assert tuple(verdict(found, each) for each in words) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.92, True), (1.1, False)])
def test_pairs_that_saturate_and_pairs_that_do_not(factor: float, expected: bool) -> None:
    found = reach_findings(planted(np.full(30, 0.1 * (factor - 1))))
    assert verdict(found, "0.92 of the sum") is expected
    assert not [f for f in reach_findings(planted(H, "2 layers")) if "0.92" in f.claim]
