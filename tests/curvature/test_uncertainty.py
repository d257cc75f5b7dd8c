"""Error bars of H: against formulas written out, and by simulated coverage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.extensions.analysis.stability import (
    is_converged,
    selection_stability,
)
from helpers.gaussian import UNITS, covariance, draw
from helpers.problems import gram_curvature, make_units, random_curvature

STATISTICS = ("saliency", "edges", "connectivity", "block_means", "ffn_redundancy")


# The jackknife ----------------------------------------------------------------------------------


def test_unequal_groups_follow_the_pseudovalues_of_busing() -> None:
    sizes = [5, 9, 40, 17, 23]
    curvature = draw(covariance(), sizes, np.random.default_rng(2))
    found = jackknife(curvature, lambda c: float(c.matrix[0, 1] ** 3))
    n, theta, count = sum(sizes), curvature.matrix[0, 1] ** 3, len(sizes)
    grams = curvature.group_grams[:, 0, 1]
    without = [((grams.sum() - grams[j]) / (n - sizes[j])) ** 3 for j in range(count)]
    best = count * theta - sum((1 - sizes[j] / n) * without[j] for j in range(count))
    variance = 0.0
    for j in range(count):
        h = n / sizes[j]
        pseudo = h * theta - (h - 1) * without[j]
        variance += (pseudo - best) ** 2 / (h - 1) / count
    assert float(found.corrected) == pytest.approx(best, rel=1e-9)
    assert float(found.standard_error) == pytest.approx(np.sqrt(variance), rel=1e-9)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=20), seed=st.integers(0, 99))
def test_linear_statistics_agree_with_the_general_formula(sizes: list[int], seed: int) -> None:
    curvature = draw(covariance(), sizes, np.random.default_rng(seed))
    for name, function in (("edges", lambda c: c.matrix), ("saliency", lambda c: c.saliency)):
        closed, general = jackknife(curvature, name), jackknife(curvature, function)
        np.testing.assert_array_equal(closed.estimate, general.estimate)
        np.testing.assert_allclose(closed.standard_error, general.standard_error, rtol=1e-6)
        np.testing.assert_allclose(general.bias, 0, atol=1e-9 * curvature.matrix.max())
        assert not closed.bias.any()


@pytest.mark.parametrize("sizes", [[20] * 16, [8, 32] * 8], ids=["equal", "unequal"])
def test_intervals_cover_as_often_as_they_say(sizes: list[int]) -> None:
    truth, rng, draws = cl.Curvature(covariance(), UNITS), np.random.default_rng(6), 400
    hits = dict.fromkeys(("saliency", "edges", "ffn_redundancy"), 0)
    for _ in range(draws):
        curvature = draw(truth.matrix, sizes, rng)
        for name, true in (
            ("saliency", truth.saliency[1]),
            ("edges", truth.matrix[1, 2]),
            ("ffn_redundancy", truth.ffn_redundancy),
        ):
            result = jackknife(curvature, name)
            at = {"saliency": 1, "edges": (1, 2)}.get(name, ())
            low, high = (end[at] for end in result.interval)
            hits[name] += bool(low <= true <= high)
    # 1 in 10^4 outside if the coverage is 95 %; 2 points are allowed for skewness below it
    floor = stats.binom.ppf(5e-5, draws, 0.93)
    ceiling = stats.binom.ppf(1 - 5e-5, draws, 0.95)
    assert all(floor <= count <= ceiling for count in hits.values()), hits


def test_wider_confidence_and_fewer_groups_widen_by_the_t_quantile() -> None:
    curvature = draw(covariance(), [30] * 4, np.random.default_rng(7))
    for confidence in (0.5, 0.95, 0.99):
        result = jackknife(curvature, "saliency", confidence)
        reach = stats.t.ppf((1 + confidence) / 2, 3) * result.standard_error
        for end, sign in zip(result.interval, (-1, 1), strict=True):
            np.testing.assert_allclose(end - result.corrected, sign * reach)


@pytest.mark.parametrize(("groups", "enough"), [(1, False), (2, False), (15, False), (16, True)])
def test_few_groups_are_said_not_hidden(groups: int, enough: bool) -> None:
    curvature = random_curvature(UNITS, groups=groups, positions=80)
    for name in STATISTICS if groups == 1 else ("saliency",):
        result = jackknife(curvature, name)
        assert result.trustworthy is enough
        assert np.isfinite(result.interval).all() == (groups > 1)
        assert np.isnan(result.standard_error).all() == (groups == 1)


def test_empty_groups_do_not_count() -> None:
    full = random_curvature(UNITS, groups=4)
    grams = np.concatenate([full.group_grams, np.zeros((2, 6, 6))])[[0, 4, 1, 2, 5, 3]]
    positions = np.concatenate([full.group_positions, [0, 0]])[[0, 4, 1, 2, 5, 3]]
    padded = cl.Curvature(full.matrix, UNITS, {}, Groups(grams, positions))
    for name in STATISTICS:
        one, two = jackknife(full, name), jackknife(padded, name)
        np.testing.assert_allclose(one.standard_error, two.standard_error, rtol=1e-9)
        assert two.groups == 4


def test_units_without_effect_and_absent_blocks() -> None:
    features = np.random.default_rng(8).normal(size=(6, 160))
    features[1] = 0
    features[2, 10:] = 0  # moved by the first group alone
    curvature = gram_curvature(UNITS, features, 16)
    saliency = jackknife(curvature, "saliency")
    assert saliency.standard_error[1] == 0
    assert saliency.standard_error[2] == pytest.approx(saliency.estimate[2])
    assert jackknife(curvature, "connectivity").standard_error[1] == 0
    rho = jackknife(curvature, lambda c: c.correlation())
    assert np.isfinite(rho.standard_error).all()
    only_ffn = gram_curvature(make_units(2, 0, 3), features, 16)
    blocks = jackknife(only_ffn, "block_means")
    assert np.isnan(blocks.standard_error[:2]).all()
    assert blocks.standard_error[2] == jackknife(only_ffn, "ffn_redundancy").standard_error


@pytest.mark.parametrize(
    "use",
    [
        lambda c: jackknife(c, "edges"),
        lambda c: selection_stability(c, 0.3),
        is_converged,
    ],
)
def test_without_groups_there_is_no_error(use: Any) -> None:
    with pytest.raises(cl.InputError):
        use(random_curvature(UNITS))


@pytest.mark.parametrize(
    ("statistic", "confidence"),
    [
        ("saliancy", 0.95),
        *(("edges", confidence) for confidence in (0.0, 1.0, 95)),
        (lambda c: c.single_unit_risk, 0.95),  # None without groups
    ],
)
def test_jackknife_refuses_what_it_cannot_judge(statistic: Any, confidence: float) -> None:
    curvature = random_curvature(UNITS, groups=4)
    with pytest.raises(cl.InputError):
        jackknife(curvature, statistic, confidence)
    with pytest.raises(cl.InputError):  # an edited matrix
        jackknife(cl.Curvature(np.abs(curvature.matrix), UNITS, {}, curvature.groups), "edges")
