"""Predicted and measured risk of single units and of whole plans, and how well the two agree.

The paper's appendix "Surrogate Fidelity: Empirical Study"; pairs are in `reach.py`. The table
of plans has the KL of every held-out sequence in columns `kl_0`, `kl_1`, ..., so that its summary
can resample the text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import rankdata

from cocurve_lab.base.errors import InputError
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import Sample
from cocurve_lab.extensions.figures import (
    COLORS,
    finish,
    graph_objects,
)
from cocurve_lab.extensions.judging.agreement import (
    PREDICTIONS,
    RANDOM,
    predictions,
    same_budget_pool,
)
from cocurve_lab.extensions.judging.gap import RiskSplit
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import CalibrationSet, DataFrame, Figure, PreTrainedModel
from ..shared import known, marks, sequence_columns, sequence_values
from ..study import Study
from ..tables import Columns, Folder, Row, Rows, Table, column, table_of

ACROSS, POOL = "across ratios", "same budget"
# columns of `fidelity_study` for reading, with `shown`
COLUMNS: Columns = {
    "method": "plan",
    "requested_ratio": "removed",
    "units": "",
    "predicted": "",
    "measured": "",
    "measured_over_predicted": "measured / predicted",
}


@dataclass(frozen=True)
class FidelityOptions:
    """The plans to measure.

    Attributes:
        ratios, strengths: of the plans across ratios. pool_ratio, pool_size, seed: of the plans of
        one budget (`same_budget_pool`); the paper has 26 at 0.2.
    """

    ratios: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
    strengths: tuple[float, ...] = (0.0, 1.0)
    pool_ratio: float = 0.2
    pool_size: int = 26
    seed: int = 0


# Single units -------------------------------------------------------------------------------------
def single_unit_fidelity(curvature: Curvature) -> DataFrame:
    """Return predicted 1/2 H_uu and measured KL of every unit removed alone, both from the build.

    Rows, positions and support are the same on both sides (unless the build measured over the full
    vocabulary, `Curvature.risk_support`), so the ratio shows the error of the quadratic form alone
    (Proposition "Fisher quadratic").

    Returns:
        One row per unit: unit, kind, predicted, measured, and measured_over_predicted, None where
        nothing is predicted.
    """
    measured, predicted = curvature.single_unit_risk, curvature.saliency / 2
    if measured is None:
        raise InputError(
            "this H came without single-unit risks (a released or hand-made matrix). Use an H from "
            "estimate_curvature, which has them."
        )
    return table_of(
        {
            "unit": unit.name,
            "kind": unit.kind,
            "predicted": predicted[u],
            "measured": measured[u],
            "measured_over_predicted": measured[u] / predicted[u] if predicted[u] > 0 else None,
        }
        for u, unit in enumerate(curvature.units)
    )


# Plans --------------------------------------------------------------------------------------------
def fidelity_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    options: FidelityOptions = FidelityOptions(),
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Measure the risk of plans across ratios, and of different plans of one budget.

    Returns:
        One row per plan: group (ACROSS, POOL), method, interaction_strength, requested_ratio,
        realized_ratio, units, the scores of `predictions` (predicted, diagonal, single_units), the
        first with its sampling error (plan fixed, so without the optimism of a plan chosen on the
        same H), measured and measured_over_predicted, and kl_<n> of each sequence.
    """
    settings = marks(model, curvature, held_out, **asdict(options))

    def compute(study: Study) -> Rows:
        plans = _plans(curvature, options)
        table = study.measure([plan for _, plan in plans])
        return [
            row | plan_columns(curvature, plan, kl, error)
            for (row, plan), kl, error in zip(plans, table.kl, table.standard_error, strict=True)
        ]

    study = Study(model, held_out, curvature, cache=cache, progress=progress)
    return study.table("fidelity", settings, compute)


def _plans(curvature: Curvature, options: FidelityOptions) -> list[tuple[Row, Selection]]:
    """Every plan and the first columns of its row; without guards greedy reaches any ratio."""
    plans = [
        (ACROSS, f"lambda {strength:g}", solve_greedy(curvature, ratio, strength))
        for strength in options.strengths
        for ratio in options.ratios
    ]
    pool = same_budget_pool(curvature, options.pool_ratio, options.seed, options.pool_size)
    plans += [(POOL, method, plan) for method, plan in pool]
    return [
        (
            {
                "group": group,
                "method": method,
                "interaction_strength": plan.interaction_strength,
                "requested_ratio": plan.requested_ratio,
            },
            plan,
        )
        for group, method, plan in plans
    ]


