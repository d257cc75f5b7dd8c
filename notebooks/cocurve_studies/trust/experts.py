"""Experts one by one or together: rankings against H, and which experts stand in for each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from cocurve_lab.base.storage import fingerprint
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.interactions.measured import Interactions, measure_interactions
from cocurve_lab.methods.registry import get_method
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import DataFrame, PreTrainedModel
from ..shared import compared
from ..study import Study
from ..tables import Columns, Folder, Rows, table_of

RANKED = ("reap", "expert-frequency")  # one by one, equally many of each layer
SOLVED = {  # name -> lambda, and whether every layer loses equally many
    "H, equal counts": (1.0, True),
    "diagonal of H, equal counts": (0.0, True),
    "H, free counts": (1.0, False),
    "diagonal of H, free counts": (0.0, False),
}
REAP = "REAP"
COLUMNS: Columns = {
    "requested_ratio": "removed",
    "plan": "plan",
    "kl": "KL",
    "difference": "more than REAP",
}
PAIR_COLUMNS: Columns = {
    "pairs": "pairs of experts",
    "count": "number",
    "negative": "measured below 0",
    "negative_h": "H below 0",
    "same_sign": "same sign",
    "rank_correlation": "rank correlation",
}
SAME, OTHER = "of one layer", "of two layers"


def experts_study(
    model: PreTrainedModel,
    curvature: Curvature,
    calibration: CalibrationSet,
    report: CalibrationSet,
    ratios: Sequence[float] = (0.1, 0.25, 0.5),
    *,
    cache: Folder = None,
) -> DataFrame:
    """Measure plans that remove experts alone: two rankings, and H with equal and free counts.

    Every plan is made of the same calibration rows, without guards, and removes at least the ratio.

    Returns:
        A row per ratio and plan: its KL on `report`, nats per token, and `difference`, what it
        costs more than REAP, both with their standard error over rows, the second paired.
    """
    settings = {
        "ratios": list(ratios),
        "curvature": curvature.fingerprint,
        "calibration": calibration.fingerprint,
        "report": report.fingerprint,
    }

    def compute(study: Study) -> Rows:
        units, only = curvature.units, Guards(kinds=("expert",))
        methods = [get_method(name) for name in RANKED]
        evidence = [method.measure(model, units, calibration, progress=False) for method in methods]
        plans: dict[tuple[float, str], Selection] = {}
        for ratio in ratios:
            for method, found in zip(methods, evidence, strict=True):
                plans[ratio, method.title] = method.select(found, units, ratio)
            for name, (strength, equal) in SOLVED.items():
                plans[ratio, name] = solve_greedy(
                    curvature, ratio, strength, only, uniform=None if equal else ()
                )
        table, names = study.measure(list(plans.values())), list(plans)
        return [
            {"requested_ratio": ratio, "plan": name}
            | compared(table, place, names.index((ratio, REAP)))
            for place, (ratio, name) in enumerate(names)
        ]

    return Study(model, report, curvature, cache=cache).table("experts", settings, compute)


def pairs_of_experts(
    model: PreTrainedModel, curvature: Curvature, rows: CalibrationSet, *, cache: Folder = None
) -> Interactions:
    """Measure the KL of every expert alone and of all pairs of experts, or read it from `cache`."""
    of = fingerprint(curvature.provenance["model_fingerprint"], rows.fingerprint)[:10]
    file = None if cache is None else Path(cache) / f"interactions_experts_{of}.npz"
    if file is not None and file.exists():
        return Interactions.load(file)
    parts = [[int(unit)] for unit in np.flatnonzero(curvature.units.kinds == "expert")]
    found = measure_interactions(model, parts, rows, units=curvature.units)
    if file is not None:
        found.save(file)
    return found


def stand_ins(curvature: Curvature, measured: Interactions, draws: int = 200) -> DataFrame:
    """Compare H_uv with the measured interaction of every pair of experts.

    Where experts stand in for each other, both together cost more than the sum of each alone.

    Returns:
        A row for the pairs of one layer and one for those of two: shares of measured interactions
        and of H_uv below 0 and of equal signs, and Spearman's correlation. Errors are those of a
        bootstrap over the measured rows.
    """
    experts = [part[0] for part in measured.parts]
    layers = curvature.units.layers[experts]
    us, vs = np.triu_indices(len(experts), 1)
    edges = curvature.matrix[np.ix_(experts, experts)][us, vs]
    by_row = measured.by_row[:, us, vs]
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, len(by_row), len(by_row)) for _ in range(draws)]
    rows: Rows = []
    for name, mine in ((SAME, layers[us] == layers[vs]), (OTHER, layers[us] != layers[vs])):
        h, found = edges[mine], by_row[:, mine]

        def told(of: np.ndarray, h: np.ndarray = h) -> list[float]:
            return [np.mean(of < 0), np.mean((of < 0) == (h < 0)), spearmanr(of, h).statistic]

        values = told(found.mean(axis=0))
        errors = np.std([told(found[draw].mean(axis=0)) for draw in drawn], axis=0, ddof=1)
        row = {"pairs": name, "count": int(mine.sum()), "negative_h": float(np.mean(h < 0))}
        for key, value, error in zip(
            ("negative", "same_sign", "rank_correlation"), values, errors, strict=True
        ):
            row |= {key: float(value), f"{key}_error": float(error)}
        rows.append(row)
    return table_of(rows)
