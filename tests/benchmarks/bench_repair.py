"""What a refit brings to a plan of H, by the rows that it is fitted on.

python tests/benchmarks/bench_repair.py             # the demo model at 20 and 40 %
python tests/benchmarks/bench_repair.py --quick     # for checking the script
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring.risk import model_risk, standard_error
from helpers.demo_rows import demo_rows


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.rows, options.refit_rows, options.held_out, options.ratios = 2, [2], 2, [0.2]
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model("demo", device="cpu", dtype="float32")
    text = demo_rows("calibration", max(options.rows, *options.refit_rows), tokenizer)
    held_out = demo_rows("held_out", options.held_out, tokenizer)
    curvature = cl.estimate_curvature(
        model, cl.enumerate_units(model), text.rows(0, options.rows), progress=False
    )
    print(f"H of {options.rows} rows; KL on {options.held_out} held-out rows, nats per token\n")
    print("| removed | as pruned | " + " | ".join(f"{n} rows" for n in options.refit_rows) + " |")
    print("|---" * (2 + len(options.refit_rows)) + "|")
    for ratio in options.ratios:
        plan = cl.solve_greedy(curvature, ratio)
        cells = [shown(cl.measure_plans(model, [plan], held_out, progress=False).kl[0])]
        for rows in options.refit_rows:
            begun = time.monotonic()
            refitted = cl.repair(
                model, plan, text.rows(0, rows), options=RepairOptions(progress=False)
            )
            seconds = time.monotonic() - begun
            cells.append(f"{shown(model_risk(model, refitted, held_out))}, {seconds:.0f} s")
        print(f"| {plan.realized_ratio:.1%} | " + " | ".join(cells) + " |", flush=True)


def shown(kl) -> str:  # type: ignore[no-untyped-def]
    return f"{kl.mean():.4f} ± {standard_error(kl[None])[0]:.4f}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4])
    made.add_argument("--rows", type=int, default=16, help="of H")
    made.add_argument("--refit-rows", type=int, nargs="+", default=[16, 128])
    made.add_argument("--held-out", type=int, default=32)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action="store_true")
    return made


if __name__ == "__main__":
    main()
