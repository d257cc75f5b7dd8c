"""Improvements on a greedy plan: a better plan, or gains on the units it keeps.

`refinement_study` compares greedy, local search and the certified bound. `gains_study` measures
whether rescaling the kept FFN groups helps on text that H has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.bounds import risk_lower_bound
from cocurve_lab.extensions.analysis.refinement import refine
from cocurve_lab.extensions.choosing.gains import GainsChoice, choose_gains
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty
from ..claims import name_plan
from ..draws import Plans
from ..shared import marks, solved
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, kept_table, pick
from .choices import Texts, kept_beside

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


# columns of the two studies for reading, with `shown`
REFINEMENT_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "interaction_strength": "λ",
    "objective": "R_λ, greedy",
    "refined_objective": "after search",
    "bound": "",
    "certified": "bound / after",
    "units_exchanged": "units exchanged",
    "kl": "KL, greedy",
    "difference": "KL after − before",
}
GAINS_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "interaction_strength": "λ",
    "ridge": "ridge γ",
    "clip": "clip τ",
    "kl": "KL with gains",
    "difference": "KL with − without",
}


def refinement_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    ratios: Sequence[float] = (0.2, 0.4),
    strengths: Sequence[float] = (0.0, 0.5, 1.0),
    *,
    draws: int = 0,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Compare greedy, local search and the lower bound, and measure what the two plans cost.

    H must be positive semidefinite up to rounding, and lambdas in [0, 1] (the bound's range).

    Returns:
        One row per ratio and lambda. `objective`, `refined_objective` and `bound` are R_lambda;
        `certified` is bound / refined objective: no plan is better by more than 1 - certified. KL
        is measured; `difference` is refined minus greedy.
    """
    pairs = [(ratio, strength) for ratio in ratios for strength in strengths]

    def compute(study: Study) -> Rows:
        greedy = [solve_greedy(curvature, *pair) for pair in pairs]
        plans = [*greedy, *(refine(plan, curvature) for plan in greedy)]
        table, drawn = study.measure(plans), study.redraw(partial(_refined, pairs))
        rows = []
        for number, (ratio, strength) in enumerate(pairs):
            better = number + len(pairs)
            bound = risk_lower_bound(curvature, ratio, interaction_strength=strength)
            objective, refined = plans[number].objective, plans[better].objective
            assert objective is not None  # solve_greedy fills it, and refine keeps it
            assert refined is not None
            difference, error = table.paired(better, number)
            rows.append(
                {
                    "requested_ratio": ratio,
                    "interaction_strength": strength,
                    "objective": objective,
                    "refined_objective": refined,
                    "bound": bound,
                    "certified": bound / refined if refined > 0 else None,
                    "units_exchanged": len(set(plans[number].pruned) ^ set(plans[better].pruned)),
                    "kl": float(table.mean[number]),
                    "refined_kl": float(table.mean[better]),
                    "difference": difference,
                }
                | drawn.columns(
                    "difference", error, (ratio, strength, "refined"), (ratio, strength, "greedy")
                )
            )
        return rows

    settings = marks(model, curvature, held_out, dtype=False, **_plans(ratios, strengths))
    study = Study(model, held_out, curvature, draws, cache, progress)
    return study.table("refinement", settings, compute)


def _refined(pairs: Sequence[tuple[float, float]], curvature: Curvature) -> Plans:
    """Return greedy plans of one draw of H and what local search makes of them."""
    plans: dict[Any, Selection | None] = {}
    for pair in pairs:
        greedy, _ = solved(curvature, *pair)
        if greedy is not None:
            plans[(*pair, "greedy")] = greedy
            plans[(*pair, "refined")] = refine(greedy, curvature)
    return plans


def gains_study(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float] = (0.2, 0.4),
    strengths: Sequence[float] = (0.0, 1.0),
    *,
    options: ChoiceOptions = ChoiceOptions(),
    cache: Folder = None,
) -> DataFrame:
    """Measure gains on kept FFN groups, applied only where held-out text says so.

    Returns:
        One row per plan and (ridge, clip); `role` is "candidate", measured on `texts.choose`, or
        "report", the chosen one on `texts.report` (difference 0 where no gains are applied).
        Differences are against the plan without gains.
    """

    def compute() -> Rows:
        rows = []
        for ratio in ratios:
            for strength in strengths:
                choice = choose_gains(
                    model,
                    curvature,
                    solve_greedy(curvature, ratio, strength),
                    texts.choose,
                    report_on=texts.report,
                    options=kept_beside(options, cache, model, texts.choose),
                )
                plan = {"requested_ratio": ratio, "interaction_strength": strength}
                rows += [plan | row for row in _gains_rows(choice)]
        return rows

    settings = marks(model, curvature, texts.choose, dtype=False, **_plans(ratios, strengths))
    settings["report"] = texts.report.fingerprint
    return kept_table(cache, "gains", settings, compute)


def _plans(ratios: Sequence[float], strengths: Sequence[float]) -> dict[str, list[float]]:
    return {"ratios": [float(r) for r in ratios], "strengths": [float(s) for s in strengths]}


def _gains_rows(choice: GainsChoice) -> Rows:
    rows: Rows = [{"role": "candidate", **row} for row in pick(choice.curve)]
    if choice.report is None:
        return rows
    ridge, clip = choice.setting or (None, None)
    difference, error = choice.report.paired(1, 0)
    reported: Row = {
        "role": "report",
        "ridge": ridge,
        "clip": clip,
        "kl": float(choice.report.mean[1]),
        "kl_error": float(choice.report.standard_error[1]),
        "difference": difference,
        "difference_error": error,
        "predicted_risk": float(choice.predicted[choice.chosen]),
        "chosen": True,
    }
    return [*rows, reported]


def plot_gains(table: Table) -> Figure:
    """Plot KL with gains minus KL without, by plan and setting; below 0 they help."""
    figure = empty()
    rows = [row for row in pick(table, role="candidate") if row["ridge"] is not None]
    for number, (ridge, clip) in enumerate(dict.fromkeys((r["ridge"], r["clip"]) for r in rows)):
        part, name = pick(rows, ridge=ridge, clip=clip), f"ridge γ {ridge:g}, clip τ {clip:g}"
        add(figure, part, name_plan, "difference", name, number)
    title = "KL with gains on kept FFN groups, less KL without"
    units = "KL with gains − without, nats per token"
    return chart(figure, title, "share removed, and λ", units, across=0)
