"""What it brings to measure a surrogate anew while pruning: KL of plans in stages and in one shot.

python tests/benchmarks/bench_stages.py             # the demo model, measured anew every 10 %
python tests/benchmarks/bench_stages.py --quick     # for checking the script
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates.staged import SURROGATES, staged_plan
from helpers.benchmarks import arguments, demo, error_bar, flag, head, row, seconds


def main() -> None:
    options = arguments(
        __doc__,
        {"rows": 2, "held_out": 2},
        ratios=[0.1, 0.2, 0.3, 0.4],
        surrogates=flag(list(SURROGATES), choices=SURROGATES),
        strength=1.0,
        rows=16,
        held_out=16,
        tokens=64,
        threads=1,
    )
    model, text, held_out = demo(calibration=options.rows, held_out=options.held_out)
    build = cl.BuildOptions(sketch_positions=10**9, sketch_top=options.tokens)
    curvature = cl.estimate_curvature(model, None, text, progress=False, options=build)
    print(f"H on {text}\n{curvature.shifts}\njudged on {held_out}, lambda {options.strength:g}\n")
    head("solved on", "removed", "one shot", "in stages", "difference", "minutes")
    *stages, last = options.ratios

    def both(surrogate: str) -> list[cl.Selection]:
        inputs = (model, curvature, text, last)
        return [
            staged_plan(*inputs, places, options.strength, surrogate=surrogate, progress=False)
            for places in ([], stages)
        ]

    for surrogate in options.surrogates:
        took, (shot, staged) = seconds(lambda: both(surrogate))  # noqa: B023  (called here)
        # both are nested: the plan of a smaller ratio is a prefix
        plans = [plan.prefix(ratio) for ratio in options.ratios[1:] for plan in (shot, staged)]
        table = cl.measure_plans(model, plans, held_out, progress=False)
        for place, ratio in enumerate(options.ratios[1:]):
            one, two = 2 * place, 2 * place + 1
            kl = (error_bar(table.mean[at], table.standard_error[at]) for at in (one, two))
            difference = error_bar(*table.paired(two, one), sign="+")
            row(surrogate, f"{ratio:.0%}", *kl, difference, f"{took / 60:.1f}")


if __name__ == "__main__":
    main()
