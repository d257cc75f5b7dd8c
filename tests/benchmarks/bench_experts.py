"""Time the solver, the path and the graph on an H as large as that of a mixture of experts.

    python tests/benchmarks/bench_experts.py --layers 48 --experts 128
    python tests/benchmarks/bench_experts.py --model ../mixture --rows 64 --held-out 32

The second line measures a trained mixture (data/train_demo.py --experts): H of its experts, the
pairs that H says matter, and REAP against H, each with its standard error over held-out rows.

The default has the units of Qwen3-30B-A3B: 48 layers of 4 KV groups and 128 experts, M = 6,336. H
is random. Prints seconds of the processor, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cocurve_lab as cl


def units_of(layers: int, experts: int, top_k: int = 8) -> cl.UnitSet:
    """The units of Qwen3-30B-A3B, with other numbers of layers and experts."""
    units = []
    for layer in range(layers):
        units += [
            cl.Unit("attention", layer, i, 1024 * i, 1024 * (i + 1), 4_718_592) for i in range(4)
        ]
        units += [cl.Unit("expert", layer, i, i, i + 1, 4_720_640) for i in range(experts)]
    return cl.UnitSet(tuple(units), 16, experts_per_token=top_k)


def timed(name: str, call: Callable[[], Any]) -> Any:
    start = time.process_time()
    found = call()
    print(f"{name:42} {time.process_time() - start:8.3f} s", flush=True)
    return found


def measured(folder: str, rows: int, held_out: int) -> None:
    """Print what H says about the experts of a mixture, and the KL of plans, in nats per token."""
    model, tokenizer = cl.load_model(folder)
    text, judge = cl.default_calibration("demo", tokenizer, rows, held_out=held_out)
    units, only = cl.enumerate_units(model), cl.Guards(kinds=("expert",))
    curvature = cl.estimate_curvature(model, units, text, progress=False)
    print(curvature)
    print("\npair, H_uv, KL of both less the KL of each (standard error over rows)")
    experts = np.flatnonzero(units.kinds == "expert")
    edges = np.triu(curvature.matrix[np.ix_(experts, experts)], 1)
    strongest = np.argsort(np.abs(edges), axis=None)[::-1][:8]
    for u, v in zip(*np.unravel_index(strongest, edges.shape), strict=True):
        pair = [int(experts[u]), int(experts[v])]
        sets = [pair, pair[:1], pair[1:]]
        plans = [cl.Selection.from_pruned(units, chosen) for chosen in sets]
        both, one, other = cl.measure_plans(model, plans, judge, progress=False).kl
        found = both - one - other
        error = found.std(ddof=1) / len(found) ** 0.5
        names = f"{units[pair[0]]} {units[pair[1]]}"
        print(f"{names:32} {edges[u, v]:9.5f}  {found.mean():9.5f} ({error:.5f})", flush=True)
    print("\nratio, plan, KL (standard error), less that of REAP (paired standard error)")
    ranked = {name: cl.get_method(name) for name in ("reap", "expert-frequency")}
    evidence = {n: m.measure(model, units, text, progress=False) for n, m in ranked.items()}
    for ratio in (0.1, 0.25, 0.5):
        plans = {n: method.select(evidence[n], units, ratio) for n, method in ranked.items()}
        for name, strength, uniform in (
            ("H, equal counts", 1.0, None),
            ("diagonal of H, equal counts", 0.0, None),
            ("H, free counts", 1.0, ()),
            ("diagonal of H, free counts", 0.0, ()),
        ):
            plans[name] = cl.solve_greedy(curvature, ratio, strength, only, uniform=uniform)
        table = cl.measure_plans(model, list(plans.values()), judge, progress=False)
        for number, name in enumerate(plans):
            less, error = table.paired(number, 0)
            kl = f"{table.mean[number]:.4f} ({table.standard_error[number]:.4f})"
            print(f"{ratio:4.0%}  {name:30} {kl}  {less:+.4f} ({error:.4f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--path", action="store_true", help="the lambda path, too: minutes")
    parser.add_argument("--model", help="a folder with a mixture to measure instead")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=32)
    asked = parser.parse_args()
    if asked.model:
        measured(asked.model, asked.rows, asked.held_out)
        return
    units = units_of(asked.layers, asked.experts)
    print(f"M = {len(units):,}; H takes {8 * len(units) ** 2 / 1e6:,.0f} MB", flush=True)
    root = np.random.default_rng(0).normal(size=(len(units), 64)).astype(np.float32)
    matrix = (root @ root.T).astype(np.float64) / 64 + np.eye(len(units))
    curvature = timed("Curvature", lambda: cl.Curvature(matrix, units))
    curvature.saliency  # noqa: B018, cached
    for ratio in (0.2, 0.5):
        for words, uniform in (("equal counts", None), ("free counts", ())):
            plan = timed(
                f"solve {ratio:.0%}, {words}",
                lambda r=ratio, u=uniform: cl.solve_greedy(curvature, r, uniform=u),
            )
            print(f"    {len(plan)} units, objective {plan.objective:.4g}")
    timed("edge_graph", lambda: cl.edge_graph(curvature, top_k=2000))
    timed("bridge_units", lambda: cl.bridge_units(curvature))
    if asked.path:
        path = timed("lambda_path 20 %", lambda: cl.lambda_path(curvature, 0.2))
        print(f"    {len(path.segments)} segments, {path.orders} orders")


if __name__ == "__main__":
    main()
