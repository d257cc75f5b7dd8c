"""Plans of several ways beside what they cost, as pruned and as refitted (notebook 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from cocurve_lab.extensions.repairing.repair import repair
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.measuring.risk import model_risk
from cocurve_lab.solver.guards import FREE, Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from .shared import marks
from .study import Study
from .tables import DataFrame, Folder, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAY_COLUMNS = {
    "way": "plan of",
    "kl": "KL",
    "against_first": "minus the first",
    "refitted": "KL refitted",
}


def plans_by_way(curvature: Curvature, ratio: float, guards: Guards = FREE) -> dict[str, Selection]:
    """Return greedy plans by what made them: H at lambda 0 and 1, and the KL of each unit alone."""
    return {
        "H, λ 0": solve_greedy(curvature, ratio, 0.0, guards),
        "H, λ 1": solve_greedy(curvature, ratio, 1.0, guards),
        "each unit alone": solve_greedy(measured_diagonal(curvature), ratio, 0.0, guards),
    }


def way_table(
    model: PreTrainedModel,
    plans: Mapping[str, Selection],
    calibration: CalibrationSet,
    text: CalibrationSet,
    *,
    cache: Folder = None,
) -> DataFrame:
    """Measure the plans of several ways, as pruned and as refitted.

    Args:
        plans: by what made them; the first is the one to compare with.
        calibration: rows of the refit (`repair`).
        text: rows on which nothing was chosen.

    Returns:
        One row per plan: way, realized_ratio, kl, refitted and against_first, the difference to the
        first plan without a refit, each with its error over rows.
    """
    text.require_disjoint(calibration)

    def compute(study: Study) -> Rows:
        pruned = study.measure(list(plans.values()))
        rows: Rows = []
        for way, plan, kl in zip(plans, plans.values(), pruned.kl, strict=True):
            row = {"way": way, "realized_ratio": plan.realized_ratio}
            refitted = model_risk(model, repair(model, plan, calibration), text)
            values = {"kl": kl, "refitted": refitted, "against_first": kl - pruned.kl[0]}
            for name, found in values.items():
                row[name], row[f"{name}_error"] = mean_and_error(found)
            rows.append(row)
        return rows

    made = {way: plan.fingerprint for way, plan in plans.items()}
    settings = marks(model, text=text, plans=made, refit=calibration.fingerprint)
    return Study(model, text, cache=cache).table("ways", settings, compute)
