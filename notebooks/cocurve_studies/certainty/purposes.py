"""What a plan is for: one budget, calibrated on each of several texts and judged on all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.pretrained.kept import kept_plans
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.models.identity import demo_folder, is_demo
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.solve import solve_greedy

from ..chart import chart, empty
from ..shared import Recipe, known, marks
from ..study import Study
from ..tables import (
    Columns,
    DataFrame,
    Folder,
    Row,
    Rows,
    Table,
    kept_table,
    pick,
    plus_minus,
    table_of,
)
from .sensitivity import read_families

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STRENGTHS = (0.0, 1.0)
FAMILIES = ("mixed", "stories", "arithmetic")  # of the demo model's text
# kept plans: the text of H as their names have it -> the text that judges
KEPT = {"C4": "c4", "WikiText": "wikitext", "the manual": "manual", "chat text": "chat"}
OWN_COLUMNS: Columns = {
    "judged_on": "judged on",
    "calibrated_on": "calibrated on",
    "interaction_strength": "λ",
    "kl": "KL",
    "against_own": "minus the plan for it",
}
Text = tuple[CalibrationSet, CalibrationSet]  # rows to calibrate on, and rows to judge on


def purpose_texts(
    model_id: str,
    sources: Mapping[str, Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    judged: int,
    seq_len: int,
) -> dict[str, Text]:
    """Cut rows of each text, every position scored: `rows` to calibrate on, `judged` to judge.

    No document is in both. The demo model's own text ("mixed" among `sources`) is judged on
    documents of its held-out file, by family: documents of one family in one file are so alike that
    the check of held-out text refuses them. Its programs are alike across files, too (12 % of their
    windows of 8 tokens), and are left out.
    """
    calibrating = judging = sources
    if is_demo(model_id) and "mixed" in sources:
        folder = demo_folder().parent / "texts"
        calibrating = read_families(folder / "calibration.jsonl", FAMILIES)
        judging = read_families(folder / "held_out.jsonl", FAMILIES)
    found = {}
    for name, documents in judging.items():
        stream = iter(random.Random(0).sample(documents, len(documents)))
        judge = CalibrationSet.from_texts(stream, tokenizer, judged, seq_len, "all", source=name)
        # of one list, what the judge has left
        rest = stream if calibrating is judging else list(calibrating[name])
        text = CalibrationSet.from_texts(rest, tokenizer, rows, seq_len, "all", source=name)
        found[name] = text, judge
    return found


def purpose_table(
    model: PreTrainedModel,
    units: UnitSet,
    texts: Mapping[str, Text],
    ratio: float,
    *,
    top_r: int = 256,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Build H of each text, solve the same budget at lambda 0 and 1, and judge on every text.

    Returns:
        One row per plan and judge: calibrated_on, judged_on, interaction_strength, own (whether
        they are the same text), kl with its error, and against_own: KL less that of the plan of the
        judge's own text, with its paired error, and relative to that KL as `share`.
    """
    for rows, judge in texts.values():
        judge.require_disjoint(rows)
    recipes = {
        name: Recipe(rows, top_r, cache=cache, progress=progress)
        for name, (rows, _) in texts.items()
    }
    judges = {name: judge.fingerprint for name, (_, judge) in texts.items()}
    calibrations = {name: recipe.mark for name, recipe in recipes.items()}
    settings = marks(
        model, units=units.fingerprint, ratio=ratio, recipes=calibrations, judges=judges
    )

    def compute() -> Rows:
        plans = {}
        for name, recipe in recipes.items():
            curvature = recipe.build(model, units)
            for strength in STRENGTHS:
                plans[name, strength] = solve_greedy(curvature, ratio, strength)
        kl: dict[tuple[str, float], dict[str, np.ndarray]] = {key: {} for key in plans}
        for name, (_, judge) in texts.items():
            measured = Study(model, judge, cache=cache, progress=progress).measure(
                list(plans.values())
            )
            for key, values in zip(plans, measured.kl, strict=True):
                kl[key][name] = values
        return list(_rows(kl))

    return kept_table(cache, "purposes", settings, compute)


def kept_purposes(curvature: Curvature, ratio: float) -> DataFrame | None:
    """Return `purpose_table` of what ships with a kept H; None for any other H."""
    kept = kept_plans(curvature)
    if kept is None:
        return None
    kl = {
        (name, strength): {judge: plan.kl[key] for judge, key in KEPT.items()}
        for plan in kept.plans
        for name in KEPT
        for strength in STRENGTHS
        if plan.name == f"H of {name}, lambda {strength:g}"
        and plan.selection.requested_ratio == ratio
    }
    return table_of(_rows(kl)) if kl else None


def _rows(kl: Mapping[tuple[str, float], Mapping[str, np.ndarray]]) -> Iterator[Row]:
    for (name, strength), by_judge in kl.items():
        for judge, values in by_judge.items():
            own = kl[judge, strength][judge]
            yield {
                "calibrated_on": name,
                "judged_on": judge,
                "interaction_strength": strength,
                "own": name == judge,
                **_with_error("kl", values),
                **_with_error("against_own", values - own),
                "share": float(values.mean() / own.mean() - 1),
                "share_error": known(mean_and_error(values - own)[1] / own.mean()),
            }


def _with_error(name: str, values: np.ndarray) -> Row:
    mean, error = mean_and_error(values)
    return {name: mean, f"{name}_error": known(error)}


def others(table: Table) -> DataFrame:
    """Return the rows of plans made for another text than they are judged on, by judge."""
    rows = sorted(pick(table, own=False), key=lambda row: (row["judged_on"], row["kl"]))
    return table_of(rows)


def plot_purposes(table: Table, strength: float) -> Figure:
    """Plot the KL of each plan on each text as a map; the diagonal is the plan's own text."""
    rows = pick(table, interaction_strength=strength)
    names = list(dict.fromkeys(row["calibrated_on"] for row in rows))
    cells = {(row["calibrated_on"], row["judged_on"]): row for row in rows}
    grid = [[cells[made, judge] for judge in names] for made in names]
    figure: Any = empty()
    figure.add_heatmap(
        x=names,
        y=names,
        z=[[row["share"] for row in line] for line in grid],
        text=[[plus_minus(row["kl"], row["kl_error"]) for row in line] for line in grid],
        texttemplate="%{text}",
        hovertemplate="calibrated on %{y}, judged on %{x}<br>%{text}<extra></extra>",
        colorscale="RdBu_r",
        zmin=-1.0,  # half the scale is enough to see what is lost; a cell tells the rest
        zmax=1.0,
        colorbar={"title": "over the text's own plan", "tickformat": "+.0%"},
    )
    figure.update_yaxes(autorange="reversed")
    title = f"KL of each plan on each text, λ = {strength:g} (nats per token)"
    return chart(figure, title, "judged on", "calibrated on", height=420)
