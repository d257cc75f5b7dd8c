"""What the same counts in every layer cost: KL of the uniform plan against the free one.

python tests/benchmarks/bench_uniform.py            # the table of README.md beside it, some minutes
python tests/benchmarks/bench_uniform.py --quick    # for checking the script
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from helpers.benchmarks import arguments, demo, error_bar, flag, head, row


def main() -> None:
    options = arguments(
        __doc__,
        {"ratios": [0.2], "rows": 4, "test": 4},
        ratios=[0.1, 0.2, 0.3, 0.4, 0.5],
        rows=flag(64, "calibration rows of 256 tokens"),
        test=flag(32, "rows to measure on"),
        interaction_strength=1.0,
        threads=1,
    )
    model, rows, test = demo(calibration=options.rows, test=options.test)
    curvature = cl.estimate_curvature(model, None, rows)
    plans = [
        cl.solve_greedy(curvature, ratio, options.interaction_strength, uniform=uniform)
        for ratio in options.ratios
        for uniform in (False, True)
    ]
    table = cl.measure_plans(model, plans, test, calibrated_on=curvature)
    # the error of a difference is over the same rows, in pairs
    uniform = [f"uniform: {what}" for what in ("counts left", "removed", "KL")]
    head("asked", "free: removed", "free: KL", *uniform, "difference ± s.e.")
    for number in range(0, len(table), 2):
        free, same = table.selections[number : number + 2]
        row(
            f"{free.requested_ratio:.0%}",
            f"{free.realized_ratio:.1%}",
            f"{table.mean[number]:.4f}",
            left(same),
            f"{same.realized_ratio:.1%}",
            f"{table.mean[number + 1]:.4f}",
            error_bar(*table.paired(number + 1, number), sign="+"),
        )


def left(plan: cl.Selection) -> str:
    """KV groups and FFN groups that every layer keeps."""
    kept = [plan.units.units[i] for i in plan.kept if plan.units.units[i].layer == 0]
    heads = sum(unit.kind == "attention" for unit in kept)
    return f"{heads} KV, {len(kept) - heads} FFN"


if __name__ == "__main__":
    main()
