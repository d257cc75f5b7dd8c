"""How much a search by measured KL lowers the KL of a plan of H, and of a random plan.

python tests/benchmarks/bench_search.py             # the demo model at 20 and 40 %
python tests/benchmarks/bench_search.py --repair --ratios 0.4 --evaluations 480
python tests/benchmarks/bench_search.py --front --ratios 0.1 0.2 0.3 --evaluations 1500
python tests/benchmarks/bench_search.py --quick     # for checking the script; also with the others

--repair refits every plan on rows of its own before it is measured. --front searches at all ratios
in one run, on one budget.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.search import PlanSearch, SearchOptions, search_front
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring.agreement import random_set
from helpers.demo_rows import demo_rows

HEAD = (
    "| removed | start | swaps | KL of the start | KL found | difference | on the search rows | "
    "units that differ | evaluations | minutes |\n|" + "---|" * 10
)


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model("demo", device="cpu", dtype="float32")
    text = demo_rows("calibration", 2 * options.rows, tokenizer)
    seen, rows = text.split(held_out=options.rows)  # H, and the search
    held_out = demo_rows("held_out", options.held_out, tokenizer)
    curvature = cl.estimate_curvature(model, None, seen, progress=False)
    print(f"search on {rows}\njudged on {held_out}\n\n{HEAD}")
    settings = {
        "held_out": held_out,
        "evaluations": options.evaluations,
        "progress": "lines",
        "options": SearchOptions(seed=options.seed),
    }
    counted = None
    if options.repair:
        more = demo_rows("calibration", 2 * options.rows + options.refit_rows, tokenizer)
        fresh = more.rows(2 * options.rows, len(more))  # a refit fits its own rows too well
        fresh.require_disjoint(rows)
        counted = Refit(fresh)
    for swaps in options.swaps:
        settings |= {"surrogate": curvature if swaps == "guided" else None, "repair": counted}
        for name in options.starts:
            starts = [start(name, curvature, ratio, options.seed) for ratio in options.ratios]
            for few in [starts] if options.front else [[one] for one in starts]:
                begun = time.monotonic()
                front = search_front(model, few, rows, **settings)
                minutes = (time.monotonic() - begun) / 60
                for found in front.results:
                    report(name, swaps, found, minutes)
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
    row = found.row()
    cells = [
        f"{row['realized_ratio']:.1%}",
        name,
        swaps,
        f"{row['start_kl']:.4f} ± {found.held_out.standard_error[0]:.4f}",
        f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
        f"{row['difference']:+.4f} ± {row['difference_error']:.4f}",
        f"{row['search_start_kl']:.4f} to {row['search_kl']:.4f}",
        str(row["distance"]),
        f"{row['evaluations']:,}",
        f"{minutes:.1f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4])
    made.add_argument("--starts", nargs="+", choices=["H", "random"], default=["H", "random"])
    made.add_argument(
        "--swaps",
        nargs="+",
        choices=["random", "guided"],
        default=["random"],
        help="guided: half of them proposed by H",
    )
    made.add_argument("--repair", action="store_true", help="refit every plan")
    made.add_argument("--refit-rows", type=int, default=32)
    made.add_argument("--front", action="store_true", help="all ratios in one run, on one budget")
    made.add_argument("--evaluations", type=int, default=4000)
    made.add_argument("--rows", type=int, default=16, help="of H, and of the search")
    made.add_argument("--held-out", type=int, default=32)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action=Quick, nargs=0, help="few rows and evaluations")
    return made


class Quick(argparse.Action):
    """Sets the numbers of a run that only checks the script."""

    def __call__(self, parser, options, *_):  # type: ignore[no-untyped-def]
        options.rows, options.held_out, options.evaluations, options.ratios = 2, 2, 12, [0.1]
        options.refit_rows = 2


if __name__ == "__main__":
    main()
