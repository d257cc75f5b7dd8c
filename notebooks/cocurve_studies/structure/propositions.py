"""The paper's propositions and remarks on H, measured on one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.extensions.figures import COLORS, LABELS
from cocurve_lab.models.kinds import KINDS
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty
from ..shared import errors_of, group_marks, resampled, spread_of
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, kept_table, pick

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


PAPER_DECOUPLED, PAPER_CV = 0.63, {"attention": 0.685, "ffn": 0.084}  # 8B; Qwen2.5-32B

# columns of `proposition_table` for reading, with `shown`
COLUMNS: Columns = {
    "quantity": "",
    "requested_ratio": "removed",
    "interaction_strength": "λ",
    "value": "",
    "reference": "bound",
    "holds": "",
    "paper": "",
}


def proposition_table(
    curvature: Curvature,
    ratios: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    strengths: tuple[float, ...] = (0.0, 1.0),
    cache: Folder = None,
) -> DataFrame:
    """Return both sides of the paper's propositions about H and its plans, for this H.

    - "gram" (Prop. "Gram equivalence"): smallest eigenvalue over the largest, at least -1e-6 (what
      float32 features leave); smallest diagonal entry, at least 0.
    - "offdiag" (Prop. "The diagonal omission"): share of sum |H_uv| that is off the diagonal; and,
      of each plan, edge over node risk, the share of its edges that are positive, and the mean
      correlation of its pairs weighted by sqrt(H_uu H_vv), which times (sum of sqrt(H_uu))^2 less
      the trace is twice the edge risk. The paper calls it the statistic of its gate, so the
      reference is the FFN redundancy without sampling noise; `holds` within a factor of 2.
    - "when" (Prop. "Edge-to-diagonal balance"), on the lambda = 0 plan S of each ratio: median over
      u in S with H_uu > 0 of |sum over v in S, v != u of H_uv| / (1/2 H_uu), against the median of
      2 |sum of rho_uv| (correlations of that unit) and against 2 |S| |rho_bar| (mean over pairs of
      S); `holds` where the two are within a factor of 2.
    - "when", spread of the diagonal: std / mean of H_uu and of the measured single-unit KL by kind.
    - "bridges": correlation of saliency and connectivity, Pearson and Spearman.
    - "overshoot" (Prop. "Overshoot bound"): realized less requested ratio, at most the largest
      unit's share of the cost.

    Returns:
        Rows of proposition, quantity, requested_ratio, interaction_strength, units (|S|), value,
        value_error (plan fixed: a jackknife, for medians and ranks a bootstrap of 100 draws of the
        groups), reference (the other side of the proposition), holds, paper (its figure where
        it states one, for its own models).
    """
    settings = group_marks(curvature, ratios=list(ratios), strengths=list(strengths))

    def compute() -> Rows:
        rows = _gram_rows(curvature) + _whole_rows(curvature) + _variation_rows(curvature)
        for ratio in ratios:
            rows += _balance_rows(curvature, solve_greedy(curvature, ratio, 0.0))
            for strength in strengths:
                rows += _plan_rows(curvature, solve_greedy(curvature, ratio, strength))
        return rows

    return kept_table(cache, "propositions", settings, compute)


def _row(
    proposition: str, quantity: str, value: Any, error: Any = None, plan: Selection | None = None
) -> Row:
    return {
        "proposition": proposition,
        "quantity": quantity,
        "requested_ratio": None if plan is None else plan.requested_ratio,
        "interaction_strength": None if plan is None else plan.interaction_strength,
        "units": None if plan is None else len(plan),
        "value": value,
        "value_error": error,
    } | dict.fromkeys(("reference", "holds", "paper"))


def _gram_rows(curvature: Curvature) -> Rows:
    spectrum = curvature.spectrum()
    relative = spectrum[-1] / spectrum[0] if spectrum[0] > 0 else 0.0
    lowest = curvature.saliency.min()
    return [
        _row("gram", "smallest eigenvalue over the largest", relative)
        | {"reference": 0.0, "holds": bool(relative >= -1e-6)},
        _row("gram", "smallest diagonal entry", lowest)
        | {"reference": 0.0, "holds": bool(lowest >= 0)},
    ]


def _whole_rows(curvature: Curvature) -> Rows:
    def mass(part: Curvature) -> float:
        total = float(np.abs(part.matrix).sum())
        return 1 - float(part.saliency.sum()) / total if total > 0 else np.nan

    def pearson(part: Curvature) -> float:
        return bridge_units(part).saliency_connectivity_correlation

    def spearman(part: Curvature) -> float:
        return bridge_units(part).saliency_connectivity_rank_correlation

    share, linear = errors_of(curvature, mass, 1)[0], errors_of(curvature, pearson, 1)[0]
    rank = spread_of([spearman(part) for part in resampled(curvature)])
    name = "saliency-connectivity correlation"
    return [
        _row("offdiag", "share of |H| off the diagonal", mass(curvature), share),
        _row("bridges", name, pearson(curvature), linear) | {"paper": PAPER_DECOUPLED},
        _row("bridges", f"{name}, ranks", spearman(curvature), rank),
    ]


def _variation_rows(curvature: Curvature) -> Rows:
    def variation(part: Curvature) -> list[float]:
        return [_variation(part.saliency[part.units.kinds == kind]) for kind in KINDS]

    values, errors = variation(curvature), errors_of(curvature, variation, len(KINDS))
    rows = []
    for number, kind in enumerate(KINDS):
        name = f"diagonal CV, {LABELS[kind]}"
        rows.append(_row("when", name, values[number], errors[number]) | {"paper": PAPER_CV[kind]})
        mine = curvature.units.kinds == kind
        if curvature.group_risks is None or curvature.group_positions is None:
            continue
        risks = curvature.group_risks[:, mine]
        count = len(risks)
        # the positions of a draw are one factor for all units, so they cancel in std / mean
        drop = [_variation(risks.sum(axis=0) - part) for part in risks]
        error = float(np.sqrt((count - 1) * np.var(drop))) if count > 1 else None
        name, value = f"single-unit KL CV, {LABELS[kind]}", _variation(risks.sum(axis=0))
        rows.append(_row("when", name, value, error) | {"paper": PAPER_CV[kind]})
    return rows


def _variation(values: np.ndarray) -> float:
    """Return std / mean, NaN of nothing."""
    return float(values.std() / values.mean()) if values.any() else float("nan")


def _balance_rows(curvature: Curvature, plan: Selection) -> Rows:
    """Return both readings of the edge-to-diagonal balance on one plan."""
    if len(plan) < 2:
        return []
    block = np.ix_(plan.pruned, plan.pruned)

    def medians(part: Curvature) -> tuple[float, float]:
        matrix, rho = part.matrix[block], part.correlation()[block]
        diagonal = np.diagonal(matrix)
        live = diagonal > 0
        edges, correlations = np.abs(matrix.sum(axis=1) - diagonal), np.abs(rho.sum(axis=1) - 1)
        if not live.any():
            return np.nan, np.nan
        measured = np.median(edges[live] / (diagonal[live] / 2))
        return float(measured), float(np.median(2 * correlations[live]))

    measured, per_unit = medians(curvature)
    spread = spread_of([medians(part) for part in resampled(curvature)])
    error = None if spread is None else spread[0]
    gate = redundancy_gate(curvature, plan.requested_ratio)
    rows = []
    for name, reference in (("its own", per_unit), ("the mean", gate.edge_to_diagonal)):
        row = _row("when", f"edge over diagonal, by {name} correlation", measured, error, plan)
        holds = bool(0.5 * reference <= measured <= 2 * reference)
        rows.append(row | {"reference": reference, "holds": holds})
    return rows


def _plan_rows(curvature: Curvature, plan: Selection) -> Rows:
    units, block = plan.units, np.ix_(plan.pruned, plan.pruned)
    most = units.costs.max() / units.total_cost
    over = plan.realized_ratio - plan.requested_ratio
    rows = [
        _row("overshoot", "realized less requested ratio", over, 0.0, plan)
        | {"reference": most, "holds": bool(over <= most)}
    ]
    if len(plan) < 2:
        return rows

    def edge_over_node(part: Curvature) -> float:
        matrix = part.matrix[block]
        trace = float(np.trace(matrix))
        return float(matrix.sum()) / trace - 1 if trace > 0 else np.nan

    error = errors_of(curvature, edge_over_node, 1)[0]
    rows.append(_row("offdiag", "edge over node risk", edge_over_node(curvature), error, plan))
    pairs = np.triu_indices(len(plan), k=1)

    def positive(part: Curvature) -> float:
        return float((part.matrix[block][pairs] > 0).mean())

    spread = spread_of([positive(part) for part in resampled(curvature)])
    rows.append(_row("offdiag", "share of positive edges", positive(curvature), spread, plan))

    def weighted(part: Curvature) -> float:
        """The mean of rho_uv over the pairs, weighted by sqrt(H_uu H_vv)."""
        root = np.sqrt(part.saliency[list(plan.pruned)])
        weights = np.outer(root, root)[pairs]
        total = float(weights.sum())
        return float(part.correlation()[block][pairs] @ weights) / total if total > 0 else np.nan

    mean, error = weighted(curvature), errors_of(curvature, weighted, 1)[0]
    clean = curvature.ffn_redundancy_corrected
    gate = curvature.ffn_redundancy if clean is None else clean
    row = _row("offdiag", "weighted mean correlation", mean, error, plan)
    return [*rows, row | {"reference": gate, "holds": bool(0.5 * gate <= mean <= 2 * gate)}]


def plot_propositions(table: Table) -> Figure:
    """Plot edge-to-diagonal balance against |S|: measured, and as the correlations predict it."""
    figure = empty()
    measured, predicted = (
        [
            row
            for row in pick(table)
            if row["quantity"] == f"edge over diagonal, by {by} correlation"
        ]
        for by in ("its own", "the mean")
    )
    series = (
        (measured, "value", "measured", "attention", "circle", "solid"),
        (measured, "reference", "2 |S| |ρ|, ρ of the unit", "ffn", "square", "dot"),
        (predicted, "reference", "2 |S| |ρ|, ρ of all pairs", "bridge", "diamond", "dot"),
    )
    for rows, y, name, color, symbol, dash in series:
        add(figure, rows, "units", y, name, {"color": COLORS[color], "symbol": symbol}, line=dash)
    title = "Edge term over diagonal term, by size of the plan"
    y_title = "edge term over diagonal term, median unit"
    return chart(figure, title, "units in the plan |S|", y_title)
