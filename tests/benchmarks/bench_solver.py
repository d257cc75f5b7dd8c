"""How long the solver and the lambda path take: M = 768 and 1,920, ratios 0.2, 0.4 and 0.6.

Run with `python tests/benchmarks/bench_solver.py`; one thread, minimum, median and interquartile
range over repeats. On a shared machine read the minimum. H is a Gram matrix of random features with
log-normal saliencies and a common component; real matrices of larger correlation have more orders.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads its BLAS
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.path import lambda_path
from cocurve_lab.solver.solve import solve_greedy
from helpers.benchmarks import arguments, flag
from helpers.benchmarks import seconds as timed
from helpers.problems import make_units

LAYERS = {768: 32, 1920: 80}  # of 8 query groups and 16 FFN groups, the costs of Llama-3.1-8B
ATTENTION_COST, FFN_COST = 5_242_880, 11_010_048


def main() -> None:
    options = arguments(
        __doc__,
        sizes=flag(list(LAYERS), choices=list(LAYERS)),
        ratios=[0.2, 0.4, 0.6],
        repeats=flag(15, "of one solve"),
        path_repeats=flag(3, "of one path; 0 skips it"),
        maximum=flag(1.0, "largest lambda of the path"),
        layer_cap=flag(type=float),
        seed=0,
    )
    guards = Guards(layer_cap=options.layer_cap)
    for size in options.sizes:
        curvature = problem(size, options.seed)
        digest = seconds(lambda: curvature.fingerprint, 1)  # noqa: B023  (called here)
        print(f"M = {size}: fingerprint of H, once per matrix: {show(digest)}")
        for ratio in options.ratios:
            solves = seconds(
                lambda: solve_greedy(curvature, ratio, 1.0, guards),  # noqa: B023
                options.repeats,
            )
            print(f"  ratio {ratio:.2f}  solve {show(solves)}", flush=True)
            if options.path_repeats:
                path = lambda_path(curvature, ratio, guards, options.maximum)
                paths = seconds(
                    lambda: lambda_path(curvature, ratio, guards, options.maximum),  # noqa: B023
                    options.path_repeats,
                )
                print(f"              path  {show(paths)}\n                    {path}", flush=True)


def problem(size: int, seed: int) -> Curvature:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(size, 2000))
    features += 0.3 * rng.normal(size=(size, 1)) * rng.normal(size=2000)
    features *= 0.01 * np.exp(rng.normal(size=(size, 1)))
    units = make_units(LAYERS[size], 8, 16, ATTENTION_COST, FFN_COST)
    return Curvature(features @ features.T / 2000, units)


def seconds(call: Callable[[], object], repeats: int) -> np.ndarray:
    return np.array([timed(call)[0] for _ in range(repeats)])


def show(times: np.ndarray) -> str:
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]) * 1e3
    return (
        f"min {times.min() * 1e3:9.2f} ms, median {middle:9.2f} ms (quartiles {low:.2f}-{high:.2f})"
    )


if __name__ == "__main__":
    main()
