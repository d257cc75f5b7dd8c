"""Plans of several ways beside what they cost, as pruned and as refitted (notebook 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cocurve_lab.base.errors import InputError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from cocurve_lab.extensions.choosing.neighbors import Neighbors
from cocurve_lab.extensions.repairing.repair import repair
from cocurve_lab.measuring.risk import PlanTable, measure_plans, model_risk
from cocurve_lab.models.units import Unit
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from .shared import known, marks, sequence_columns, sequence_values
from .study import Study
from .tables import DataFrame, Folder, Row, Rows, table_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAY_COLUMNS = {
    "way": "plan of",
    "kl": "KL",
    "against_first": "minus the first",
    "refitted": "KL refitted",
    "evaluations": "row evaluations",
}


def plans_by_way(curvature: Curvature, ratio: float) -> dict[str, Selection]:
    """Return greedy plans by what made them: H at lambda 0 and 1, and the KL of each unit alone."""
    return {
        "H, λ 0": solve_greedy(curvature, ratio, 0.0),
        "H, λ 1": solve_greedy(curvature, ratio, 1.0),
        "each unit alone": solve_greedy(measured_diagonal(curvature), ratio, 0.0),
    }


def way_table(
    model: PreTrainedModel,
    plans: Mapping[str, Selection],
    evaluations: Mapping[str, int],
    calibration: CalibrationSet,
    text: CalibrationSet,
    *,
    cache: Folder = None,
) -> DataFrame:
    """Measure the plans of several ways, as pruned and as refitted.

    Args:
        plans: by what made them; the first is the one to compare with.
        evaluations: row evaluations that each plan took.
        calibration: rows of the refit (`repair`).
        text: rows on which nothing was chosen.

    Returns:
        One row per plan: way, realized_ratio, kl, refitted and against_first, the difference to the
        first plan without a refit, each with its error over rows, and evaluations.
    """
    text.require_disjoint(calibration)

    def measure(study: Study) -> Rows:
        pruned = study.measure(list(plans.values()))
        rows: Rows = []
        for way, plan, kl in zip(plans, plans.values(), pruned.kl, strict=True):
            refitted = model_risk(model, repair(model, plan, calibration), text)
            values = sequence_columns(kl, "kl") | sequence_columns(refitted, "refitted")
            rows.append({"way": way, **values})
        return rows

    made = {way: plan.fingerprint for way, plan in plans.items()}
    settings = marks(model, text=text, plans=made, refit=calibration.fingerprint)
    kept = Study(model, text, cache=cache).table("ways", settings, measure)
    chosen = tuple(plans.values())
    pruned = PlanTable(chosen, sequence_values(kept, "kl"))
    refitted = PlanTable(chosen, sequence_values(kept, "refitted"))
    return table_of(
        _way(way, pruned, refitted, place) | {"evaluations": evaluations[way]}
        for place, way in enumerate(plans)
    )


def _way(way: str, pruned: PlanTable, refitted: PlanTable, place: int) -> Row:
    difference, error = pruned.paired(place, 0)
    return {
        "way": way,
        "realized_ratio": pruned.selections[place].realized_ratio,
        "kl": float(pruned.mean[place]),
        "kl_error": known(pruned.standard_error[place]),
        "against_first": difference,
        "against_first_error": known(error),
        "refitted": float(refitted.mean[place]),
        "refitted_error": known(refitted.standard_error[place]),
    }


# Swaps by hand ------------------------------------------------------------------------------------


def swapped(
    plan: Selection, out: Sequence[Unit | str | int], into: Sequence[Unit | str | int]
) -> Selection:
    """Return the plan with some of its units `out`, which stay in the model, and others `into` it.

    The plan has no gains; `out` are units of it, `into` are others.
    """
    units, pruned = plan.units, set(plan.pruned)
    gone, new = set(units.indices(out)), set(units.indices(into))
    for wrong, where in ((gone - pruned, "not in the plan"), (new & pruned, "in the plan already")):
        if wrong:
            raise InputError(
                f"{units[min(wrong)].name} is {where}. Take out units of plan.pruned, and put in "
                "units of plan.kept."
            )
    made = Neighbors(plan).selection(pruned - gone | new)
    Neighbors(made)  # raises where the swap misses the target
    return made


def duel(
    model: PreTrainedModel,
    plan: Selection,
    out: Sequence[Unit | str | int],
    into: Sequence[Unit | str | int],
    text: CalibrationSet,
) -> str:
    """Measure a plan with some units `swapped` against the plan itself; name the cheaper.

    `text` has at least two held-out rows.
    """
    mine = swapped(plan, out, into)
    if set(mine.pruned) == set(plan.pruned):
        return "nothing is swapped: name units to take out and to put in"
    table = measure_plans(model, [mine, plan], text, progress=False)
    difference, error = table.paired(0, 1)
    verdict = "cannot be told: within two standard errors"
    if abs(difference) > 2 * error:
        verdict = "yours costs less" if difference < 0 else "yours costs more"
    return (
        f"yours {table.mean[0]:.4f}, the plan {table.mean[1]:.4f}, difference "
        f"{difference:+.4f} ± {error:.4f} nats per token: {verdict}"
    )
