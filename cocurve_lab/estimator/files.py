"""Shards: one build done by several processes; which sequences each has, and where its file lies.

A build sums the Grams of its sequences into groups, each in the order of the sequences. A shard
does whole groups, a contiguous range of them, so no sum is ever split: merging only assembles.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..curvature.matrix import Curvature
from ..curvature.merging import (
    Shard,
    settings_of,
)
from ..storage import fingerprint

_NAME = re.compile(r"_(?P<mark>[^_]+)\.shard-(?P<number>\d+)-of-(?P<count>\d+)\.pkl$")


# Files ------------------------------------------------------------------------------------------
def build_path(folder: str | os.PathLike[str], name: str, settings: dict[str, Any]) -> Path:
    """Where the H of these settings is kept in a folder: the file there, else a new name.

    The name ends in a fingerprint of the settings. What stands before it is a courtesy: the same
    weights may have been loaded from a place of another name.
    """
    mark = fingerprint(settings)[:10]
    return next(Path(folder).glob(f"H_*_{mark}.pkl"), Path(folder) / f"H_{name}_{mark}.pkl")


def shard_path(path: Path, shard: Shard) -> Path:
    """Where a shard of the build at `path` is kept: `H_demo_1f2e.shard-2-of-3.pkl`."""
    return path.with_name(f"{path.stem}.shard-{shard[0]}-of-{shard[1]}{path.suffix}")


def kept_at(path: Path, shard: Shard | None) -> Path:
    """Where the result of a shard, or of all, is kept: at `path` where the whole H is there."""
    return path if shard is None or path.exists() else shard_path(path, shard)


def checkpoint_of(path: Path) -> Path:
    """Where the build whose result is kept at `path` keeps what is done of it."""
    return path.with_suffix(".ckpt")


@dataclass(frozen=True)
class Files:
    """The files of H in a folder, each list sorted by name: whole, finished shards, unfinished."""

    whole: list[Path]
    shards: list[Path]
    checkpoints: list[Path]


def files_in(folder: str | os.PathLike[str]) -> Files:
    """What lies in a folder, by the names alone."""
    results = sorted(Path(folder).glob("H_*.pkl"))
    return Files(
        whole=[file for file in results if ".shard-" not in file.name],
        shards=[file for file in results if _NAME.search(file.name)],
        checkpoints=sorted(Path(folder).glob("H_*.ckpt")),
    )


def complete_shards(path: Path) -> list[Path]:
    """All shards of the build at `path`, where they lie beside it; empty where one is missing.

    The names tell: a damaged shard of a set that is not whole is no obstacle.
    """
    sets: dict[int, dict[int, Path]] = {}
    for file in files_in(path.parent).shards:
        name = _NAME.search(file.name)
        if name and path.stem.endswith(f"_{name['mark']}"):
            sets.setdefault(int(name["count"]), {})[int(name["number"])] = file
    for count, found in sorted(sets.items()):
        if set(found) == set(range(1, count + 1)):
            return list(found.values())
    return []


def whole_path(folder: str | os.PathLike[str], part: Curvature) -> Path:
    """Where the whole build that a shard belongs to is kept."""
    return build_path(folder, str(part.provenance.get("model_name", "model")), settings_of(part))
