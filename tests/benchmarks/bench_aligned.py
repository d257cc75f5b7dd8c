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

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model

GUARDS = {
    "free": {},
    "align=64": {"align": 64},
    "align=128": {"align": 128},
    "uniform": {},
    'depth="block"': {"depth": "block"},
    'depth="layer"': {"depth": "layer"},
}
SPEEDS = ("prefill", "decode")


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.hidden, options.ffn, options.rounds, options.prompt, options.new = (
            256,
            768,
            2,
            32,
            4,
        )
    if options.threads:
        torch.set_num_threads(options.threads)
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
    print("| asked | plan | removed | prefill / dense | decode / dense |\n|---|---|---|---|---|")
    for ratio in options.ratios:
        layers = cl.solve_greedy(curvature, ratio, guards=cl.Guards(depth="layer"))
        plans = {name: nearest(curvature, layers.realized_ratio, name) for name in GUARDS}
        found = timed(model, {name: cl.prune(model, plan) for name, plan in plans.items()}, options)
        for name, plan in plans.items():
            cells = [f"{ratio:.1%}", f"`{name}`", f"{plan.realized_ratio:.1%}"]
            print("| " + " | ".join([*cells, *(shown(found[name][s]) for s in SPEEDS)]) + " |")
    print(f"\n{found['protocol']}")


def nearest(curvature: cl.Curvature, ratio: float, name: str) -> cl.Selection:
    """The plan whose ratio is nearest, because portions overshoot what is asked."""
    guards, uniform = cl.Guards(**GUARDS[name]), name == "uniform"
    found = [
        cl.solve_greedy(curvature, ratio - less / 100, guards=guards, uniform=uniform)
        for less in range(11)
    ]
    return min(found, key=lambda plan: abs(plan.realized_ratio - ratio))


def timed(model, pruned, options):  # type: ignore[no-untyped-def]
    """Tokens per second over those of the dense model, by plan and speed: one value per round.

    In each round the plans take turns, and the next round goes the other way.
    """
    settings = EfficiencyOptions((options.batch,), options.prompt, options.new, repeats=3)
    found = {name: {speed: [] for speed in SPEEDS} for name in pruned}
    names = list(pruned)
    for _ in range(options.rounds):
        for name in names:
            measured = measure_efficiency(model, pruned[name], settings)
            for speed in SPEEDS:
                found[name][speed].append(measured.ratio(speed, options.batch))
        names.reverse()
    return found | {"protocol": f"{options.rounds} rounds, median (range). {measured.protocol}"}


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.375])
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--hidden", type=int, default=1024, help="a multiple of 256")
    made.add_argument("--ffn", type=int, default=3072, help="a multiple of 384")
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    made.add_argument("--batch", type=int, default=1)
    made.add_argument("--prompt", type=int, default=512)
    made.add_argument("--new", type=int, default=32)
    made.add_argument("--rounds", type=int, default=5, help="of all plans in turn")
    made.add_argument("--threads", type=int)
    made.add_argument("--quick", action="store_true")
    return made


if __name__ == "__main__":
    main()
