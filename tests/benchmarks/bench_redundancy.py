"""Do edges help less where FFN channels are redundant? A row per model, and the rank correlation.

    python data/train_demo.py --out ../short --steps 400
    python tests/benchmarks/bench_redundancy.py demo ../short --other FOLDER TEXT_FILE

Everything is kept in --folder; a second run with one model more measures only that one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_studies.trust import redundancy
from helpers.demo_rows import demo_rows


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    models: dict[str, Callable[[], redundancy.Subject]] = {
        Path(place).name: lambda place=place: of_the_demo_world(place, options)
        for place in options.models
    }
    for folder, text in options.other:
        models[Path(folder).name] = lambda a=folder, b=text: of_own_text(a, b, options)
    for ratio in options.ratios:
        asked = redundancy.RedundancyOptions(ratio=ratio)
        table = redundancy.redundancy_study(models, asked, cache=options.folder, progress=False)
        print(f"\n{ratio:.0%} removed\n")
        print("| model | FFN redundancy | KL at lambda 0 | edge benefit | share |")
        print("|---" * 5 + "|")
        for row in table:
            cells = [
                row["model"],
                f"{row['redundancy']:.3f} ± {row['redundancy_error']:.3f}",
                f"{row['kl_0']:.4f}",
                f"{row['edge_benefit']:+.4f} ± {row['edge_benefit_error']:.4f}",
                f"{row['relative_benefit']:+.0%}",
            ]
            print(f"| {' | '.join(cells)} |")
        for benefit in ("edge_benefit", "relative_benefit"):
            trend = redundancy.redundancy_trend(table, benefit)
            print(f"\n{benefit}: {describe(trend)}")


def of_the_demo_world(place: str, options: argparse.Namespace) -> redundancy.Subject:
    """The demo model, or another one trained on its world, with its texts."""
    model, tokenizer = cl.load_model(place)
    rows = demo_rows("calibration", options.rows, tokenizer)
    return redundancy.Subject(model, rows, demo_rows("test", options.test, tokenizer))


def of_own_text(place: str, text: str, options: argparse.Namespace) -> redundancy.Subject:
    """Any other model with a text file: documents end with <|endoftext|>, else at blank lines."""
    model, tokenizer = cl.load_model(place)
    content = Path(text).read_text(encoding="utf-8")
    end = "<|endoftext|>" if "<|endoftext|>" in content else "\n\n"
    documents = [part for part in content.split(end) if part.strip()]
    every = cl.CalibrationSet.from_texts(
        documents,
        tokenizer,
        num_sequences=options.rows + options.test,
        seq_len=256,
        positions_per_sequence="all",
    )
    return redundancy.Subject(model, *every.split(held_out=options.test)[:2])


def describe(trend: redundancy.Row) -> str:
    if trend["spearman"] is None:
        return trend["note"]
    return (
        f"rank correlation with redundancy {trend['spearman']:+.1f} over {trend['models']} models, "
        f"p = {trend['p_value']:.2f}"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("models", nargs="+", help='"demo", or folders of train_demo.py')
    made.add_argument("--other", nargs=2, action="append", default=[], metavar=("FOLDER", "TEXT"))
    made.add_argument("--folder", default="redundancy", help="where everything is kept")
    made.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4])
    made.add_argument("--rows", type=int, default=48, help="rows of 256 tokens to build H on")
    made.add_argument("--test", type=int, default=24, help="rows to measure on")
    made.add_argument("--threads", type=int, default=2)
    return made


if __name__ == "__main__":
    main()
