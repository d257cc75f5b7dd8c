"""Measure the co-pruning curvature of the demo model: writes data/demo/curvature.json for its card,
and notebooks/explore_demo.html, the explorers with H and the measured plans in one offline page.

    python data/measure_curvature.py
    python data/model_card.py

Plans are solved on calibration text without guards and measured on held-out text. "random" is the
mean over ten plans that remove units in random order. The standard error (+-) is over held-out
rows; for "random" it is over the plans.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import cocurve_lab as cl
from cocurve_lab.cli.demo import random_plan

STRENGTHS = (0.0, 0.25, 0.5, 1.0)
RANDOM_PLANS = 10


def measure(
    rows: int, held_out_rows: int, ratios: list[float]
) -> tuple[dict, cl.Curvature, cl.PlanTable]:
    """Everything the card says about H, as plain values; H itself; and the measured plans."""
    model, tokenizer = cl.load_model("demo")
    units = cl.enumerate_units(model)
    text, held_out = cl.default_calibration(
        "demo", tokenizer, rows, held_out_rows, positions_per_sequence="all"
    )
    curvature = cl.estimate_curvature(model, units, text)
    bridges = cl.bridge_units(curvature)
    plans = [
        plan
        for ratio in ratios
        for plan in (
            *(cl.solve_greedy(curvature, ratio, strength) for strength in STRENGTHS),
            *(random_plan(units, ratio, seed) for seed in range(RANDOM_PLANS)),
        )
    ]
    table = cl.measure_plans(model, plans, held_out, calibrated_on=curvature)
    per_ratio = len(STRENGTHS) + RANDOM_PLANS
    kl = []
    for number, ratio in enumerate(ratios):
        start = number * per_ratio
        row = {"removed": f"{ratio:.0%}"}
        for place, strength in enumerate(STRENGTHS, start):
            row[f"lambda {strength:g}"] = shown(table.mean[place], table.standard_error[place])
        values = table.mean[start + len(STRENGTHS) : start + per_ratio]
        row["random"] = shown(values.mean(), values.std(ddof=1) / np.sqrt(len(values)))
        kl.append(row)
    facts = {
        "rows": rows,
        "positions": text.positions_per_sequence,
        "held_out_rows": held_out_rows,
        "units": len(units),
        "correlation_of_saliency_and_connectivity": bridges.saliency_connectivity_correlation,
        "bridge_units": 0 if bridges.ranked else len(bridges),
        "bridge_note": bridges.note,
        "mean_correlations": curvature.block_means(),
        "ffn_noise_floor": curvature.ffn_redundancy_noise_floor,
        "kl": kl,
    }
    return facts, curvature, table


def export_page(curvature: cl.Curvature, table: cl.PlanTable, path: Path) -> None:
    """The explorers without a kernel, with what was measured under the slider."""
    from cocurve_widgets import Measured, Session, export_html

    session = Session(curvature)
    session.add_measured(
        *(
            Measured(plan, float(mean), float(error), table.source)
            for plan, mean, error in zip(
                table.selections, table.mean, table.standard_error, strict=True
            )
            if plan.interaction_strength is not None
        )
    )
    title = "Co-pruning curvature of the demo model"
    export_html(curvature, path, title=title, session=session)


def shown(mean: float, error: float) -> str:
    return f"{mean:.4f} ± {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="calibration rows, all positions")
    parser.add_argument("--held-out-rows", type=int, default=64)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--out", type=Path, default=Path("data/demo/curvature.json"))
    parser.add_argument("--page", type=Path, default=Path("notebooks/explore_demo.html"))
    options = parser.parse_args()
    facts, curvature, table = measure(options.rows, options.held_out_rows, options.ratios)
    options.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    export_page(curvature, table, options.page)


if __name__ == "__main__":
    main()
