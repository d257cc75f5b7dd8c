"""Rows of a comparison, made by hand."""

from __future__ import annotations

import json
from typing import Any


def cell(method: str, kl: float | None, **changes: Any) -> dict[str, Any]:
    """One row: a method at 20 %, with a KL and what follows from it."""
    row = {
        "method": method,
        "search": "none",
        "calibration": 0,
        "requested_ratio": 0.2,
        "failed": "",
        "guards": "cap none protect 0/0",
        "realized_ratio": 0.201,
        "comparable": True,
        "kl": kl,
        "perplexity": None if kl is None else 2 + kl,
        "accuracy all": None if kl is None else 1 - kl,
    }
    row |= changes
    if row["kl"] is not None:  # two test rows with this mean and standard error
        error = row.get("kl_error", 0.0)
        row.setdefault("kl_rows", json.dumps([row["kl"] - error, row["kl"] + error]))
    return row
