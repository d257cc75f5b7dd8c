"""Error bars, the knobs of a build, and texts: against loops by hand and builds one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.extensions.pretrained.kept import kept_curvature, kept_plans
from cocurve_studies.certainty import purposes
from cocurve_studies.certainty.findings import sensitivity_findings
from cocurve_studies.certainty.precision import interval_table
from cocurve_studies.certainty.resampling import coverage, coverage_table, of_groups
from cocurve_studies.certainty.sensitivity import (
    SensitivityOptions,
    outside,
    sensitivity_study,
    sensitivity_summary,
    text_sources,
)
from cocurve_studies.tables import Rows, column, pick
from helpers.gaussian import UNITS
from helpers.problems import random_curvature
from helpers.tiny_models import (
    naive_build,
    naive_risk,
    relative_error,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

TOKENIZER = word_tokenizer()
HELD_OUT = tiny_text(5, seed=9)
OPTIONS = SensitivityOptions(3, 20, 24, row_counts=(1, 5), top_rs=(97,), draws=2)


def words(seed: int, high: int = 90) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{n}" for n in rng.integers(0, high, 40)) for _ in range(10)]


def calibration(rows: int, source: int = 0) -> cl.CalibrationSet:
    return cl.CalibrationSet.from_texts(words(source), TOKENIZER, rows, 24, "all")


def test_every_knob_is_the_build_it_claims_to_be() -> None:
    model, texts = tiny_model(), {"mixed": words(0), "again": words(0), "narrow": words(1, 5)}
    how: dict[str, Any] = {"options": OPTIONS, "progress": False}
    table = sensitivity_study(model, TOKENIZER, texts, HELD_OUT, **how)
    base = naive_build(model, calibration(3), 20, groups=16)[0]
    later = cl.CalibrationSet(calibration(6).input_ids[3:], calibration(6).scored[3:])
    expected: dict[tuple[str, Any], Any] = {
        ("top_r", 97): naive_build(model, calibration(3), 97, groups=16)[0],
        ("rows", 1): naive_build(model, calibration(1), 20, groups=16)[0],
        ("rows", 5): naive_build(model, calibration(5), 20, groups=16)[0],
        ("seed", 1): naive_build(model, later, 20, groups=16)[0],
        ("source", "again"): base,
    }
    for (knob, value), matrix in expected.items():
        row = pick(table, knob=knob, value=value, interaction_strength=1.0)[0]
        distance = relative_error(matrix, base)
        assert row["matrix_distance"] == pytest.approx(distance, rel=1e-3, abs=1e-6)
    units = cl.enumerate_units(model)
    built = cl.estimate_curvature(model, units, calibration(3), 20, progress=False)
    plan = cl.solve_greedy(built, 0.2, 1.0)
    slow = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
    (row,) = pick(table, knob="rows", value=3, interaction_strength=1.0)
    assert row["is_base"]
    assert row["kl"] == pytest.approx(slow.mean(), rel=1e-3)
    assert len(sensitivity_findings(table)) == 6


def test_the_summary_says_the_band_and_the_spread() -> None:
    table: Rows = [
        {"knob": "seed", "value": n, "interaction_strength": 1.0, "is_base": n == 0}
        | {"kl": perplexity / 100, "perplexity": perplexity, "difference": gap}
        | {"difference_error": 0.5, "overlap": overlap}
        for n, (perplexity, gap, overlap) in enumerate(
            ((10.0, 0.0, 1.0), (10.5, -2.0, 0.7), (11.0, 1.0, 0.8))
        )
    ]
    (found,) = pick(sensitivity_summary(table))
    assert found["band"] == pytest.approx(0.1)
    assert (found["perplexity_mean"], found["perplexity_std"]) == (10.5, 0.5)
    assert found["kl_std"] == pytest.approx(0.005)
    assert (found["largest_difference"], found["lowest_overlap"]) == (-2.0, 0.7)


def test_some_groups_are_a_build_on_their_rows() -> None:
    model, text = tiny_model(), tiny_text(5)
    units = cl.enumerate_units(model, 4)
    options = cl.BuildOptions(groups=5)
    whole = cl.estimate_curvature(model, units, text, 20, progress=False, options=options)
    part = of_groups(whole, [1, 2])
    alone = cl.estimate_curvature(model, units, text.rows(1, 3), 20, progress=False)
    np.testing.assert_allclose(part.matrix, alone.matrix, rtol=1e-4, atol=1e-9)
    with pytest.raises(cl.MismatchError):
        text.rows(2, 3).require_disjoint(part)
    text.rows(3, 4).require_disjoint(part)
    with pytest.raises(cl.InputError, match="no scored position"):
        of_groups(random_curvature(UNITS, groups=3), [])


def test_documents_of_the_held_out_rows_are_left_out(tmp_path: Any) -> None:
    documents = [" ".join(f"w{(7 * n + k * k) % 90}" for k in range(30)) for n in range(12)]
    held_out = cl.CalibrationSet.from_texts(iter(documents[:3]), TOKENIZER, 4, 20, "all")
    assert outside(documents, TOKENIZER, held_out) == documents[3:]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents[:3]))
    with pytest.raises(cl.InputError, match="all 3 documents are in the held-out text"):
        text_sources("any", TOKENIZER, held_out, path)
    sources = text_sources("demo", TOKENIZER, held_out)
    assert set(sources["code"]) < set(sources["mixed"])


# Intervals ----------------------------------------------------------------------------------------


def test_intervals_are_those_of_the_jackknife() -> None:
    curvature = random_curvature(UNITS, groups=16)
    table = interval_table(curvature, 0.9)
    means = np.diagonal(curvature.group_grams, axis1=1, axis2=2)
    positions = curvature.group_positions
    means = means / positions[:, None]
    weights = positions / (positions.sum() - positions)
    error = np.sqrt((weights[:, None] * (means - curvature.saliency) ** 2).mean(axis=0))
    assert column(table, "relative_error") == pytest.approx(error / curvature.saliency)
    half = (column(table, "high") - column(table, "low")) / 2
    assert half == pytest.approx(1.7530503 * error)  # t(15), 95 % quantile


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
    (row,) = pick(coverage_table(large, 48, (16,), 200, ("edges",)))
    assert 0.91 < row["coverage"] < 0.98
    assert 0.85 < row["error_ratio"] < 1.15
    with pytest.raises(cl.InputError, match="groups <= size"):
        coverage(large, "edges", 8, 9, 5)


# Purposes -----------------------------------------------------------------------------------------


def test_plans_of_several_texts_are_judged_on_all_of_them() -> None:
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    table = purposes.kept_purposes(curvature, 0.2)
    names = {p.name: p for p in kept_plans(curvature).plans if "H of" in p.name}  # type: ignore[union-attr]
    wanted = {"calibrated_on": "WikiText", "judged_on": "C4", "interaction_strength": 1.0}
    (row,) = pick(table, **wanted)
    mine, own = (names[f"H of {name}, lambda 1"].kl["c4"] for name in ("WikiText", "C4"))
    assert row["kl"] == pytest.approx(mine.mean(), rel=0.3)
    assert row["share"] == pytest.approx(row["kl"] / (row["kl"] - row["against_own"]) - 1)
    assert len(mine) == len(own)
    assert all(row["against_own"] == 0 for row in pick(table, own=True))
    assert len(pick(table)) == len(purposes.KEPT) ** 2 * len(purposes.STRENGTHS)
    small = cl.Curvature(np.eye(len(UNITS)), UNITS)
    assert purposes.kept_purposes(small, 0.2) is None
