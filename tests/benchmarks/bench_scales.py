"""What measured blocks and layers bring on small models, as plans and as moves of a search.

    python tests/benchmarks/bench_scales.py                             # the demo model
    python tests/benchmarks/bench_scales.py --model FOLDER --text FILE  # another one
    python tests/benchmarks/bench_scales.py --quick                     # for checking the script

Layers and blocks are measured on the first rows of H. Every plan is measured on the rows of the
search, the best one starts it, and the two ends are chosen on rows of their own. The table is of
further rows, which are read once.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_studies.trust.scales import plans_by_scale
from helpers.benchmarks import arguments, error_bar, flag, head, row
from helpers.demo_rows import demo_rows


def main() -> None:
    options = arguments(
        __doc__,
        dict.fromkeys(("rows", "held_out", "test", "parts_rows"), 2)
        | {"evaluations": 12, "ratios": [0.2]},
        model="demo",
        text=flag(help="text file for another model"),
        ratios=[0.1, 0.2, 0.3],
        rows=flag(32, "of H"),
        parts_rows=flag(8, "of measured blocks and layers, the first of H"),
        held_out=flag(16, "of the search, and as many to choose on"),
        test=flag(32, "to report on"),
        evaluations=2000,
        threads=2,
    )
    model, tokenizer = cl.load_model(options.model, device="cpu", dtype="float32")
    rows, search, choose, test = texts(options, tokenizer)
    curvature = cl.estimate_curvature(model, None, rows, progress=False)
    few = rows.rows(0, options.parts_rows)
    scales = {
        parts: cl.measure_interactions(model, parts, few, progress=False)
        for parts in ("layers", "blocks")
    }
    found: dict[str, dict[float, cl.Selection]] = {}
    for ratio in options.ratios:
        plans = plans_by_scale(curvature, scales, ratio, strengths=(0.0, 1.0))
        table = cl.measure_plans(model, list(plans.values()), search, progress=False)
        start = table.selections[int(table.mean.argmin())]
        for name, moved in (("units", ()), ("units, blocks and layers", tuple(scales.values()))):
            plans[f"search that moves {name}"] = cl.search_plan(
                *(model, start, search),
                held_out=choose,
                evaluations=options.evaluations,
                surrogate=curvature,
                scales=moved,
                progress=False,
            ).selection
        for name, plan in plans.items():
            found.setdefault(name, {})[ratio] = plan
    every = [plan for of_name in found.values() for plan in of_name.values()]
    table = cl.measure_plans(model, every, test, progress=False)
    kl = map(partial(error_bar, places=3), table.mean, table.standard_error)
    print(
        f"{model.config.num_hidden_layers} layers, {len(curvature.units)} units, judged on {test}"
    )
    head("plan", *(f"{ratio:.0%}" for ratio in options.ratios))
    for name, of_name in found.items():
        cells = {ratio: next(kl) for ratio in of_name}
        row(name, *(cells.get(ratio, "") for ratio in options.ratios))


def texts(options: Any, tokenizer: Any) -> list[cl.CalibrationSet]:
    """Rows of H, of the search, to choose on and to report on."""
    if options.model == "demo":
        held_out = demo_rows("held_out", 2 * options.held_out, tokenizer)
        first = demo_rows("calibration", options.rows, tokenizer)
        judges = held_out.split(held_out=options.held_out)
        return [first, *judges, demo_rows("test", options.test, tokenizer)]
    count = options.rows + 2 * options.held_out + options.test
    text = cl.CalibrationSet.from_file(
        options.text, tokenizer, num_sequences=count, positions_per_sequence="all"
    )
    rest, choose, test = text.split(held_out=options.held_out, test=options.test)
    return [*rest.split(held_out=options.held_out), choose, test]


if __name__ == "__main__":
    main()
