"""A synthetic folder in the layout of the authors' release, with the published totals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Of a model; by default Llama-3.1-8B: M 768, cost 6,979,321,856."""

    key: str = "llama-3.1-8b-instruct"
    layers: int = 32
    hidden: int = 4096
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    width: int = 14336
    groups: int = 16
    biases: bool = False  # on q, k and v


def registry_of(shape: Shape) -> dict[str, Any]:
    """The published registry; costs are floats there."""
    queries = shape.heads // shape.kv_heads
    attention = shape.hidden * shape.head_dim * (2 * queries + 2)
    attention += shape.head_dim * (queries + 2) if shape.biases else 0
    rows: list[dict[str, Any]] = []
    for layer in range(shape.layers):
        for k in range(shape.kv_heads):
            meta = {
                "kv_head_index": k,
                "kv_group_size": queries,
                "num_heads": shape.heads,
                "num_kv_heads": shape.kv_heads,
                "query_head_indices": list(range(k * queries, (k + 1) * queries)),
            }
            rows.append(_row(len(rows), layer, k, "attn_head", attention, meta))
        blocks = np.array_split(np.arange(shape.width), shape.groups)
        for g, block in enumerate(blocks):
            meta = {"start_channel": int(block[0]), "group_size": len(block)}
            cost = 3 * shape.hidden * len(block)
            rows.append(_row(len(rows), layer, g, "ffn_group", cost, meta))
    return {
        "cost_type": "parameters",
        "ffn_groups_per_layer": shape.groups,
        "model_key": shape.key,
        "schema_version": 1,
        "units": rows,
    }


def mask_of(registry: dict[str, Any], percent: int, seed: int = 0) -> dict[str, Any]:
    """A published mask of random units that reach `percent`."""
    costs = np.array([row["cost"] for row in registry["units"]])
    order = np.random.default_rng(seed).permutation(len(costs))
    count = int(np.searchsorted(np.cumsum(costs[order]), percent / 100 * costs.sum())) + 1
    pruned = sorted(order[:count].tolist())
    gone, total = float(costs[pruned].sum()), float(costs.sum())
    return {
        "actual_prune_ratio": gone / total,
        "interaction_strength": 0.0108,
        "method": "cocurve",
        "model_id": "somebody/" + registry["model_key"],
        "model_key": registry["model_key"],
        "pruned_cost": gone,
        "pruned_units": pruned,
        "schema_version": 1,
        "selected_units": sorted(order[count:].tolist()),
        "target_prune_ratio": percent / 100,
        "total_cost": total,
    }


def write_release(
    folder: Path, shape: Shape = Shape(), percents: tuple[int, ...] = (10, 20, 30, 40, 50)
) -> np.ndarray:
    """registry.json, matrices/H.npy and rXX/masks/prune_solution.json; returns H, float32."""
    registry = registry_of(shape)
    write_json(folder / "registry.json", registry)
    size = len(registry["units"])
    features = np.random.default_rng(0).normal(size=(size, 50)).astype(np.float32)
    matrix = features @ features.T / np.float32(50)
    (folder / "matrices").mkdir()
    np.save(folder / "matrices" / "H.npy", matrix)
    for percent in percents:
        write_json(mask_path(folder, percent), mask_of(registry, percent))
    return matrix


def mask_path(folder: Path, percent: int) -> Path:
    return folder / f"r{percent:02d}" / "masks" / "prune_solution.json"


def write_json(path: Path, content: Any) -> None:
    """As the published files are written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _row(
    number: int, layer: int, index: int, kind: str, cost: int, meta: dict[str, Any]
) -> dict[str, Any]:
    return {
        "cost": float(cost),
        "index_within_layer": index,
        "layer_idx": layer,
        "metadata": meta,
        "unit_id": number,
        "unit_type": kind,
    }
