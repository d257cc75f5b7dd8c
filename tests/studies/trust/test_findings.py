"""Findings about trusting the edges: planted tables, whose verdicts are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cocurve_lab.extensions.judging.agreement import RANDOM
from cocurve_studies.findings import Finding
from cocurve_studies.tables import pick
from cocurve_studies.trust import findings
from cocurve_studies.trust.fidelity import ACROSS, POOL

NOISE = np.random.default_rng(0).normal(size=8) * 1e-3


def verdict(found: list[Finding], words: str) -> bool | None:
    """The verdict of the one finding whose claim has these words."""
    (finding,) = [finding for finding in found if words in finding.claim]
    return finding.agrees


# Section 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "expected"), [(1.02, True), (1.5, False), (0.7, False)])
def test_single_units_are_near_their_parabola_or_not(factor: float, expected: bool) -> None:
    ratios = factor + np.linspace(-0.02, 0.02, 41)
    (finding,) = findings.single_unit_findings(
        [{"measured_over_predicted": r} for r in [*ratios, None]]
    )
    assert finding.agrees is expected
    assert "of 41 units" in finding.ours


def fidelity_table(measured: Any, diagonal: Any = None) -> list[dict[str, Any]]:
    """Plans at five ratios and a pool, predicted 1, 2, ..., with a function of that measured."""
    groups = [(ACROSS, "lambda 1")] * 5 + [(POOL, "greedy")] * 6 + [(POOL, RANDOM)] * 6
    rows = []
    for place, (group, method) in enumerate(groups):
        x = place + 1.0 if group == ACROSS else place - 3.0
        kl = measured(x) + NOISE
        rows.append(
            {
                "group": group,
                "method": method,
                "units": int(x),
                "predicted": x,
                "diagonal": diagonal(x) if diagonal else x,
                "single_units": None,
                "measured": kl.mean(),
                "measured_error": kl.std(ddof=1) / 8**0.5,
            }
            | {f"kl_{n}": value for n, value in enumerate(kl)}
        )
    return rows


def test_a_prediction_that_is_right_agrees_and_one_twenty_times_too_low_does_not() -> None:
    right = findings.fidelity_findings(fidelity_table(lambda x: 1.2 * x), 200)
    assert verdict(right, "Spearman 1.00") is True
    assert verdict(right, "ranked") is True
    assert verdict(right, "accurate") is True
    low = findings.fidelity_findings(fidelity_table(lambda x: 20 * x), 200)
    assert verdict(low, "ranked") is True
    assert verdict(low, "accurate") is False


def test_a_prediction_in_the_wrong_order_does_not_agree() -> None:
    found = findings.fidelity_findings(fidelity_table(lambda x: 20 - x), 200)
    assert verdict(found, "Spearman 1.00") is False
    assert verdict(found, "ranked") is False


@pytest.mark.parametrize(("power", "expected"), [(2, True), (4, False)])
def test_the_exponent_of_the_gap(power: int, expected: bool) -> None:
    found = findings.fidelity_findings(fidelity_table(lambda x: x + 3 * x**power), 200)
    assert verdict(found, "as the cube") is expected


def test_edges_that_make_the_order_are_told_from_edges_that_do_not() -> None:
    better = findings.fidelity_findings(fidelity_table(lambda x: x, lambda x: -x), 200)
    assert verdict(better, "co-pruning") is True
    worse = findings.fidelity_findings(fidelity_table(lambda x: 20 - x, lambda x: -x), 200)
    assert verdict(worse, "co-pruning") is False


def test_the_order_by_h_is_held_against_that_by_the_measured_units() -> None:
    table = fidelity_table(lambda x: x)
    assert not [f for f in findings.fidelity_findings(table, 200) if "added up" in f.claim]
    for score, expected in ((lambda x: -x, True), (lambda x: x, None)):  # one and the same order
        known = [row | {"single_units": score(row["predicted"])} for row in pick(table)]
        assert verdict(findings.fidelity_findings(known, 200), "added up") is expected
    wrong = [row | {"single_units": row["measured"]} for row in fidelity_table(lambda x: 20 - x)]
    assert verdict(findings.fidelity_findings(wrong, 200), "added up") is False


# Section 2 ----------------------------------------------------------------------------------------


def strength_rows(
    ratio: float, benefit: float, best: tuple[float, float], gate: float = 1.0, edge: float = 0.1
) -> list[dict[str, Any]]:
    """One ratio of a strength table: a chosen candidate, a worse one, and three reports."""
    common = {
        "requested_ratio": ratio,
        "gate": gate,
        "edge_benefit": benefit,
        "edge_benefit_error": 0.01,
        "kl_error": 0.01,
        "difference_error": 0.01,
        "stopped_early": False,
        "edge_mass": edge,
        "remainder": 2.0,
        "fitting": 1 + 2.0 / edge,
        "fitting_error": 0.1,
        "printed": 1 - 2.0 / edge,
    }
    names = (("candidate", True), ("candidate", False))
    rows = [
        common | {"role": role, "chosen": first, "kl": 0.1, "difference": 0.0 if first else 1.0}
        for role, first in names
    ]
    rows[0] |= {"start": best[0], "stop": best[1]}
    rows[1] |= {"start": 0.0, "stop": 1.0}
    for role, kl, more in (("best", 0.1, 0.0), ("lambda 0", 0.1, benefit), ("lambda 1", 0.1, 0.0)):
        rows.append(common | {"role": role, "chosen": False, "kl": kl, "difference": more})
        rows[-1] |= {"start": 0.0, "stop": 0.0}
    return rows


def test_edges_that_help_at_one_ratio_and_hurt_at_another_are_said_so() -> None:
    table = strength_rows(0.2, -0.1, (0.05, 0.1)) + strength_rows(0.4, 0.1, (0.7, 0.8))
    found = findings.strength_findings(table)
    assert verdict(found, "at 20% the edges help") is False
    assert verdict(found, "at 40% the edges help") is True
    assert verdict(found, "gate tells") is False
    assert verdict(found, "floor") is False
    assert verdict(found, "falls with the ratio") is False
    assert verdict(found, "at 20 % λ is") is True
    assert verdict(found, "remainder b") is True
    assert verdict(found, "1 - b/E") is False


def test_a_model_on_which_the_section_holds() -> None:
    table = strength_rows(0.2, 0.1, (0.6, 0.8)) + strength_rows(0.4, 0.1, (0.1, 0.2), edge=4.0)
    found = findings.strength_findings(table)
    for words in ("at 20% the", "at 40% the", "gate tells", "floor", "E is positive", "falls"):
        assert verdict(found, words) is True, words
    assert verdict(found, "at 20 % λ is") is False


def test_benefits_within_noise_cannot_be_told() -> None:
    found = findings.strength_findings(strength_rows(0.3, 0.01, (0.0, 1.0), edge=-1.0))
    assert verdict(found, "at 30% the edges help") is None
    assert verdict(found, "gate tells") is None
    assert verdict(found, "E is positive") is False
    assert verdict(found, "falls with the ratio") is None  # one ratio has no neighbor


# Sections 3 to 7 ----------------------------------------------------------------------------------


def guards_rows(without: float, release: float | None, loss: str = "cap 0.3") -> list[Any]:
    rows = []
    for judge, chosen in (("kl", "cap 0.3"), ("nll", loss)):
        common = {"requested_ratio": 0.2, "judge": judge, "difference_error": 0.01}
        rows.append(common | {"role": "best", "guards": chosen, "difference": 0.0})
        rows.append(common | {"role": "no guards", "guards": "none", "difference": without})
        if release is not None:
            last = {"role": "release's guards", "guards": "cap 1.5x", "difference": release}
            rows.append(common | last)
    return rows


def test_guards_that_help_and_guards_that_do_not() -> None:
    found = findings.guards_findings(guards_rows(0.1, 0.2))
    assert verdict(found, "collapsing") is True
    assert verdict(found, "1.5 x ratio") is False
    assert verdict(found, "perplexity") is True
    found = findings.guards_findings(guards_rows(0.0, None, "cap 0.5"))
    assert verdict(found, "collapsing") is None  # the same plan
    assert verdict(found, "1.5 x ratio") is None
    assert verdict(found, "perplexity") is False


def versus(ratio: float, search: str, loss: float, kl: float) -> dict[str, Any]:
    row = {"requested_ratio": ratio, "search": search, "perplexity_0": 6.1, "perplexity_1": 6.0}
    row |= {"edge_benefit": kl, "edge_benefit_error": 0.01 if kl else 0.0}
    return row | {"loss_benefit": loss, "loss_benefit_error": 0.01 if loss else 0.0}


def test_edges_are_judged_without_guards_and_with() -> None:
    table = [
        *(versus(0.1, "free", 0.0, 0.1), versus(0.2, "free", 0.05, 0.1)),
        *(versus(0.2, "own", -0.05, 0.1), versus(0.4, "own", 0.05, -0.1)),
    ]
    found = findings.diagonal_findings(table)
    assert [(f.agrees, f.lab) for f in found] == [
        *((True, False), (True, True)),
        *((False, False), (False, True)),  # at 20 % on the loss, at 40 % on KL
    ]
    assert "at 20%, free" in found[0].claim
    assert "20%: 0.100 ± 0.010, 40%: -0.100 ± 0.010" in found[3].ours
    same = findings.diagonal_findings([versus(0.2, "own", 0.0, 0.0)])
    assert [f.agrees for f in same] == [None, None]  # one and the same plan


def refined(
    bound: float, difference: float, exchanged: int = 2, found: float = 1.0
) -> dict[str, Any]:
    return {
        "requested_ratio": 0.2,
        "interaction_strength": 1.0,
        "objective": 1.0,
        "refined_objective": found,
        "bound": bound,
        "units_exchanged": exchanged,
        "difference": difference,
        "difference_error": 0.01,
    }


def test_search_that_lowers_the_risk_and_search_that_does_not() -> None:
    found = findings.refinement_findings([refined(0.99, -0.1), refined(0.97, 0.0, 0)])
    assert [finding.agrees for finding in found] == [True, True]
    found = findings.refinement_findings([refined(0.5, 0.1), refined(0.97, -0.1)])
    assert [finding.agrees for finding in found] == [None, False]
    assert findings.refinement_findings([refined(0.99, 0.0, 0)])[1].agrees is None
    beaten = findings.refinement_findings([refined(0.5, 0.0, found=0.9)])
    assert beaten[0].agrees is False  # a better plan is known


def test_gains_on_the_reported_rows_count() -> None:
    row = {"requested_ratio": 0.4, "interaction_strength": 1.0, "ridge": 0.2, "clip": 1.0}
    rows = [
        row | {"role": "candidate", "difference": 1.0, "difference_error": 0.0},
        row | {"role": "report", "difference": -0.1, "difference_error": 0.01},
        row | {"role": "report", "difference": 0.1, "difference_error": 0.01},
        row | {"role": "report", "difference": 0.0, "difference_error": 0.0, "ridge": None},
    ]
    assert [f.agrees for f in findings.gains_findings(rows)] == [True, False, None]


def test_three_models_are_the_fewest_for_a_trend() -> None:
    def models(count: int, sign: float) -> list[dict[str, Any]]:
        return [
            {
                "model": f"m{n}",
                "redundancy": 0.1 * n,
                "redundancy_error": 0.01,
                "relative_benefit": sign * n,
                "edge_benefit": 0.1,
                "edge_benefit_error": 0.01,
                "gate_lambda": 1.0,
                "gate_right": n > 0,
            }
            for n in range(count)
        ]

    found = findings.redundancy_findings(models(1, -1.0))
    assert [finding.agrees for finding in found] == [None, False]
    assert "too few" in found[0].ours
    assert findings.redundancy_findings(models(6, -1.0))[0].agrees is True
    assert findings.redundancy_findings(models(6, 1.0))[0].agrees is False
    assert findings.redundancy_findings(models(3, -1.0))[0].agrees is None  # p is never below 1/3
