"""Coverage of the jackknife's intervals, against a loop by hand."""

from __future__ import annotations

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_studies.certainty.resampling import coverage
from helpers.gaussian import UNITS
from helpers.problems import random_curvature

STATISTICS = ("saliency", "edges", "connectivity", "block_means", "ffn_redundancy")


def quadratic(curvature: cl.Curvature) -> np.ndarray:
    return curvature.matrix**2


# Coverage ---------------------------------------------------------------------------------------


def test_coverage_is_that_of_a_loop_by_hand() -> None:
    reference = random_curvature(UNITS, groups=100, positions=800)
    found = coverage(reference, "saliency", size=10, groups=4, draws=30, seed=5)
    rng, held = np.random.default_rng(5), np.zeros(6)
    for _ in range(30):
        rows = np.array_split(rng.integers(100, size=10), 4)
        grams = np.stack([reference.group_grams[r].sum(axis=0) for r in rows])
        sizes = np.array([reference.group_positions[r].sum() for r in rows])
        drawn = cl.Curvature.from_groups(UNITS, Groups(grams, sizes), {})
        low, high = jackknife(drawn, "saliency").interval
        held += (low <= reference.saliency) & (reference.saliency <= high)
    np.testing.assert_allclose(found.share, held / 30)
    assert 0 < found.share.mean() <= 1


def test_coverage_of_a_large_reference_is_near_nominal() -> None:
    reference = random_curvature(UNITS, groups=300, positions=6000)
    found = coverage(reference, "edges", size=48, draws=200)
    assert 0.91 < found.share.mean() < 0.98
    assert 0.85 < np.median(found.error_ratio) < 1.15
    assert found.simulation_error == pytest.approx(0.0154, abs=1e-4)


@pytest.mark.parametrize(("size", "groups", "draws"), [(8, 9, 5), (8, 1, 5), (8, 4, 1)])
def test_coverage_refuses_numbers_that_do_not_fit(size: int, groups: int, draws: int) -> None:
    with pytest.raises(cl.InputError, match="groups <= size"):
        coverage(random_curvature(UNITS, groups=20), "edges", size, groups, draws)
