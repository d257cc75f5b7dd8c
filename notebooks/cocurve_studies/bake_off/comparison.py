"""The table of a bake-off: every cell, and its summary at a ratio."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.errors import InputError
from cocurve_lab.base.schema import parse_json
from cocurve_lab.extensions.writing import as_csv
from cocurve_lab.measuring.results import Tabular, standard_error

from ..lazy import DataFrame
from ..tables import Columns, Row, Rows, pick, table_of

OURS = "CoCurve"  # its label in the table
COMPARABLE = 0.012  # largest distance of realized from requested ratio at which rows are ranked
LOWER_IS_BETTER = ("kl", "perplexity")
COSTS = ("evaluations", "seconds")
DAGGER = "†"
_COUNTS = ("settings_tried", "settings_out")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Tabular):
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

    rows: Rows

    @property
    def table(self) -> DataFrame:
        """The cells."""
        return table_of(self.rows)

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

    def cells(self, method: str, search: str = "none", **wanted: Any) -> Rows:
        """Return the cells of a method; one that ignores guards has the same in both searches."""
        found = pick(self.rows, method=method, search=search, **wanted)
        return found or pick(self.rows, method=method, search="none", **wanted)

    def summary(self, ratio: float, search: str = "none") -> DataFrame:
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
        table = table_of(self._summarize(cells) for cells in found if cells)
        for metric in self.metrics if len(table) else ():
            ranked = table[metric].where(table["comparable"])
            places = ranked.rank(method="min", ascending=metric in LOWER_IS_BETTER)
            table[f"{metric}_rank"] = places.astype("Int64")
        return table

    def _summarize(self, cells: Rows) -> Row:
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

    def leads(self, leader: str, rivals: Sequence[str], search: str = "searched") -> DataFrame:
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
        rows: Rows = []
        for ratio in dict.fromkeys(ratio for ratio, _ in own):
            for rival, other in others.items():
                both = [cell for cell in own if cell in other and cell[0] == ratio]
                if not both:
                    continue
                mine, theirs = (np.array([kl[cell] for cell in both]) for kl in (own, other))
                gap = theirs - mine  # [calibrations, test rows]
                parts = [gap.mean(axis=0), gap.mean(axis=1)]
                errors = [standard_error(p) for p in parts if len(p) > 1]
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
        return table_of(rows)

    def _kl_rows(self, method: str, search: str) -> dict[tuple[float, int], list[float]]:
        """Return KL by test row of each (ratio, calibration) that a method reached."""
        return {
            (cell["requested_ratio"], cell["calibration"]): parse_json(cell["kl_rows"], nan=True)
            for cell in self.cells(method, search)
            if not cell["failed"]
        }

    def columns(self, search: str = "none") -> Columns:
        """Return the columns of `summary` for reading, with `shown`."""
        names = {"method": "", "mark": "", "realized_ratio": "removed", "kl": "KL"}
        names |= {name: name.removeprefix("accuracy ") for name in self.metrics if name != "kl"}
        names |= {"evaluations": "passes", "seconds": ""}
        return names | ({} if search == "none" else {"guards": ""}) | {"failed": ""}

    # Files ----------------------------------------------------------------------------------------

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write every cell as CSV, and return the path."""
        write_atomically(path, as_csv(self.rows).encode())
        return Path(path)
