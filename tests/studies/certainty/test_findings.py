"""Findings on certainty: verdicts on planted tables, by their error bars."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.gate import Gate
from cocurve_lab.extensions.analysis.stability import Convergence, Stability
from cocurve_studies.certainty.findings import (
    convergence_finding,
    coverage_findings,
    redundancy_finding,
    sensitivity_findings,
    stability_finding,
)
from cocurve_studies.findings import Finding
from cocurve_studies.tables import Table, pick
from helpers.problems import make_units, random_curvature

UNITS = make_units()


def gate(value: float, error: float, corrected: float) -> Gate:
    rest: dict[str, Any] = {"diagonal_cv": {}, "edge_to_diagonal": 1.0, "ratio": 0.2}
    rest |= {"edge_to_diagonal_measured": 1.0, "band": "low", "recommended": 1.0}
    return Gate(value, 0.0, corrected, redundancy_error=error, **rest)


@pytest.mark.parametrize(
    ("found", "groups", "verdict"),
    [
        (gate(0.05, 0.01, 0.04), 16, True),
        (gate(0.30, 0.01, 0.29), 16, True),
        (gate(0.11, 0.02, 0.10), 16, None),  # the interval reaches across 0.12
        (gate(0.125, 0.002, 0.085), 16, None),  # noise alone lifts it across
        (gate(0.05, 0.01, 0.04), 8, None),
    ],
    ids=["below", "above", "across", "noise", "few groups"],
)
def test_redundancy_is_told_apart_from_the_threshold(
    found: Gate, groups: int, verdict: bool | None
) -> None:
    finding = redundancy_finding(found, groups)
    assert finding.agrees is verdict
    low, high = found.interval
    assert f"{low:.3f} to {high:.3f}" in finding.ours
    assert f"halves of the text) {found.corrected:.3f}" in finding.ours


def coverage_row(**changes: Any) -> dict[str, Any]:
    row = {"statistic": "edges", "size": 16, "groups": 16, "coverage": 0.94, "coverage_error": 0.02}
    return row | {"confidence": 0.95} | changes


@pytest.mark.parametrize(
    ("share", "error", "verdict"),
    [
        (0.94, 0.02, True),
        (0.85, 0.02, False),
        (1.0, 0.02, False),  # intervals longer than they say
        (0.90, 0.05, None),  # too few draws to see a shortfall
        (0.50, 0.05, False),
    ],
)
def test_coverage_verdicts(share: float, error: float, verdict: bool | None) -> None:
    (finding,) = coverage_findings([coverage_row(coverage=share, coverage_error=error)])
    assert finding.agrees is verdict


def test_coverage_is_judged_at_the_most_groups() -> None:
    table = [
        coverage_row(groups=4, coverage=0.2),
        coverage_row(),
        coverage_row(statistic="saliency", coverage=0.8),
    ]
    found = coverage_findings(table)
    assert [finding.agrees for finding in found] == [True, False]
    assert "16 groups" in found[0].ours
    assert found[1].ours.startswith("saliency: 80.0% ± 2.0%")


def test_stability_by_the_draws() -> None:
    plan = cl.solve_greedy(random_curvature(UNITS, groups=16), 0.2)

    def verdict(overlaps: list[float], groups: int = 16) -> bool | None:
        frequency = np.zeros(len(UNITS))
        draws = np.array(overlaps)
        return stability_finding(Stability(plan, frequency, draws, len(draws), 0, groups)).agrees

    assert verdict([0.95] * 40) is True
    assert verdict([0.5, 0.6, 0.7] * 20) is False
    assert verdict([0.5, 0.95] * 20) is None
    assert verdict([0.95] * 40, groups=8) is None
    assert verdict([]) is None  # greedy stalled in all draws


@pytest.mark.parametrize(
    ("converged", "groups", "rows", "verdict"),
    [
        (True, 16, 64, True),
        (False, 16, 128, False),
        (False, 16, 64, None),  # with the paper's 128 rows it might be
        (False, 8, 128, None),
    ],
)
def test_convergence(converged: bool, groups: int, rows: int, verdict: bool | None) -> None:
    readout = Convergence(converged, 1.0, 0.0, 0.0, 0.0, 1.0, groups, 0.1, "Said so.")
    finding = convergence_finding(readout, rows)
    assert finding.agrees is verdict
    assert finding.ours == f"{rows} rows: Said so"


def build(knob: str, value: Any, base: bool = False, **changes: Any) -> dict[str, Any]:
    row = {"knob": knob, "value": value, "is_base": base, "interaction_strength": 1.0}
    row |= {"kl": 0.1, "perplexity": 2.0, "overlap": 1.0 if base else 0.5}
    row |= {"difference": 0.0, "difference_error": 0.001, "matrix_distance": 0.0 if base else 0.5}
    return row | changes


def sensitivity(spread: float = 0.005, largest: float = 2.02, source: float = 2.01) -> Table:
    """Knobs whose effect on perplexity is known; seeds with the given relative spread."""
    seeds = [2.0 * (1 + spread * step) for step in (0, math.sqrt(2), -math.sqrt(2), 0)]
    table = [
        build("top_r", 256, True),
        build("top_r", 512, matrix_distance=0.01),
        build("top_r", 128, matrix_distance=0.3),  # below the base: not what is claimed
        build("rows", 16, True),
        build("rows", 64, perplexity=largest),
        build("source", "mixed", True),
        build("source", "code", perplexity=source, difference=0.02),
        build("source", "near", perplexity=2.001),
    ]
    table += [build("seed", n, n == 0, perplexity=value) for n, value in enumerate(seeds)]
    # another lambda, where everything is worse
    worse = {"interaction_strength": 0.0, "perplexity": 9.0, "matrix_distance": 0.9}
    return table + [row | worse for row in pick(table) if row["is_base"] or row["value"] == 512]


def found(table: Table, **given: Any) -> list[Finding]:
    return sensitivity_findings(table, **given)


def test_sensitivity_that_agrees() -> None:
    rows, top_r, matrix, spread, overlap, source = found(sensitivity())
    assert rows.ours.startswith("1.0% ± ")
    assert "over 16 to 64" in rows.ours
    assert top_r.ours.startswith("0.0% ± ")
    assert matrix.ours == "H moves by 1.0% in Frobenius norm; other text moves it by 50%"
    assert source.ours.startswith("code: +0.5% ± ")
    assert [f.agrees for f in (rows, top_r, matrix, source)] == [True] * 4
    std = np.std([0, math.sqrt(2), -math.sqrt(2), 0], ddof=1) * 0.005
    assert spread.ours.startswith(f"{std:.1%} ± {std / math.sqrt(6):.1%} over 4 draws")
    assert spread.agrees is True
    assert overlap.agrees is False  # half of the units


def test_sensitivity_that_does_not() -> None:
    rows, *_, source = found(sensitivity(largest=2.4, source=2.3))
    assert (rows.agrees, source.agrees) == (False, False)


def test_the_spread_between_builds_is_the_error_bar() -> None:
    rows, top_r, *_, source = found(sensitivity(spread=0.05))
    assert (rows.agrees, top_r.agrees, source.agrees) == (None, None, None)
    without = [row for row in sensitivity() if row["knob"] != "seed"]
    rows, top_r, matrix, source = found(without)
    assert (rows.agrees, top_r.agrees, source.agrees) == (None, None, None)
    assert matrix.agrees is True
    assert matrix.ours == "H moves by 1.0% in Frobenius norm"


def test_another_lambda_and_a_matrix_that_moves() -> None:
    top_r, matrix = found(sensitivity(), strength=0.0)
    assert top_r.agrees is None  # a single seed there, so no spread
    assert matrix.agrees is False
    assert matrix.ours == "H moves by 90.0% in Frobenius norm"
