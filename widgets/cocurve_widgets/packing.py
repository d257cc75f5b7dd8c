"""What the front ends get of a curvature: plain lists and little-endian bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cocurve_lab import Curvature, Selection

MOST_UNITS = 1200  # above, H stays in the kernel and the kernel solves
_DOUBLE_UNITS = 512  # up to here doubles are small enough to send


def pack_problem(curvature: Curvature, most_units: int = MOST_UNITS) -> dict[str, Any]:
    """A curvature as `unpack` of solver.js reads it.

    The upper triangle of H goes row by row, float64 up to 512 units, float32 up to `most_units`,
    and not at all above (a solve needs all of it, and it would be more than 3 MB).
    """
    units, size = curvature.units, len(curvature.units)
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
        "parameters": units.total_parameters,
        "saliency": curvature.saliency.astype("<f8").tobytes(),
        "connectivity": curvature.connectivity.astype("<f8").tobytes(),
        "matrix": matrix,
    }


def as_packed(curvature: Curvature) -> np.ndarray:
    """H [M, M] float64 as the front end sees it: rounded to what is sent."""
    if len(curvature.units) <= _DOUBLE_UNITS:
        return curvature.matrix.copy()
    return curvature.matrix.astype(np.float32).astype(np.float64)


def curve(run: Selection, most: int = 120) -> dict[str, list[float]]:
    """Risk against ratio along a removal order: ratio, node and edge part, at most `most` points.

    Greedy under fixed guards is nested, so every prefix is the plan of its own ratio.
    """
    assert run.node_terms is not None
    assert run.edge_terms is not None
    steps = np.arange(1, len(run) + 1)
    every = max(1, -(-len(run) // most))
    keep = np.concatenate([[0], steps[(steps % every == 0) | (steps == len(run))]])
    columns = {
        "ratio": run.units.costs[list(run.pruned)] / run.units.total_cost,
        "node": run.node_terms,
        "edge": run.edge_terms,
    }
    return {
        name: [float(f"{x:.6g}") for x in np.concatenate([[0.0], np.cumsum(values)])[keep]]
        for name, values in columns.items()
    }
