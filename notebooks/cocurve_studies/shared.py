"""The common ground of the studies: how they build H, mark kept tables, compare and resample.

Torch is imported only where a model is built or measured: the studies of H alone need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import Sample, jackknife
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import FREE, Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from .lazy import CalibrationSet, PlanTable, PreTrainedModel
from .tables import Folder, Row, Table, pick


# Builds -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    """The recipe by which a study builds H of a model, or finds it in a folder.

    Attributes:
        calibration: rows and scored positions.
        top_r: size of the teacher's support.
        groups: groups of rows whose Grams are kept apart. With a group per row, H of any of the
            rows is a sum of them; the Grams take rows x M^2 x 8 bytes.
        cache: folder of the builds; None keeps nothing.
        progress: show a progress bar.
    """

    calibration: CalibrationSet
    top_r: int = 256
    groups: int = 16
    cache: Folder = None
    progress: bool = True

    def build(self, model: PreTrainedModel, units: UnitSet) -> Curvature:
        """Build H [M, M] of a model, or load it where it lies in the cache."""
        from cocurve_lab.curvature.settings import BuildOptions
        from cocurve_lab.estimator import estimate

        build = estimate.estimate_curvature
        if self.cache is not None:
            build = partial(estimate.load_or_estimate, self.cache)
        return build(
            model,
            units,
            self.calibration,
            self.top_r,
            progress=self.progress,
            options=BuildOptions(groups=self.groups),
        )


# Kept tables --------------------------------------------------------------------------------------
def marks(
    model: PreTrainedModel | None = None,
    curvature: Curvature | None = None,
    text: CalibrationSet | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the settings of a table for `kept_table`: fingerprints of inputs, and options.

    The name of a kept file depends on every key and value here, so a changed key makes all users
    measure again.

    Args:
        text: rows that plans are measured on.
        options: anything else that decides the outcome, as JSON-able values.
    """
    found: dict[str, Any] = {}
    if model is not None:
        from cocurve_lab.models.identity import fingerprint_model, model_dtype

        found |= {"model": fingerprint_model(model), "dtype": model_dtype(model)}
    if curvature is not None:
        found["curvature"] = curvature.fingerprint
    if text is not None:
        found["text"] = text.fingerprint
    return found | options


def group_marks(curvature: Curvature, **options: Any) -> dict[str, Any]:
    """`marks` of a study of H alone. Its errors depend on the groups, which H's own mark omits."""
    grams = curvature.group_grams
    return marks(
        curvature=curvature, groups=None if grams is None else fingerprint(grams), **options
    )


def sequence_columns(values: np.ndarray, name: str = "kl") -> dict[str, float]:
    """Return one row's values [sequences] as columns name_0, name_1, ..."""
    return {f"{name}_{number}": float(value) for number, value in enumerate(values)}


def sequence_values(table: Table, name: str = "kl") -> np.ndarray:
    """Return the values [rows, sequences] that `sequence_columns` put into a table."""
    rows = pick(table)
    count = sum(key.startswith(f"{name}_") and key[len(name) + 1 :].isdigit() for key in rows[0])
    return np.array([[row[f"{name}_{number}"] for number in range(count)] for row in rows])


def known(value: Any) -> float | None:
    """Return a number as a cell of a table; None for None, NaN and infinities."""
    return float(value) if value is not None and np.isfinite(value) else None


# Plans --------------------------------------------------------------------------------------------
def solved(
    curvature: Curvature, ratio: float, strength: float, guards: Guards = FREE
) -> tuple[Selection | None, str]:
    """Solve greedily; return the plan and "", or None and the reason why there is no plan."""
    try:
        return solve_greedy(curvature, ratio, strength, guards), ""
    except InfeasibleError as error:
        return None, str(error)


def compared(table: PlanTable, place: int, base: int) -> Row:
    """Compare one measured plan with another of the same table, paired over sequences.

    Returns:
        `realized_ratio`, `pruned_units`, `overlap`; `kl` and `difference` (to the base) with their
        errors; `perplexity` of the plan and `dense_perplexity`.
    """
    plan, difference = table.selections[place], table.paired(place, base)
    assert table.dense_nll is not None  # measure_plans always has it
    return {
        "realized_ratio": plan.realized_ratio,
        "pruned_units": len(plan),
        "overlap": plan_overlap(plan, table.selections[base]),
        "kl": table.mean[place],
        "kl_error": table.standard_error[place],
        "difference": difference[0],
        "difference_error": difference[1],
        "perplexity": table.perplexity[place],
        "dense_perplexity": np.exp(table.dense_nll.mean()),
    }


def plan_overlap(plan: Selection, other: Selection) -> float:
    """Jaccard overlap of two pruned sets, [0, 1]; 1 if both are empty."""
    either = int((plan.indicator | other.indicator).sum())
    return int((plan.indicator & other.indicator).sum()) / either if either else 1.0


# Groups of sequences ------------------------------------------------------------------------------
DRAWS = 100  # bootstrap draws behind errors of medians and plans


def errors_of(curvature: Curvature, statistic: Callable[[Curvature], Any], size: int) -> list[Any]:
    """Return the jackknife standard errors [size] of a smooth function of H; None where unknown."""
    if curvature.group_grams is None:
        return [None] * size
    return [known(error) for error in jackknife(curvature, statistic).standard_error.ravel()]


def resampled(curvature: Curvature, draws: int = DRAWS, seed: int = 0) -> Iterator[Curvature]:
    """Return H on groups of sequences drawn again; nothing for an H without groups."""
    if curvature.group_grams is None:
        return
    groups = Sample.of(curvature)
    even = np.full(len(groups), 1 / len(groups))
    for counts in np.random.default_rng(seed).multinomial(len(groups), even, size=draws):
        yield groups.weighted(counts)


def spread_of(values: list[Any]) -> Any:
    """Return the standard deviation over draws, first axis; None with fewer than two of them."""
    return np.std(np.array(values, dtype=float), axis=0, ddof=1) if len(values) > 1 else None
