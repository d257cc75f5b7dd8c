"""Reading back what an exported page holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np


def data_of(path: Path) -> dict:
    """The JSON inside a page that `export_html` wrote."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="cocurve-data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def matrix_of(packed: dict) -> np.ndarray:
    """H [M, M] float64 as the page unpacks it from `pack_problem`'s bytes."""
    size, raw = len(packed["costs"]), packed["matrix"]
    kind = "<f8" if len(raw) == 4 * size * (size + 1) else "<f4"
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = np.frombuffer(raw, kind)
    return upper + np.triu(upper, 1).T
