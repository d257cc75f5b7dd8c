"""How long the solver and the lambda path take: M = 768 and 1,920, ratios 0.2, 0.4 and 0.6.

Run with `python tests/benchmarks/bench_solver.py`; one thread, minimum, median and interquartile
range over repeats. On a shared machine read the minimum. H is a Gram matrix of random features with
log-normal saliencies and a common component; real matrices of larger correlation have more orders.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads its BLAS
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.models.units import Unit, UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.path import lambda_path
from cocurve_lab.solver.solve import solve_greedy

LAYERS = {768: 32, 1920: 80}  # of 8 query groups and 16 FFN groups, the costs of Llama-3.1-8B
ATTENTION_COST, FFN_COST = 5_242_880, 11_010_048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[768, 1920], choices=list(LAYERS))
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4, 0.6])
    parser.add_argument("--repeats", type=int, default=15, help="of one solve")
    parser.add_argument("--path-repeats", type=int, default=3, help="of one path; 0 skips it")
    parser.add_argument("--maximum", type=float, default=1.0, help="largest lambda of the path")
    parser.add_argument("--layer-cap", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
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
    units = [
        Unit(kind, layer, index, index * width, (index + 1) * width, cost)
        for layer in range(LAYERS[size])
        for kind, count, width, cost in (
            ("attention", 8, 512, ATTENTION_COST),
            ("ffn", 16, 896, FFN_COST),
        )
        for index in range(count)
    ]
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(size, 2000))
    features += 0.3 * rng.normal(size=(size, 1)) * rng.normal(size=2000)
    features *= 0.01 * np.exp(rng.normal(size=(size, 1)))
    return Curvature(features @ features.T / 2000, UnitSet(tuple(units), 16))


def seconds(call: Callable[[], object], repeats: int) -> np.ndarray:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return np.array(times)


def show(times: np.ndarray) -> str:
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]) * 1e3
    return (
        f"min {times.min() * 1e3:9.2f} ms, median {middle:9.2f} ms (quartiles {low:.2f}-{high:.2f})"
    )


if __name__ == "__main__":
    main()
