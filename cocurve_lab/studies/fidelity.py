"""Does 1/2 s^T H s predict the measured KL? Of single units, of pairs, and of whole plans.

The paper's appendix "Surrogate Fidelity: Empirical Study". Tables that were measured hold the KL of
every held-out sequence in columns `kl_0`, `kl_1`, ..., so that their summaries can resample text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..curvature import Curvature
from ..errors import InputError
from ..fidelity import same_budget_pool
from ..figures import COLORS, finish, graph_objects
from ..loading import fingerprint_model, model_dtype
from ..risk import measure_plans
from ..selection import Selection
from ..solver import solve_greedy
from ..storage import fingerprint
from ..uncertainty import Groups
from .tables import Folder, Row, Table, cached_table, pick, plans_file

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet

ACROSS, POOL = "across ratios", "same budget"
PALETTE = (*COLORS.values(), "#009E73", "#56B4E9", "#CC79A7")  # Okabe-Ito
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
PAPER = {"spearman": 1.0, "pearson": 0.95, "pool": 0.81, "random": 3.0, "exponent": 3.0}


@dataclass(frozen=True)
class FidelityOptions:
    """What to measure.

    Attributes:
        ratios: of the plans across ratios, each in [0, 1).
        strengths: lambdas of those plans.
        pool_ratio, pool_size: of the plans of one budget (`same_budget_pool`; the paper: 0.2, 26).
        pairs: pairs in each of the three groups of `pair_saturation`.
        seed: of the pool and of the random pairs.
    """

    ratios: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
    strengths: tuple[float, ...] = (0.0, 1.0)
    pool_ratio: float = 0.2
    pool_size: int = 26
    pairs: int = 60
    seed: int = 0


# What every measured study does ----------------------------------------------------------------


def measured_on(
    model: PreTrainedModel, curvature: Curvature, held_out: CalibrationSet
) -> dict[str, str]:
    """Fingerprints of model, curvature and text: the part of a table's settings all studies share.

    Raises:
        MismatchError: H was built on a row of the text, even where the table itself is kept.
    """
    held_out.require_disjoint(curvature)
    return {
        "model": fingerprint_model(model),
        "dtype": model_dtype(model),
        "curvature": curvature.fingerprint,
        "text": held_out.fingerprint,
    }


def sequence_columns(values: np.ndarray, name: str = "kl") -> dict[str, float]:
    """One row's values [sequences] as columns name_0, name_1, ..."""
    return {f"{name}_{number}": float(value) for number, value in enumerate(values)}


def sequence_values(table: Table, name: str = "kl") -> np.ndarray:
    """The values [rows, sequences] that `sequence_columns` put into a table."""
    count = sum(key.startswith(f"{name}_") and key[len(name) + 1 :].isdigit() for key in table[0])
    return np.array([[row[f"{name}_{number}"] for number in range(count)] for row in table])


# Single units -----------------------------------------------------------------------------------


def single_unit_fidelity(curvature: Curvature, cache: Folder = None) -> Table:
    """Predicted 1/2 H_uu against the measured KL of removing u alone, both as the build saw them.

    Same rows, positions and top-r support on both sides, so the ratio shows the error of the
    quadratic form alone (Proposition "Fisher quadratic"), without sampling and without other units.

    Args:
        curvature: H [M, M] with its groups and single-unit risks, from `estimate_curvature`.
        cache: folder to keep the table in.

    Returns:
        One row per unit: unit, kind, layer, predicted, measured (nats per token), ratio = measured
        / predicted, and the standard error of each over groups of sequences; ratio None where
        nothing is predicted.

    Raises:
        InputError: H came without groups or single-unit risks.
    """
    if curvature.group_risks is None or curvature.group_positions is None:
        raise InputError(
            "this H came without single-unit risks (a released or hand-made matrix). Use an H from "
            "estimate_curvature, which keeps them."
        )
    grams, risks = curvature.group_grams, curvature.group_risks
    settings = {"curvature": curvature.fingerprint, "groups": fingerprint(grams, risks)}
    return cached_table(cache, "single_units", settings, lambda: _single_units(curvature))


def _single_units(curvature: Curvature) -> Table:
    groups = Groups.of(curvature)
    half = np.diagonal(groups.grams, axis1=1, axis2=2) / 2  # [G, M] sums over positions
    positions, risks = curvature.group_positions, curvature.group_risks
    assert positions is not None
    assert risks is not None
    risks = risks[positions > 0]
    scored = np.broadcast_to(groups.positions[:, None], half.shape)
    columns = {
        name: _ratio_of_sums(top, bottom)
        for name, top, bottom in (
            ("predicted", half, scored),
            ("measured", risks, scored),
            ("ratio", risks, half),
        )
    }
    return [
        {"unit": unit.name, "kind": unit.kind, "layer": unit.layer}
        | {name: number(values[i]) for name, (values, _) in columns.items()}
        | {f"{name}_error": number(errors[i]) for name, (_, errors) in columns.items()}
        for i, unit in enumerate(curvature.units)
    ]


