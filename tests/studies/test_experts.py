"""The study of experts: rankings against H, and pairs of experts, on a tiny random mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

import cocurve_lab as cl
from cocurve_studies.tables import pick
from cocurve_studies.trust import experts
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

RATIO = 0.2


@pytest.fixture(scope="module")
def built() -> tuple[cl.Curvature, cl.CalibrationSet, cl.CalibrationSet]:
    model, text = tiny_model("mixtral"), tiny_text(6, 20, "all")
    units = cl.enumerate_units(model, GROUPS)
    rows = text.rows(0, 3)
    return cl.estimate_curvature(model, units, rows, 16, progress=False), rows, text.rows(3, 6)


def test_every_plan_is_measured_beside_reap(built, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    curvature, rows, apart = built
    model = tiny_model("mixtral")
    table = experts.experts_study(model, curvature, rows, apart, (RATIO,), cache=tmp_path)
    assert [row["plan"] for row in pick(table)] == ["REAP", "Expert frequency", *experts.SOLVED]
    (reap,) = (row for row in pick(table) if row["plan"] == experts.REAP)
    assert reap["behind"] == 0
    free = cl.solve_greedy(curvature, RATIO, 1.0, cl.Guards(kinds=("expert",)), uniform=())
    by_hand = cl.pruning_risk(model, free, apart)
    (mine,) = (row for row in pick(table) if row["plan"] == "H, free counts")
    assert np.isclose(mine["kl"], by_hand, rtol=1e-5)
    assert np.isclose(mine["behind"], mine["kl"] - reap["kl"])
    said = experts.compared(table, RATIO)
    for row in pick(table)[1:]:
        far = abs(row["behind"]) > 2 * row["behind_error"]
        side = "Not to be told" if not far else "less" if row["behind"] < 0 else "more"
        (sentence,) = (part for part in said.split(". ") if side in part and row["plan"] in part)
        assert sentence


def test_pairs_of_experts_are_compared_with_h(built, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    curvature, _, apart = built
    model = tiny_model("mixtral")
    measured = experts.pairs_of_experts(model, curvature, apart, cache=tmp_path)
    again = experts.pairs_of_experts(model, curvature, apart, cache=tmp_path)
    assert np.array_equal(again.together, measured.together)
    same, other = pick(experts.stand_ins(curvature, measured, draws=10))
    units, found, edges = curvature.units, [], []
    for a, (one,) in enumerate(measured.parts):
        for b, (two,) in list(enumerate(measured.parts))[a + 1 :]:
            if units[one].layer == units[two].layer:
                found.append(measured.interaction[a, b])
                edges.append(curvature.matrix[one, two])
    assert same["count"] == len(found)
    assert other["count"] == len(measured.parts) * (len(measured.parts) - 1) // 2 - len(found)
    assert np.isclose(same["negative"], np.mean(np.array(found) < 0))
    assert np.isclose(same["rank_correlation"], spearmanr(found, edges).statistic)
    assert same["rank_correlation_error"] > 0
