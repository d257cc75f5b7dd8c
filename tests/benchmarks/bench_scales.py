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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.measuring.risk import standard_error
from cocurve_lab.solver.variants import measured_diagonal
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
    scales = [
        cl.measure_interactions(model, parts, few, progress=False) for parts in ("layers", "blocks")
    ]
    found: dict[str, dict[float, cl.Selection]] = {}
    for ratio in options.ratios:
        plans = dict(candidates(curvature, scales, ratio))
        table = cl.measure_plans(model, list(plans.values()), search, progress=False)
        start = list(plans.values())[int(table.kl.mean(axis=1).argmin())]
        for name, moved in (("units", []), ("units, blocks and layers", scales)):
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
    kl = iter(cl.measure_plans(model, every, test, progress=False).kl)
    print(
        f"{model.config.num_hidden_layers} layers, {len(curvature.units)} units, judged on {test}"
    )
    head("plan", *(f"{ratio:.0%}" for ratio in options.ratios))
    for name, of_name in found.items():
        cells = {ratio: next(kl) for ratio in of_name}
        shown = {r: error_bar(v.mean(), standard_error(v[None])[0], 3) for r, v in cells.items()}
        row(name, *(shown.get(ratio, "") for ratio in options.ratios))


def texts(options: Any, tokenizer: Any) -> list[cl.CalibrationSet]:
    """Rows of H, of the search, to choose on and to report on."""
    both = 2 * options.held_out
    if options.model == "demo":
        held_out = demo_rows("held_out", both, tokenizer)
        ends = held_out.rows(0, options.held_out), held_out.rows(options.held_out, both)
        first = demo_rows("calibration", options.rows, tokenizer)
        return [first, *ends, demo_rows("test", options.test, tokenizer)]
    sizes = (options.rows, options.held_out, options.held_out, options.test)
    text = cl.CalibrationSet.from_file(
        options.text, tokenizer, num_sequences=sum(sizes), positions_per_sequence="all"
    )
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [text.rows(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def candidates(
    curvature: cl.Curvature, scales: list[Any], ratio: float
) -> Iterator[tuple[str, cl.Selection]]:
    """Plans of H, of each unit's own KL, and of measured layers and blocks, without guards."""
    for strength in (0.0, 1.0):
        yield f"H, λ {strength:g}", cl.solve_greedy(curvature, ratio, strength)
    yield "units by their own KL", cl.solve_greedy(measured_diagonal(curvature), ratio, 0.0)
    for found, words in zip(scales, ("layers", "blocks"), strict=True):
        for strength in (0.0, 0.5, 1.0):
            with suppress(cl.InputError, cl.InfeasibleError):
                yield f"measured {words}, λ {strength:g}", found.solve(ratio, strength)


if __name__ == "__main__":
    main()
