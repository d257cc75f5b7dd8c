"""What a refit brings to a plan of H, by the rows that it is fitted on.

python tests/benchmarks/bench_repair.py             # the demo model at 20 and 40 %
python tests/benchmarks/bench_repair.py --quick     # for checking the script
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring.risk import model_risk, standard_error
from helpers.benchmarks import arguments, demo, error_bar, flag, head, row, seconds

QUIET = RepairOptions(progress=False)


def main() -> None:
    options = arguments(
        __doc__,
        {"rows": 2, "refit_rows": [2], "held_out": 2, "ratios": [0.2]},
        ratios=[0.2, 0.4],
        rows=flag(16, "of H"),
        refit_rows=[16, 128],
        held_out=32,
        threads=2,
    )
    most = max(options.rows, *options.refit_rows)
    model, text, held_out = demo(calibration=most, held_out=options.held_out)
    curvature = cl.estimate_curvature(model, None, text.rows(0, options.rows), progress=False)
    print(f"H of {options.rows} rows; KL on {options.held_out} held-out rows, nats per token\n")
    head("removed", "as pruned", *(f"{rows} rows" for rows in options.refit_rows))
    for ratio in options.ratios:
        plan = cl.solve_greedy(curvature, ratio)
        cells = [shown(cl.measure_plans(model, [plan], held_out, progress=False).kl[0])]
        for rows in options.refit_rows:
            some = text.rows(0, rows)
            took, refitted = seconds(lambda: cl.repair(model, plan, some, options=QUIET))  # noqa: B023
            cells.append(f"{shown(model_risk(model, refitted, held_out))}, {took:.0f} s")
        row(f"{plan.realized_ratio:.1%}", *cells)


def shown(kl) -> str:  # type: ignore[no-untyped-def]
    return error_bar(kl.mean(), standard_error(kl))


if __name__ == "__main__":
    main()
