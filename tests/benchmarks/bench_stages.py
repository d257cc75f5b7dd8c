"""What it brings to measure a surrogate anew while pruning: KL of plans in stages and in one shot.

python tests/benchmarks/bench_stages.py             # the demo model, measured anew every 10 %
python tests/benchmarks/bench_stages.py --quick     # for checking the script
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates.staged import SURROGATES, staged_plan
from helpers.demo_rows import demo_rows


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model("demo", device="cpu", dtype="float32")
    text = demo_rows("calibration", options.rows, tokenizer)
    held_out = demo_rows("held_out", options.held_out, tokenizer)
    build = cl.BuildOptions(sketch_positions=10**9, sketch_top=options.tokens)
    curvature = cl.estimate_curvature(model, None, text, progress=False, options=build)
    print(f"H on {text}\n{curvature.shifts}\njudged on {held_out}, lambda {options.strength:g}\n")
    print("| solved on | removed | one shot | in stages | difference | minutes |\n|" + "---|" * 6)
    *stages, last = options.ratios
    for surrogate in options.surrogates:
        begun = time.monotonic()
        shot, staged = (
            staged_plan(
                *(model, curvature, text, last, places, options.strength),
                surrogate=surrogate,
                progress=False,
            )
            for places in ([], stages)
        )
        minutes = (time.monotonic() - begun) / 60
        # both are nested: the plan of a smaller ratio is a prefix
        plans = [plan.prefix(ratio) for ratio in options.ratios[1:] for plan in (shot, staged)]
        table = cl.measure_plans(model, plans, held_out, progress=False)
        for place, ratio in enumerate(options.ratios[1:]):
            one, two = 2 * place, 2 * place + 1
            cells = [
                surrogate,
                f"{ratio:.0%}",
                *(f"{table.mean[at]:.4f} ± {table.standard_error[at]:.4f}" for at in (one, two)),
                "{:+.4f} ± {:.4f}".format(*table.paired(two, one)),
                f"{minutes:.1f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def parser() -> argparse.ArgumentParser:
    quick = "--quick" in sys.argv
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--quick", action="store_true")
    made.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4])
    made.add_argument("--surrogates", nargs="+", default=SURROGATES, choices=SURROGATES)
    made.add_argument("--strength", type=float, default=1.0)
    made.add_argument("--rows", type=int, default=2 if quick else 16)
    made.add_argument("--held-out", type=int, default=2 if quick else 16)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--threads", type=int, default=1)
    return made


if __name__ == "__main__":
    main()
