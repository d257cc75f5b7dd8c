"""Time the solver, the path and the graph on an H as large as that of a mixture of experts.

    python tests/benchmarks/bench_experts.py --layers 48 --experts 128
    python tests/benchmarks/bench_experts.py --model mixture --rows 64 --held-out 32

The second line prints the tables of EXPERTS.md: rankings against H on a trained mixture, over three
draws of calibration rows, and every pair of experts measured.

The default has the units of Qwen3-30B-A3B: 48 layers of 4 KV groups and 128 experts, M = 6,336. H
is random. Prints seconds of the processor, which other work on the machine changes little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.writing import plus_minus
from cocurve_studies.tables import pick
from cocurve_studies.trust import experts
from helpers.benchmarks import arguments, flag, head, row

PAIR_ROWS = 8  # that every pair of experts is measured on


def units_of(layers: int, experts: int, top_k: int = 8) -> cl.UnitSet:
    """The units of Qwen3-30B-A3B, with other numbers of layers and experts."""
    units = []
    for layer in range(layers):
        units += [
            cl.Unit("attention", layer, i, 1024 * i, 1024 * (i + 1), 4_718_592) for i in range(4)
        ]
        units += [cl.Unit("expert", layer, i, i, i + 1, 4_720_640) for i in range(experts)]
    return cl.UnitSet(tuple(units), 16, least=top_k)


def timed(name: str, call: Callable[[], Any]) -> Any:
    start = time.process_time()
    found = call()
    print(f"{name:42} {time.process_time() - start:8.3f} s", flush=True)
    return found


def measured(folder: str, rows: int, held_out: int, draws: int, cache: str) -> None:
    """Print the tables of EXPERTS.md: KL of plans over draws of rows, and pairs of experts."""
    model, tokenizer = cl.load_model(folder)
    text, judge = cl.default_calibration("mixture", tokenizer, draws * rows, held_out)
    units, tables, paired = cl.enumerate_units(model), [], []
    for draw in range(draws):
        mine = text.rows(draw * rows, (draw + 1) * rows)
        curvature = cl.load_or_estimate(cache, model, units, mine)
        print(curvature, flush=True)
        tables.append(pick(experts.experts_study(model, curvature, mine, judge, cache=cache)))
        pairs = experts.pairs_of_experts(model, curvature, judge.rows(0, PAIR_ROWS), cache=cache)
        paired.append(pick(experts.stand_ins(curvature, pairs)))
    print()
    shares = sorted({line["requested_ratio"] for line in tables[0]})
    head("plan", *(f"{share:.0%}" for share in shares), *(f"{s:.0%}, less REAP" for s in shares))
    for name in dict.fromkeys(line["plan"] for line in tables[0]):
        cells = [[pick(t, plan=name, requested_ratio=s)[0] for t in tables] for s in shares]
        kls = [_over_draws([one["kl"] for one in each]) for each in cells]
        behind = [
            _over_draws(
                [one["difference"] for one in each],
                np.mean([one["difference_error"] for one in each]),
            )
            for each in cells
        ]
        row(name, *kls, *([""] * len(shares) if name == experts.REAP else behind))
    print()
    head(*experts.PAIR_COLUMNS.values())
    for at, first in enumerate(paired[0]):
        each = [table[at] for table in paired]
        keys = ("negative", "negative_h", "same_sign", "rank_correlation")
        errors = [np.mean([r.get(f"{key}_error", 0.0) for r in each]) for key in keys]
        told = [_over_draws([r[key] for r in each], e) for key, e in zip(keys, errors, strict=True)]
        row(first["pairs"], first["count"], *told)


def _over_draws(values: list[float], over_rows: float = 0.0) -> str:
    """The mean over draws of rows, with the error that joins draws and judged rows."""
    over_draws = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return plus_minus(float(np.mean(values)), float(np.hypot(over_draws, over_rows)))


def main() -> None:
    asked = arguments(
        __doc__,
        layers=48,
        experts=128,
        path=flag(help="the lambda path, too, up to this lambda", type=float),
        model=flag(help="a mixture to measure instead"),
        rows=64,
        held_out=32,
        draws=3,
        cache="build/experts",
    )
    if asked.model:
        measured(asked.model, asked.rows, asked.held_out, asked.draws, asked.cache)
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
        end = asked.path
        path = timed("lambda_path 20 %", lambda: cl.lambda_path(curvature, 0.2, maximum=end))
        print(f"    lambda 0 to {end:g}: {len(path.segments)} segments, {path.orders} orders")


if __name__ == "__main__":
    main()
