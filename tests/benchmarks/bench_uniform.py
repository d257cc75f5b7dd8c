"""What the same counts in every layer cost: KL of the uniform plan against the free one.

python tests/benchmarks/bench_uniform.py            # the table of README.md beside it, some minutes
python tests/benchmarks/bench_uniform.py --quick    # for checking the script
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.measuring.risk import PlanTable
from helpers.demo_rows import demo_rows


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.ratios, options.rows, options.test = [0.2], 4, 4
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model("demo")
    rows = demo_rows("calibration", options.rows, tokenizer)
    curvature = cl.estimate_curvature(model, cl.enumerate_units(model), rows)
    plans = []
    for ratio in options.ratios:
        for uniform in (False, True):
            plans.append(
                cl.solve_greedy(curvature, ratio, options.interaction_strength, uniform=uniform)
            )
    test = demo_rows("test", options.test, tokenizer)
    report(cl.measure_plans(model, plans, test, calibrated_on=curvature))


def report(table: PlanTable) -> None:
    """Markdown: a line per ratio; the difference's error is over the same rows, in pairs."""
    print("| asked | free: removed | free: KL | uniform: counts left | uniform: removed ", end="")
    print("| uniform: KL | difference ± s.e. |\n" + "|---" * 7 + "|")
    for number in range(0, len(table), 2):
        free, uniform = table.selections[number : number + 2]
        difference, error = table.paired(number + 1, number)
        cells = [
            f"{free.requested_ratio:.0%}",
            f"{free.realized_ratio:.1%}",
            f"{table.mean[number]:.4f}",
            left(uniform),
            f"{uniform.realized_ratio:.1%}",
            f"{table.mean[number + 1]:.4f}",
            f"{difference:+.4f} ± {error:.4f}",
        ]
        print("| " + " | ".join(cells) + " |")


def left(plan: cl.Selection) -> str:
    """KV groups and FFN groups that every layer keeps."""
    kept = [plan.units.units[i] for i in plan.kept if plan.units.units[i].layer == 0]
    heads = sum(unit.kind == "attention" for unit in kept)
    return f"{heads} KV, {len(kept) - heads} FFN"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.5])
    made.add_argument("--rows", type=int, default=64, help="calibration rows of 256 tokens")
    made.add_argument("--test", type=int, default=32, help="rows to measure on")
    made.add_argument("--interaction-strength", type=float, default=1.0)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--quick", action="store_true")
    return made


if __name__ == "__main__":
    main()
