"""Plans of H, of the pair KL Q and of the additive KL F beside what they cost (notebook 11).

This departs from the paper, whose only surrogate is H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.tables import Folder, Row, Table, pick
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.neighbors import Neighbors
from cocurve_lab.extensions.repairing.repair import repair
from cocurve_lab.measuring.risk import PlanTable, measure_plans, model_risk
from cocurve_lab.models.units import Unit
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from .chart import HOVER, add, add_diagonal, chart, empty, log_scale
from .findings import percent
from .shared import known, marks, sequence_columns, sequence_values
from .study import Study

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

SURROGATES = {"by_h": "H", "by_q": "Q", "by_f": "F"}  # column of a prediction -> its name
COLUMNS = {"requested_ratio": "asked", "way": "plan of", **SURROGATES, "measured": "measured"}
PREFERRED_COLUMNS = {"requested_ratio": "asked", "measured": "", "H": "", "Q": "", "F": ""}
WAY_COLUMNS = {
    "way": "plan of",
    "kl": "KL",
    "against_first": "minus the first",
    "refitted": "KL refitted",
    "evaluations": "row evaluations",
}


def plans_by_way(
    curvature: Curvature, ratios: Iterable[float]
) -> dict[float, dict[str, Selection]]:
    """Return greedy plans of H at lambda 0 and 1, of Q and of F, by ratio and by what made them.

    Q and F are solved on the part "fit" of the sketch, so that "price" is left to predict on. An H
    without a sketch has plans of H alone.
    """
    ways: dict[str, Callable[[float], Selection]] = {
        "H, λ 0": lambda ratio: solve_greedy(curvature, ratio, 0.0),
        "H, λ 1": lambda ratio: solve_greedy(curvature, ratio, 1.0),
    }
    if curvature.shifts is not None:
        pair, additive = curvature.pair_kl("fit"), curvature.additive()
        ways["Q"] = lambda ratio: solve_greedy(pair, ratio)
        ways["F"] = lambda ratio: additive.solve(ratio, part="fit")
    return {ratio: {way: solve(ratio) for way, solve in ways.items()} for ratio in ratios}


def prediction_table(
    model: PreTrainedModel,
    curvature: Curvature,
    plans: Mapping[float, Mapping[str, Selection]],
    text: CalibrationSet,
    *,
    cache: Folder = None,
) -> Table:
    """Return what H, Q and F predict for each plan of `plans_by_way`, beside its measured KL.

    Q and F predict on the part "price" of the sketch, H on all positions of its build.

    Returns:
        One row per plan: requested_ratio, way, realized_ratio, by_h, by_q, by_f and measured, the
        last two with their errors over groups of sequences and over held-out rows. What Q and F
        predict is None where H has no sketch.
    """
    named = [(ratio, way, plan) for ratio, own in plans.items() for way, plan in own.items()]
    known_shifts = curvature.shifts is not None
    pair = curvature.pair_kl("price") if known_shifts else None
    additive = curvature.additive() if known_shifts else None
    text.require_disjoint(curvature)
    measured = Study(model, text, cache=cache).measure([plan for _, _, plan in named])
    return [
        {
            "requested_ratio": ratio,
            "way": way,
            "realized_ratio": plan.realized_ratio,
            "by_h": curvature.risk(plan.pruned),
            "by_q": pair and pair.risk(plan.pruned),
            "by_f": additive and additive.predict(plan, "price"),
            "by_f_error": additive and known(additive.standard_error(plan, "price")),
            "measured": float(mean),
            "measured_error": known(error),
        }
        for (ratio, way, plan), mean, error in zip(
            named, measured.mean, measured.standard_error, strict=True
        )
    ]


def preferred(table: Table) -> Table:
    """Name the cheapest plan of each ratio, as measured and by the prediction of H, Q and F.

    Returns:
        One row per ratio: requested_ratio, measured, H, Q and F, each the way of a plan; None for
        a surrogate without predictions.
    """
    found: Table = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in table):
        row: Row = {"requested_ratio": ratio}
        for column, name in {"measured": "measured", **SURROGATES}.items():
            told = [one for one in pick(table, requested_ratio=ratio) if one[column] is not None]
            least = min(told, key=lambda one: float(one[column]), default={"way": None})
            row[name] = least["way"]
        found.append(row)
    return found


def shortfalls(table: Table) -> str:
    """Say how many times the measured KL is of each prediction, by ratio: the median of plans."""
    lines = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in table):
        told = []
        for column, name in SURROGATES.items():
            rows = [one for one in pick(table, requested_ratio=ratio) if (one[column] or 0) > 0]
            if rows:
                times = np.median([one["measured"] / one[column] for one in rows])
                told.append(f"{times:.3g} times that of {name}")
        lines.append(f"{percent(ratio)} removed: measured {', '.join(told)}.")
    return "\n".join(lines)


def plot_predictions(table: Table) -> Figure:
    """Plot the measured KL of every plan against what H, Q and F predict, log axes."""
    figure, drawn = empty(), list[float]()
    for place, (column, name) in enumerate(SURROGATES.items()):
        rows = [row for row in table if (row[column] or 0) > 0]  # Q may be negative
        if not rows:
            continue
        drawn += [row[column] for row in rows]
        words = [f"plan of {row['way']}, {row['requested_ratio']:.0%}" for row in rows]
        label = f"predicted by {name}"
        add(figure, rows, column, "measured", label, place, text=words, hover=HOVER)
    add_diagonal(figure, drawn)
    x = log_scale("predicted, nats per token", drawn)
    y = log_scale("measured KL, nats per token", [row["measured"] for row in table])
    return chart(figure, "H, Q and F: predicted and measured", x, y)


def way_table(
    model: PreTrainedModel,
    plans: Mapping[str, Selection],
    evaluations: Mapping[str, int],
    calibration: CalibrationSet,
    text: CalibrationSet,
    *,
    cache: Folder = None,
) -> Table:
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

    def measure(study: Study) -> Table:
        pruned = study.measure(list(plans.values()))
        rows: Table = []
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
    return [
        _way(way, pruned, refitted, place) | {"evaluations": evaluations[way]}
        for place, way in enumerate(plans)
    ]


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
