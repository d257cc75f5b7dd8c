"""The table of a bake-off: every cell, and the paper's form of it."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.errors import InputError
from cocurve_lab.base.schema import parse_json
from cocurve_lab.base.tables import Row, Table, as_csv, pick

OURS = "CoCurve"  # its label in the table
COMPARABLE = 0.012  # largest distance of realized from requested ratio at which rows are ranked
LOWER_IS_BETTER = ("kl", "perplexity")
COSTS = ("evaluations", "seconds")
DAGGER = "†"
_COUNTS = ("settings_tried", "settings_out")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Cells of a bake-off, as `compare` makes them.

    Attributes:
        rows: one dict per cell (method, search, calibration, requested_ratio), the dense model's
            first. `kl` and its standard error over rows `kl_error` are in nats per token, and
            `kl_rows` is a JSON list of the values by test row; `accuracy <family>` are shares of
            right answers. `evaluations` (rows run through all layers) and `seconds` are what the
            evidence, a measured search and the repair cost. `failed` says why a cell has no
            numbers; otherwise it is empty. `settings_tried` counts settings of methods and guards,
            `settings_out` those that do not reach the ratio.
    """

    rows: Table

    @property
    def metrics(self) -> tuple[str, ...]:
        """The measured columns: kl, perplexity, then accuracies."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        accuracies = [name for name in names if name.startswith("accuracy ")]
        return tuple([name for name in LOWER_IS_BETTER if name in names] + accuracies)

    @property
    def methods(self) -> list[str]:
        """The labels of the table, without the dense model's."""
        return list(dict.fromkeys(r["method"] for r in self.rows if r["search"] != "dense"))

    @property
    def ratios(self) -> list[float]:
        """The requested ratios of the table, without the dense model's 0."""
        return list(
            dict.fromkeys(r["requested_ratio"] for r in self.rows if r["search"] != "dense")
        )

    def cells(self, method: str, search: str = "none", **wanted: Any) -> Table:
        """Return the cells of a method; one that ignores guards has the same in both searches."""
        found = pick(self.rows, method=method, search=search, **wanted)
        return found or pick(self.rows, method=method, search="none", **wanted)

    def summary(self, ratio: float, search: str = "none") -> Table:
        """Summarize each method at a ratio: mean and spread over calibrations, and its rank.

        `<metric>` is the mean over calibrations and `<metric>_spread` their standard deviation
        (None with one). `<metric>_rank` is 1 for the best of the ranked rows, those whose realized
        ratio is within 1.2 points of the requested one in every calibration. The others carry a
        dagger.

        Args:
            ratio: a requested ratio of the table.
            search: "none" or "searched".
        """
        found = [self.cells(method, search, requested_ratio=ratio) for method in self.methods]
        rows = [self._summarize(cells) for cells in found if cells]
        for metric in self.metrics:
            _rank(rows, metric)
        return rows

    def _summarize(self, cells: Table) -> Row:
        done = [cell for cell in cells if not cell["failed"]]
        row: Row = {
            "method": cells[0]["method"],
            "requested_ratio": cells[0]["requested_ratio"],
            "calibrations": len(done),
            "failed": next((cell["failed"] for cell in cells if cell["failed"]), ""),
            "comparable": bool(done) and all(cell["comparable"] for cell in done),
            "guards": " / ".join(dict.fromkeys(cell["guards"] for cell in done)),
        }
        counts = {n: max((cell.get(n, 0) for cell in done), default=0) for n in _COUNTS}
        row |= counts
        row["mark"] = "" if row["comparable"] or not done else DAGGER
        for name in ("realized_ratio", *COSTS, *self.metrics):
            values = np.array([cell[name] for cell in done if cell.get(name) is not None])
            row[name] = float(values.mean()) if len(values) else None
            row[f"{name}_spread"] = float(values.std(ddof=1)) if len(values) > 1 else None
        return row

    def dense(self) -> Row:
        """Return the row of the dense model."""
        found = pick(self.rows, search="dense")
        if not found:
            raise InputError("this table has no row of the dense model. Run `compare` for one.")
        return found[0]

    def leads(self, leader: str, rivals: Sequence[str], search: str = "searched") -> Table:
        """Compare the KL of one row with others, test row by test row.

        Args:
            leader: a method of the table.
            rivals: those it is compared with. A rival without cells at a ratio has no row there.
            search: "none" or "searched"; a method that ignores guards is taken as it is.

        Returns:
            A row per ratio and rival: method, requested_ratio, leader_kl, kl, `behind` (KL of the
            rival minus the leader's; above 0 the leader is better) and `behind_error`, nats per
            token, and the number of calibrations. The error combines the standard error over test
            rows of the mean over calibrations, and that over calibrations of the mean over rows.
        """
        own = self._kl_rows(leader, search)
        if not own:
            known = ", ".join(dict.fromkeys(row["method"] for row in self.rows))
            raise InputError(f"this table has no cells of {leader!r}. Choose one of {known}.")
        others = {rival: self._kl_rows(rival, search) for rival in rivals}
        rows: Table = []
        for ratio in dict.fromkeys(ratio for ratio, _ in own):
            for rival, other in others.items():
                both = [cell for cell in own if cell in other and cell[0] == ratio]
                if not both:
                    continue
                mine, theirs = (np.array([kl[cell] for cell in both]) for kl in (own, other))
                gap = theirs - mine  # [calibrations, test rows]
                parts = [gap.mean(axis=0), gap.mean(axis=1)]
                errors = [p.std(ddof=1) / np.sqrt(len(p)) for p in parts if len(p) > 1]
                rows.append(
                    {
                        "method": rival,
                        "requested_ratio": ratio,
                        "leader_kl": float(mine.mean()),
                        "kl": float(theirs.mean()),
                        "behind": float(gap.mean()),
                        "behind_error": float(np.hypot.reduce(errors)) if errors else None,
                        "calibrations": len(both),
                    }
                )
        return rows

    def _kl_rows(self, method: str, search: str) -> dict[tuple[float, int], list[float]]:
        """Return KL by test row of each (ratio, calibration) that a method reached."""
        return {
            (cell["requested_ratio"], cell["calibration"]): parse_json(cell["kl_rows"], nan=True)
            for cell in self.cells(method, search)
            if not cell["failed"]
        }

    def unreached(self) -> str:
        """Say which methods have no plan at which ratio, and why, with one line for each."""
        lines = [
            f"{row['method']} has no plan at {ratio:.0%}: {row['failed']}"
            for ratio in self.ratios
            for row in self.summary(ratio, "searched")
            if not row["calibrations"]
        ]
        return "\n".join(lines) or "Every method has a plan at every ratio."

    # Files ----------------------------------------------------------------------------------------

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write every cell as CSV, and return the path."""
        write_atomically(path, as_csv(self.rows).encode())
        return Path(path)

    def to_html(self, ratio: float, search: str = "none") -> str:
        """Format a ratio as the paper does: best bold, second underlined, under-pruned a dagger."""
        metrics = self.metrics
        priced = any("seconds" in row for row in self.rows)
        heads = [{"kl": "KL"}.get(name, name.removeprefix("accuracy ")) for name in metrics]
        heads = ["method", "removed", *heads, *(("passes", "seconds") if priced else ())]
        heads += ["guards"] * (search != "none")
        lines = [_line("th", map(html.escape, heads))]
        for row in [*pick(self.rows, search="dense"), *self.summary(ratio, search)]:
            name = f"{html.escape(row['method'])}{row.get('mark', '')}"
            if row.get("failed") and row.get("realized_ratio") is None:
                why = f'<td colspan="{len(heads) - 1}">{html.escape(row["failed"])}</td>'
                lines.append(f"<tr><td>{name}</td>{why}</tr>")
                continue
            cells = [name, f"{row['realized_ratio']:.1%}"]
            cells += [_shown(row, metric) for metric in metrics]
            cells += [_whole(row.get(name)) for name in COSTS] if priced else []
            if search != "none":
                cells.append("" if row.get("search") == "dense" else html.escape(_searched(row)))
            lines.append(_line("td", cells))
        note = (
            f"Best bold, second underlined. {DAGGER} not ranked: the realized ratio is more than "
            f"{COMPARABLE:.1%} from the requested one. KL in nats per token; columns after "
            "perplexity are shares of right answers; ± is the standard deviation over calibrations."
            + " Passes (rows run through all layers) and seconds are those of the evidence, a "
            "measured search and a repair." * priced
        )
        return "\n".join(["<table>", *lines, "</table>", f"<p>{html.escape(note)}</p>"])

    def _repr_html_(self) -> str:
        parts = (f"<h4>{ratio:.0%} removed</h4>{self.to_html(ratio)}" for ratio in self.ratios)
        return "".join(parts)

    def __repr__(self) -> str:
        failed = sum(bool(row["failed"]) for row in self.rows)
        count = len(self.methods)
        return f"Comparison of {count} methods, {len(self.rows)} cells, {failed} failed"


def _rank(rows: Table, metric: str) -> None:
    """Add `<metric>_rank`: 1 for the best of the comparable rows, equal values sharing a rank."""
    sign = 1 if metric in LOWER_IS_BETTER else -1
    ranked = [row for row in rows if row["comparable"] and row[metric] is not None]
    for row in rows:
        row[f"{metric}_rank"] = None
    for row in ranked:
        better = sum(sign * other[metric] < sign * row[metric] for other in ranked)
        row[f"{metric}_rank"] = better + 1


def _line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _shown(row: Row, metric: str) -> str:
    if row.get(metric) is None:
        return ""
    spread = row.get(f"{metric}_spread")
    text = f"{row[metric]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
    tag = {1: "b", 2: "u"}.get(row.get(f"{metric}_rank") or 0)
    return text if tag is None else f"<{tag}>{text}</{tag}>"


def _searched(row: Row) -> str:
    """Name the guards, and how many settings were searched for them."""
    tried, out = (row.get(name, 0) for name in _COUNTS)
    searched = f" (of {tried}, {out} out of reach)" if tried > 1 else ""
    return f"{row['guards']}{searched}"


def _whole(value: float | None) -> str:
    return "" if value is None or not np.isfinite(value) else f"{value:,.0f}"
