"""What FidelityScatter says about its points: statistics, status, caption, tables as HTML."""

from __future__ import annotations

import base64
from dataclasses import asdict
from html import escape
from typing import Any

from cocurve_lab import Curvature
from cocurve_lab.measuring.agreement import agreement

from .fidelity_points import Book, drawable
from .instrument import to_csv

ALL_PLANS, SINGLE_UNITS = "all plans", "single units"
MOST_ROWS = 300  # of the table in the page; the CSV has all
COLUMNS = {  # of the table in the page, narrow enough for it
    "point": "name",
    "method": "method",
    "λ": "interaction_strength",
    "asked": "requested_ratio",
    "removed": "realized_ratio",
    "units": "units",
    "predicted": "predicted_risk",
    "measured": "measured_risk",
    "±": "standard_error",
    "text": "text",
}


def caption(curvature: Curvature, text: str | None) -> str:
    """Where predictions and measurements live, as HTML."""
    known = curvature.provenance
    top_r = known.get("top_r")
    support = "top-r support (r unknown)" if top_r is None else f"top-{top_r} support"
    parts = [
        f"Predicted: on the teacher's {support}, from the calibration text. Measured: over the "
        f"full vocabulary, on {text or 'the text each point names'}."
    ]
    if curvature.single_unit_risk is None:
        parts.append("This curvature came without the KL of single units: no grey points.")
    else:
        parts.append(
            "Grey: each unit alone, ½ H_uu against its KL in the build, both on that support and "
            "on the calibration text."
        )
    if text and "row_fingerprints" not in known:
        parts.append("H does not say which rows it was built on, so overlap cannot be checked.")
    return f'<div class="cocurve"><p class="cc-muted">{escape(" ".join(parts))}</p></div>'


def preview_html(note: str) -> str:
    """What is said of a preview of H at the top, as HTML."""
    return f'<div class="cocurve"><p class="cc-preview" role="note">{escape(note)}</p></div>'


def summarize(
    rows: list[dict[str, Any]], marks: list[str], book: Book
) -> dict[str, dict[str, Any]]:
    """`agreement` of all plans, of each pool, and of the single units, with the worst named.

    Args:
        rows: rows of `points`; the single units come last.
        marks: fingerprint of each plan among them, in order.
    """
    groups = {ALL_PLANS: rows[: len(marks)]}
    for name, (_, members) in book.pools.items():
        mine = set(members)
        groups[name] = [row for row, mark in zip(rows, marks, strict=False) if mark in mine]
    groups[SINGLE_UNITS] = rows[len(marks) :]
    return {name: _score(group) for name, group in groups.items() if group or name == ALL_PLANS}


def status_line(rows: list[dict[str, Any]], marks: list[str], plan: str, took: str) -> str:
    """How many points of what, what cannot be drawn, what is chosen, how long it took.

    Args:
        rows, marks: as for `summarize`.
        plan: words about the chosen plan; may be empty.
        took: words about the last work; may be empty.
    """
    units = len(rows) - len(marks)
    parts = [f"{len(marks)} measured plans and {units} single units shown"]
    texts = {row["text"] for row in rows[: len(marks)]}
    if len(texts) > 1:
        parts.append(f"plans are from {len(texts)} texts, choose one under Text to compare")
    hidden = [row["name"] for row in rows if not drawable(row)]
    if hidden:
        some = ", ".join(hidden[:3]) + (", ..." if len(hidden) > 3 else "")
        verb = "is" if len(hidden) == 1 else "are"
        parts.append(
            f"{len(hidden)} of them {verb} not above 0 and cannot be drawn on log axes: {some}"
        )
    parts += [plan] if plan else []
    parts += [f"last: {took}"] if took else []
    return "; ".join(parts) + "."


def _score(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = agreement(
        [row["predicted_risk"] for row in rows], [row["measured_risk"] for row in rows]
    )
    worst = None if found.worst is None else rows[found.worst]["name"]
    return asdict(found) | {"worst": worst}


def scores_table(scores: dict[str, dict[str, Any]]) -> str:
    """The statistics as HTML."""
    heads = ["", "points", "Spearman", "Pearson of logs", "median measured / predicted", "worst"]
    lines = []
    for name, score in scores.items():
        known = score["points"] > 0
        worst = f"{escape(score['worst'])} ({score['worst_ratio']:.3g} x)" if known else "-"
        both = [f"{score[key]:.3f}" for key in ("spearman", "pearson_log")]
        if score["note"]:
            both = [escape(score["note"]), "-"]
        median = f"{score['median_ratio']:.3g}" if known else "-"
        lines.append([escape(name), str(score["points"]), *both, median, worst])
    return f'<div class="cocurve"><h4>Agreement</h4>{_html(heads, lines)}</div>'


def points_table(rows: list[dict[str, Any]], plan: str | None) -> str:
    """The points as HTML with links to save them, and the plan (JSON text) where there is one."""
    files = _download("CSV", "fidelity.csv", "text/csv", to_csv(rows))
    files += "" if plan is None else _download("JSON", "plan.json", "application/json", plan)
    shown = [[_cell(row[key]) for key in COLUMNS.values()] for row in rows[:MOST_ROWS]]
    more = len(rows) - len(shown)
    note = f"<p>{more} further rows are in the CSV.</p>" if more else ""
    table = _html(list(COLUMNS), shown) if rows else "<p>no points yet</p>"
    return f'<div class="cocurve"><p>{files}</p><div class="cc-scroll">{table}</div>{note}</div>'


def _html(heads: list[str], lines: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return "-" if value is None else escape(str(value))


def _download(label: str, name: str, kind: str, content: str) -> str:
    data = base64.b64encode(content.encode()).decode()
    link = f'download="{name}" href="data:{kind};base64,{data}" style="text-decoration: underline"'
    return f"<a {link}>{label}</a> &nbsp; "
