"""FFN redundancy and the benefit of the edges, over any set of models.

Figure "edge benefit vs. FFN redundancy", appendix "Scope of Applicability".
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from scipy.stats import rankdata, spearmanr

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.measuring.results import mean_and_error

from ..tables import Columns, Row, Table, column

FEWEST = 3  # models below which a rank correlation says nothing
_EXACT = 8  # up to so many models every order is tried
COLUMNS: Columns = {
    "model": "",
    "requested_ratio": "removed",
    "redundancy": "mean |ρ| of FFN",
    "edge_benefit": "KL(λ 0) − KL(λ 1)",
    "relative_benefit": "share of KL(λ 0)",
    "gate": "gate's λ",
}


def redundancy_row(
    name: str, curvature: Curvature, ratio: float, kl_0: np.ndarray, kl_1: np.ndarray
) -> Row:
    """Set the FFN redundancy of a model beside what its edges save.

    Args:
        name: of the model.
        curvature: its H, with groups.
        ratio: share of removable cost of the two plans.
        kl_0, kl_1: KL [rows] of the plans of lambda 0 and 1 on the same rows.

    Returns:
        model, requested_ratio; redundancy (mean |rho| over FFN pairs) with its jackknife error;
        kl_0; edge_benefit, KL(lambda 0) - KL(lambda 1) with its paired error, and as a share of
        KL(lambda 0), which is taken as exact; gate, the lambda of the redundancy gate or None.
    """
    benefit, error = mean_and_error(kl_0 - kl_1)
    whole = float(kl_0.mean())
    return {
        "model": name,
        "requested_ratio": ratio,
        "redundancy": curvature.ffn_redundancy,
        "redundancy_error": float(jackknife(curvature, "ffn_redundancy").standard_error),
        "kl_0": whole,
        "edge_benefit": benefit,
        "edge_benefit_error": error,
        "relative_benefit": benefit / whole if whole > 0 else None,
        "relative_benefit_error": error / whole if whole > 0 else None,
        "gate": redundancy_gate(curvature, ratio).verdict,
    }


def redundancy_trend(table: Table, benefit: str = "relative_benefit") -> Row:
    """Return the rank correlation of FFN redundancy with a benefit over models.

    Returns:
        `models` that count, those with both numbers; `spearman` and `p_value` (two-sided
        permutation test, exact up to 8 models: with three models it is never below 1/3), None with
        fewer than three models or a constant column.
    """
    x, y = (column(table, name).astype(float) for name in ("redundancy", benefit))
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < FEWEST or len(set(x)) == 1 or len(set(y)) == 1:
        return {"models": len(x), "spearman": None, "p_value": None}
    found = spearmanr(x, y)
    value = float(found.statistic)
    chance = _exact(x, y, value) if len(x) <= _EXACT else float(found.pvalue)
    return {"models": len(x), "spearman": value, "p_value": chance}


def _exact(x: np.ndarray, y: np.ndarray, value: float) -> float:
    """Return the share of all orders of y whose |rank correlation| is at least as large."""
    a, b = rankdata(x), rankdata(y)
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    orders = b[np.array(list(permutations(range(len(b)))))]  # at most 8! = 40,320
    # the order found is one of them; rounding must not count it out
    return float((np.abs(orders @ a / len(a)) >= abs(value) - 1e-9).mean())
