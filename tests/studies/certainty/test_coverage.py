"""Coverage and stability on curvatures whose certainty is known by construction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_studies.certainty import coverage, resampling
from cocurve_studies.certainty.coverage import (
    CoverageOptions,
    coverage_study,
    stability_table,
)
from cocurve_studies.tables import Table, column, pick
from helpers.problems import gram_curvature, make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text

MODEL, TEXT = tiny_model(layers=2), tiny_text(8)
UNITS = cl.enumerate_units(MODEL, 4)
GAUSSIAN = CoverageOptions(sizes=(16,), groups=(4, 16), draws=60)


def independent(groups: int, per_group: int = 40, seed: int = 0) -> cl.Curvature:
    """Features without any correlation: every true rho is 0."""
    rng = np.random.default_rng(seed)
    return gram_curvature(UNITS, rng.normal(size=(len(UNITS), groups * per_group)), groups)


@pytest.fixture(scope="module")
def gaussian() -> Table:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage.Recipe, "build", lambda *_: independent(512))
        return coverage_study(MODEL, UNITS, TEXT, GAUSSIAN, progress=False)


def test_means_cover_and_a_bent_statistic_does_not(gaussian: Table) -> None:
    assert [(row["size"], row["groups"]) for row in pick(gaussian)] == [(16, 4), (16, 16)] * 5
    for name in ("saliency", "edges"):
        for row in pick(gaussian, statistic=name):
            assert row["coverage"] == pytest.approx(0.95, abs=0.03)
            assert row["error_ratio"] == pytest.approx(1, abs=0.15)
    (bent,) = pick(gaussian, statistic="ffn_redundancy", groups=16)
    assert bent["coverage"] < 0.7  # |rho| where the true rho is 0
    assert (bent["values"], bent["enough_groups"]) == (1, True)
    for row in pick(gaussian, statistic="redundancy, gate"):
        assert row["coverage"] > 0.75  # it reaches down to the value without noise
    (few,) = pick(gaussian, statistic="edges", groups=4)
    assert (few["values"], few["enough_groups"]) == (len(UNITS) ** 2, False)
    assert few["coverage_error"] == pytest.approx(np.sqrt(0.95 * 0.05 / 60))
    assert few["lowest_coverage"] <= few["coverage"]


def test_the_sentence_on_coverage_sorts_statistics_by_their_shares() -> None:
    shares = {"edges": 0.70, "block_means": 0.93, "saliency": 1.0, "ffn_redundancy": 0.90}
    table = [
        {"statistic": name, "size": 8, "groups": groups, "confidence": 0.95}
        | {"coverage": share if groups == 8 else 0.95, "coverage_error": 0.02}
        for name, share in shares.items()
        for groups in (4, 8)
    ]
    assert coverage.coverage_sentence(table) == (
        "Intervals of 95% that held too seldom: edges (70%), ffn redundancy (90%); "
        "as often as they promise: block means (93%); more often: saliency (100%)."
    )


def test_the_reference_is_built_once_with_a_group_per_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CoverageOptions(("saliency",), sizes=(2, 4), groups=(2, 3), draws=5, top_r=20)
    table = coverage_study(MODEL, UNITS, TEXT, options, cache=tmp_path, progress=False)
    # three groups of two rows are left out
    assert [(row["size"], row["groups"]) for row in pick(table)] == [(2, 2), (4, 2), (4, 3)]
    assert column(table, "reference_rows").tolist() == [8, 8, 8]
    build = cl.BuildOptions(groups=8)
    reference = cl.estimate_curvature(MODEL, UNITS, TEXT, 20, progress=False, options=build)
    expected = resampling.coverage(reference, "saliency", size=4, groups=3, draws=5)
    assert pick(table)[2]["coverage"] == pytest.approx(expected.share.mean())
    monkeypatch.setattr(coverage, "Recipe", None)
    assert coverage_study(MODEL, UNITS, TEXT, options, cache=tmp_path, progress=False).equals(table)
    with pytest.raises(TypeError):  # another text: it wants to build
        coverage_study(MODEL, UNITS, TEXT.rows(0, 6), options, cache=tmp_path, progress=False)


def test_text_that_repeats_itself_leaves_nothing_in_doubt() -> None:
    one = random_curvature(make_units(), positions=60, groups=1)
    assert one.group_grams is not None
    grams = np.repeat(one.group_grams, 8, axis=0)
    same = cl.Curvature(one.matrix, one.units, {}, Groups(grams, np.full(8, 60)))
    for row in pick(stability_table(same, draws=10)):
        assert row["bootstrap_overlap"] == row["halves_overlap"] == row["overlap_with_whole"] == 1
        for name in ("risk_error", "saliency_error", "optimism"):
            assert row[name] == pytest.approx(0, abs=1e-6)
        assert row["infeasible"] == 0
        assert row["converged"] == 0  # below 16 groups nobody says so


def test_errors_fall_with_the_root_of_the_text() -> None:
    curvature = independent(64)
    table = stability_table(curvature, ratios=(0.3,), strengths=(1.0,), draws=10)
    assert column(table, "groups").tolist() == [2, 4, 8, 16, 32, 64]
    assert column(table, "parts").tolist() == [32, 16, 8, 4, 2, 1]
    assert column(table, "positions").tolist() == [80, 160, 320, 640, 1280, 2560]
    errors = column(table, "saliency_error")
    np.testing.assert_allclose(errors[2:-1] / errors[3:], np.sqrt(2), rtol=0.15)
    expected = np.sqrt(2 / column(table, "positions"))  # variance of a Gaussian's variance
    np.testing.assert_allclose(errors[2:], expected[2:], rtol=0.15)
    assert column(table, "optimism")[0] > 3 * column(table, "optimism")[-1]
    assert pick(table)[-1]["overlap_with_whole"] == 1
    assert pick(table)[-1]["risk_error_error"] is None
    assert pick(table)[0]["risk_error_error"] > 0
    assert pick(table)[-1]["converged"] == float(bool(cl.is_converged(curvature, 0.3)))


def test_a_part_is_what_stability_says_of_it() -> None:
    curvature = random_curvature(make_units(), positions=120, groups=6)
    row = pick(stability_table(curvature, (0.4,), (0.5,), draws=7, seed=3))[-1]
    readout = cl.is_converged(curvature, 0.4, 0.5)
    again = cl.selection_stability(curvature, 0.4, 0.5, draws=7, seed=3)
    assert row["groups"] == 6
    assert row["risk_error"] == pytest.approx(readout.risk_error)
    assert row["optimism"] == pytest.approx(readout.optimism, abs=0.2)  # other halves
    assert row["bootstrap_overlap"] == pytest.approx(again.mean_overlap, abs=0.2)
