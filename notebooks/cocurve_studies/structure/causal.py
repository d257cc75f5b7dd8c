"""The causal study: bridges and matched controls, forced out in two arms of equal cost.

Appendix "Mechanism Analysis", table bridge-causal. Controls equal the bridges in kind, cost and
saliency, and one and the same fill completes both arms, so that these differ in connectivity only.
The paper has one fill and one threshold; here both vary, and every difference is paired over
sequences or questions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.figures import GUIDE, finish, graph_objects, look
from cocurve_lab.extensions.judging.answers import ALL, AnswerOptions, AnswerTable, answer_accuracy
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.texts.records import read_objects
from cocurve_lab.measuring.risk import PlanTable, measure_plans, standard_error
from cocurve_lab.models.identity import demo_folder
from cocurve_lab.solver.selection import Selection

from ..shared import marks
from ..tables import Columns, DataFrame, Row, Rows, Table, kept_table, pick
from .arms import CausalOptions, Trial, make_trials

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# columns of `causal_study` for reading, with `shown`
COLUMNS: Columns = {
    "outcome": "",
    "connectivity_quantile": "connectivity ≥",
    "fill": "",
    "pairs": "",
    "dense": "",
    "bridge": "",
    "control": "",
    "difference": "bridge − control",
    "seed_spread": "seed spread",
    "seeds": "",
}
FAMILY_COLUMNS: Columns = {
    "family": "",
    "pairs": "",
    "bridge": "",
    "control": "",
    "difference": "bridge − control",
}
QUESTION_COLUMNS: Columns = {
    **FAMILY_COLUMNS,
    "bridge_only_right": "only bridge arm",
    "control_only_right": "only control arm",
}
SEED_COLUMNS: Columns = {
    "connectivity_quantile": "connectivity ≥",
    "seed": "",
    "bridge": "",
    "control": "",
    "difference": "bridge − control",
    "predicted_difference": "predicted from H",
}


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The texts and questions that the arms are measured on.

    Attributes:
        held_out: text for KL and perplexity.
        questions: for exact match and answer likelihood, by capability; none measures neither.
        tokenizer: needed with questions.
        families: further texts by name, for KL and perplexity by family.
    """

    held_out: CalibrationSet
    questions: Sequence[Question] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    families: Mapping[str, CalibrationSet] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.questions and self.tokenizer is None:
            raise InputError(
                f"there are {len(self.questions)} questions and no tokenizer. Pass tokenizer=."
            )


