"""H from whole removals against H* from derivatives: the matrices, and their plans measured.

The paper estimates H by finite ablations "in place of infinitesimal derivatives" (Introduction).
H* may also be a preview from random probes; the table then shows how good the preview is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.base.tables import Columns, Folder, Row, Table, pick
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.estimator.estimate import build_settings, exact_curvature
from cocurve_lab.extensions.analysis.exact import ExactOptions
from cocurve_lab.models.identity import model_name
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty, share_axis
from ..draws import Plans
from ..shared import Recipe, marks, plan_overlap, solved
from ..study import Study

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)

RATIOS = (0.1, 0.2, 0.3, 0.4)
STRENGTHS = (0.0, 0.5, 1.0)

# columns of `measure_infinitesimal` for reading, with `shown`: of each plan, and of the matrices
PLAN_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "interaction_strength": "λ",
    "overlap": "",
    "measured_finite": "KL, plan of H",
    "measured_exact": "KL, plan of H*",
    "difference": "KL, H* − H",
}
MATRIX_COLUMNS: Columns = {
    "frobenius_distance": "‖H* − H‖ / ‖H‖",
    "diagonal_ratio": "median H*_uu / H_uu",
    "log_diagonal_correlation": "correlation of log H_uu",
    "edge_spearman": "rank correlation of edges",
}

_NAMES = ("finite", "exact")
_MEASURED = tuple(
    f"{name}{end}"
    for name in ("measured_finite", "measured_exact", "difference")
    for end in ("", "_error")
)


# Builds -------------------------------------------------------------------------------------------
def finite_and_exact(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int = 256,
    cache: Folder = None,
    progress: bool = True,
) -> tuple[Curvature, Curvature]:
    """Build H from whole removals and H* from derivatives, of the same rows (eq. huv).

    `calibration` is explained in `exact_curvature`, `top_r` is the size of the teacher's support.
    Both are first looked for in `cache`.
    """
    finite = Recipe(calibration, top_r, cache=cache, progress=progress).build(model, units)
    settings = build_settings(model, units, calibration, top_r, ExactOptions())
    name = f"H_star_{model_name(model)}_{fingerprint(settings)[:10]}.pkl"
    path = None if cache is None else Path(cache) / name
    if path is not None and path.exists():
        return finite, Curvature.load(path, expected=settings)
    exact = exact_curvature(model, units, calibration, top_r, progress=progress)
    if not exact.provenance["complete"]:
        raise KeyboardInterrupt("the build of H* was stopped. Run it again.")
    if path is not None:
        try:
            exact.save(path)
        except OSError as error:  # minutes of work: hand them over, whatever the disk says
            log.warning("%s could not be written (%s). H* is returned but not kept.", path, error)
    return finite, exact


# Matrices -----------------------------------------------------------------------------------------
def compare_curvatures(curvature: Curvature, exact: Curvature) -> dict[str, float | None]:
    """Return the distance of H* from H in four numbers, each with its jackknife error.

    - frobenius_distance: ||H* - H|| / ||H||, Frobenius norms;
    - log_diagonal_correlation: Pearson, of log H*_uu and log H_uu; diagonal_ratio: median of
      H*_uu / H_uu; both without the dead_units, where one of the two is 0;
    - edge_spearman: rank correlation of the entries u < v.

    The errors leave one group of sequences out of both at a time, so they are known (not None) only
    where both matrices are built on the same rows in the same groups, two at least.
    """
    curvature.units.require_same(exact.units, mine="the curvature", theirs="the other one")
    left = _left_out(curvature, exact)
    dead = (curvature.saliency == 0) | (exact.saliency == 0)
    result: dict[str, float | None] = {"dead_units": int(dead.sum())}
    for name, value in _statistics(curvature.matrix, exact.matrix).items():
        spread = float(np.std([part[name] for part in left])) if left else None
        error = None if spread is None else spread * np.sqrt(len(left) - 1)
        result |= {name: value, f"{name}_error": error}
    return result


def _statistics(finite: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    alive = (np.diagonal(finite) > 0) & (np.diagonal(exact) > 0)
    one, other = np.diagonal(finite)[alive], np.diagonal(exact)[alive]
    norm, upper = float(np.linalg.norm(finite)), np.triu_indices(len(finite), 1)
    return {
        "frobenius_distance": float(np.linalg.norm(exact - finite)) / norm if norm else np.nan,
        "log_diagonal_correlation": _correlate(np.log(one), np.log(other)),
        "diagonal_ratio": float(np.median(other / one)) if alive.any() else np.nan,
        "edge_spearman": _correlate(rankdata(finite[upper]), rankdata(exact[upper])),
    }


def _correlate(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Pearson correlation; NaN, without a warning, if one of the two does not vary."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _left_out(curvature: Curvature, exact: Curvature) -> list[dict[str, float]]:
    """The statistics without each group of sequences; empty where the groups do not pair up."""
    rows = [matrix.provenance.get("row_fingerprints") for matrix in (curvature, exact)]
    parts = [_without_each_group(matrix) for matrix in (curvature, exact)]
    if rows[0] is None or rows[0] != rows[1] or len(parts[0]) != len(parts[1]):
        return []
    return [_statistics(one, other) for one, other in zip(*parts, strict=True)]


def _without_each_group(curvature: Curvature) -> list[np.ndarray]:
    grams, positions = curvature.group_grams, curvature.group_positions
    if grams is None or positions is None or np.count_nonzero(positions) < 2:
        return []
    total, count = grams.sum(axis=0), positions.sum()
    return [(total - grams[g]) / (count - positions[g]) for g in np.flatnonzero(positions)]


# Plans --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlanGrid:
    """The plans to compare: every ratio with every lambda, under the same guards."""

    ratios: Sequence[float] = RATIOS
    strengths: Sequence[float] = STRENGTHS
    guards: Guards = field(default_factory=Guards)

    def __post_init__(self) -> None:
        for name in ("ratios", "strengths"):
            if not len(getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)!r}. Give at least one.")


def measure_infinitesimal(
    model: PreTrainedModel,
    curvature: Curvature,
    exact: Curvature,
    held_out: CalibrationSet,
    grid: PlanGrid = PlanGrid(),
    *,
    draws: int = 0,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Table:
    """Measure the KL of the plans of H and of H* on the same held-out text (eq. risk).

    If both are of the same rows, the draws take the same groups of both.

    Returns:
        The rows of `compare_plans`, with `measured_finite` and `measured_exact`, and `difference`
        (exact - finite, above 0 where finite ablations plan better); None where greedy stalls. The
        error of the difference is over rows alone if one of the two has no groups, and a note says
        so.
    """
    both = (curvature, exact)
    settings = marks(
        model,
        text=held_out,
        curvatures=[matrix.fingerprint for matrix in both],
        methods=[matrix.provenance.get("method") for matrix in both],
        groups=[fingerprint(m.group_grams, m.group_positions) for m in both],  # error bars
        grid=asdict(grid),
    )

    def compute(study: Study) -> Table:
        return _measure(study, *compare_plans(curvature, exact, grid), grid)

    study = Study(model, held_out, both, draws, cache, progress)
    return study.table("infinitesimal", settings, compute)


def compare_plans(
    curvature: Curvature, exact: Curvature, grid: PlanGrid
) -> tuple[Table, list[list[Selection]]]:
    """Compare H with H* without a model: the matrices, and their plans (section "Solver").

    Returns:
        One row per ratio and lambda, and the pair of plans of each. `overlap` is the Jaccard
        overlap of the two pruned sets, and `risk_of_P_by_Q` the risk 1/2 s^T Q s (lambda 1) of the
        plan that P makes, P and Q each "finite" or "exact". Where greedy stalls these are None,
        `stalled` names the matrix, and there is no pair. Each row also has `exact_method` and the
        columns of `compare_curvatures`.
    """
    common: Row = {"exact_method": exact.provenance.get("method")}
    common |= compare_curvatures(curvature, exact)
    table, pairs = [], []
    for ratio in grid.ratios:
        for strength in grid.strengths:
            row, pair = _plan_row(curvature, exact, ratio, strength, grid.guards)
            table.append(row | common)
            pairs.append(pair)
    return table, pairs


def _plan_row(
    curvature: Curvature, exact: Curvature, ratio: float, strength: float, guards: Guards
) -> tuple[Row, list[Selection]]:
    """Return one row, and its two plans; none where greedy stalls on either matrix."""
    row: Row = {"requested_ratio": ratio, "interaction_strength": strength}
    row |= {"stalled": None, "overlap": None}
    row |= {f"risk_of_{maker}_by_{judge}": None for maker in _NAMES for judge in _NAMES}
    matrices = dict(zip(_NAMES, (curvature, exact), strict=True))
    plans: dict[str, Selection] = {}
    for name, matrix in matrices.items():
        plan, _ = solved(matrix, ratio, strength, guards)
        if plan is None:
            return row | {"stalled": name}, []
        plans[name] = plan
    for maker, plan in plans.items():
        for judge, matrix in matrices.items():
            row[f"risk_of_{maker}_by_{judge}"] = matrix.risk(plan.pruned)
    row["overlap"] = plan_overlap(*plans.values())
    return row, list(plans.values())


def _drawn_plans(grid: PlanGrid, *matrices: Curvature) -> Plans:
    """Return the plans of one draw of H and H* (or preview)."""
    plans: dict[Any, Selection] = {}
    for ratio in grid.ratios:
        for strength in grid.strengths:
            _, pair = _plan_row(matrices[0], matrices[1], ratio, strength, grid.guards)
            plans |= {(ratio, strength, n): p for n, p in zip(_NAMES, pair, strict=False)}
    return plans


def _measure(study: Study, table: Table, pairs: list[list[Selection]], grid: PlanGrid) -> Table:
    """Return the rows with the measured KL of their pairs of plans."""
    plans = [plan for pair in pairs for plan in pair]
    kl = study.measure(plans) if plans else None
    drawn = study.redraw(partial(_drawn_plans, grid))
    rows, finite = [], 0
    for row, pair in zip(table, pairs, strict=True):
        measured: Row = dict.fromkeys(_MEASURED)
        if pair and kl is not None:
            exact = finite + 1
            values = [kl.mean[finite], kl.standard_error[finite]]
            values += [kl.mean[exact], kl.standard_error[exact], *kl.paired(exact, finite)]
            measured = dict(zip(_MEASURED, values, strict=True))
            plan = (row["requested_ratio"], row["interaction_strength"])
            names = (*plan, "exact"), (*plan, "finite")
            measured |= drawn.columns("difference", values[-1], *names)
        rows.append(row | measured)
        finite += len(pair)
    return rows


# Picture ------------------------------------------------------------------------------------------
def plot_infinitesimal(table: Table) -> Figure:
    """Plot the KL of the plans of H* minus that of H by ratio: a line per lambda, with errors."""
    figure = empty()
    measured = [row for row in table if row["difference"] is not None]
    for number, strength in enumerate(sorted({row["interaction_strength"] for row in table})):
        rows = pick(measured, interaction_strength=strength)
        name = f"λ = {strength:g}"
        add(figure, rows, "requested_ratio", "difference", name, number, line="solid")
    what = "preview" if table and table[0]["exact_method"] == "probe" else "H*"
    title = f"KL of plans of {what}, less that of H (above 0: H plans better)"
    x = share_axis("removed share of removable parameters")
    return chart(figure, title, x, f"KL of plans, {what} − H, nats per token", across=0)
