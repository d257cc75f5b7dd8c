"""Do edges help less where FFN channels are redundant? A row per model, and the rank correlation.

    python -m data.make.train_demo --out ../short --steps 400
    python tests/benchmarks/bench_redundancy.py demo ../short --other FOLDER TEXT_FILE

Everything is kept in --folder; a second run with one model more measures only that one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
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
        head("model", "FFN redundancy", "KL at lambda 0", "edge benefit", "share")
        for row in table.to_dict("records"):
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


def of_the_demo_world(place: str, options: Namespace) -> redundancy.Subject:
    """The demo model, or another one trained on its world, with its texts."""
    model, tokenizer = cl.load_model(place)
    rows = demo_rows("calibration", options.rows, tokenizer)
    return redundancy.Subject(model, rows, demo_rows("test", options.test, tokenizer))


def of_own_text(place: str, text: str, options: Namespace) -> redundancy.Subject:
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


if __name__ == "__main__":
    main()
