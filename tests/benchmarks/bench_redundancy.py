"""Do edges help less where FFN channels are redundant? A row per model, and the rank correlation.

    python data/train_demo.py --out ../short --steps 400
    python tests/benchmarks/bench_redundancy.py demo ../short --other FOLDER TEXT_FILE

Everything is kept in --folder; a second run with one model more measures only that one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_studies.trust import redundancy
from helpers.benchmarks import arguments, error_bar, flag, head
from helpers.benchmarks import row as line
from helpers.demo_rows import demo_rows


def main() -> None:
    pair = {"nargs": 2, "action": "append", "metavar": ("FOLDER", "TEXT")}
    options = arguments(
        __doc__,
        models=flag(help='"demo", or folders of train_demo.py', nargs="+", positional=True),
        other=flag([], **pair),
        folder=flag("redundancy", "where everything is kept"),
        ratios=[0.2, 0.4],
        rows=flag(48, "rows of 256 tokens to build H on"),
        test=flag(24, "rows to measure on"),
        threads=2,
    )
    rows = [
        row
        for place in options.models
        for row in measured(place, *of_the_demo_world(place, options), options)
    ]
    for folder, text in options.other:
        rows += measured(folder, *of_own_text(folder, text, options), options)
    for ratio in options.ratios:
        table = [row for row in rows if row["requested_ratio"] == ratio]
        print(f"\n{ratio:.0%} removed\n")
        head("model", "FFN redundancy", "KL at lambda 0", "edge benefit", "share")
        for row in table:
            line(
                row["model"],
                error_bar(row["redundancy"], row["redundancy_error"], 3),
                f"{row['kl_0']:.4f}",
                error_bar(row["edge_benefit"], row["edge_benefit_error"], sign="+"),
                f"{row['relative_benefit']:+.0%}",
            )
        for benefit in ("edge_benefit", "relative_benefit"):
            trend = redundancy.redundancy_trend(table, benefit)
            print(f"\n{benefit}: {describe(trend)}")


def measured(
    place: str, model: Any, rows: Any, held_out: Any, options: Namespace
) -> list[redundancy.Row]:
    """Build H, and measure its plans of lambda 0 and 1 at every ratio."""
    units, folder = cl.enumerate_units(model), Path(options.folder)
    curvature = cl.load_or_estimate(folder, model, units, rows, progress=False)
    pairs = [(ratio, strength) for ratio in options.ratios for strength in (0.0, 1.0)]
    plans = [cl.solve_greedy(curvature, *pair) for pair in pairs]
    path = plans_file(folder, model, held_out)
    kl = cl.measure_plans(model, plans, held_out, checkpoint=path, progress=False).kl
    return [
        redundancy.redundancy_row(Path(place).name, curvature, ratio, *kl[2 * n : 2 * n + 2])
        for n, ratio in enumerate(options.ratios)
    ]


def of_the_demo_world(place: str, options: Namespace) -> tuple[Any, Any, Any]:
    """The demo model, or another one trained on its world, with its texts."""
    model, tokenizer = cl.load_model(place)
    rows = demo_rows("calibration", options.rows, tokenizer)
    return model, rows, demo_rows("test", options.test, tokenizer)


def of_own_text(place: str, text: str, options: Namespace) -> tuple[Any, Any, Any]:
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
    return (model, *every.split(held_out=options.test)[:2])


def describe(trend: redundancy.Row) -> str:
    if trend["spearman"] is None:
        return f"{trend['models']} models, too few for a rank correlation"
    return (
        f"rank correlation with redundancy {trend['spearman']:+.1f} over {trend['models']} models, "
        f"p = {trend['p_value']:.2f}"
    )


if __name__ == "__main__":
    main()
