"""The paper's propositions on H, measured on one matrix and its plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty
from ..shared import errors_of, group_marks, resampled, spread_of
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, kept_table, pick

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# columns of `proposition_table` for reading, with `shown`
COLUMNS: Columns = {
    "quantity": "",
    "requested_ratio": "removed",
    "value": "",
    "reference": "by the proposition",
}


def proposition_table(
    curvature: Curvature,
    ratios: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    cache: Folder = None,
) -> DataFrame:
    """Return both sides of the paper's propositions about H and its plans, for this H.

    - "smallest eigenvalue over the largest" (Prop. "Gram equivalence"): at least -1e-6, what
      float32 features leave.
    - "share of |H| off the diagonal", and "single-unit KL CV, FFN": std / mean of the measured KL
      of single FFN groups.
    - "edge over diagonal" (Prop. "Edge-to-diagonal balance"), on the lambda = 0 plan S: median over
      u in S with H_uu > 0 of |sum over v in S, v != u of H_uv| / (1/2 H_uu), against the median of
      2 |S| |rho_bar|, with the mean correlation rho_bar over pairs of S.
    - "weighted mean correlation" (Prop. "The diagonal omission"), on the same plan: the mean of
      rho_uv over its pairs, weighted by sqrt(H_uu H_vv); the paper calls it the statistic of its
      gate, so the reference is the FFN redundancy without sampling noise.
    - "share of positive edges" of the plan of lambda 1.
    - "overshoot" (Prop. "Overshoot bound"): realized less requested ratio, at most the largest
      unit's share of the cost.

    Returns:
        Rows of quantity, requested_ratio, units (|S|), value, value_error (plan fixed: a jackknife,
        for medians and shares a bootstrap of the groups), reference and holds.
    """
    settings = group_marks(curvature, ratios=list(ratios))

    def compute() -> Rows:
        rows = _whole_rows(curvature)
        for ratio in ratios:
            zero, one = (solve_greedy(curvature, ratio, strength) for strength in (0.0, 1.0))
            rows += [_overshoot(plan) for plan in (zero, one)]
            if len(zero) > 1 and len(one) > 1:
                rows += [_balance(curvature, zero), _weighted(curvature, zero)]
                rows.append(_positive(curvature, one))
        return rows

    return kept_table(cache, "propositions", settings, compute)


def _row(quantity: str, value: float, error: float | None, plan: Selection | None = None) -> Row:
    return {
        "quantity": quantity,
        "requested_ratio": None if plan is None else plan.requested_ratio,
        "units": None if plan is None else len(plan),
        "value": value,
        "value_error": error,
        "reference": None,
        "holds": None,
    }


def _whole_rows(curvature: Curvature) -> Rows:
    spectrum = curvature.spectrum()
    relative = spectrum[-1] / spectrum[0] if spectrum[0] > 0 else 0.0

    def mass(part: Curvature) -> float:
        total = float(np.abs(part.matrix).sum())
        return 1 - float(part.saliency.sum()) / total if total > 0 else np.nan

    gram = _row("smallest eigenvalue over the largest", relative, None)
    rows = [gram | {"reference": 0.0, "holds": bool(relative >= -1e-6)}]
    error = errors_of(curvature, mass, 1)[0]
    rows.append(_row("share of |H| off the diagonal", mass(curvature), error))
    if curvature.group_risks is not None:
        risks = curvature.group_risks[:, curvature.units.kinds == "ffn"]
        count = len(risks)
        # the positions of a draw are one factor for all units, so they cancel in std / mean
        drop = [_variation(risks.sum(axis=0) - part) for part in risks]
        error = float(np.sqrt((count - 1) * np.var(drop))) if count > 1 else None
        rows.append(_row("single-unit KL CV, FFN", _variation(risks.sum(axis=0)), error))
    return rows


def _variation(values: np.ndarray) -> float:
    """Return std / mean, NaN of nothing."""
    return float(values.std() / values.mean()) if values.any() else float("nan")


def _overshoot(plan: Selection) -> Row:
    most = float(plan.units.costs.max() / plan.units.total_cost)
    over = plan.realized_ratio - plan.requested_ratio
    return _row("overshoot", over, 0.0, plan) | {"reference": most, "holds": over <= most}


def _balance(curvature: Curvature, plan: Selection) -> Row:
    block = np.ix_(plan.pruned, plan.pruned)

    def median(part: Curvature) -> float:
        matrix = part.matrix[block]
        diagonal = np.diagonal(matrix)
        live = diagonal > 0
        edges = np.abs(matrix.sum(axis=1) - diagonal)
        return float(np.median(edges[live] / (diagonal[live] / 2))) if live.any() else np.nan

    row = _bootstrapped("edge over diagonal", curvature, median, plan)
    return row | {"reference": redundancy_gate(curvature, plan.requested_ratio).edge_to_diagonal}


def _weighted(curvature: Curvature, plan: Selection) -> Row:
    block, pairs = np.ix_(plan.pruned, plan.pruned), np.triu_indices(len(plan), k=1)

    def weighted(part: Curvature) -> float:
        root = np.sqrt(part.saliency[list(plan.pruned)])
        weights = np.outer(root, root)[pairs]
        total = float(weights.sum())
        return float(part.correlation()[block][pairs] @ weights) / total if total > 0 else np.nan

    error = errors_of(curvature, weighted, 1)[0]
    clean = curvature.ffn_redundancy_corrected
    reference = curvature.ffn_redundancy if clean is None else clean
    row = _row("weighted mean correlation", weighted(curvature), error, plan)
    return row | {"reference": reference}


def _positive(curvature: Curvature, plan: Selection) -> Row:
    block, pairs = np.ix_(plan.pruned, plan.pruned), np.triu_indices(len(plan), k=1)

    def positive(part: Curvature) -> float:
        return float((part.matrix[block][pairs] > 0).mean())

    return _bootstrapped("share of positive edges", curvature, positive, plan)


def _bootstrapped(
    quantity: str, curvature: Curvature, statistic: Callable[[Curvature], float], plan: Selection
) -> Row:
    spread = spread_of([statistic(part) for part in resampled(curvature)])
    error = None if spread is None else float(spread)
    return _row(quantity, statistic(curvature), error, plan)


def plot_propositions(table: Table) -> Figure:
    """Plot edge-to-diagonal balance against |S|: measured, and as the correlations predict it."""
    figure, rows = empty(), pick(table, quantity="edge over diagonal")
    add(figure, rows, "units", "value", "measured", 0, line="solid")
    add(figure, rows, "units", "reference", "2 |S| |ρ|", 1, line="dot")
    title = "Edge term over diagonal term, by size of the plan"
    y_title = "edge term over diagonal term, median unit"
    return chart(figure, title, "units in the plan |S|", y_title)
