"""What a plan is for: one budget, calibrated on each of several texts and judged on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.pretrained.kept import kept_plans
from cocurve_lab.measuring.results import mean_and_error

from ..lazy import DataFrame
from ..shared import known
from ..tables import Columns, Row, table_of

STRENGTHS = (0.0, 1.0)
# kept plans: the text of H as their names have it -> the text that judges
KEPT = {"C4": "c4", "WikiText": "wikitext", "the manual": "manual", "chat text": "chat"}
COLUMNS: Columns = {
    "judged_on": "judged on",
    "calibrated_on": "calibrated on",
    "kl": "KL",
    "against_own": "minus the plan for it",
}


def kept_purposes(curvature: Curvature, ratio: float) -> DataFrame | None:
    """Return what ships with a kept H: plans of H of several texts, judged on each; else None.

    Returns:
        One row per plan and judge: calibrated_on, judged_on, interaction_strength, own (whether
        they are the same text), kl with its error, and against_own: KL less that of the plan of the
        judge's own text, with its paired error, and relative to that KL as `share`.
    """
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
