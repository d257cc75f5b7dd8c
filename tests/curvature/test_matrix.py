"""The matrix H: its checks, its statistics, its files, and merged builds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cocurve_lab.base.errors import InputError, NumericalError
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gate import noise_of
from helpers.problems import gram_curvature, make_units, random_curvature

UNITS = make_units()
SIZE = len(UNITS)


# Checks -------------------------------------------------------------------------------------------


def changed(u: int, v: int, value: float) -> np.ndarray:
    matrix = random_curvature(UNITS).matrix.copy()
    matrix[u, v] = value
    return matrix


FEW = make_units(1, 0, 3)
GRAMS, POSITIONS = np.zeros((2, SIZE, SIZE)), np.ones(2, int)
BAD: list[tuple[Any, type[Exception]]] = [
    (lambda: Curvature(changed(3, 5, math.nan), UNITS), NumericalError),
    (lambda: Curvature(changed(0, 1, math.inf), UNITS), NumericalError),
    (lambda: Curvature(changed(0, 1, 9.0), UNITS), NumericalError),
    (lambda: Curvature(changed(2, 2, -0.1), UNITS), NumericalError),
    (lambda: Curvature(np.eye(3), UNITS), InputError),
    (lambda: Curvature(np.eye(SIZE) * 1j, UNITS), InputError),
    (lambda: Curvature(np.full((SIZE, SIZE), "1"), UNITS), InputError),
    (lambda: Curvature(np.eye(15)[:, :14], UNITS), InputError),
    (lambda: Curvature(np.ones(15), UNITS), InputError),
    (lambda: Groups(GRAMS[:, :3], POSITIONS), InputError),
    (lambda: Groups(GRAMS, POSITIONS[:1]), InputError),
    (lambda: Groups(GRAMS, -POSITIONS), InputError),
    (lambda: Groups(GRAMS, 0 * POSITIONS).matrix, InputError),
    (lambda: Curvature(np.eye(3), FEW, {}, Groups(GRAMS, POSITIONS)), InputError),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_is_no_gram_matrix_is_refused(case: int) -> None:
    call, error = BAD[case]
    with pytest.raises(error):
        call()


def test_rounding_is_symmetrised_and_the_matrix_is_read_only() -> None:
    matrix = random_curvature(UNITS).matrix.astype(np.float32)
    matrix[2, 3] *= np.float32(1 + 1e-6)
    curvature = Curvature(matrix, UNITS)
    assert curvature.matrix.dtype == np.float64
    np.testing.assert_array_equal(curvature.matrix, curvature.matrix.T)
    with pytest.raises(ValueError, match="read-only"):
        curvature.matrix[0, 0] = 1.0
    matrix[:] = 0  # the caller's array is a copy's source, no more
    assert curvature.matrix.any()


# Statistics ---------------------------------------------------------------------------------------


def test_statistics_against_loops() -> None:
    curvature = random_curvature(UNITS, 4)
    h = curvature.matrix
    rho = [[h[u, v] / math.sqrt(h[u, u] * h[v, v]) for v in range(SIZE)] for u in range(SIZE)]
    np.testing.assert_allclose(curvature.correlation(), rho, atol=1e-15)
    assert curvature.correlation().min() < 0
    for u in range(SIZE):
        assert curvature.saliency[u] == h[u, u]
        others = sum(abs(h[u, v]) for v in range(SIZE) if v != u)
        assert curvature.connectivity[u] == pytest.approx(others)
    sums: dict[str, list[float]] = {"attention": [], "cross": [], "ffn": []}
    for u in range(SIZE):
        for v in range(SIZE):
            if u != v:
                kinds = {UNITS[u].kind, UNITS[v].kind}
                sums["cross" if len(kinds) == 2 else kinds.pop()].append(abs(rho[u][v]))
    expected = {block: np.mean(values) for block, values in sums.items()}
    assert curvature.block_means() == pytest.approx(expected)
    assert curvature.ffn_redundancy == pytest.approx(expected["ffn"])


def test_risk_is_the_quadratic_form_and_the_spectrum_is_sorted() -> None:
    curvature = random_curvature(UNITS, 5)
    s = np.zeros(SIZE)
    s[[1, 4, 9]] = 1
    assert curvature.risk([1, 4, 9]) == pytest.approx(s @ curvature.matrix @ s / 2)
    assert curvature.risk([]) == 0
    spectrum = curvature.spectrum()
    assert (np.diff(spectrum) <= 0).all()
    assert spectrum.sum() == pytest.approx(curvature.saliency.sum())
    assert spectrum.min() > -1e-12


def test_a_unit_without_effect_correlates_with_nothing() -> None:
    matrix = random_curvature(UNITS).matrix.copy()
    matrix[4, :] = matrix[:, 4] = 0
    correlation = Curvature(matrix, UNITS).correlation()
    assert correlation[4, 4] == 1
    assert not np.delete(correlation[4], 4).any()
    means = random_curvature(make_units(3, 2, 0)).block_means()  # blocks without pairs
    assert np.isnan([means["ffn"], means["cross"]]).all()
    assert means["attention"] > 0


def halves(curvature: Curvature) -> list[np.ndarray]:
    grams = curvature.group_grams[::2].sum(axis=0), curvature.group_grams[1::2].sum(axis=0)
    return [g / np.sqrt(np.outer(np.diagonal(g), np.diagonal(g))) for g in grams]


def test_noise_floor_and_corrected_redundancy_against_loops() -> None:
    curvature = random_curvature(UNITS, 6, groups=6)
    a, b = halves(curvature)
    ffn = [u for u in range(SIZE) if UNITS[u].kind == "ffn"]
    pairs = [(u, v) for u in ffn for v in ffn if u != v]
    floor = np.mean([abs(a[p] - b[p]) / 2 for p in pairs])
    corrected = np.mean([(np.sign(a[p]) * b[p] + np.sign(b[p]) * a[p]) / 2 for p in pairs])
    assert noise_of(curvature, curvature.pair_mask("ffn")) == pytest.approx((floor, corrected))
    for alone in (random_curvature(UNITS), random_curvature(UNITS, groups=1)):
        assert noise_of(alone, alone.pair_mask("ffn")) == (None, None)


@pytest.mark.parametrize("rho", [0.0, 0.2])
def test_corrected_redundancy_is_the_true_one(rho: float) -> None:
    """The raw value of independent features is sqrt(2 / (pi n)) of noise: here, 0.056."""
    units, n, rng = make_units(8, 0, 12), 200, np.random.default_rng(0)
    features = math.sqrt(1 - rho) * rng.normal(size=(96, n)) + math.sqrt(rho) * rng.normal(size=n)
    curvature = gram_curvature(units, features, groups=10)
    noise, corrected = noise_of(curvature, curvature.pair_mask("ffn"))
    assert corrected == pytest.approx(rho, abs=0.03 if rho else 0.006)
    if not rho:
        floor = pytest.approx(math.sqrt(2 / (math.pi * n)), rel=0.03)
        assert noise == floor
        assert curvature.ffn_redundancy == floor


def test_single_unit_risk_is_the_mean_over_positions() -> None:
    curvature = random_curvature(UNITS, groups=4)
    # the factory stores half the squared features, of which H_uu is the mean square
    np.testing.assert_allclose(curvature.single_unit_risk, curvature.saliency / 2)
    assert random_curvature(UNITS).single_unit_risk is None
    assert random_curvature(UNITS).saturation is None  # of no groups, so nothing was counted


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pkl", ".npz"])
@pytest.mark.parametrize("groups", [None, 4])
def test_round_trip(tmp_path: Path, suffix: str, groups: int | None) -> None:
    curvature = random_curvature(UNITS, groups=groups).with_provenance(top_r=256, model_name="m")
    again = Curvature.load(curvature.save(tmp_path / f"H{suffix}"))
    np.testing.assert_array_equal(again.matrix, curvature.matrix)
    assert again.units == curvature.units
    assert again.provenance == curvature.provenance
    assert again.fingerprint == curvature.fingerprint
    assert repr(again) == repr(curvature)
    if groups:
        for name in ("group_grams", "group_positions", "group_risks"):
            np.testing.assert_array_equal(getattr(again, name), getattr(curvature, name))
    else:
        assert again.group_grams is None


def test_an_h_of_nearly_symmetric_grams_reads_back(tmp_path: Path) -> None:
    """Grams of float32 features differ from their transposes by rounding."""
    built = random_curvature(UNITS, groups=4)
    grams = built.groups.grams.copy()
    grams[:, 0, 1] *= 1 + 1e-6
    found = Curvature.from_groups(UNITS, replace(built.groups, grams=grams), built.facts)
    assert Curvature.load(found.save(tmp_path / "H.npz")).fingerprint == found.fingerprint


# Merge --------------------------------------------------------------------------------------------


def test_a_part_of_fewer_sequences_than_groups_is_added_too() -> None:
    many = random_curvature(UNITS, groups=4)
    few = random_curvature(UNITS, 1, groups=2).with_provenance(row_fingerprints=["x", "y"])
    for parts in ([many, few], [few, many]):
        merged = Curvature.merge(parts)
        assert merged.group_positions.tolist() == [45, 45, 15, 15]
        np.testing.assert_allclose(merged.matrix, (many.matrix + few.matrix) / 2)


def test_unit_sets_are_part_of_the_fingerprint() -> None:
    curvature = random_curvature(UNITS)
    other = Curvature(curvature.matrix, make_units(ffn_cost=12))
    assert curvature.fingerprint != other.fingerprint
    assert curvature.fingerprint == Curvature(curvature.matrix, make_units()).fingerprint
