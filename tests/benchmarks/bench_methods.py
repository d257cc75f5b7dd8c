"""The bake-off of BAKE_OFF.md: every method at equal budgets, over several calibration seeds.

A killed run resumes from its folder; a finished one prints at once.

    python tests/benchmarks/bench_methods.py                 # the tables of BAKE_OFF.md
    python tests/benchmarks/bench_methods.py --quick         # two minutes, for checking the script
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.methods.cocurve import CoCurve
from cocurve_lab.studies.bake_off.compare import CompareOptions, Judges, compare
from cocurve_lab.studies.bake_off.comparison import Comparison
from cocurve_lab.studies.bake_off.frontier import all_methods
from helpers.demo_rows import demo_rows

SHOWN = ("kl", "perplexity", "accuracy all")


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.ratios, options.seeds = [0.2], 1
        options.rows, options.held_out, options.test, options.questions = 4, 4, 4, 4
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model("demo")
    judges = Judges(
        demo_rows("held_out", options.held_out, tokenizer),
        demo_rows("test", options.test, tokenizer),
        cl.demo_questions(options.questions),
    )
    calibrations = [
        demo_rows("calibration", options.rows, tokenizer, seed) for seed in range(options.seeds)
    ]
    result = compare(
        model,
        tokenizer,
        all_methods() | {"CoCurve, gate": CoCurve("gate")},
        options.ratios,
        calibrations,
        judges,
        CompareOptions(options.folder),
    )
    result.to_csv(Path(options.folder) / "bake_off.csv")
    report(result, options.ratios)


def report(result: Comparison, ratios: list[float]) -> None:
    """Print Markdown tables: methods down, ratios across, mean ± spread, the best two marked."""
    dense = result.dense()
    print(f"dense: perplexity {dense['perplexity']:.3f}, accuracy {dense['accuracy all']:.3f}\n")
    for search in ("none", "searched"):
        summaries = {ratio: result.summary(ratio, search) for ratio in ratios}
        for metric in SHOWN:
            print(f"{metric}, guards {search}")
            print("| method | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |")
            print("|---" * (len(ratios) + 1) + "|")
            for place, row in enumerate(summaries[ratios[0]]):
                cells = [shown(summaries[ratio][place], metric) for ratio in ratios]
                print(f"| {row['method']} | " + " | ".join(cells) + " |")
            print()


def shown(row: dict, metric: str) -> str:
    if row[metric] is None:
        return "-"
    spread = row[f"{metric}_spread"]
    text = f"{row[metric]:.3f}" + ("" if spread is None else f" ± {spread:.3f}") + row["mark"]
    return {1: f"**{text}**", 2: f"_{text}_"}.get(row[f"{metric}_rank"], text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--folder", default="bake_off", help="folder that keeps evidence and cells")
    made.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5])
    made.add_argument("--seeds", type=int, default=3, help="calibration sets")
    made.add_argument("--rows", type=int, default=64, help="calibration rows of 256 tokens")
    made.add_argument("--held-out", type=int, default=16, help="rows to search guards on")
    made.add_argument("--test", type=int, default=32, help="rows to report on")
    made.add_argument("--questions", type=int, default=40, help="prompts per family")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--quick", action="store_true")
    return made


if __name__ == "__main__":
    main()
