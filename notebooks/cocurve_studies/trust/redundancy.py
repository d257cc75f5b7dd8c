"""FFN redundancy and the benefit of the edges, over any set of models.

Figure "edge benefit vs. FFN redundancy", appendix "Scope of Applicability" and Proposition
"Edge-to-diagonal balance".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata, spearmanr

from cocurve_lab.base.errors import InputError, MismatchError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import Sample, jackknife
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.measuring.risk import PlanTable, standard_error
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty, share_axis
from ..draws import Plans, Redrawn, again
from ..findings import ABOVE, Finding, judged_column
from ..shared import Recipe, marks
from ..study import Study
from ..tables import (
    Columns,
    DataFrame,
    Folder,
    Row,
    Rows,
    Table,
    column,
    pick,
    plus_minus,
    table_of,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


STRENGTHS = {"0": 0.0, "half": 0.5, "1": 1.0}  # in column names, and as lambda
FEWEST = 3  # models below which a rank correlation says nothing

# columns of `redundancy_study` for reading, with `shown`
COLUMNS: Columns = {
    "model": "",
    "requested_ratio": "removed",
    "redundancy": "mean |ρ| of FFN",
    "edge_benefit": "KL(λ 0) − KL(λ 1)",
    "relative_benefit": "share of KL(λ 0)",
    "gate_band": "band",
    "gate_lambda": "gate's λ",
    "gate_right": "gate right",
}

UNMOVED = 0.1  # share of the redundancy of a base model by which a tuned one may differ
_EXACT = 8  # up to so many models every order is tried


@dataclass(frozen=True)
class Subject:
    """A model under study, with its own texts.

    Attributes:
        model: the dense model.
        calibration, held_out: rows to build H on, and to measure on.
        ffn_groups: groups per FFN layer; the redundancy depends on it (wider groups average more
            channels), so keep it the same across models to be compared.
    """

    model: PreTrainedModel
    calibration: CalibrationSet
    held_out: CalibrationSet
    ffn_groups: int = 16


@dataclass(frozen=True)
class RedundancyOptions:
    """The pruning of each model: ratio, top r of the builds, guards of the plans."""

    ratio: float = 0.2
    top_r: int = 256
    guards: Guards = field(default_factory=Guards)


def redundancy_study(
    models: Mapping[str, Subject | Callable[[], Subject]],
    options: RedundancyOptions = RedundancyOptions(),
    *,
    draws: int = 0,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Measure FFN redundancy and edge benefit, model by model.

    Each model has a table of its own in `cache`, so that adding one measures only that one.

    Args:
        models: name -> Subject, or a function that loads one, so that large models are in memory
            one at a time.
        options: ratio, top_r, guards.

    Returns:
        A row per model: `units`; `redundancy` (mean |rho| over FFN pairs), `noise_floor` and
        `corrected`; `attention_mean`, `cross_mean`; `attention_cv`, `ffn_cv` (std / mean of the
        saliency); `kl_0`, `kl_half`, `kl_1` (lambda 0, 0.5, 1) and `perplexity_...`; `edge_benefit`
        = KL(lambda 0) - KL(lambda 1); `relative_benefit`, its share of KL(lambda 0), whose error
        takes KL(lambda 0) as exact; `perplexity_gain` = perplexity(lambda 0) - perplexity(lambda
        1); `gate_band` and `gate_lambda` (None where undecided), and `gate_right`: whether the end
        of [0, 1] it recommends has the lower KL, None where two standard errors of the benefit
        cannot tell, or where the gate is undecided.
    """
    if not models:
        raise InputError(
            "models is empty, so there is no model to study. Give {'name': Subject(...)}."
        )
    rows: Rows = []
    for name, source in models.items():
        subject = source if isinstance(source, Subject) else source()
        # the name is the user's and may change; the table below is of the model
        found = _of_model(subject, options, draws, cache, progress)
        rows += [{"model": name} | row for row in pick(found)]
    return table_of(rows)


