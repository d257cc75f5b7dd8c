"""The race of candidates over rows: after each stage only those that are not far behind go on.

Candidates are compared in pairs over the same rows. Most of the spread over rows is common to both
and cancels in the difference, so a few rows are enough to drop a clear loser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ...base.errors import InputError
from ...calibration import CalibrationSet
from ...measuring.results import mean_and_error

Candidate = TypeVar("Candidate")
Stage = TypeVar("Stage")


def race(
    candidates: Iterable[Candidate],
    stages: Sequence[Stage],
    measure: Callable[[list[Candidate], Stage], object],
    ahead: Callable[[list[Candidate], Stage], Iterable[Candidate]],
) -> list[Candidate]:
    """Measure candidates stage by stage; return those that were measured in all stages.

    Args:
        candidates: what is compared: plans, or their numbers.
        stages: what a candidate goes through, such as the rows of `doubling_stages`.
        measure: measures the candidates that are left in one stage, and stores their values.
        ahead: selects those that go on after a stage; not called after the last one.
    """
    left = list(candidates)
    for number, stage in enumerate(stages, 1):
        if not left:
            break
        measure(left, stage)
        if number < len(stages):
            left = list(ahead(left, stage))
    return left


def doubling_stages(rows: int, first: int) -> list[slice]:
    """Split rows into stages: `first` rows, then as many as are done already."""
    stops = [0, min(first, rows)]
    while stops[-1] < rows:
        stops.append(min(2 * stops[-1], rows))
    return [slice(start, stop) for start, stop in pairwise(stops)]


def survivors(judged: np.ndarray, stop_beyond: float) -> list[int]:
    """Return the places of the plans that are not clearly behind the one of lowest mean.

    Args:
        judged: [plans, rows] values to compare, nats per token.
        stop_beyond: paired standard errors beyond which a plan is clearly behind.
    """
    leader = judged[judged.mean(axis=1).argmin()]
    gaps = [mean_and_error(row - leader) for row in judged]
    # `not >`, so that the leader (0 against 0) stays, and a gap whose error is unknown (NaN) too
    return [place for place, (gap, error) in enumerate(gaps) if not gap > stop_beyond * error]


def require_pairs(text: CalibrationSet, name: str) -> None:
    """Raise InputError unless there are two rows, for a paired standard error."""
    if len(text) < 2:
        raise InputError(
            f"{name} has {len(text)} row, but a paired standard error needs two. Give more."
        )
