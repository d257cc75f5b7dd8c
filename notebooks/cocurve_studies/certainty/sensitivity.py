"""The sensitivity of plans to the budget of H: one knob of the build at a time, on held-out text.

The knobs are those of appendix "Sensitivity to the Surrogate Budget": calibration size, top-r
and draw; `purposes.py` has the source of the text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import DataFrame, PreTrainedModel
from ..shared import Recipe, compared, marks
from ..study import Study
from ..tables import Columns, Folder, Row, Rows, Table, column, pick, table_of
from .resampling import of_groups

# columns of `sensitivity_study` and of its summary for reading, with `shown`
COLUMNS: Columns = {
    "knob": "",
    "value": "",
    "matrix_distance": "distance of H",
    "overlap": "",
    "kl": "KL",
    "difference": "",
    "perplexity": "",
}
SUMMARY_COLUMNS: Columns = {
    "knob": "",
    "values": "",
    "band": "",
    "kl_std": "spread of KL over builds",
    "largest_difference": "largest difference",
    "lowest_overlap": "lowest overlap",
}


@dataclass(frozen=True)
class SensitivityOptions:
    """The base build, the values each knob takes beside it, and the plans that are compared.

    Attributes:
        rows, top_r: of the base build: sequences, and support size r.
        row_counts, top_rs: other values of a knob; () leaves it at its base.
        draws: disjoint sets of `rows` rows, the knob "seed".
        ratio, interaction_strengths: of the plans, without guards.
    """

    rows: int = 8
    top_r: int = 256
    row_counts: tuple[int, ...] = (4, 16)
    top_rs: tuple[int, ...] = (128, 512)
    draws: int = 4
    ratio: float = 0.2
    interaction_strengths: tuple[float, ...] = (0.0, 1.0)


def sensitivity_study(
    model: PreTrainedModel,
    text: CalibrationSet,
    held_out: CalibrationSet,
    options: SensitivityOptions = SensitivityOptions(),
    *,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Rebuild H with one knob changed at a time, and measure the plan of each build.

    One build keeps a Gram per row, and H of any of its rows is a sum of them. Row counts are its
    first rows, and values of the knob "seed" are disjoint sets of its rows, so both cost nothing.
    Row counts are nested and share text with the base; seeds do not.

    Args:
        text: rows to build H on, as many as the knobs ask for.
        held_out: rows on which every plan is measured.
        options: base build, values of the knobs, plans.

    Returns:
        A row per knob, value and lambda, the base first in each knob (`is_base`): `matrix_distance`
        |H - H_base| / |H_base| in Frobenius norm; `overlap`, the Jaccard overlap with the base
        plan; `kl` and the `difference` to the base plan; `perplexity` and `dense_perplexity`.
    """
    held_out.require_disjoint(text)
    settings = marks(
        model,
        held_out=held_out.fingerprint,
        options=asdict(options),
        rows=text.fingerprint,
    )

    def compute(study: Study) -> Rows:
        units, few = enumerate_units(model), text.rows(0, options.rows)
        whole = Recipe(text, options.top_r, len(text), cache, progress).build(model, units)
        base = of_groups(whole, range(options.rows))
        variants: list[tuple[str, int, Curvature]] = [("top_r", options.top_r, base)]
        for top_r in options.top_rs:
            built = Recipe(few, top_r, len(few), cache, progress).build(model, units)
            variants.append(("top_r", top_r, built))
        variants.append(("rows", options.rows, base))
        for count in options.row_counts:
            variants.append(("rows", count, of_groups(whole, range(count))))
        variants.append(("seed", 0, base))
        for draw in range(1, options.draws):
            mine = range(draw * options.rows, (draw + 1) * options.rows)
            variants.append(("seed", draw, of_groups(whole, mine)))
        return _measured(study, variants, options)

    study = Study(model, held_out, cache=cache, progress=progress)
    return study.table("sensitivity", settings, compute)


def _measured(
    study: Study, variants: list[tuple[str, int, Curvature]], options: SensitivityOptions
) -> Rows:
    """Solve and measure every variant at every lambda; the first variant is the base."""
    strengths, base = options.interaction_strengths, variants[0][2]
    plans = [
        solve_greedy(curvature, options.ratio, strength)
        for _, _, curvature in variants
        for strength in strengths
    ]
    table, size = study.measure(plans), np.linalg.norm(base.matrix)
    rows: Rows = []
    for number, (knob, value, curvature) in enumerate(variants):
        for step, strength in enumerate(strengths):
            rows.append(
                {
                    "knob": knob,
                    "value": value,
                    "is_base": curvature is base,
                    "matrix_distance": np.linalg.norm(curvature.matrix - base.matrix) / size,
                    "interaction_strength": strength,
                }
                | compared(table, number * len(strengths) + step, step)
            )
    return rows


def sensitivity_summary(table: Table) -> DataFrame:
    """Summarize each knob that has several values: a row per knob and lambda.

    `band` is the largest perplexity over the smallest, less 1; `perplexity_std` and `kl_std` are
    over values (ddof 1); `largest_difference` is the KL furthest from the base plan's, with the
    error of that one (the largest of several is large by chance too).
    """
    rows: Rows = []
    for knob in dict.fromkeys(row["knob"] for row in pick(table)):
        for strength in dict.fromkeys(row["interaction_strength"] for row in pick(table)):
            found = pick(table, knob=knob, interaction_strength=strength)
            if len(found) > 1:
                head = {"knob": knob, "interaction_strength": strength, "values": len(found)}
                rows.append(head | _summary(found))
    return table_of(rows)


def _summary(rows: Rows) -> Row:
    perplexities = column(rows, "perplexity")
    others = [row for row in rows if not row["is_base"]]
    furthest = max(others, key=lambda row: abs(row["difference"]))
    return {
        "band": float(perplexities.max() / perplexities.min() - 1),
        "perplexity_mean": float(perplexities.mean()),
        "perplexity_std": float(perplexities.std(ddof=1)),
        "kl_std": float(column(rows, "kl").std(ddof=1)),
        "largest_difference": furthest["difference"],
        "largest_difference_error": furthest["difference_error"],
        "lowest_overlap": min(row["overlap"] for row in others),
    }
