"""Bridge units, cheap to remove alone but tied to many others: their number and their edges.

Appendix "Mechanism Analysis" reports 87 of 768 units without saying where "low" and "high" begin;
the table shows how the list moves with both thresholds. All of it comes from H alone; `causal.py`
measures what the removal of bridges does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from cocurve_lab.curvature.graph import Bridges, bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.solver.guards import UnitsLike
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import DataFrame
from ..shared import marks
from ..tables import Columns, Row, Rows, kept_table, table_of

QUANTILES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

# columns of the two tables for reading, with `shown`
THRESHOLD_COLUMNS: Columns = {
    "saliency_quantile": "saliency ≤ quantile",
    "connectivity_quantile": "connectivity ≥",
    "bridges": "",
    "jaccard": "shared with both medians",
    "pruned_by_diagonal": "λ = 0 removes",
    "pruned_by_edges": "λ = 1 removes",
}
EDGE_COLUMNS: Columns = {
    "bridge": "",
    "partner": "",
    "curvature": "edge H_uv",
    "correlation": "correlation ρ",
    "to_saliency": "to saliency",
    "cross_module": "other module",
    "same_layer": "same layer",
}


def bridge_table(
    curvature: Curvature,
    quantiles: Sequence[float] = QUANTILES,
    ratio: float = 0.2,
    *,
    cache: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """Count the bridge units for every pair of thresholds (appendix "Mechanism Analysis").

    Args:
        curvature: H [M, M].
        quantiles: of saliency (at most) and of connectivity (at least), every pair of them.
        ratio: of the two plans whose treatment of the bridges is counted.

    Returns:
        One row per pair of thresholds. `bridges` counts units that pass both; `jaccard` compares
        with median/median (None where both are empty). `pruned_by_diagonal` and `pruned_by_edges`
        count bridges in the plans of lambda 0 and 1. The same in every row: Pearson's `correlation`
        of saliency and connectivity, its jackknife error over groups, and Spearman's.
    """
    settings = marks(
        curvature=curvature,
        quantiles=[float(q) for q in quantiles],
        ratio=ratio,
    )

    def compute() -> Rows:
        reference = _passing(curvature, bridge_units(curvature))
        plans = [solve_greedy(curvature, ratio, strength).indicator for strength in (0.0, 1.0)]
        error = None
        if curvature.group_grams is not None:
            error = float(jackknife(curvature, _correlation).standard_error)
        rows = []
        for low in quantiles:
            for high in quantiles:
                found = bridge_units(curvature, low, high)
                chosen = _passing(curvature, found)
                union = int((chosen | reference).sum())
                rows.append(
                    {
                        "saliency_quantile": low,
                        "connectivity_quantile": high,
                        "requested_ratio": ratio,
                        "units": len(chosen),
                        "bridges": int(chosen.sum()),
                        "jaccard": float((chosen & reference).sum() / union) if union else None,
                        "pruned_by_diagonal": int((chosen & plans[0]).sum()),
                        "pruned_by_edges": int((chosen & plans[1]).sum()),
                        "correlation": found.saliency_connectivity_correlation,
                        "correlation_error": error,
                        "rank_correlation": found.saliency_connectivity_rank_correlation,
                    }
                )
        return rows

    return kept_table(cache, "bridge_thresholds", settings, compute)


def _correlation(part: Curvature) -> float:
    return bridge_units(part).saliency_connectivity_correlation


def _passing(curvature: Curvature, found: Bridges) -> np.ndarray:
    """Units [M] that pass both thresholds, also where `bridge_units` lists others instead."""
    low = curvature.saliency <= found.saliency_threshold
    return low & (curvature.connectivity >= found.connectivity_threshold)


def bridge_edges(curvature: Curvature, bridges: UnitsLike | None = None, top: int = 5) -> DataFrame:
    """Return the strongest edges of each bridge unit, signed, and the units at their other end.

    Args:
        curvature: H [M, M].
        bridges: units, names or indices; None: `bridge_units(curvature)`.
        top: edges per bridge, by falling |H_uv|; ties go to the lowest partner.

    Returns:
        One row per edge: `curvature` H_uv with its error over groups, `correlation` rho_uv,
        `to_saliency` |H_uv| / H_uu, whether the partner is in the same layer and of the other
        module, and the shares of units with at most the bridge's saliency and at least its
        connectivity.
    """
    chosen = curvature.units.indices(bridge_units(curvature) if bridges is None else bridges)
    correlation = curvature.correlation()
    errors = None
    if curvature.group_grams is not None:
        errors = jackknife(curvature, "edges").standard_error
    rows: Rows = []
    for u in chosen:
        strength = np.abs(curvature.matrix[u])
        strength[u] = -1.0  # not its own partner
        partners = np.argsort(-strength, kind="stable")[: min(top, len(strength) - 1)]
        rows += [
            _edge_row(curvature, u, int(v), rank)
            | {
                "correlation": correlation[u, v],
                "curvature_error": None if errors is None else errors[u, v],
            }
            for rank, v in enumerate(partners, start=1)
        ]
    return table_of(rows)


def _edge_row(curvature: Curvature, u: int, v: int, rank: int) -> Row:
    unit, partner = curvature.units[u], curvature.units[v]
    saliency, degree = curvature.saliency, curvature.connectivity
    edge = float(curvature.matrix[u, v])
    return {
        "bridge": unit.name,
        "saliency": saliency[u],
        "saliency_share": float((saliency <= saliency[u]).mean()),
        "connectivity": degree[u],
        "connectivity_share": float((degree >= degree[u]).mean()),
        "rank": rank,
        "partner": partner.name,
        "curvature": edge,
        "to_saliency": abs(edge) / saliency[u] if saliency[u] > 0 else None,
        "same_layer": unit.layer == partner.layer,
        "cross_module": unit.kind != partner.kind,
    }
