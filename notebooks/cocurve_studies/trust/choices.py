"""The best lambda, ratio by ratio, and edges against the diagonal, without guards and with.

Sections "A trust-region view" and "Ablations: the edge term is decisive". Everything is chosen on
one text and reported on another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.racing import Candidate, ChoiceOptions
from cocurve_lab.extensions.choosing.settings import (
    choose_guards,
    choose_interaction_strength,
    guards_grid,
)
from cocurve_lab.extensions.figures import look
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.measuring.risk import PlanTable, standard_error
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty, log_scale
from ..draws import Redrawn, again
from ..lazy import DataFrame, Figure, PreTrainedModel
from ..shared import marks, solved
from ..study import Study
from ..tables import Columns, Folder, Row, Rows, Table, column, pick

NONE, OWN = "without guards", "each with its own guards"

# columns of `strength_study` and of `diagonal_study` for reading, with `shown`
STRENGTH_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "plan": "",
    "start": "λ from",
    "stop": "to",
    "kl": "KL",
    "difference": "KL − best",
    "edge_mass": "edge mass E",
    "fitting": "1 + b/E, fits",
    "printed": "1 − b/E, printed",
}
DIAGONAL_COLUMNS: Columns = {
    "requested_ratio": "removed",
    "search": "",
    "kl_0": "KL, diagonal",
    "kl_1": "KL, edges",
    "edge_benefit": "saved by edges",
    "loss_benefit": "loss saved",
    "guards_1": "guards, edges",
}


class Texts(NamedTuple):
    """Rows to choose on, and other rows to report on."""

    choose: CalibrationSet
    report: CalibrationSet


# Lambda -------------------------------------------------------------------------------------------
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
    """Measure the held-out KL of plans that lambda makes, ratio by ratio.

    Section "Trust-Region View". `texts` must be disjoint from each other and from the calibration.

    Returns:
        One row per ratio and plan. `plan` is "candidate" (measured on `texts.choose`; `chosen`
        marks the best, `tied` what cannot be told from it), or "best", "lambda 0", "lambda 1"
        (measured on `texts.report`, with the difference to the best). `edge_mass` is E, `remainder`
        b, `fitting` 1 + b/E, `printed` 1 - b/E.
    """

    def compute(study: Study) -> Rows:
        rows: Rows = []
        reported: dict[Any, Selection] = {}
        for ratio in ratios:
            choice = choose_interaction_strength(
                model,
                curvature,
                ratio,
                texts.choose,
                report_on=texts.report,
                options=kept_beside(options, cache, model, texts.choose),
            )
            for entry in choice.candidates:
                chosen = entry is choice.chosen
                rows.append(_candidate(ratio, "candidate", entry) | {"chosen": chosen})
            for name, entry in choice.report.items():
                rows.append(_candidate(ratio, name, entry) | {"chosen": False})
                reported[ratio, name] = entry.selection
        drawn = study.redraw(lambda h: {name: again(plan, h) for name, plan in reported.items()})
        for row in rows:
            ratio, plan, error = row["requested_ratio"], row["plan"], row["difference_error"]
            if plan != "candidate":
                row |= drawn.columns("difference", error, (ratio, plan), (ratio, "best"))
        return rows

    study = Study(model, texts.report, curvature, draws, cache, options.progress)
    return study.table("strength", choice_marks(model, curvature, texts, ratios, options), compute)


def _candidate(ratio: float, plan: str, entry: Candidate) -> Row:
    fit = entry.fit
    return {
        "requested_ratio": ratio,
        "plan": plan,
        "start": entry.intervals[0][0],
        "stop": entry.intervals[-1][1],
        "rows": entry.rows,
        "kl": entry.kl,
        "kl_error": entry.standard_error,
        "difference": entry.difference,
        "difference_error": entry.difference_error,
        "tied": entry.tied,
        "edge_mass": fit.edge_mass,
        "remainder": fit.remainder,
        "fitting": fit.interaction_strength,
        "fitting_error": fit.strength_error,
        "printed": fit.printed,
    }


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
    """Return the settings of a table of choices."""
    return marks(
        model,
        curvature,
        choose=texts.choose.fingerprint,
        report=texts.report.fingerprint,
        ratios=[float(ratio) for ratio in ratios],
        max_candidates=options.max_candidates,
        first_rows=options.first_rows,
        stop_beyond=options.stop_beyond,
        judge=options.judge,
    )


def plot_strength(table: Table) -> Figure:
    """Plot held-out KL against lambda, one curve per ratio; a ring marks the plan that was chosen.

    The axis is symlog-like (arsinh), because published choices reach from 4.5e-5 to 0.2.
    """
    figure, scale = empty(), 1e-3
    candidates = pick(table, plan="candidate")

    def middle(row: Row) -> float:
        return math.asinh((row["start"] + row["stop"]) / 2 / scale)

    for number, ratio in enumerate(dict.fromkeys(row["requested_ratio"] for row in candidates)):
        rows = sorted(pick(candidates, requested_ratio=ratio), key=lambda row: row["start"])
        words = [f"λ {row['start']:.4g} to {row['stop']:.4g}, {row['rows']} rows" for row in rows]
        hover = "%{text}<br>KL %{y:.4g}<extra></extra>"
        add(
            figure,
            rows,
            middle,
            "kl",
            f"{ratio:.0%}",
            number,
            line="solid",
            text=words,
            hover=hover,
        )
        ring = look(number) | {"symbol": "circle-open", "line": {"width": 2}}
        chosen = pick(rows, chosen=True)
        add(figure, chosen, middle, "kl", "chosen", ring, bars="", size=16, showlegend=False)
    ticks = [0.0, 1e-3, 1e-2, 1e-1, 1.0]
    places = np.arcsinh(np.array(ticks) / scale).tolist()
    return chart(
        figure,
        "Held-out KL by λ, for each share removed (rings: the plans chosen)",
        {"title_text": "weight of the edges (λ)", "tickvals": places, "ticktext": ticks},
        log_scale("held-out KL, nats per token", column(candidates, "kl")),
    )


# Edges against the diagonal -----------------------------------------------------------------------
def diagonal_study(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5),
    *,
    options: ChoiceOptions = ChoiceOptions(),
    draws: int = 0,
    cache: Folder = None,
) -> DataFrame:
    """Measure the plans of lambda 1 and lambda 0, without guards and each with its own.

    Guards are chosen by `choose_guards` on `texts.choose`, in one grid and by one rule for both.
    Each draw of H solves every plan again under the same guards; the choice is not repeated.

    Returns:
        One row per ratio and search (`NONE`, `OWN`) with a plan of either lambda. `kl_0` and
        `kl_1` are those of lambda 0 and 1 on `texts.report`, `edge_benefit` is kl_0 - kl_1, and
        `loss_benefit` the same of the loss on the text, the logarithm of perplexity: positive where
        edges help.
    """
    settings = choice_marks(model, curvature, texts, ratios, options)
    settings["grid"] = [str(guards) for guards in guards_grid()]

    def compute(study: Study) -> Rows:
        plans: dict[Any, Selection] = {}
        chosen_by = kept_beside(options, cache, model, texts.choose)
        for ratio in ratios:
            for strength in (0.0, 1.0):
                free, _ = solved(curvature, ratio, strength)
                if free is not None:
                    plans[ratio, NONE, strength] = free
                try:
                    choice = choose_guards(
                        model,
                        curvature,
                        ratio,
                        texts.choose,
                        interaction_strength=strength,
                        options=chosen_by,
                    )
                except InfeasibleError:
                    continue
                plans[ratio, OWN, strength] = choice.best
        table, names = study.measure(list(plans.values())), list(plans)
        drawn = study.redraw(lambda h: {name: again(plan, h) for name, plan in plans.items()})
        rows: Rows = []
        for ratio in ratios:
            for search in (NONE, OWN):
                pair = (ratio, search, 0.0), (ratio, search, 1.0)
                if set(pair) <= plans.keys():
                    places = [names.index(name) for name in pair]
                    head = {"requested_ratio": ratio, "search": search}
                    rows.append(head | _benefit(table, drawn, pair, places))
        return rows

    study = Study(model, texts.report, curvature, draws, cache, options.progress)
    return study.table("diagonal", settings, compute)


def _benefit(table: PlanTable, drawn: Redrawn, pair: tuple[Any, Any], places: list[int]) -> Row:
    row: Row = {}
    for name, place in zip(("0", "1"), places, strict=True):
        row[f"guards_{name}"] = str(table.selections[place].guards)
        row[f"kl_{name}"] = table.mean[place]
        row[f"kl_{name}_error"] = table.standard_error[place]
        row[f"perplexity_{name}"] = table.perplexity[place]
    benefit, over_rows = table.paired(*places)
    assert table.nll is not None  # measure_plans always has it
    loss = table.nll[places[0]] - table.nll[places[1]]
    row |= {"edge_benefit": benefit, "loss_benefit": float(np.mean(loss))}
    row |= drawn.columns("edge_benefit", over_rows, *pair)
    return row | drawn.columns("loss_benefit", float(standard_error(loss)), *pair, "nll")
