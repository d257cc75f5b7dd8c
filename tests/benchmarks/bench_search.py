"""How much a search by measured KL lowers the KL of a plan of H, and of a random plan.

python tests/benchmarks/bench_search.py             # the demo model at 20 and 40 %
python tests/benchmarks/bench_search.py --repair --ratios 0.4 --evaluations 480
python tests/benchmarks/bench_search.py --quick     # for checking the script; also with the others

--repair refits every plan on rows of its own before it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.search import PlanSearch, SearchOptions
from cocurve_lab.extensions.judging.agreement import random_set
from cocurve_lab.extensions.repairing.repair import RepairOptions
from helpers.benchmarks import arguments, demo, error_bar, flag, head, row, seconds

COLUMNS = (
    *("removed", "start", "swaps", "KL of the start", "KL found", "difference"),
    *("on the search rows", "units that differ", "evaluations", "minutes"),
)


def main() -> None:
    options = arguments(
        __doc__,
        {"rows": 2, "held_out": 2, "evaluations": 12, "ratios": [0.1], "refit_rows": 2},
        ratios=[0.2, 0.4],
        starts=flag(["H", "random"], choices=["H", "random"]),
        swaps=flag(["random"], "guided: half of them proposed by H", choices=["random", "guided"]),
        repair=flag(False, "refit every plan"),
        refit_rows=32,
        evaluations=4000,
        rows=flag(16, "of H, and of the search"),
        held_out=32,
        seed=0,
        threads=2,
    )
    both = 2 * options.rows
    model, more, held_out = demo(
        calibration=both + options.refit_rows * options.repair, held_out=options.held_out
    )
    seen, rows = more.rows(0, both).split(held_out=options.rows)  # H, and the search
    curvature = cl.estimate_curvature(model, None, seen, progress=False)
    print(f"search on {rows}\njudged on {held_out}\n")
    head(*COLUMNS)
    settings = {
        "held_out": held_out,
        "evaluations": options.evaluations,
        "progress": "lines",
        "options": SearchOptions(seed=options.seed),
    }
    counted = None
    if options.repair:
        fresh = more.rows(both, len(more))  # a refit fits its own rows too well
        fresh.require_disjoint(rows)
        counted = Refit(fresh)
    for swaps in options.swaps:
        settings |= {"surrogate": curvature if swaps == "guided" else None, "repair": counted}
        for name in options.starts:
            starts = [start(name, curvature, ratio, options.seed) for ratio in options.ratios]
            for one in starts:
                took, found = seconds(lambda: cl.search_plan(model, one, rows, **settings))  # noqa: B023
                report(name, swaps, found, took / 60)
    if counted is not None:
        print(f"\n{counted.plans} refits on {counted.text}")


def start(name: str, curvature: cl.Curvature, ratio: float, seed: int) -> cl.Selection:
    if name == "H":
        return cl.solve_greedy(curvature, ratio)
    drawn = random_set(curvature.units, ratio, np.random.default_rng(seed))
    return cl.Selection.from_pruned(curvature.units, sorted(drawn), requested_ratio=ratio)


class Refit:
    """`cl.repair` on a text, which counts how often it is called."""

    def __init__(self, text: cl.CalibrationSet) -> None:
        self.text, self.plans = text, 0

    def __call__(self, model: PreTrainedModel, plan: cl.Selection) -> PreTrainedModel:
        self.plans += 1
        return cl.repair(model, plan, self.text, options=RepairOptions(progress=False))


def report(name: str, swaps: str, found: PlanSearch, minutes: float) -> None:
    start, shown = found.table.iloc[0], found.table.iloc[found.chosen]
    row(
        f"{shown['realized_ratio']:.1%}",
        name,
        swaps,
        error_bar(start["kl"], start["kl_error"]),
        error_bar(shown["kl"], shown["kl_error"]),
        error_bar(shown["difference"], shown["difference_error"], sign="+"),
        f"{start['search_kl']:.4f} to {shown['search_kl']:.4f}",
        shown["distance"],
        f"{found.evaluations:,}",
        f"{minutes:.1f}",
    )


if __name__ == "__main__":
    main()
