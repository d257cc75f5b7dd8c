r"""Do aligned plans run faster than free ones of the same size? A random model, plans in turn.

    python tests/benchmarks/bench_aligned.py            # on a quiet machine
    python tests/benchmarks/bench_aligned.py --quick    # for checking the script
    python tests/benchmarks/bench_aligned.py --device cuda --dtype bfloat16 --hidden 4096 \
        --ffn 12288 --prompt 2048

FFN groups have 12 channels, so that a free plan leaves widths which no kernel likes; with align=64
and 128 a block keeps multiples of 192 and 384. All plans remove what whole layers remove, as nearly
as their portions allow.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from helpers.benchmarks import arguments, flag, head, in_turn, row, spread
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model

MACHINES = {
    "free": cl.Machine(),
    "align=64": cl.Machine(align=64),
    "align=128": cl.Machine(align=128),
    "uniform": cl.Machine(),
    'depth="block"': cl.Machine(depth="block"),
    'depth="layer"': cl.Machine(depth="layer"),
}
SPEEDS = ("prefill", "decode")


def main() -> None:
    options = arguments(
        __doc__,
        {"hidden": 256, "ffn": 768, "rounds": 2, "prompt": 32, "new": 4},
        ratios=[0.25, 0.375],
        layers=8,
        hidden=flag(1024, "a multiple of 256"),
        ffn=flag(3072, "a multiple of 384"),
        device="cpu",
        dtype=flag("float32", choices=("float32", "bfloat16", "float16")),
        batch=1,
        prompt=512,
        new=32,
        rounds=flag(5, "of all plans in turn"),
        threads=flag(type=int),
    )
    model = tiny_model(
        "llama",
        layers=options.layers,
        dtype=getattr(torch, options.dtype),
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 256,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=options.prompt + options.new,
    ).to(options.device)
    units = cl.enumerate_units(model, ffn_groups=options.ffn // 12)
    curvature = random_curvature(units)
    settings = EfficiencyOptions((options.batch,), options.prompt, options.new, repeats=3)
    head("asked", "plan", "removed", *(f"{speed} / dense" for speed in SPEEDS))
    for ratio in options.ratios:
        layers = cl.solve_aligned(curvature, ratio, machine=cl.Machine(depth="layer"))
        plans = {name: nearest(curvature, layers.realized_ratio, name) for name in MACHINES}
        ways = {
            name: partial(measure_efficiency, model, cl.prune(model, plan), settings)
            for name, plan in plans.items()
        }
        for name, found in in_turn(ways, options.rounds).items():
            ratios = (
                [next(r["ratio"] for r in one.rows if r["quantity"] == speed) for one in found]
                for speed in SPEEDS
            )
            cells = (f"{ratio:.1%}", f"`{name}`", f"{plans[name].realized_ratio:.1%}")
            row(*cells, *map(spread, ratios))
    print(f"\n{options.rounds} rounds, median (range). {found[-1].protocol}")


def nearest(curvature: cl.Curvature, ratio: float, name: str) -> cl.Selection:
    """The plan whose ratio is nearest, because portions overshoot what is asked."""
    machine, uniform = MACHINES[name], name == "uniform"
    found = [
        cl.solve_aligned(curvature, ratio - less / 100, machine=machine, uniform=uniform)
        for less in range(11)
    ]
    return min(found, key=lambda plan: abs(plan.realized_ratio - ratio))


if __name__ == "__main__":
    main()