def _ratio_of_sums(top: np.ndarray, bottom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sum / sum over the first axis and its linearised standard error; NaN where bottom is 0."""
    count, below = len(top), bottom.sum(axis=0)
    empty = np.full(below.shape, np.nan)
    ratio = np.divide(top.sum(axis=0), below, out=empty.copy(), where=below > 0)
    if count < 2:
        return ratio, empty
    spread = ((top - ratio * bottom) ** 2).sum(axis=0) * count / (count - 1)
    return ratio, np.divide(np.sqrt(spread), below, out=empty, where=below > 0)


def number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


# Plans ------------------------------------------------------------------------------------------


def fidelity_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    options: FidelityOptions = FidelityOptions(),
    cache: Folder = None,
    progress: bool = True,
) -> Table:
    """Predicted and measured risk of plans across ratios, and of different plans of one budget.

    Args:
        model: the dense model.
        curvature: H [M, M] of that model.
        held_out: text H was not built on.
        options: ratios, lambdas, the pool.
        cache: folder for the table and for the plans measured so far; a run resumes there.
        progress: show a progress bar.

    Returns:
        One row per plan: group (ACROSS, POOL), method, interaction_strength, requested_ratio,
        realized_ratio, units, and in nats per token: predicted = 1/2 s^T H s with its sampling
        error (plan fixed, so without the optimism of a plan chosen on the same H), diagonal = 1/2
        sum of H_uu, single_units (sum of the KL of removing each alone, as the build measured it;
        None where it did not), measured with its standard error over sequences, kl_<n> of each
        sequence; and ratio = measured / predicted.

    Raises:
        InputError: a ratio, lambda or size out of range.
        MismatchError: H was built on a row of the text.
    """
    settings = measured_on(model, curvature, held_out) | {
        name: getattr(options, name)
        for name in ("ratios", "strengths", "pool_ratio", "pool_size", "seed")
    }

    def compute() -> Table:
        known = _plans(curvature, options)
        table = measure_plans(
            model,
            [plan for _, plan in known],
            held_out,
            checkpoint=plans_file(cache, model, held_out),
            progress=progress,
            calibrated_on=curvature,
        )
        return [
            row | _plan_columns(curvature, plan, kl, error)
            for (row, plan), kl, error in zip(known, table.kl, table.standard_error, strict=True)
        ]

    return cached_table(cache, "fidelity", settings, compute)


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


def _plan_columns(curvature: Curvature, plan: Selection, kl: np.ndarray, error: float) -> Row:
    predicted, chosen, known = curvature.risk(plan.pruned), np.ix_(plan.pruned, plan.pruned), None
    alone = curvature.single_unit_risk
    if curvature.group_grams is not None:
        error_of = Groups.of(curvature).linear_error
        known = number(error_of(lambda gram: gram[chosen].sum() / 2))
    return {
        "realized_ratio": plan.realized_ratio,
        "units": len(plan),
        "predicted": predicted,
        "predicted_error": known,
        "diagonal": curvature.saliency[list(plan.pruned)].sum() / 2,
        "single_units": None if alone is None else alone[list(plan.pruned)].sum(),
        "measured": kl.mean(),
        "standard_error": number(error),
        "ratio": kl.mean() / predicted if predicted > 0 else None,
    } | sequence_columns(kl)


# Pictures ---------------------------------------------------------------------------------------


def plot_single_unit_fidelity(table: Table) -> Figure:
    """Measured KL of each unit alone against 1/2 H_uu, log axes, with the diagonal."""
    figure = graph_objects().Figure()
    for kind, symbol in (("attention", "circle"), ("ffn", "square")):
        name = "FFN" if kind == "ffn" else kind
        _points(figure, pick(table, kind=kind), name, COLORS[kind], symbol)
    return _against_diagonal(figure, table, "Single units: predicted and measured on one support")


def plot_fidelity(table: Table) -> Figure:
    """Measured KL of every plan against 1/2 s^T H s, log axes, error bars over sequences."""
    figure = graph_objects().Figure()
    names = dict.fromkeys((row["group"], row["method"]) for row in table)
    for number, (group, method) in enumerate(names):
        members = pick(table, group=group, method=method)
        color, symbol = PALETTE[number % len(PALETTE)], SYMBOLS[number % len(SYMBOLS)]
        _points(figure, members, f"{method} ({group})", color, symbol)
    return _against_diagonal(figure, table, "Plans: predicted and measured on held-out text")


def _points(figure: Any, rows: Table, name: str, color: str, symbol: str) -> None:
    error = "measured_error" if rows and "measured_error" in rows[0] else "standard_error"
    figure.add_scatter(
        x=[row["predicted"] for row in rows],
        y=[row["measured"] for row in rows],
        error_y={"type": "data", "array": [row[error] or 0.0 for row in rows], "thickness": 1},
        mode="markers",
        name=name,
        marker={"color": color, "symbol": symbol, "size": 8},
        text=[row.get("unit") or f"{row['requested_ratio']:.0%}" for row in rows],
        hovertemplate="%{text}<br>predicted %{x:.3g}<br>measured %{y:.3g}<extra></extra>",
    )


def _against_diagonal(figure: Any, rows: Iterable[Row], title: str) -> Figure:
    positive = [row["predicted"] for row in rows if row["predicted"] and row["predicted"] > 0]
    ends = [min(positive), max(positive)] if positive else []
    line = {"color": "#808080", "dash": "dot"}
    figure.add_scatter(x=ends, y=ends, mode="lines", name="measured = predicted", line=line)
    axis = {"type": "log", "exponentformat": "power"}
    figure.update_xaxes(title_text="predicted ½ sᵀHs, nats per token", **axis)
    figure.update_yaxes(title_text="measured KL, nats per token", **axis)
    finish(figure, title)
    side = {"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top"}
    figure.update_layout(legend=side)  # above, so many names would run into the title
    return figure
