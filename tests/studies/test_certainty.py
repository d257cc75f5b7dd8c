"""Error bars, the knobs of a build, and texts: against loops by hand and builds one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_studies.certainty import purposes
from cocurve_studies.certainty.findings import sensitivity_findings
from cocurve_studies.certainty.resampling import (
    coverage,
)
from cocurve_studies.certainty.sensitivity import (
    SensitivityOptions,
    sensitivity_study,
)
from cocurve_studies.paper.shipped import shipped
from cocurve_studies.tables import pick
from helpers.gaussian import UNITS
from helpers.problems import random_curvature
from helpers.tiny_models import (
    naive_build,
    naive_risk,
    relative_error,
    tiny_model,
    tiny_text,
)

HELD_OUT = tiny_text(5, seed=9)
OPTIONS = SensitivityOptions(3, 20, row_counts=(1, 5), top_rs=(97,), draws=2)


def test_every_knob_is_the_build_it_claims_to_be() -> None:
    model, text = tiny_model(), tiny_text(6, 24, "all")
    table = sensitivity_study(model, text, HELD_OUT, OPTIONS, progress=False)
    base = naive_build(model, text.rows(0, 3), 20, groups=16)[0]
    expected: dict[tuple[str, Any], Any] = {
        ("top_r", 97): naive_build(model, text.rows(0, 3), 97, groups=16)[0],
        ("rows", 1): naive_build(model, text.rows(0, 1), 20, groups=16)[0],
        ("rows", 5): naive_build(model, text.rows(0, 5), 20, groups=16)[0],
        ("seed", 1): naive_build(model, text.rows(3, 6), 20, groups=16)[0],
    }
    for (knob, value), matrix in expected.items():
        row = pick(table, knob=knob, value=value, interaction_strength=1.0)[0]
        distance = relative_error(matrix, base)
        assert row["matrix_distance"] == pytest.approx(distance, rel=1e-3, abs=1e-6)
    units = cl.enumerate_units(model)
    built = cl.estimate_curvature(model, units, text.rows(0, 3), 20, progress=False)
    plan = cl.solve_greedy(built, 0.2, 1.0)
    slow = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
    (row,) = pick(table, knob="rows", value=3, interaction_strength=1.0)
    assert row["is_base"]
    assert row["kl"] == pytest.approx(slow.mean(), rel=1e-3)
    assert len(sensitivity_findings(table)) == 4


# Intervals ----------------------------------------------------------------------------------------


def test_coverage_is_that_of_a_loop_by_hand() -> None:
    reference = random_curvature(UNITS, groups=100, positions=800)
    found = coverage(reference, "saliency", size=10, groups=4, draws=30, seed=5)
    rng, held = np.random.default_rng(5), np.zeros(len(UNITS))
    for _ in range(30):
        rows = np.array_split(rng.integers(100, size=10), 4)
        grams = np.stack([reference.group_grams[r].sum(axis=0) for r in rows])
        sizes = np.array([reference.group_positions[r].sum() for r in rows])
        drawn = cl.Curvature.from_groups(UNITS, Groups(grams, sizes), {})
        low, high = jackknife(drawn, "saliency").interval
        held += (low <= reference.saliency) & (reference.saliency <= high)
    np.testing.assert_allclose(found.share, held / 30)
    large = random_curvature(UNITS, groups=300, positions=6000)
    nominal = coverage(large, "edges", 48, 16, 200)
    assert 0.91 < nominal.share.mean() < 0.98
    assert 0.85 < np.median(nominal.error_ratio) < 1.15
    with pytest.raises(cl.InputError, match="groups <= size"):
        coverage(large, "edges", 8, 9, 5)


# Purposes -----------------------------------------------------------------------------------------


def test_plans_of_several_texts_are_judged_on_all_of_them() -> None:
    real = shipped()
    table = purposes.kept_purposes(real, 0.2)
    wanted = {"calibrated_on": "WikiText", "judged_on": "C4", "interaction_strength": 1.0}
    (row,) = pick(table, **wanted)
    mine, own = (real.plans[f"H of {x}, lambda 1", 0.2].kl["c4"] for x in ("WikiText", "C4"))
    assert row["kl"] == pytest.approx(mine.mean())
    assert row["against_own"] == pytest.approx((mine - own).mean())
    assert all(row["against_own"] == 0 for row in pick(table, own=True))
    assert len(table) == len(purposes.KEPT) ** 2 * len(purposes.STRENGTHS)
