"""Rows of a comparison, made by hand."""

from __future__ import annotations

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
    return row | changes
