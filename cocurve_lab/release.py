"""The authors' released layout: registry.json and matrices/H.npy, without any model.

registry.json lists the units in our order; matrices/H.npy holds float32 [M, M].
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FileFormatError
from .units import Kind, Unit, UnitSet


def read_release(folder: str | os.PathLike[str]) -> tuple[np.ndarray, UnitSet, dict[str, Any]]:
    """H [M, M] float64, its units, and the provenance the registry states.

    Raises:
        FileNotFoundError: one of the two files is missing.
        FileFormatError: H.npy is a Git LFS pointer, or a file does not have the layout.
    """
    folder = Path(folder)
    registry = _read_registry(folder / "registry.json")
    matrix = _read_npy(folder / "matrices" / "H.npy")
    provenance = {
        "source": "release",
        "model_name": registry.get("model_key"),
        "method": "ablation",
        "ffn_groups": registry.get("ffn_groups_per_layer"),
    }
    return np.asarray(matrix, np.float64), _release_units(registry), provenance


def _read_registry(path: Path) -> dict[str, Any]:
    try:
        registry = json.loads(path.read_text())
    except ValueError as error:
        raise FileFormatError(f"{path} is not JSON ({error}). Download it again.") from None
    version = registry.get("schema_version") if isinstance(registry, dict) else None
    if version != 1 or "units" not in registry:
        raise FileFormatError(
            f"{path} has schema_version {version!r}; the published layout is 1. Download it again."
        )
    return registry


def _read_npy(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        if file.read(12) == b"version http":
            raise FileFormatError(
                f"{path} is a Git LFS pointer, not the matrix: the download was incomplete. "
                "Run `git lfs pull` in that folder."
            )
        file.seek(0)
        try:
            return np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise FileFormatError(
                f"{path} is not a numpy array ({error}). Download it again."
            ) from None


def _release_units(registry: dict[str, Any]) -> UnitSet:
    """Our units from the published registry, columns included (its unit order is ours)."""
    try:
        head_dim = _release_head_dim(registry["units"])
        units = tuple(_release_unit(row, head_dim) for row in registry["units"])
    except (KeyError, TypeError, IndexError) as error:
        raise FileFormatError(
            f"registry.json lacks {error} in a unit. Download it again."
        ) from None
    return UnitSet(units, registry.get("ffn_groups_per_layer"))


def _release_unit(row: dict[str, Any], head_dim: int) -> Unit:
    meta, kind = row["metadata"], row["unit_type"]
    if kind == "attn_head":
        heads = meta["query_head_indices"]
        start, stop = heads[0] * head_dim, (heads[-1] + 1) * head_dim
        name: Kind = "attention"
    else:
        start, stop = meta["start_channel"], meta["start_channel"] + meta["group_size"]
        name = "ffn"
    return Unit(name, row["layer_idx"], row["index_within_layer"], start, stop, int(row["cost"]))


def _release_head_dim(rows: list[dict[str, Any]]) -> int:
    """head_dim is not in the registry but follows from the costs.

    A gated FFN group costs 3 * hidden * channels; a query group of g heads costs
    hidden * head_dim * (2g + 2), plus head_dim * (g + 2) where q, k and v have biases (Qwen2).
    """
    ffn = next((row for row in rows if row["unit_type"] != "attn_head"), None)
    head = next((row for row in rows if row["unit_type"] == "attn_head"), None)
    if ffn is None or head is None:
        return 1  # one kind only: columns cannot be placed, counting heads is the best there is
    hidden = ffn["cost"] // (3 * ffn["metadata"]["group_size"])
    group = len(head["metadata"]["query_head_indices"])
    for per_channel in (hidden * (2 * group + 2), hidden * (2 * group + 2) + group + 2):
        if head["cost"] % per_channel == 0:
            return int(head["cost"] // per_channel)
    raise FileFormatError(
        f"the attention cost {head['cost']} in registry.json fits no head_dim for hidden size "
        f"{hidden}. Is the model of a family with other projections? Check the registry."
    )