def plan_columns(curvature: Curvature, plan: Selection, kl: np.ndarray, error: float) -> Row:
    """Return what `fidelity_study` says of a plan, from its measured KL [sequences]."""
    predicted, chosen = curvature.risk(plan.pruned), np.ix_(plan.pruned, plan.pruned)
    sampling = None
    if curvature.group_grams is not None:
        error_of = Sample.of(curvature).linear_error
        sampling = known(error_of(lambda gram: gram[chosen].sum() / 2))
    return {
        "realized_ratio": plan.realized_ratio,
        "units": len(plan),
        **predictions(curvature, plan.pruned),
        "predicted_error": sampling,
        "measured": kl.mean(),
        "measured_error": known(error),
        "measured_over_predicted": kl.mean() / predicted if predicted > 0 else None,
    } | sequence_columns(kl)


# Summary of plans ---------------------------------------------------------------------------------
def fidelity_summary(table: Table, draws: int = 2000, seed: int = 0) -> DataFrame:
    """Summarize how well `fidelity_study` predicted.

    Each group gets pearson, spearman and median_ratio, and the spearman of the other scores of
    `predictions`. Plans across ratios also get the exponent of the gap: the slope of
    log |measured - predicted| on the log of the number of units (||s||_1; Proposition "Surrogate-KL
    gap" bounds it by a cube). The pool gets the factor by which random plans are worse.

    Returns:
        Rows of group, statistic, value, value_error (from `draws` of a bootstrap over sequences
        with plans and predictions fixed, and of an exponent also that of the fit) and points. Left
        out are plans without a ratio and, for exponents, gaps within two standard errors of 0.
    """
    means = resampled_means(sequence_values(table), draws, seed)
    rows: Rows = []
    for group, members in _groups(table).items():
        x, y = column(table, "predicted")[members], means[:, members]
        good = (x > 0) & (y[0] > 0)
        rows.append(_row(group, "pearson", correlations(x[good], y[:, good])))
        rows.append(_row(group, "median_ratio", np.median(y[:, good] / x[good], axis=1)))
        for name in PREDICTIONS:
            score = column(table, name)[members].astype(float)
            known = good & np.isfinite(score)
            ranks = rankdata(score[known]), rankdata(y[:, known], axis=1)
            statistic = "spearman" if name == "predicted" else f"spearman, {name}"
            rows.append(_row(group, statistic, correlations(*ranks)))
        for row in rows[-2 - len(PREDICTIONS) :]:
            row["points"] = int(good.sum())
        if group.startswith(ACROSS):
            error = column(table, "measured_error")[members].astype(float)
            clear = np.abs(y[0] - x) > 2 * np.nan_to_num(error)
            size = column(table, "units")[members].astype(float)
            rows.append(_exponent(group, size, np.abs(y - x), clear & (size > 0)))
    return table_of(rows + _random_row(table, means))