def _of_model(
    subject: Subject, options: RedundancyOptions, draws: int, cache: Folder, progress: bool
) -> DataFrame:
    model, held_out = subject.model, subject.held_out
    held_out.require_disjoint(subject.calibration)
    recipe = Recipe(subject.calibration, options.top_r, cache=cache, progress=progress)
    settings = marks(
        model,
        held_out=held_out.fingerprint,
        recipe=recipe.mark,
        ffn_groups=subject.ffn_groups,
        options=asdict(options),
    )

    def compute(study: Study) -> Rows:
        curvature = recipe.build(model, enumerate_units(model, subject.ffn_groups))
        plans = {
            name: solve_greedy(curvature, options.ratio, strength, options.guards)
            for name, strength in STRENGTHS.items()
        }

        def solve(h: Curvature) -> Plans:
            return {name: again(plans[name], h) for name in ("0", "1")}

        table, drawn = study.measure(list(plans.values())), study.redraw(solve, curvature)
        row = {"requested_ratio": options.ratio} | _statistics(curvature) | _measured(table, drawn)
        return [row | _gated(curvature, row)]

    study = Study(model, held_out, None, draws, cache, progress)
    return study.table("redundancy", settings, compute)


def _statistics(curvature: Curvature) -> Row:
    blocks, gate = curvature.block_means(), redundancy_gate(curvature)
    return {
        "units": len(curvature.units),
        "ffn_groups": curvature.units.ffn_groups,
        "redundancy": curvature.ffn_redundancy,
        "redundancy_error": float(jackknife(curvature, "ffn_redundancy").standard_error),
        "noise_floor": curvature.ffn_redundancy_noise_floor,
        "corrected": curvature.ffn_redundancy_corrected,
        "attention_mean": blocks["attention"],
        "cross_mean": blocks["cross"],
        "attention_cv": gate.diagonal_cv["attention"],
        "ffn_cv": gate.diagonal_cv["ffn"],
    }


def _measured(table: PlanTable, drawn: Redrawn) -> Row:
    assert table.nll is not None  # measure_plans always has it
    assert table.dense_nll is not None
    row: Row = {"dense_perplexity": np.exp(table.dense_nll.mean())}
    for place, name in enumerate(STRENGTHS):
        row[f"kl_{name}"] = table.mean[place]
        row[f"kl_{name}_error"] = table.standard_error[place]
        row[f"perplexity_{name}"] = table.perplexity[place]
    benefit, over_rows = table.paired(0, len(STRENGTHS) - 1)
    errors = drawn.columns("edge_benefit", over_rows, "0", "1")
    error = errors["edge_benefit_error"]
    nll = (table.nll[0] - table.nll[-1])[None]
    return row | {
        "edge_benefit": benefit,
        **errors,
        "relative_benefit": benefit / table.mean[0] if table.mean[0] > 0 else None,
        "relative_benefit_error": error / table.mean[0] if table.mean[0] > 0 else None,
        "perplexity_gain": table.perplexity[0] - table.perplexity[-1],
        "nll_gain": float(nll.mean()),
        "nll_gain_error": float(standard_error(nll)[0]),
    }


def _gated(curvature: Curvature, row: Row) -> Row:
    gate = redundancy_gate(curvature)
    right, helps = None, judged_column(row, "edge_benefit", *ABOVE)
    # equal plans help neither side
    if gate.verdict is not None and helps is not None and row["edge_benefit"]:
        right = helps == (gate.verdict > 0)
    return {"gate_band": gate.band, "gate_lambda": gate.verdict, "gate_right": right}


def tuned_redundancy(base: Curvature, tuned: Curvature) -> Row:
    """Compare the FFN redundancy of a base model and its instruction-tuned form.

    A verdict needs both models at the same width of FFN groups, and H of the same rows of text in
    the same groups; then sampling noise, which lifts mean |rho|, is much the same in both.

    Returns:
        `base`, `tuned` (mean |rho|, the paper's); `base_corrected`, `tuned_corrected` (without
        sampling noise); and `difference` of the former two, with the error of a jackknife that
        leaves out the same group of rows of both.

    Raises:
        MismatchError: the two differ in units or rows.
    """
    base.units.require_same(tuned.units, mine="H of the base model", theirs="H of the tuned one")
    rows = [h.provenance.get("row_fingerprints") for h in (base, tuned)]
    first, second = Sample.of(base), Sample.of(tuned)
    if rows[0] is None or rows[0] != rows[1] or len(first) != len(second):
        raise MismatchError("the two H are not of the same rows of text. Build them on the same.")
    without = zip(first.leave_one_out(), second.leave_one_out(), strict=True)
    gaps = [b.ffn_redundancy - a.ffn_redundancy for a, b in without]
    return {
        "base": base.ffn_redundancy,
        "tuned": tuned.ffn_redundancy,
        "base_corrected": base.ffn_redundancy_corrected,
        "tuned_corrected": tuned.ffn_redundancy_corrected,
        "difference": tuned.ffn_redundancy - base.ffn_redundancy,
        "difference_error": float(np.sqrt(len(gaps) - 1) * np.std(gaps)) if gaps else None,
    }


