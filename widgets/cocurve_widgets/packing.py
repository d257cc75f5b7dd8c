"""A curvature as the browser receives it: plain lists and little-endian bytes."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

import cocurve_lab as cl

MOST_UNITS = 1200  # with more units H stays in the kernel, and the kernel solves
_DOUBLE_UNITS = 512  # up to here H is small enough to send in doubles


def pack_problem(curvature: cl.Curvature, most_units: int = MOST_UNITS) -> dict[str, Any]:
    """A curvature as `unpack` of front/solver.js reads it.

    The upper triangle of H is sent row by row: float64 up to 512 units, float32 up to `most_units`.
    Above that `matrix` is empty: a solve needs all of H, which would be more than 3 MB.
    """
    units, size = curvature.units, len(curvature.units)
    if "expert" in units.kinds:
        raise cl.InputError(
            "the page draws attention and FFN units, and this H has experts. Solve it in Python: "
            "cl.solve_greedy(curvature, ratio)."
        )
    matrix = b""
    if size <= most_units:
        kind = "<f8" if size <= _DOUBLE_UNITS else "<f4"
        matrix = curvature.matrix[np.triu_indices(size)].astype(kind).tobytes()
    return {
        "costs": units.costs.tolist(),
        "layers": units.layers.tolist(),
        "kinds": (units.kinds == "ffn").astype(int).tolist(),
        "places": [unit.index for unit in units],
        "num_layers": units.num_layers,
        "protected": cl.opening_guards(units).protect_first,  # at either end, as it opens
        "parameters": units.total_parameters,
        "saliency": curvature.saliency.astype("<f8").tobytes(),
        "connectivity": curvature.connectivity.astype("<f8").tobytes(),
        "matrix": matrix,
    }


def plan_mark(pruned: Iterable[int]) -> str:
    """A set of units as text: a bit for each up to the last, in base 64; as in measured.js."""
    units = list(pruned)
    bits = np.zeros(max(units, default=-1) + 1, np.uint8)
    bits[units] = 1
    return base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()


def nodes_of(curvature: cl.Curvature) -> dict[str, list[Any]]:
    """The columns of all M units, for the page and for tables; H's in nats per token."""
    units = curvature.units
    return {
        "name": [unit.name for unit in units],
        "layer": units.layers.tolist(),
        "kind": units.kinds.tolist(),
        "index": [unit.index for unit in units],
        "cost": units.costs.tolist(),
        "saliency": curvature.saliency.tolist(),
        "connectivity": curvature.connectivity.tolist(),
    }


def unit_rows(
    nodes: dict[str, list[Any]], chosen: Iterable[int], *columns: str
) -> list[dict[str, Any]]:
    """Rows of a table of some units: their names and these columns of `nodes_of`."""
    return [{"unit": nodes["name"][u]} | {c: nodes[c][u] for c in columns} for u in chosen]


def plain(value: Any) -> Any:
    """The value for JSON: bytes as {"$bytes": base64}, NaN and infinity as null."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