def causal_study(
    model: PreTrainedModel,
    curvature: Curvature,
    outcomes: Outcomes,
    options: CausalOptions | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> DataFrame:
    """Test with matched pairs that connectivity carries the damage (table bridge-causal).

    Where the forced units alone exceed the ratio or a guard, the closest pairs that fit are taken:
    fewer pairs rather than bad ones.

    Returns:
        One row per arms and outcome. Columns of the arms: thresholds, `fill`, `seed`, `bridges`,
        `pairs`, `unmatched` with `reasons`, `worst_pair` and its `worst_distance` (|log saliency|),
        median and smallest `contrast` (connectivity of bridge over control), units `forced` and
        `shared`, realized ratios, predicted risks 1/2 s^T H s (full signed H). Of the outcome:
        `outcome` ("kl", "perplexity", "accuracy", "log_likelihood" in nats per answer), `family`
        ("all" or one), values `dense`, `bridge`, `control`, `difference` (bridge - control) with
        its error over `observations` (sequences or questions), and for "accuracy" how many
        questions one arm alone gets right. The rows with `seed` None sum up a fill over its
        `seeds`: the error is that of the mean over seeds, for text and questions; `seed_spread` is
        the standard deviation over seeds of the difference (None for fills without a seed). Arms
        that cannot be made have one row whose `outcome` is None and whose `note` says why.
    """
    options = options or CausalOptions()
    settings = _settings(model, curvature, outcomes, options)
    keep = (
        None if cache is None else Path(cache) / f"causal_{fingerprint(settings['measured'])[:10]}"
    )

    def compute() -> Rows:
        trials = list(make_trials(curvature, options))
        made = [trial for trial in trials if trial.arms]
        rows = [trial.columns() for trial in trials if not trial.arms]
        if not made:
            return [_EMPTY | row for row in rows]
        dense = Selection.from_pruned(curvature.units, [], curvature)
        plans = [dense, *(arm for trial in made for arm in trial.arms)]
        for effect in _effects(model, plans, curvature, outcomes, keep, progress):
            rows += _rows(made, effect)
        return [_EMPTY | row for row in rows]

    return kept_table(cache, "causal", settings, compute)


def _settings(
    model: PreTrainedModel, curvature: Curvature, outcomes: Outcomes, options: CausalOptions
) -> dict[str, Any]:
    asked = [[q.capability, q.prompt, q.answer] for q in outcomes.questions]
    # the measurements alone: they name the checkpoints, which serve other options too
    measured = marks(
        model,
        held_out=outcomes.held_out.fingerprint,
        families={name: text.fingerprint for name, text in outcomes.families.items()},
        questions=fingerprint(asked),
    )
    return marks(curvature=curvature, measured=measured, options=asdict(options))


# Outcomes -----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Effect:
    """One outcome of every plan, the dense model first: values [plans, observations]."""

    outcome: str
    family: str
    values: np.ndarray


def _effects(
    model: PreTrainedModel,
    plans: list[Selection],
    curvature: Curvature,
    outcomes: Outcomes,
    keep: Path | None,
    progress: bool,
) -> Iterator[_Effect]:
    for number, (family, text) in enumerate([(ALL, outcomes.held_out), *outcomes.families.items()]):
        table = measure_plans(
            model,
            plans,
            text,
            checkpoint=None if keep is None else keep.with_suffix(f".plans{number}.pkl"),
            progress=progress,
            calibrated_on=curvature,
        )
        yield _Effect("kl", family, table.kl)
        yield _Effect("perplexity", family, _perplexities(table))
    if outcomes.questions and outcomes.tokenizer is not None:
        checkpoint = None if keep is None else keep.with_suffix(".answers.pkl")
        yield from _answers(
            answer_accuracy(
                model,
                outcomes.tokenizer,
                plans,
                outcomes.questions,
                options=AnswerOptions(checkpoint=checkpoint),
                progress=progress,
            )
        )


def _answers(table: AnswerTable) -> Iterator[_Effect]:
    for family in (*table.capabilities, ALL):
        mine = table.of(family)
        yield _Effect("accuracy", family, table.right[:, mine].astype(float))
        yield _Effect("log_likelihood", family, table.log_likelihood[:, mine])


def _perplexities(table: PlanTable) -> np.ndarray:
    """Values [plans, sequences] whose mean is the perplexity and whose spread gives its error.

    The first-order expansion of exp about the mean nll, exact in the mean.
    """
    assert table.nll is not None
    offset = table.nll - table.nll.mean(axis=1, keepdims=True)
    return np.asarray(table.perplexity[:, None] * (1 + offset))


def _rows(made: list[Trial], effect: _Effect) -> Rows:
    """Return a row per trial with a seed, and one per thresholds and fill over its seeds."""
    dense, arms = effect.values[0], effect.values[1:].reshape(len(made), 2, -1)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, trial in enumerate(made):
        groups.setdefault((trial.thresholds, trial.fill), []).append(number)
    shared = {"outcome": effect.outcome, "family": effect.family, "dense": float(dense.mean())}
    rows: Rows = []
    for members in groups.values():
        singles = [made[number].columns() for number in members]
        if made[members[0]].seed is not None:
            rows += [
                row | shared | _difference(effect, arms[[n]])
                for row, n in zip(singles, members, strict=True)
            ]
        rows.append(_summed_up(singles) | shared | _difference(effect, arms[members]))
    return rows


def _difference(effect: _Effect, arms: np.ndarray) -> Row:
    """Bridge against control from [seeds, 2, observations]."""
    difference = arms[:, 0] - arms[:, 1]
    by_seed = difference.mean(axis=1)
    answers = effect.outcome == "accuracy"
    return {
        "bridge": float(arms[:, 0].mean()),
        "control": float(arms[:, 1].mean()),
        "difference": float(by_seed.mean()),
        "difference_error": float(standard_error(difference.mean(axis=0))),
        "seed_spread": float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None,
        "observations": difference.shape[1],
        "bridge_only_right": float((difference > 0).sum() / len(arms)) if answers else None,
        "control_only_right": float((difference < 0).sum() / len(arms)) if answers else None,
    }


def _summed_up(rows: Rows) -> Row:
    """Return the columns of several seeds: means of what the fill decides, fewest pairs."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in _BY_FILL}
    least = {name: min(row[name] for row in rows) for name in ("pairs", "forced")}
    return rows[0] | means | least | {"seed": None, "seeds": len(rows)}


_BY_FILL = (
    "predicted_bridge",
    "predicted_control",
    "predicted_difference",
    "shared",
    "realized_ratio",
    "control_realized_ratio",
)
_EMPTY: Row = dict.fromkeys(
    (
        "requested_ratio",
        "saliency_quantile",
        "connectivity_quantile",
        "fill",
        "seed",
        "seeds",
        "outcome",
        "family",
        "dense",
        "bridge",
        "control",
        "difference",
        "difference_error",
        "seed_spread",
        "observations",
        "bridge_only_right",
        "control_only_right",
        "predicted_bridge",
        "predicted_control",
        "predicted_difference",
        "bridges",
        "ranked",
        "pairs",
        "unmatched",
        "reasons",
        "worst_pair",
        "worst_distance",
        "contrast",
        "smallest_contrast",
        "forced",
        "shared",
        "realized_ratio",
        "control_realized_ratio",
        "note",
    )
)


def family_texts(
    tokenizer: PreTrainedTokenizerBase, rows: int = 8, seq_len: int = 128
) -> dict[str, CalibrationSet]:
    """Return held-out text of the embedded model's corpus by family, every position scored."""
    path = demo_folder().parent / "texts" / "held_out.jsonl"
    documents: dict[str, list[str]] = {}
    for record in read_objects(path):
        documents.setdefault(record["family"], []).append(record["text"])
    return {
        family: CalibrationSet.from_texts(
            texts,
            tokenizer,
            num_sequences=rows,
            seq_len=seq_len,
            positions_per_sequence="all",
            source=f"held-out {family} of the demo model",
        )
        for family, texts in sorted(documents.items())
    }


def plot_causal(table: Table) -> Figure:
    """Plot bridge - control with paired standard errors: KL beside its prediction, and exact match.

    Small marks are single seeds of the random fill.
    """
    go = graph_objects()
    from plotly.subplots import make_subplots

    summary = [row for row in pick(table) if row["seed"] is None and row["outcome"] is not None]
    if not summary:
        notes = sorted({str(row["note"]) for row in pick(table)})
        raise InputError(f"the table has no measured arms to draw: {'; '.join(notes)}.")
    titles = ("KL, nats per token", "share of questions answered right")
    figure = go.Figure(make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=titles))
    kl = pick(summary, outcome="kl", family=ALL)
    seeds = [row for row in pick(table, outcome="kl", family=ALL) if row["seed"] is not None]
    figure.add_trace(_points(kl, "measured", 0, "difference"), 1, 1)
    figure.add_trace(_points(kl, "predicted from H", 1, "predicted_difference"), 1, 1)
    if seeds:
        figure.add_trace(_points(seeds, "single seeds", 5, "difference", size=5), 1, 1)
    accuracy = pick(summary, outcome="accuracy")
    for number, family in enumerate(dict.fromkeys(row["family"] for row in accuracy)):
        points = _points(pick(accuracy, family=family), family, number, "difference")
        figure.add_trace(points.update(legend="legend2"), 1, 2)
    figure.add_vline(x=0, line=GUIDE)
    figure.update_xaxes(title_text="bridge − control, ± 1 paired standard error")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(scattermode="group")  # families side by side, not on top of each other
    figure.update_yaxes(title_text="quantiles: low saliency / high connectivity, fill", col=1)
    ratio = f"{summary[0]['requested_ratio']:.0%}"
    title = f"Forcing out bridges instead of matched controls, {ratio} removed"
    finish(figure, title, height=280 + 46 * len(kl))
    # the panels have their titles where the legend of other figures is, and each its own names
    below = {"orientation": "v", "y": -70 / (46 * len(kl) + 100), "yanchor": "top"}
    left, right = (below | {"x": side, "xanchor": "left"} for side in (0, 0.55))
    figure.update_annotations(font={"size": 13})  # titles of panels, below that of the whole
    margin = {"l": 190, "b": 120, "t": 80}
    return figure.update_layout(legend=left, legend2=right, margin=margin)


def _points(rows: Rows, name: str, number: int, value: str, size: int = 9) -> Any:
    go = graph_objects()
    predicted, single = value != "difference", name == "single seeds"
    errors = None if predicted or single else [row["difference_error"] for row in rows]
    return go.Scatter(
        x=[row[value] for row in rows],
        y=[
            f"{row['saliency_quantile']:g}/{row['connectivity_quantile']:g} {row['fill']}, "
            f"{row['pairs']} pairs"
            for row in rows
        ],
        error_x=None if errors is None else {"type": "data", "array": errors},
        mode="markers",
        name=name,
        orientation="h",
        offsetgroup=str(number),
        marker=look(number) | {"size": size},
    )
