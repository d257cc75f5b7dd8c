"""Measured numbers and the paper's side by side: results.csv and results.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.extensions.publishing.card import as_markdown
from cocurve_lab.extensions.writing import as_csv, plus_minus

from ..bake_off.comparison import COMPARABLE
from ..tables import Row, Rows, pick

DENSE = "dense"  # the dense model's label in place of a plan's
# columns of the paper's table of efficiency; the first four relative to the dense model
SIZES = ("parameters", "prefill", "decode", "peak memory")
HOURS = "prune hours"


def best_of(rows: Rows) -> Rows:
    """Return the best value of each task over other methods, as the paper's "best baseline".

    A plan further from its ratio than the paper allows does not count.

    Args:
        rows: shown and measured, of the other methods at one ratio.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if abs(row["realized_ratio"] - row["requested_ratio"]) > COMPARABLE:
            continue
        sign = 1 if "perplexity" in row["metric"] or "stride" in row["metric"] else -1
        known = best.get(row["task"])
        if known is None or sign * row["value"] < sign * known["value"]:
            best[row["task"]] = row
    return [
        row | {"plan": "best baseline", "metric": f"{row['metric']}, {row['plan']}"}
        for row in best.values()
    ]


def write_tables(table: Rows, folder: Path, heading: str, further: Sequence[Row] = ()) -> Path:
    """Write results.csv, every number, and results.md, the shown ones side by side.

    Args:
        table: of `Reproduction.run`.
        folder: for both files; older ones are replaced.
        heading: the first lines of the page.
        further: the paper's rows that no measured number stands beside.

    Returns:
        The page.
    """
    page = folder / "results.md"
    write_atomically(folder / "results.csv", as_csv(table).encode())
    write_atomically(page, _results_page(table, heading, further).encode())
    return page


def _results_page(table: Rows, heading: str, further: Sequence[Row]) -> str:
    """Lay out the shown numbers as Markdown: per ratio, tasks down and plans across."""
    lines, other = [heading], (*SIZES, HOURS)
    shown = pick(table, shown=True)
    dense = pick(shown, plan=DENSE)
    for ratio in sorted({row["requested_ratio"] for row in pick(table) if row["plan"] != DENSE}):
        here = [*dense, *pick(shown, requested_ratio=ratio)] if ratio else dense
        lines += ["", f"## {ratio:.0%} removed", ""]
        lines += _grid([row for row in here if row["task"] not in other])
        lines += ["", *_grid([row for row in here if row["task"] in other])]
        lines += _failures(pick(table, requested_ratio=ratio))
    lines += _failures(pick(table, plan=DENSE))
    if further:
        lines += ["", "## What else the paper says of this model", ""]
        cells = [(r["table"], f"{r['ratio']:.0%}", _about(r), _values(r)) for r in further]
        lines += as_markdown(("table", "removed", "row", "values"), cells).splitlines()
    return "\n".join(lines) + "\n"


def _about(row: Row) -> str:
    strength = row["interaction_strength"]
    words = (row["method"], "" if strength is None else f"lambda {strength:g}", row["variant"])
    return ", ".join(filter(None, words))


def _values(row: Row) -> str:
    return ", ".join(f"{task} {value}" for task, value in row["values"].items())


def _failures(rows: Rows) -> list[str]:
    return [f"- {r['plan']} {r['task']} failed: {r['failed']}" for r in rows if r["failed"]]


def _grid(rows: Rows) -> list[str]:
    if not rows:
        return []
    columns = list(dict.fromkeys((row["source"], row["plan"]) for row in rows))
    heads = [plan if source == "measured" else f"{source}: {plan}" for source, plan in columns]
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        found = [pick(rows, task=task, source=source, plan=plan) for source, plan in columns]
        lines.append([task, *(_cell(cells[0]) if cells else "" for cells in found)])
    return as_markdown(["task", *heads], lines).splitlines()


def _cell(row: Row) -> str:
    """Format a value, with four digits if it has no error: the paper states as many."""
    if row["value_error"] is None:
        return f"{row['value']:.4g}"
    return plus_minus(row["value"], row["value_error"])
