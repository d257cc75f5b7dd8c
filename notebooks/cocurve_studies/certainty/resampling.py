"""H over part of the text, and whether the jackknife's intervals hold on small calibrations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import ENOUGH, Sample, Statistic, jackknife, relative


def of_groups(curvature: Curvature, groups: Iterable[int]) -> Curvature:
    """Return H over some of the groups of a curvature, which may be one per sequence."""
    whole = curvature.groups
    chosen = [int(group) for group in groups]
    if whole is None or not whole.positions[chosen].any():
        raise InputError(
            f"groups {chosen} of this H have no scored position. Choose others, or give an H with "
            "group Grams (one from estimate_curvature)."
        )
    # sequence i is in group i mod G
    marks = curvature.provenance.get("row_fingerprints", [])
    kept = [mark for row, mark in enumerate(marks) if row % len(whole) in chosen]
    changes = {"row_fingerprints": kept, "num_sequences": len(kept), "sequences_done": len(kept)}
    changes |= dict.fromkeys(("calibration_fingerprint", "text_windows"))
    return Curvature.from_groups(
        curvature.units, whole.part(np.array(chosen)), curvature.provenance | changes
    )


@dataclass(frozen=True, eq=False)
class Coverage:
    """Share of intervals of small calibrations that contain the true value; made by `coverage`.

    Attributes:
        name: of the statistic.
        share: share of draws whose interval contained the reference value, in the shape of the
            statistic.
        error_ratio: mean claimed standard error / standard deviation of the estimate over draws, in
            the shape of the statistic; 1 is honest, NaN where the estimate never varied.
        draws, groups: number of resampled calibrations, and of groups in each.
        confidence: the value that `share` should have.
    """

    name: str
    share: np.ndarray
    error_ratio: np.ndarray
    draws: int
    groups: int
    confidence: float

    @property
    def simulation_error(self) -> float:
        """Standard error of one value of `share` over this many draws, if the intervals hold."""
        return float(np.sqrt(self.confidence * (1 - self.confidence) / self.draws))


def coverage(
    reference: Curvature,
    statistic: str | Statistic,
    size: int = 64,
    groups: int = ENOUGH,
    draws: int = 200,
    seed: int = 0,
) -> Coverage:
    """Test the 95 % intervals of `jackknife` on small calibrations drawn from a large reference.

    The groups of the reference stand for all text. Each draw takes `size` of them with replacement
    as a calibration of its own, puts them in `groups` groups, and checks whether its interval
    contains the value of the reference. Build the reference with one sequence per group
    (`BuildOptions(groups=len(calibration))`) and several times `size` sequences.

    Args:
        reference: a much larger H with groups [R, M, M].
        statistic: as for `jackknife`.
        size, groups: sequences in each drawn calibration, and groups of them (2 to `size`).
        draws, seed: number of calibrations, at least 2; each takes the time of a jackknife and
            size x M^2 x 8 bytes.
    """
    if not 2 <= groups <= size or draws < 2:
        raise InputError(
            f"groups is {groups}, size is {size} and draws is {draws}. Give 2 <= groups <= size "
            "and draws >= 2."
        )
    world, random = Sample.of(reference), np.random.default_rng(seed)
    truth = jackknife(reference, statistic).estimate
    # where each group begins among the drawn rows: `add.reduceat` sums from there to the next start
    starts = np.array([part[0] for part in np.array_split(np.arange(size), groups)])
    found, held = [], np.zeros(truth.shape)
    for _ in range(draws):
        rows = random.integers(len(world), size=size)
        grams = np.add.reduceat(world.grams[rows], starts, axis=0)
        positions = np.add.reduceat(world.positions[rows], starts)
        drawn = Curvature.from_groups(world.units, Groups(grams, positions), {})
        result = jackknife(drawn, statistic)
        low, high = result.interval
        held += (low <= truth) & (truth <= high)
        found.append((result.estimate, result.standard_error))
    values, errors = (np.stack(column) for column in zip(*found, strict=True))
    ratio = relative(errors.mean(axis=0), values.std(axis=0, ddof=1))
    return Coverage(result.name, held / draws, ratio, draws, groups, result.confidence)
