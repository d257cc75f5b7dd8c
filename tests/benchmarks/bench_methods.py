"""The bake-off of BAKE_OFF.md: every method at equal budgets, over several calibration seeds.

A killed run resumes from its folder; a finished one prints at once.

    python tests/benchmarks/bench_methods.py                 # the tables of BAKE_OFF.md
    python tests/benchmarks/bench_methods.py --parts trained --only "CoCurve, refitted, trained"
    python tests/benchmarks/bench_methods.py --model FOLDER --text FILE
    python tests/benchmarks/bench_methods.py --quick         # two minutes, for checking the script
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.writing import plus_minus
from cocurve_lab.methods.base import Method
from cocurve_lab.methods.cocurve import CoCurve
from cocurve_lab.methods.registry import get_method
from cocurve_lab.solver.guards import Guards
from cocurve_studies.bake_off.compare import compare
from cocurve_studies.bake_off.comparison import Comparison
from cocurve_studies.bake_off.contenders import (
    BASELINES,
    DEPTH,
    OURS_CHOSEN,
    CompareOptions,
    Contender,
    Judges,
    Repairing,
    alike,
    all_methods,
    treated,
)
from cocurve_studies.tables import pick
from helpers.benchmarks import arguments, demo_rows, flag, head, row

SHOWN = ("kl", "perplexity", "accuracy all")
STARTS = ("random", "magnitude", "cocurve")  # of a measured search
REPAIRED: dict[str, Repairing] = {
    "alike": "own",
    "refitted": "refit",
    "trained": "refit and training",
}
PARTS = ("all", "alike", "refitted", "trained", "searched")


def main() -> None:
    options = arguments(
        __doc__,
        {"ratios": [0.2], "seeds": 1, "evaluations": 12}
        | dict.fromkeys(("rows", "held_out", "test", "questions"), 4),
        folder=flag("bake_off", "folder that keeps evidence and cells"),
        model=flag("demo", "or a folder or name, with --text"),
        text=flag(help="text file for another model"),
        parts=flag(list(PARTS), choices=PARTS),
        only=flag(help="labels of the rows to measure", nargs="+"),
        ratios=[0.1, 0.2, 0.3, 0.4, 0.5],
        search_ratios=[0.2, 0.4],
        seeds=flag(3, "calibration sets"),
        rows=flag(64, "calibration rows of 256 tokens"),
        held_out=flag(16, "rows to search guards on"),
        test=flag(32, "rows to report on"),
        questions=flag(40, "prompts per family"),
        evaluations=flag(1500, "of each measured search"),
        repaired=flag(2, "plans of a row that are refitted on all its rows"),
        threads=2,
        backwards=flag(False, "last row first: for a second run"),
    )
    model, tokenizer = cl.load_model(options.model, device="cpu", dtype="float32")
    questions = cl.demo_questions(options.questions) if options.model == "demo" else []
    calibrations, held_out, test = texts(options, tokenizer)
    done = []
    for part in options.parts:
        rows, ratios = line_up(part, options), options.ratios
        if options.only:
            rows = {label: row for label, row in rows.items() if label in options.only}
        if part == "searched":
            ratios = [ratio for ratio in ratios if ratio in options.search_ratios]
        settings = CompareOptions(
            options.folder,
            guards(part),
            unguarded=part in ("all", "searched"),
            repaired=options.repaired,
        )
        if options.backwards:
            rows = dict(reversed(rows.items()))
        judges = Judges(held_out, test, questions)
        result = compare(model, tokenizer, rows, ratios, calibrations, judges, settings)
        result.to_csv(Path(options.folder) / f"bake_off_{part}.csv")
        report(part, result, ratios)
        done.append((part, result))
    for part, result in done:
        leads(part, result)


def texts(options, tokenizer):  # type: ignore[no-untyped-def]
    """Calibrations, held-out rows and test rows; no two share a row."""
    if options.model == "demo":
        calibrations = [
            demo_rows("calibration", options.rows, tokenizer, seed) for seed in range(options.seeds)
        ]
        held_out = demo_rows("held_out", options.held_out, tokenizer)
        return calibrations, held_out, demo_rows("test", options.test, tokenizer)
    count = options.seeds * options.rows + options.held_out + options.test
    text = cl.CalibrationSet.from_file(
        options.text, tokenizer, num_sequences=count, positions_per_sequence="all"
    )
    first = options.held_out + options.test
    calibrations = [
        text.rows(start, start + options.rows) for start in range(first, count, options.rows)
    ]
    return calibrations, text.rows(0, options.held_out), text.rows(options.held_out, first)


def line_up(part: str, options) -> dict[str, Contender | Method]:  # type: ignore[no-untyped-def]
    if part == "all":
        return all_methods() | {"CoCurve, gate": CoCurve("gate")}
    if part in REPAIRED:
        return dict(alike(REPAIRED[part]))
    return {
        treated(method.title, repair, options.evaluations): Contender(
            (method,), repair, options.evaluations
        )
        for repair in ("own", "refit")
        for method in map(get_method, STARTS)
    }


def guards(part: str) -> tuple[Guards, ...]:
    """The grid of a part. A search may change everything but the guards, so it has none."""
    if part in ("refitted", "trained"):  # a refit does best where every layer loses something
        return (*CompareOptions().guards, Guards(layer_cap_factor=1.25))
    return () if part == "searched" else CompareOptions().guards


def report(part: str, result: Comparison, ratios: list[float]) -> None:
    """Print Markdown tables: methods down, ratios across, mean ± spread, the best two marked."""
    dense = result.dense()
    print(f"## {part}\n\ndense: perplexity {dense['perplexity']:.3f}", end="")
    print(f", accuracy {dense['accuracy all']:.3f}\n" if "accuracy all" in dense else "\n")
    for search in {"all": ("none", "searched"), "searched": ("none",)}.get(part, ("searched",)):
        for metric in [name for name in SHOWN if name in result.metrics]:
            print(f"{metric}, guards {search}")
            across(result, ratios, search, partial(shown, metric))
    print("passes of a row, seconds (evidence, search and repair)")
    across(result, ratios, "searched", price)


def across(
    result: Comparison, ratios: list[float], search: str, cell: Callable[[dict], str]
) -> None:
    """A line per method, a column per ratio."""
    summaries = [pick(result.summary(ratio, search)) for ratio in ratios]
    head("method", *(f"{ratio:.0%}" for ratio in ratios))
    for rows in zip(*summaries, strict=True):
        row(rows[0]["method"], *map(cell, rows))
    print()


def shown(metric: str, row: dict) -> str:
    if row[metric] is None:
        return "-"
    spread = row[f"{metric}_spread"]
    text = f"{row[metric]:.3f}" + ("" if spread is None else f" ± {spread:.3f}") + row["mark"]
    return {1: f"**{text}**", 2: f"_{text}_"}.get(row[f"{metric}_rank"], text)


def price(row: dict) -> str:
    return "-" if row["seconds"] is None else f"{row['evaluations']:,.0f}, {row['seconds']:.0f} s"


def leads(part: str, result: Comparison) -> None:
    """Print how far each baseline, treated alike, is behind CoCurve with lambda chosen."""
    if part not in REPAIRED:
        return
    repair = REPAIRED[part]
    measured = {each["method"] for each in result.rows}
    if treated(OURS_CHOSEN, repair) not in measured:
        return  # not among --only
    titles = (get_method(name).title for name in (*BASELINES, *DEPTH))
    rivals = [treated(title, repair) for title in titles if treated(title, repair) in measured]
    rows = pick(result.leads(treated(OURS_CHOSEN, repair), rivals))
    print(f"{part}: KL behind {treated(OURS_CHOSEN, repair)}, guards searched")
    ratios = list(dict.fromkeys(each["requested_ratio"] for each in rows))
    head("method", *(f"{ratio:.0%}" for ratio in ratios))
    for rival in rivals:
        cells = {each["requested_ratio"]: each for each in pick(rows, method=rival)}
        row(rival, *(gap(cells[ratio]) if ratio in cells else "-" for ratio in ratios))
    print()


def gap(row: dict) -> str:
    clear = abs(row["behind"]) > 2 * row["behind_error"]
    return plus_minus(row["behind"], row["behind_error"]) + ("" if clear else " (not clear)")


if __name__ == "__main__":
    main()
