"""FFN redundancy and the benefit of the edges, over any set of models.

Figure "edge benefit vs. FFN redundancy", appendix "Scope of Applicability".
"""

from __future__ import annotations

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.measuring.results import mean_and_error

from ..chart import add, chart, empty, share_axis
from ..lazy import Figure
from ..paper.published import paper_names, published
from ..tables import Columns, Row, Table, pick

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


def plot_redundancy(table: Table) -> Figure:
    """Draw what edges save by FFN redundancy (Figure "edge benefit vs. FFN redundancy").

    Models of `redundancy_row` have their error over rows. The paper's ten have benefits in several
    units, so they stand on the line of 0, by what it advises for them.
    """
    figure = empty()
    for number, row in enumerate(pick(table)):
        add(figure, [row], "redundancy", "relative_benefit", row["model"], number)
    stored = [row for name in paper_names() for row in pick(published(name).rows, variant="gate")]
    for number, word in enumerate(("full", "damp"), len(figure.data)):
        some = [row for row in stored if row["values"]["use"].startswith(word)]
        places = [row["values"]["FFN redundancy"] for row in some]
        hover = [f"{row['model']}: {row['values']['edge benefit']}" for row in some]
        title = f"the paper's: {word}"
        add(figure, some, places, [0.0] * len(some), title, number, hover="%{text}", text=hover)
    y = share_axis("KL(λ 0) − KL(λ 1), share of KL(λ 0)")
    return chart(figure, "Edge benefit by FFN redundancy", "mean |ρ| of FFN", y, across=0)
