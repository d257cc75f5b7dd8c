"""The authors' release: readers for its registry, matrix and masks; no model is needed.

registry.json lists the units in our order; matrices/H.npy holds H as float32 [M, M];
rXX/masks/prune_solution.json holds the set that was pruned at XX %. These files come from the
network, so numbers that contradict each other are rejected instead of believed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ...base.arguments import EXACT
from ...base.errors import FileFormatError, shown
from ...base.files import MOST_JSON, open_regular, read_regular
from ...base.schema import (
    NUMBER,
    Field,
    Schema,
    is_number,
    is_object,
    is_plain,
    list_of,
    parse_json,
    reading,
    require_fields,
)
from ...curvature.settings import Facts
from ...models.unit import Kind
from ...models.units import Unit, UnitSet
from ..opening.errors import is_pointer

REGISTRY = "registry.json"
MASK = Path("masks") / "prune_solution.json"
_AGAIN = "Download it again."
_KINDS: dict[str, Kind] = {"attn_head": "attention", "ffn_group": "ffn"}

_STATED = ("target_prune_ratio", "actual_prune_ratio", "pruned_cost", "total_cost")
_MASK: Schema = {
    **dict.fromkeys(
        ("pruned_units", "selected_units"), Field("a list of units", list_of(is_plain))
    ),
    **dict.fromkeys((*_STATED, "interaction_strength"), NUMBER),
}
_REGISTRY: Schema = {
    "schema_version": Field("1, the published layout", lambda value: value == 1),
    "units": Field("a list of objects", list_of(is_object)),
}


# H and masks ------------------------------------------------------------------------------------


def read_release(folder: str | os.PathLike[str]) -> tuple[np.ndarray, UnitSet, Facts]:
    """Read H [M, M] float64, its units, and the facts that the registry states."""
    folder = Path(folder)
    registry = _read_registry(folder / REGISTRY)
    matrix = _read_npy(folder / "matrices" / "H.npy")
    facts = {
        "source": "release",
        "model_name": registry.get("model_key"),
        "method": "ablation",
        "ffn_groups": registry.get("ffn_groups_per_layer"),
    }
    return np.asarray(matrix, np.float64), _release_units(registry), facts


def read_mask(
    folder: str | os.PathLike[str], ratio: float
) -> tuple[UnitSet, list[int], dict[str, Any]]:
    """Read a published mask: its units, the pruned indices, and the fields of a Selection."""
    folder = Path(folder)
    path = _mask_path(folder, ratio)
    registry = _read_registry(folder / REGISTRY)
    units = _release_units(registry)
    with reading(path, _AGAIN):
        mask = require_fields(_read_json(path), _MASK, others=True)
        ids = [row.get("unit_id", index) for index, row in enumerate(registry["units"])]
        position = {unit: index for index, unit in enumerate(ids)}
        pruned, kept = (
            [position[unit] for unit in mask[key]] for key in ("pruned_units", "selected_units")
        )
        if sorted(pruned + kept) != list(range(len(units))):
            raise FileFormatError(
                f"{len(pruned)} pruned and {len(kept)} selected units are not the {len(units)} "
                "units of registry.json, each once"
            )
        gone, total = int(units.costs[pruned].sum()), units.total_cost
        for name, found, source, tolerance in (
            ("target_prune_ratio", ratio, f"its folder {path.parent.parent.name} says", 1e-9),
            ("total_cost", total, "the units of registry.json come to", 0.5),
            ("pruned_cost", gone, "its pruned units come to", 0.5),
            ("actual_prune_ratio", gone / total, "its pruned units come to", 1e-4),  # rounded
        ):
            if not abs(mask[name] - found) <= tolerance:
                raise FileFormatError(f"{name} is {mask[name]:,}, but {source} {found:,}")
    fields = {
        "requested_ratio": float(ratio),
        "interaction_strength": float(mask["interaction_strength"]),
    }
    return units, pruned, fields


def _mask_path(folder: Path, ratio: float) -> Path:
    there = {
        int(path.parent.parent.name[1:]): path
        for path in folder.glob(f"r*/{MASK}")
        if path.parent.parent.name[1:].isdecimal()
    }
    percent = next((p for p in there if abs(p / 100 - ratio) < 1e-9), None)
    if percent is None:
        known = ", ".join(f"{p / 100:g}" for p in sorted(there)) or "none"
        raise FileNotFoundError(
            f"{folder} has no mask for ratio {ratio:g} (rXX/{MASK}); it has {known}. Ask for one "
            "of these, or solve on Curvature.from_release(folder)."
        )
    return there[percent]


def has_matrix(folder: str | os.PathLike[str]) -> bool:
    """Return whether a release has H itself, not just a Git LFS pointer to it."""
    path = Path(folder) / "matrices" / "H.npy"
    return path.exists() and not is_pointer(path)


# Files ------------------------------------------------------------------------------------------


def _require_no_pointer(path: Path, what: str) -> None:
    if is_pointer(path):
        raise FileFormatError(
            f"{path} is a Git LFS pointer, not the {what}: the download was incomplete. "
            "Run `git lfs pull` in that folder."
        )


def _read_json(path: Path) -> Any:
    _require_no_pointer(path, "JSON file")
    return parse_json(read_regular(path, MOST_JSON))


def _read_registry(path: Path) -> dict[str, Any]:
    with reading(path, _AGAIN):
        registry = require_fields(_read_json(path), _REGISTRY, others=True)
        rows: list[dict[str, Any]] = registry["units"]
        towers = {str(row.get("tower", "lm")) for row in rows}
        if towers - {"lm"}:
            raise FileFormatError(
                f"it has units of towers {sorted(towers)}, so it is of a vision-language model, "
                "which the lab does not support"
            )
    return registry


def _read_npy(path: Path) -> np.ndarray:
    _require_no_pointer(path, "matrix")
    with open_regular(path) as file:
        try:
            array = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, MemoryError) as error:
            raise FileFormatError(f"{path} is not a numpy array ({error}). {_AGAIN}") from None
    if array.dtype.kind != "f":
        raise FileFormatError(f"{path} holds {array.dtype}, not floats. {_AGAIN}")
    return array


# Units --------------------------------------------------------------------------------------------


def _release_units(registry: dict[str, Any]) -> UnitSet:
    with reading(REGISTRY, _AGAIN):
        head_dim = _release_head_dim(registry["units"])
        units = tuple(_release_unit(row, head_dim) for row in registry["units"])
        return UnitSet(units, registry.get("ffn_groups_per_layer"))


def _release_unit(row: dict[str, Any], head_dim: int) -> Unit:
    meta, kind = row["metadata"], _KINDS[row["unit_type"]]
    if kind == "attention":
        heads = meta["query_head_indices"] or [None]
        start, stop = _whole(heads[0]) * head_dim, (_whole(heads[-1]) + 1) * head_dim
    else:
        start = _whole(meta["start_channel"])
        stop = start + _whole(meta["group_size"])
    layer, index = _whole(row["layer_idx"]), _whole(row["index_within_layer"])
    return Unit(kind, layer, index, start, stop, _whole(row["cost"]))


def _whole(value: Any) -> int:
    # the published files write costs as floats, which are exact up to there
    if not (is_number(value) and 0 <= value < EXACT and value == int(value)):
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(value)


def _release_head_dim(rows: list[dict[str, Any]]) -> int:
    # a gated FFN group costs 3 * hidden * channels; a query group of g heads costs
    # hidden * head_dim * (2g + 2), plus head_dim * (g + 2) where q, k and v have biases (Qwen2)
    ffn = next((row for row in rows if row["unit_type"] != "attn_head"), None)
    head = next((row for row in rows if row["unit_type"] == "attn_head"), None)
    if ffn is None or head is None:
        return 1  # with one kind only hidden is unknown: columns then count heads, not channels
    cost, group = _whole(head["cost"]), len(head["metadata"]["query_head_indices"])
    hidden = _whole(ffn["cost"]) // max(3 * _whole(ffn["metadata"]["group_size"]), 1)
    for per_channel in (hidden * (2 * group + 2), hidden * (2 * group + 2) + group + 2):
        if per_channel and cost % per_channel == 0:
            return cost // per_channel
    raise FileFormatError(
        f"the attention cost {cost} fits no head_dim for hidden size {hidden}; the family of the "
        "model may have other projections"
    )
