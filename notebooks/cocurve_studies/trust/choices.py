"""The best lambda and the best guards, ratio by ratio (section "A trust-region view").

Everything is chosen on one text and reported on another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.racing import Candidate, ChoiceOptions, Judge
from cocurve_lab.extensions.choosing.settings import (
    GuardsChoice,
    InteractionChoice,
    choose_guards,
    choose_interaction_strength,
    guards_grid,
)
from cocurve_lab.extensions.figures import look
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty, log_scale
from ..draws import Redrawn, again, carried
from ..shared import marks
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, column, pick, table_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


# lambda of the authors' release at 20 %, by model: the lowest held-out KL over its path
RELEASED: Mapping[str, float] = MappingProxyType(
    {"Llama-3.1-8B-Instruct": 0.0108, "Llama-3.2-3B": 0.0911, "Falcon3-7B": 0.2177}
)

# columns of `strength_summary` and `guards_study` for reading, with `shown`
BEST_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "plans": "plans measured",
    "best_from": "best λ from",
    "best_to": "to",
    "gate": "gate's λ",
    "kl_best": "KL of the best",
    "kl_lambda_0": "KL, λ 0",
    "kl_lambda_1": "KL, λ 1",
}
BENEFIT_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "edge_benefit": "KL(λ 0) − KL(λ 1)",
    "lambda_0_behind": "KL(λ 0) − KL(best)",
    "lambda_1_behind": "KL(λ 1) − KL(best)",
}
FITTING_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "edge_mass": "edge mass E",
    "remainder": "remainder b",
    "fitting": "1 + b/E, fits",
    "printed": "1 − b/E, printed",
}
GUARDS_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "judge": "judged by",
    "role": "plan",
    "guards": "",
    "kl": "KL",
    "perplexity": "",
    "difference": "",
}


Name = tuple[Any, ...]  # of a choice: its ratio, and its judge; of a plan: that and its role


class Texts(NamedTuple):
    """Rows to choose on, and other rows to report on."""

    choose: CalibrationSet
    report: CalibrationSet


def strength_study(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5),
    *,
    options: ChoiceOptions = ChoiceOptions(),
    draws: int = 0,
    cache: Folder = None,
) -> DataFrame:
    """Measure the held-out KL of every plan that lambda makes, ratio by ratio.

    Section "Trust-Region View". `texts` must be disjoint from each other and from the calibration.

    Returns:
        One row per ratio and plan. `role` is "candidate" (measured on `texts.choose`; `chosen`
        marks the best), or "best", "lambda 0", "lambda 1" (measured on `texts.report`, with the
        difference to the best). `edge_mass` is E, `remainder` b, `fitting` 1 + b/E, `printed` 1 -
        b/E. `gate` is the lambda of the redundancy gate, None where it is undecided. `edge_benefit`
        is KL(lambda 0) - KL(lambda 1) on `texts.report`: positive where edges help.
    """
    settings = choice_marks(model, curvature, texts, ratios, options)

    def compute(study: Study) -> Rows:
        choices: dict[Name, InteractionChoice] = {
            (ratio,): choose_interaction_strength(
                model,
                curvature,
                ratio,
                texts.choose,
                report_on=texts.report,
                options=kept_beside(options, cache, model, texts.choose),
            )
            for ratio in ratios
        }
        candidates: dict[Name, Selection] = {
            (*name, place): entry.selection
            for name, choice in choices.items()
            for place, entry in enumerate(choice.candidates)
            if not entry.stopped_early
        }
        raced = _redrawn(replace(study, text=texts.choose), candidates)
        reported = _redrawn(study, _reported(choices))
        rows = []
        for name, choice in choices.items():
            benefit = _edge_benefit(study, name, choice, reported)
            gate = {"gate": choice.gate.verdict}
            rows += [row | benefit for row in _rows(name, choice, gate, raced, reported)]
        return rows

    study = Study(model, texts.report, curvature, draws, cache, options.progress)
    return study.table("strength", settings, compute)


def _edge_benefit(study: Study, name: Name, choice: InteractionChoice, drawn: Redrawn) -> Row:
    """KL(lambda 0) - KL(lambda 1) over the same rows; None where one of the two has no plan."""
    ends = ("lambda 0", "lambda 1")
    plans = [choice.report[end].selection for end in ends if end in choice.report]
    if len(plans) < 2:
        return {"edge_benefit": None, "edge_benefit_error": None}
    benefit, error = study.measure(plans).paired(0, 1)
    zero, one = ((*name, end) for end in ends)
    return {"edge_benefit": benefit} | drawn.columns("edge_benefit", error, zero, one)


def _reported(choices: Mapping[Name, InteractionChoice | GuardsChoice]) -> dict[Name, Selection]:
    """Return the plans measured on the reported rows, by name and role."""
    return {
        (*name, role): entry.selection
        for name, choice in choices.items()
        for role, entry in choice.report.items()
    }


def _redrawn(study: Study, plans: Mapping[Name, Selection]) -> Redrawn:
    """Solve the same settings on draws of H."""
    return study.redraw(lambda h: {name: again(plan, h) for name, plan in plans.items()})


def _rows(
    name: Name,
    choice: InteractionChoice | GuardsChoice,
    extra: Row,
    raced: Redrawn,
    reported: Redrawn,
) -> Rows:
    judge = choice.chosen.judge
    winner = choice.candidates.index(choice.winner)
    shared = {
        "requested_ratio": choice.best.requested_ratio,
        "left_out": choice.left_out,
        "infeasible": len(choice.infeasible),
        **extra,
    }
    rows = [
        {"role": "candidate", **shared, **_candidate(entry), "chosen": entry is choice.chosen}
        | raced.columns(
            "difference", entry.difference_error, (*name, place), (*name, winner), judge
        )
        for place, entry in enumerate(choice.candidates)
    ]
    rows += [
        {"role": role, **shared, **_candidate(entry), "chosen": role == "best"}
        | reported.columns(
            "difference", entry.difference_error, (*name, role), (*name, "best"), judge
        )
        for role, entry in choice.report.items()
    ]
    return rows


def _candidate(entry: Candidate) -> Row:
    fit, plan = entry.fit, entry.selection
    return {
        "start": entry.intervals[0][0],
        "stop": entry.intervals[-1][1],
        "interaction_strength": plan.interaction_strength,
        "guards": str(entry.guards[0]),
        "realized_ratio": plan.realized_ratio,
        "units": len(plan),
        "predicted_risk": plan.predicted_risk,
        "kl": entry.kl,
        "kl_error": entry.standard_error,
        "perplexity": entry.perplexity,
        "rows": entry.rows,
        "difference": entry.difference,
        "difference_error": entry.difference_error,
        "stopped_early": entry.stopped_early,
        "tied": entry.tied,
        "edge_mass": fit.edge_mass,
        "remainder": fit.remainder,
        "fitting": fit.interaction_strength,
        "fitting_error": fit.strength_error,
        "printed": fit.printed,
    }


def strength_summary(table: Table) -> DataFrame:
    """Summarize each ratio: the best plan's lambda, the lambda that fits, the edge benefit.

    E and b are those of the plan of lambda = 1 on the reported rows: a plan and rows that were not
    picked for their KL.
    """
    rows = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in pick(table)):
        part = pick(table, requested_ratio=ratio)
        chosen = next(row for row in part if row["role"] == "candidate" and row["chosen"])
        best, zero, one = (
            next((row for row in part if row["role"] == role), None)
            for role in ("best", "lambda 0", "lambda 1")
        )
        row: Row = {
            "requested_ratio": ratio,
            "best_from": chosen["start"],
            "best_to": chosen["stop"],
            "gate": chosen["gate"],
            "plans": sum(row["role"] == "candidate" for row in part),
        }
        for name, entry in (("best", best), ("lambda_0", zero), ("lambda_1", one)):
            row[f"kl_{name}"] = None if entry is None else entry["kl"]
            row[f"kl_{name}_error"] = None if entry is None else entry["kl_error"]
        for name, entry in (("lambda_0", zero), ("lambda_1", one)):
            row |= {f"{name}_behind": None, f"{name}_behind_error": None}
            row |= {} if entry is None else carried(entry, "difference", f"{name}_behind")
        row |= carried(chosen, "edge_benefit", "edge_benefit")
        for name in ("edge_mass", "remainder", "fitting", "fitting_error", "printed"):
            row[name] = None if one is None else one[name]
        row["remainder_error"] = row[
            "kl_lambda_1_error"
        ]  # of b = KL - 1/2 s^T H s, H taken as exact
        rows.append(row)
    return table_of(rows)


# Guards -------------------------------------------------------------------------------------------
def guards_study(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float] = (0.2, 0.4),
    *,
    options: ChoiceOptions = ChoiceOptions(),
    draws: int = 0,
    cache: Folder = None,
) -> DataFrame:
    """Choose layer cap and protection by held-out KL and by perplexity, at lambda 1 (Alg. 2).

    Each draw of H solves every plan again under the same guards; the choice is not repeated.

    Returns:
        One row per ratio, judge and plan; `role` as in `strength_study`, with "no guards" and
        "release's guards" reported beside the best.
    """
    settings = choice_marks(model, curvature, texts, ratios, options)
    settings["grid"] = [str(guards) for guards in guards_grid()]
    judges: tuple[Judge, ...] = ("kl", "nll")

    def compute(study: Study) -> Rows:
        choices: dict[Name, GuardsChoice] = {
            (ratio, judge): choose_guards(
                model,
                curvature,
                ratio,
                texts.choose,
                report_on=texts.report,
                options=replace(kept_beside(options, cache, model, texts.choose), judge=judge),
            )
            for ratio in ratios
            for judge in judges
        }
        # no verdict compares the candidates, so they are not redrawn
        reported = _redrawn(study, _reported(choices))
        rows = []
        for name, choice in choices.items():
            rows += _rows(name, choice, {"judge": name[1]}, Redrawn(), reported)
        return rows

    study = Study(model, texts.report, curvature, draws, cache, options.progress)
    return study.table("guards", settings, compute)


def kept_beside(
    options: ChoiceOptions, cache: Folder, model: PreTrainedModel, text: CalibrationSet
) -> ChoiceOptions:
    """Keep the measurements beside the tables, so that an interrupted study resumes."""
    path = plans_file(cache, model, text)
    return options if path is None else replace(options, checkpoint=path)


def choice_marks(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float],
    options: ChoiceOptions,
) -> dict[str, Any]:
    """Return the settings of a table of choices; the grid of guards is not among them."""
    return marks(
        model,
        curvature,
        dtype=False,
        choose=texts.choose.fingerprint,
        report=texts.report.fingerprint,
        ratios=[float(ratio) for ratio in ratios],
        max_candidates=options.max_candidates,
        first_rows=options.first_rows,
        stop_beyond=options.stop_beyond,
        judge=options.judge,
    )


# Pictures -----------------------------------------------------------------------------------------
def plot_strength(table: Table) -> Figure:
    """Plot held-out KL against lambda, one curve per ratio; a ring marks the plan that was chosen.

    The axis is symlog-like (arsinh), because published choices reach from 4.5e-5 to 0.2.
    """
    figure, scale = empty(), 1e-3

    def middle(row: Row) -> float:
        return math.asinh((row["start"] + row["stop"]) / 2 / scale)

    for number, ratio in enumerate(dict.fromkeys(row["requested_ratio"] for row in pick(table))):
        rows = pick(table, requested_ratio=ratio, role="candidate")
        rows.sort(key=lambda row: row["start"])
        words = [f"λ {row['start']:.4g} to {row['stop']:.4g}, {row['rows']} rows" for row in rows]
        hover = "%{text}<br>KL %{y:.4g}<extra></extra>"
        name = f"{ratio:.0%}"
        add(figure, rows, middle, "kl", name, number, line="solid", text=words, hover=hover)
        ring = look(number) | {"symbol": "circle-open", "size": 16, "line": {"width": 2}}
        figure.add_scatter(
            x=[middle(row) for row in rows if row["chosen"]],
            y=[row["kl"] for row in rows if row["chosen"]],
            mode="markers",
            showlegend=False,
            marker=ring,
            hovertemplate=f"chosen at {name}<extra></extra>",
        )
    ticks = [0.0, 1e-3, 1e-2, 1e-1, 1.0]
    places = np.arcsinh(np.array(ticks) / scale).tolist()
    return chart(
        figure,
        "Held-out KL by λ, for each share removed (rings: the plans chosen)",
        {"title_text": "weight of the edges (λ)", "tickvals": places, "ticktext": ticks},
        log_scale("held-out KL, nats per token", column(table, "kl")),
    )
