"""Names of the files of a build: H, its shards, and the checkpoint of either.

A name contains a fingerprint of the settings, so builds with other settings never share a file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.storage import fingerprint
from ..curvature.matrix import Curvature
from ..curvature.settings import Shard, settings_of
from ..models.identity import short_name

_NAME = re.compile(r"_(?P<mark>[^_.]+)\.shard-(?P<number>\d+)-of-(?P<count>\d+)\.pkl$")


def build_path(folder: str | os.PathLike[str], name: str, settings: dict[str, Any]) -> Path:
    """Return the file of the H with these settings in a folder; a new name if there is none.

    Args:
        folder: where files of H are kept.
        name: name of the model, for the reader; a `short_name` is made of it.
        settings: from `estimate.build_settings`; their fingerprint ends the name.
    """
    # only the fingerprint counts: the same weights may have been loaded under another name
    mark = fingerprint(settings)[:10]
    path = Path(folder) / f"H_{short_name(name)}_{mark}.pkl"
    return next(Path(folder).glob(f"H_*_{mark}.pkl"), path)


def shard_path(path: Path, shard: Shard) -> Path:
    """Return the file of a shard of the build at `path`: `H_demo_1f2e.shard-2-of-3.pkl`."""
    return path.with_name(f"{path.stem}.shard-{shard[0]}-of-{shard[1]}{path.suffix}")


def kept_at(path: Path, shard: Shard | None) -> Path:
    """Return the file of the whole H if there is one or no shard is asked for, else the shard's."""
    return path if shard is None or path.exists() else shard_path(path, shard)


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint of the build whose result is kept at `path`."""
    return path.with_suffix(".ckpt")


@dataclass(frozen=True)
class Files:
    """The files of H in a folder, sorted by name: whole, finished shards, and checkpoints."""

    whole: list[Path]
    shards: list[Path]
    checkpoints: list[Path]


def files_in(folder: str | os.PathLike[str]) -> Files:
    """List the files of H in a folder, by their names alone."""
    results = sorted(Path(folder).glob("H_*.pkl"))
    return Files(
        # only what follows the fingerprint counts: a model may be called x.shard-1-of-2
        whole=[file for file in results if ".shard-" not in file.name.rpartition("_")[2]],
        shards=[file for file in results if _NAME.search(file.name)],
        checkpoints=sorted(Path(folder).glob("H_*.ckpt")),
    )


def complete_shards(path: Path) -> list[Path]:
    """Return the files of all shards of the build at `path`; empty if one is missing."""
    # by name only: a damaged file matters only once its set is complete. Sets are told apart by
    # their number of shards: one build may lie there in two shards and in three
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
    """Return the file of the whole build to which a shard belongs."""
    return build_path(
        folder, str(part.provenance.get("model_name", "model")), settings_of(part.provenance)
    )
