"""What a search, equal counts and larger parts do to the KL of plans of H.

    python tests/benchmarks/bench_plans.py search     # swaps, judged by measured KL
    python tests/benchmarks/bench_plans.py search --refit --starts H --ratios 0.4 --evaluations 480
    python tests/benchmarks/bench_plans.py uniform    # the same counts in every layer
    python tests/benchmarks/bench_plans.py scales     # measured blocks and layers
    python tests/benchmarks/bench_plans.py scales --model FOLDER --text FILE

On the demo model unless told otherwise; --quick checks the command. `search --refit` refits each
plan on rows of its own before it is measured. `scales` measures layers and blocks on the first rows
of H, starts each search from the best plan, and judges on rows that are read once.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.search import SearchOptions
from cocurve_lab.extensions.judging.agreement import random_set
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_studies.trust.scales import plans_by_scale
from helpers.benchmarks import arguments, demo, demo_rows, error_bar, flag, head, row, seconds

DEFAULTS: dict[str, dict[str, Any]] = {
    "search": {"ratios": [0.2, 0.4], "rows": 16, "judged": 32, "evaluations": 4000},
    "uniform": {"ratios": [0.1, 0.2, 0.3, 0.4, 0.5], "rows": 64, "judged": 32},
    "scales": {"ratios": [0.1, 0.2, 0.3], "rows": 32, "judged": 32, "evaluations": 2000},
}
QUICK = {"ratios": [0.2], "rows": 2, "judged": 2, "evaluations": 12}
REFIT = RepairOptions(progress=False)


def main() -> None:
    options = arguments(
        __doc__,
        {"parts_rows": 2, "held_out": 2},
        part=flag("search", choices=list(PARTS), positional=True, nargs=None),
        ratios=flag(nargs="+", type=float),
        rows=flag(help="of H, and of the search", type=int),
        judged=flag(help="rows to report on", type=int),
        evaluations=flag(type=int),
        starts=flag(["H", "random"], choices=["H", "random"]),
        refit=flag(False, "with search: refit every plan"),
        parts_rows=flag(8, "with scales: of measured blocks and layers, the first of H"),
        held_out=flag(16, "with scales: of the search, and as many to choose on"),
        model=flag("demo", "with scales: or a folder, with --text"),
        text=flag(help="text file for another model"),
        seed=0,
        threads=2,
    )
    defaults = DEFAULTS[options.part] | (QUICK if options.quick else {})
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    PARTS[options.part](options)


def search(options: Any) -> None:
    """Swaps from the plan of H and from a random plan."""
    both = 2 * options.rows
    fit = 32 if options.refit else 0
    model, more, judge = demo(calibration=both + fit, held_out=options.judged)
    seen, rows = more.rows(0, both).split(held_out=options.rows)  # H, and the search
    curvature = cl.estimate_curvature(model, None, seen, progress=False)
    fitted: list[cl.Selection] = []

    def refitted(model: Any, plan: cl.Selection) -> Any:
        fitted.append(plan)
        return cl.repair(model, plan, more.rows(both, both + fit), options=REFIT)

    print(f"search on {rows}\njudged on {judge}\n")
    head(
        *("removed", "start", "KL of the start", "KL found", "difference", "on the search rows"),
        *("units that differ", "evaluations", "minutes"),
    )
    for name in options.starts:
        for ratio in options.ratios:
            plan = cl.solve_greedy(curvature, ratio)
            if name == "random":
                drawn = random_set(curvature.units, ratio, np.random.default_rng(options.seed))
                plan = cl.Selection.from_pruned(
                    curvature.units, sorted(drawn), requested_ratio=ratio
                )
            find = partial(
                cl.search_plan,
                model,
                plan,
                rows,
                held_out=judge,
                evaluations=options.evaluations,
                repair=refitted if options.refit else None,
                progress="lines",
                options=SearchOptions(seed=options.seed),
            )
            took, found = seconds(find)
            start, shown = found.table.iloc[0], found.table.iloc[found.chosen]
            row(
                f"{shown['realized_ratio']:.1%}",
                name,
                error_bar(start["kl"], start["kl_error"]),
                error_bar(shown["kl"], shown["kl_error"]),
                error_bar(shown["difference"], shown["difference_error"], sign="+"),
                f"{start['search_kl']:.4f} to {shown['search_kl']:.4f}",
                shown["distance"],
                f"{found.evaluations:,}",
                f"{took / 60:.1f}",
            )
    if options.refit:
        print(f"\n{len(fitted)} refits on {fit} rows")


def uniform(options: Any) -> None:
    """The plan with the same counts in every layer beside the free one."""
    model, rows, test = demo(calibration=options.rows, test=options.judged)
    curvature = cl.estimate_curvature(model, None, rows)
    plans = [
        cl.solve_greedy(curvature, ratio, uniform=same)
        for ratio in options.ratios
        for same in (False, True)
    ]
    table = cl.measure_plans(model, plans, test, calibrated_on=curvature)
    same = ("uniform: counts left", "uniform: removed", "uniform: KL")
    head("asked", "free: removed", "free: KL", *same, "difference")  # over the same rows, in pairs
    for number in range(0, len(table), 2):
        free, even = table.selections[number : number + 2]
        first = [
            unit for n, unit in enumerate(even.units.units) if n in even.kept and not unit.layer
        ]
        heads = sum(unit.kind == "attention" for unit in first)
        row(
            f"{free.requested_ratio:.0%}",
            f"{free.realized_ratio:.1%}",
            f"{table.mean[number]:.4f}",
            f"{heads} KV, {len(first) - heads} FFN",
            f"{even.realized_ratio:.1%}",
            f"{table.mean[number + 1]:.4f}",
            error_bar(*table.paired(number + 1, number), sign="+"),
        )


def scales(options: Any) -> None:
    """Plans of measured blocks and layers, and searches that move them."""
    model, tokenizer = cl.load_model(options.model, device="cpu", dtype="float32")
    rows, tried, choose, test = texts(options, tokenizer)
    curvature = cl.estimate_curvature(model, None, rows, progress=False)
    few = rows.rows(0, options.parts_rows)
    measured = {
        parts: cl.measure_interactions(model, parts, few, progress=False)
        for parts in ("layers", "blocks")
    }
    found: dict[str, dict[float, cl.Selection]] = {}
    for ratio in options.ratios:
        plans = plans_by_scale(curvature, measured, ratio, strengths=(0.0, 1.0))
        table = cl.measure_plans(model, list(plans.values()), tried, progress=False)
        start = table.selections[int(table.mean.argmin())]
        for name, moved in (("units", ()), ("units, blocks and layers", tuple(measured.values()))):
            plans[f"search that moves {name}"] = cl.search_plan(
                model,
                start,
                tried,
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
        return [first, *judges, demo_rows("test", options.judged, tokenizer)]
    count = options.rows + 2 * options.held_out + options.judged
    text = cl.CalibrationSet.from_file(
        options.text, tokenizer, num_sequences=count, positions_per_sequence="all"
    )
    rest, choose, test = text.split(held_out=options.held_out, test=options.judged)
    return [*rest.split(held_out=options.held_out), choose, test]


PARTS = {"search": search, "uniform": uniform, "scales": scales}

if __name__ == "__main__":
    main()