def tuning_finding(row: Row) -> Finding:
    """Judge the paper's claim on post-training from a row of `tuned_redundancy`."""
    bound = UNMOVED * row["base"]
    return Finding(
        "redundancy",
        "post-training leaves the FFN redundancy as it is, 8B at 0.074 in the band of base models "
        f"(we say: within {UNMOVED:.0%})",
        'section "Why Cross-Module Edges Matter"',
        f"base {row['base']:.4f}, tuned {row['tuned']:.4f}, difference "
        f"{plus_minus(row['difference'], row['difference_error'])}",
        judged_column(row, "difference", -bound, bound),
    )


def redundancy_trend(table: Table, benefit: str = "relative_benefit") -> Row:
    """Return the rank correlation of FFN redundancy with a benefit over models.

    Returns:
        `models` that count and `left_out` (a NaN or None in one of the two); `spearman` and
        `p_value` (two-sided permutation test, exact up to 8 models: with three models it is never
        below 1/3), None with fewer than three models or a constant column; `note`.
    """
    names = next(iter(pick(table)), {benefit: None})
    if benefit not in names:
        raise InputError(f"the table has no column {benefit!r}. Choose from {', '.join(names)}.")
    x, y = (column(table, name).astype(float) for name in ("redundancy", benefit))
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    head: Row = {"benefit": benefit, "models": len(x), "left_out": len(table) - len(x)}
    if len(x) < FEWEST:
        count = "1 model is" if len(x) == 1 else f"{len(x)} models are"
        note = f"{count} too few for a rank correlation; {FEWEST} are the least."
        return head | {"spearman": None, "p_value": None, "note": note}
    if len(set(x)) == 1 or len(set(y)) == 1:
        note = "All models have the same value, so there is no order."
        return head | {"spearman": None, "p_value": None, "note": note}
    found = spearmanr(x, y)
    value = float(found.statistic)
    chance = _exact(x, y, value) if len(x) <= _EXACT else float(found.pvalue)
    return head | {"spearman": value, "p_value": chance, "note": ""}


def _exact(x: np.ndarray, y: np.ndarray, value: float) -> float:
    """Return the share of all orders of y whose |rank correlation| is at least as large."""
    a, b = rankdata(x), rankdata(y)
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    orders = b[np.array(list(permutations(range(len(b)))))]  # at most 8! = 40,320
    # the order found is one of them; rounding must not count it out
    return float((np.abs(orders @ a / len(a)) >= abs(value) - 1e-9).mean())


def plot_redundancy(table: Table) -> Figure:
    """Plot edge benefit, as a share of KL(lambda 0), by FFN redundancy, one point per model."""
    figure = empty()
    hover = "%{text}<br>redundancy %{x:.3f}, benefit %{y:.1%}<extra></extra>"
    more: dict[str, Any] = {"mode": "markers+text", "textposition": "top right", "hover": hover}
    for number, lambda_ in enumerate((1.0, 0.0, None)):
        rows = [row for row in pick(table) if row["gate_lambda"] == lambda_]
        if lambda_ is None and not rows:
            continue
        name = "the gate is undecided" if lambda_ is None else f"the gate says λ = {lambda_:g}"
        more |= {"bars": "xy", "text": [row["model"] for row in rows]}
        add(figure, rows, "redundancy", "relative_benefit", name, number, **more)
    x = "FFN redundancy, mean |ρ| (± jackknife s.e.)"
    y = share_axis("share of the KL that edges save (± paired s.e.)")
    return chart(figure, "Edge benefit by FFN redundancy", x, y, across=0)
