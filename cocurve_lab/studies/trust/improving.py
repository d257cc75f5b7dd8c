"""Study: what can be gained on top of a greedy plan, by a better plan or by gains.

`refinement_study` sets greedy, local search and the certified bound side by side; `gains_study`
asks whether rescaling the kept FFN groups helps on text that H has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.choosing_gains import GainsChoice, choose_gains
from ...measuring.plan_memory import plans_file
from ...measuring.racing import ChoiceOptions
from ...measuring.risk import measure_plans
from ...models.identity import fingerprint_model
from ...solver.bounds import risk_lower_bound
from ...solver.refinement import refine
from ...solver.solve import solve_greedy
from ...tables import Folder, Row, Table, cached_table
from .choices import Texts, kept_beside

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


def refinement_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    ratios: Sequence[float] = (0.2, 0.4),
    strengths: Sequence[float] = (0.0, 0.5, 1.0),
    *,
    cache: Folder = None,
    progress: bool = True,
) -> Table:
    """Greedy, local search and the lower bound on the objective, and what the two plans cost.

    Args:
        model: the dense model.
        curvature: its H [M, M], positive semidefinite up to rounding.
        held_out: rows that H has not seen.
        ratios, strengths: every one with every other; strengths in [0, 1] (the bound's range).
        cache: folder that keeps the table; None keeps nothing.
        progress: show a progress bar.

    Returns:
        One row per ratio and lambda. `objective`, `refined_objective` and `bound` are R_lambda in
        nats per token; `certified` is bound / refined objective: no plan is better by more than
        1 - certified. KL is measured; `difference` is refined minus greedy, paired over rows.

    Raises:
        InfeasibleError, InputError, NumericalError: as `solve_greedy` and `risk_lower_bound`.
    """

    def compute() -> Table:
        pairs = [(ratio, strength) for ratio in ratios for strength in strengths]
        greedy = [solve_greedy(curvature, *pair) for pair in pairs]
        plans = [*greedy, *(refine(plan, curvature) for plan in greedy)]
        table = measure_plans(
            model,
            plans,
            held_out,
            calibrated_on=curvature,
            checkpoint=plans_file(cache, model, held_out),
            progress=progress,
        )
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
                    "difference_error": error,
                }
            )
        return rows

    settings = _settings(model, curvature, held_out, ratios, strengths)
    return cached_table(cache, "refinement", settings, compute)


def gains_study(
    model: PreTrainedModel,
    curvature: Curvature,
    texts: Texts,
    ratios: Sequence[float] = (0.2, 0.4),
    strengths: Sequence[float] = (0.0, 1.0),
    *,
    options: ChoiceOptions = ChoiceOptions(),  # noqa: B008  (frozen, so sharing it is safe)
    cache: Folder = None,
) -> Table:
    """Gains on kept FFN groups by ratio and lambda, applied only where held-out text says so.

    Args:
        model: the dense model.
        curvature: its full signed H [M, M].
        texts: rows to choose on and to report on.
        ratios, strengths: of the plans that are compensated.
        options: `progress` and `plans_per_batch` are used.
        cache: folder that keeps the table; None keeps nothing.

    Returns:
        One row per plan and (ridge, clip); `role` is "candidate", measured on `texts.choose`, or
        "report", the chosen one on `texts.report` (difference 0 where no gains are applied).
        Differences are against the plan without gains, paired over rows, nats per token.

    Raises: as `choose_gains` and `solve_greedy`.
    """

    def compute() -> Table:
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

    settings = _settings(model, curvature, texts.choose, ratios, strengths)
    settings["report"] = texts.report.fingerprint
    return cached_table(cache, "gains", settings, compute)


def _gains_rows(choice: GainsChoice) -> Table:
    rows = [{"role": "candidate", **row} for row in choice.rows()]
    if choice.report is None:
        return rows
    ridge, clip = choice.setting or (None, None)
    difference, error = choice.report.paired(1, 0)
    reported: Row = {
        "role": "report",
        "ridge": ridge,
        "clip": clip,
        "kl": float(choice.report.mean[1]),
        "standard_error": float(choice.report.standard_error[1]),
        "difference": difference,
        "difference_error": error,
        "predicted_risk": float(choice.predicted[choice.chosen]),
        "chosen": True,
    }
    return [*rows, reported]


def _settings(
    model: PreTrainedModel,
    curvature: Curvature,
    text: CalibrationSet,
    ratios: Sequence[float],
    strengths: Sequence[float],
) -> dict[str, Any]:
    return {
        "model": fingerprint_model(model),
        "curvature": curvature.fingerprint,
        "text": text.fingerprint,
        "ratios": [float(ratio) for ratio in ratios],
        "strengths": [float(strength) for strength in strengths],
    }


def plot_gains(table: Table) -> Figure:
    """KL with gains minus KL without, by plan and setting; below 0 they help."""
    from ...figures import finish, graph_objects

    go = graph_objects()
    figure = go.Figure()
    rows = [row for row in table if row["ridge"] is not None and row["role"] == "candidate"]
    symbols = ("circle", "square", "diamond", "cross", "x", "triangle-up")
    settings = dict.fromkeys((row["ridge"], row["clip"]) for row in rows)
    for symbol, (ridge, clip) in zip(symbols * len(settings), settings, strict=False):
        part = [row for row in rows if (row["ridge"], row["clip"]) == (ridge, clip)]
        figure.add_scatter(
            x=[f"{r['requested_ratio']:.0%}, λ {r['interaction_strength']:g}" for r in part],
            y=[row["difference"] for row in part],
            error_y={"array": [row["difference_error"] for row in part]},
            mode="markers",
            marker={"symbol": symbol, "size": 9},
            name=f"γ {ridge:g}, τ {clip:g}",
        )
    figure.add_hline(y=0, line={"color": "#808080", "dash": "dot"})
    figure.update_yaxes(title_text="KL with gains - without, nats per token")
    figure.update_xaxes(title_text="plan")
    return finish(figure, "Do gains on kept FFN groups help on held-out text?")