def resampled_means(values: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Means [1 + draws, rows] of values [rows, sequences]: as measured, then bootstrap draws."""
    count = values.shape[1]
    counts = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    return np.vstack([np.ones(count), counts]) @ values.T / count


def _groups(table: Table) -> dict[str, np.ndarray]:
    """Return the rows of each group of the summary, as indices."""
    group, method = column(table, "group"), column(table, "method")
    members = {ACROSS: group == ACROSS}
    for name in dict.fromkeys(method):
        members[f"{ACROSS}, {name}"] = members[ACROSS] & (method == name)
    members[POOL] = group == POOL
    return {name: np.flatnonzero(mask) for name, mask in members.items() if mask.any()}


def _exponent(group: str, x: np.ndarray, gap: np.ndarray, good: np.ndarray) -> Row:
    """Return the slope of log gap [1 + draws, n] on log x [n] over the good points."""
    row = _row(group, "gap exponent in units", np.full(len(gap), np.nan))
    row["points"] = count = int(good.sum())
    if count < 3 or np.ptp(x[good]) == 0:
        return row
    centred = np.log(x[good]) - np.log(x[good]).mean()
    log_gap = np.log(gap[:, good])
    slopes = log_gap @ centred / (centred @ centred)
    rest = log_gap[0] - log_gap[0].mean() - slopes[0] * centred
    fit = float(np.sqrt(rest @ rest / (count - 2) / (centred @ centred)))
    return row | {"value": slopes[0], "value_error": float(np.hypot(fit, _spread(slopes) or 0.0))}


def _random_row(table: Table, means: np.ndarray) -> Rows:
    """Mean KL of the pool's random plans over that of its structured ones."""
    pool, method = column(table, "group") == POOL, column(table, "method")
    random, structured = pool & (method == RANDOM), pool & (method != RANDOM)
    if not (random.any() and structured.any()):
        return []
    factor = means[:, random].mean(axis=1) / means[:, structured].mean(axis=1)
    return [_row(POOL, "random over structured", factor) | {"points": int(pool.sum())}]


def _row(group: str, statistic: str, values: np.ndarray) -> Row:
    """Return a row of a summary, from a statistic [1 + draws]: as measured, then on draws."""
    row: Row = {"group": group, "statistic": statistic, "value": known(values[0])}
    return row | {"value_error": _spread(values)}


def _spread(values: np.ndarray) -> float | None:
    """Return the standard deviation over draws, those without a value left out."""
    drawn = values[1:][np.isfinite(values[1:])]
    return float(drawn.std(ddof=1)) if np.isfinite(values[0]) and len(drawn) > 1 else None


def correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson correlation [draws] of x [n] with each row of y [draws, n]; NaN below 3 points."""
    if len(x) < 3:
        return np.full(len(y), np.nan)
    x, y = x - x.mean(), y - y.mean(axis=1, keepdims=True)
    scale = np.sqrt((x @ x) * (y**2).sum(axis=1))
    return np.divide(y @ x, scale, out=np.full(len(y), np.nan), where=scale > 0)


# Where the two part -------------------------------------------------------------------------------
_AXES: dict[Literal["p_max", "shift"], str] = {
    "p_max": "probability of the teacher's first choice",
    "shift": "predicted ½ dzᵀF dz at the position, nats",
}
_BARS = {  # column of `RiskSplit.bins`: name, color, pattern
    "predicted": ("predicted", COLORS["attention"], ""),
    "kl_of_sum": ("KL of the summed shifts", COLORS["ffn"], "."),
    "measured": ("measured", COLORS["bridge"], "/"),
}


def plot_split(split: RiskSplit) -> Figure:
    """Plot the risk of a plan by confidence of the teacher and by size of the shift.

    Predicted, measured, and between them the exact KL of the summed shifts, on the same positions.
    Bars are parts of the whole, nats per token, so those of one color add up to the same total in
    both panels; above them stands the share of positions in the bin.
    """
    figure: Any = graph_objects().Figure()
    for place, by in enumerate(_AXES):
        bins, axis = split.bins(by), {"xaxis": f"x{place + 1}", "yaxis": f"y{place + 1}"}
        for name, (label, color, pattern) in _BARS.items():
            spread = {"array": bins["measured_error"], "thickness": 1, "color": "#808080"}
            figure.add_bar(
                x=bins["bin"],
                y=bins[name],
                name=label,
                legendgroup=name,
                showlegend=place == 0,
                marker={"color": color, "pattern": {"shape": pattern}},
                error_y=spread if name == "measured" else None,
                text=[f"{share:.0%}" for share in bins["share"]],
                textposition="outside" if name == "predicted" else "none",
                hovertemplate="%{x}: %{y:.3g} nats per token<br>%{text} of positions"
                f"<extra>{label}</extra>",
                **axis,
            )
    figure.update_layout(
        barmode="group",
        xaxis={"domain": [0, 0.46], "title": {"text": _AXES["p_max"]}, "type": "category"},
        xaxis2={"domain": [0.54, 1], "title": {"text": _AXES["shift"]}, "type": "category"},
        yaxis={"title": {"text": "part of the KL, nats per token"}},
        yaxis2={"anchor": "x2", "matches": "y"},
    )
    removed = split.selection.realized_ratio
    title = f"Risk by position, {removed:.1%} removed; above the bars the share of positions"
    return finish(figure, title)
