"""Measure the co-pruning curvature of the demo model: writes data/demo/curvature.json for its card,
and notebooks/explore_demo.html, the explorers with H and the measured plans in one offline page.

    python -m data.make.measure_curvature
    python -m data.make.measure_curvature --page-only  # after a change of the front end
    python -m data.make.model_card

H is built on several disjoint draws of calibration text, each as large as that of the notebooks.
Plans of the card are solved on each H without guards and measured on the same held-out text. A mean
is over the draws, and its standard error (+-) too: it holds what another calibration would change.
"random" is the mean over ten plans that remove units in random order, its error over these plans.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import cocurve_lab as cl
from cocurve_lab.extensions.judging.agreement import random_plan

STRENGTHS = (0.0, 0.25, 0.5, 1.0)
RANDOM_PLANS = 10
QUESTIONS = 20  # of each ability, asked of every plan on the page
PAIRS = 40  # strongest edges |H_uv| whose pairs are measured for the page


def measure(options: argparse.Namespace, model: Any, tokenizer: Any) -> tuple[dict, cl.Curvature]:
    """Everything the card says about H, as plain values, and the first H."""
    units = cl.enumerate_units(model)
    # the page needs the first draw alone; its text is the same as among all draws
    draws, rows = options.draws, options.rows
    text, held_out = cl.default_calibration(
        "demo", tokenizer, draws * rows, options.held_out_rows, positions_per_sequence="all"
    )
    curvatures, seconds = [], []
    for k in range(1 if options.page_only else draws):
        begun = time.monotonic()
        drawn = text.rows(k * rows, (k + 1) * rows)
        curvatures.append(cl.load_or_estimate(options.work, model, units, drawn))
        seconds.append(time.monotonic() - begun)
        print(f"draw {k}: {seconds[-1]:.0f} s, {curvatures[-1].saturation}", flush=True)
    if options.page_only:
        return {}, curvatures[0]
    tables = [
        cl.measure_plans(
            model,
            [cl.solve_greedy(h, ratio, x) for ratio in options.ratios for x in STRENGTHS],
            held_out,
            calibrated_on=h,
            checkpoint=options.work / "plans.pkl",  # a second run measures nothing again
        )
        for h in curvatures
    ]
    seeds = range(RANDOM_PLANS)
    random = cl.measure_plans(
        model, [random_plan(units, ratio, s) for ratio in options.ratios for s in seeds], held_out
    )
    shape = draws, len(options.ratios), len(STRENGTHS)
    kl = np.array([table.mean for table in tables]).reshape(shape)
    over_rows = np.array([table.standard_error for table in tables]).reshape(shape)
    predicted = np.array([[p.predicted_risk for p in t.selections] for t in tables]).reshape(shape)
    by_chance = np.array(random.mean).reshape(len(options.ratios), RANDOM_PLANS)
    lines = []
    for r, ratio in enumerate(options.ratios):
        line = {"removed": f"{ratio:.0%}"}
        line |= {f"lambda {x:g}": shown(kl[:, r, k]) for k, x in enumerate(STRENGTHS)}
        line["random"] = shown(by_chance[r])
        line["lambda 0 - lambda 1"] = shown(kl[:, r, 0] - kl[:, r, -1])
        line["error over rows"] = f"{over_rows[:, r, -1].mean():.4f}"
        line["measured / predicted"] = shown(kl[:, r, -1] / predicted[:, r, -1], 1)
        lines.append(line)
    bridges = [cl.bridge_units(h) for h in curvatures]
    facts = {
        "draws": draws,
        "rows": rows,
        "positions": text.positions_per_sequence,
        "held_out_rows": options.held_out_rows,
        "units": len(units),
        "sure_positions": shown(np.array([h.saturation.positions for h in curvatures]), 3),
        "sure_risk": shown(np.array([h.saturation.risk for h in curvatures]), 3),
        "correlation_of_saliency_and_connectivity": shown(
            np.array([found.saliency_connectivity_correlation for found in bridges]), 2
        ),
        "bridge_units": [0 if found.ranked else len(found) for found in bridges],
        "mean_correlations": {
            name: shown(np.array([h.block_means()[name] for h in curvatures]), 3)
            for name in curvatures[0].block_means()
        },
        "kl": lines,
    }
    return facts, curvatures[0]


def export_page(
    options: argparse.Namespace, model: Any, tokenizer: Any, curvature: cl.Curvature
) -> None:
    """The explorers without a kernel, with the KL and right answers of every plan at the ratios.

    A ratio has as many plans as lambda in [0, 1] gives, without guards and under those that the
    page opens with. The strongest edges have the KL of both units, alone and together.
    """
    from cocurve_widgets import Session, export_html
    from cocurve_widgets.page_measuring import measure_for_page

    _, held_out = cl.default_calibration(
        "demo",
        tokenizer,
        options.draws * options.rows,
        options.held_out_rows,
        positions_per_sequence="all",
    )
    plans = []
    for guards in (cl.Guards(), cl.opening_guards(curvature.units)):
        for ratio in options.ratios:
            segments = cl.lambda_path(curvature, ratio, guards).segments
            plans += [segment.selection for segment in segments if segment.selection is not None]
    session = Session(curvature, model, tokenizer)
    measure_for_page(
        session,
        held_out,
        cl.demo_questions(QUESTIONS),
        plans=plans,
        pairs=PAIRS,
        cache=options.work,
    )
    title = "Co-pruning curvature of the demo model"
    export_html(curvature, options.page, title=title, session=session)


def shown(values: np.ndarray, digits: int = 4) -> str:
    """Mean and standard error of the mean of independent values."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=5, help="disjoint draws of H, at least two")
    parser.add_argument("--rows", type=int, default=64, help="rows of each draw, all positions")
    parser.add_argument("--held-out-rows", type=int, default=64)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--work", type=Path, default=Path("build/curvature"), help="keeps each H")
    parser.add_argument("--out", type=Path, default=Path("data/demo/curvature.json"))
    parser.add_argument("--page", type=Path, default=Path("notebooks/explore_demo.html"))
    parser.add_argument("--page-only", action="store_true", help="make the page, measure no card")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = cl.load_model("demo")
    facts, curvature = measure(options, model, tokenizer)
    if not options.page_only:
        options.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    export_page(options, model, tokenizer, curvature)


if __name__ == "__main__":
    main()
