"""Shards: one build done by several processes, and put together to the same bits.

A build sums the Grams of its sequences into groups, each in the order of the sequences. A shard
does whole groups, a contiguous range of them, so no sum is ever split: merging only assembles.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .curvature import Curvature, require_settings
from .errors import InputError, MismatchError
from .storage import fingerprint

log = logging.getLogger(__name__)
Shard = tuple[int, int]  # (number from 1, how many there are)

# what decides which H a build gives: the keys of `estimator.build_settings`
SETTINGS = (
    "model_fingerprint",
    "model_dtype",
    "units_fingerprint",
    "calibration_fingerprint",
    "num_sequences",
    "seq_len",
    "positions_per_sequence",
    "top_r",
    "method",
    "groups",
)
_RUNTIME = ("device_kind", "num_threads", "units_per_batch")  # they decide the last bits
_NAME = re.compile(r"_(?P<mark>[^_]+)\.shard-(?P<number>\d+)-of-(?P<count>\d+)\.pkl$")


def shard_groups(shard: Shard, groups: int) -> list[int]:
    """The groups that shard (i, n) owns; shards differ by at most one group.

    Raises:
        InputError: i is not in 1 ... n, or there are more shards than groups.
    """
    number, count = shard
    if not 1 <= number <= count:
        raise InputError(
            f"shard is {number}/{count}; shards count from 1, so it lies in 1/{count} ... "
            f"{count}/{count}."
        )
    if count > groups:
        raise InputError(
            f"{count} shards cannot share {groups} groups of sequences, which are never split. "
            f"Take at most {groups} shards, or build with more groups (--groups; "
            "BuildOptions(groups=...)), up to the number of sequences."
        )
    return np.array_split(np.arange(groups), count)[number - 1].tolist()


def shard_sequences(shard: Shard | None, groups: int, sequences: int) -> list[int]:
    """Numbers of the sequences of a shard in order; all of them for None."""
    if shard is None:
        return list(range(sequences))
    mine = set(shard_groups(shard, groups))
    return [number for number in range(sequences) if number % groups in mine]


def progress_of(curvature: Curvature) -> tuple[int, int]:
    """Sequences done, and how many its build or shard has in all."""
    settings, shard = curvature.provenance, curvature.provenance.get("shard")
    mine = shard_sequences(
        None if shard is None else tuple(shard), settings["groups"], settings["num_sequences"]
    )
    return settings["sequences_done"], len(mine)


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


def settings_of(curvature: Curvature) -> dict[str, Any]:
    """The settings a curvature was built with, from its provenance."""
    return {key: curvature.provenance.get(key) for key in SETTINGS}


def whole_path(folder: str | os.PathLike[str], part: Curvature) -> Path:
    """Where the whole build that a shard belongs to is kept."""
    return build_path(folder, str(part.provenance.get("model_name", "model")), settings_of(part))


# Merging ----------------------------------------------------------------------------------------


def merge_shards(parts: Sequence[Curvature]) -> Curvature:
    """All shards of one build, put together: to the bit what one process would have built.

    That holds for shards of one kind of device, with one number of threads and one
    `units_per_batch`; where these differ the result is as good, but its last digits are its own,
    and an event in the provenance says so.

    Args:
        parts: curvatures built with `BuildOptions(shard=(i, n))`, one of each i, in any order.

    Raises:
        InputError: a part is not a shard, is not finished, or shards are missing (which).
        MismatchError: a setting differs (named), or a shard is there twice.
    """
    if not parts:
        raise InputError("merging needs the shards of a build, got none.")
    found: dict[int, Curvature] = {}
    for number, part in enumerate(parts):
        _require_shard(part, number)
        index, count = part.provenance["shard"]
        if count != parts[0].provenance["shard"][1]:
            raise MismatchError(
                f"part {number} is shard {index} of {count}, but part 0 is one of "
                f"{parts[0].provenance['shard'][1]}. Merge the shards of one build."
            )
        what = f"part {number} (shard {index} of {count})"
        parts[0].units.require_same(part.units, mine="part 0", theirs=what)
        require_settings(part.provenance, settings_of(parts[0]), what)
        if index in found:
            raise MismatchError(
                f"shard {index} of {count} is there twice; it would count double. Give each once."
            )
        found[index] = part
    missing = [str(index) for index in range(1, count + 1) if index not in found]
    if missing:
        raise InputError(
            f"of {count} shards, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing. Build with shard {missing[0]}/{count} first."
        )
    return _assemble([found[index] for index in sorted(found)])


def _require_shard(part: Curvature, number: int) -> None:
    shard = part.provenance.get("shard")
    if shard is None:
        raise InputError(
            f"part {number} is not a shard but a build of its own. Merge the shards first, and "
            "then the result with other builds."
        )
    done, mine = progress_of(part)
    if done < mine:
        raise InputError(
            f"shard {shard[0]} of {shard[1]} has {done} of its {mine} sequences. Build it "
            "again with the same checkpoint: it goes on from there."
        )


def _assemble(parts: list[Curvature]) -> Curvature:
    """Each group from the shard that owns it."""
    first = parts[0]
    arrays = {
        name: np.zeros_like(getattr(first, name))
        for name in ("group_grams", "group_positions", "group_risks")
    }
    rows: dict[int, tuple[str, float]] = {}
    for part in parts:
        settings, shard = part.provenance, tuple(part.provenance["shard"])
        mine = shard_groups(shard, settings["groups"])
        for name, array in arrays.items():
            array[mine] = getattr(part, name)[mine]
        numbers = shard_sequences(shard, settings["groups"], settings["num_sequences"])
        values = zip(settings["row_fingerprints"], settings["sequence_seconds"], strict=True)
        rows |= dict(zip(numbers, values, strict=True))
    ordered = [rows[number] for number in sorted(rows)]
    provenance = {key: value for key, value in first.provenance.items() if key != "shard"}
    provenance |= {
        "complete": True,
        "sequences_done": len(ordered),
        "row_fingerprints": [row for row, _ in ordered],
        "sequence_seconds": [seconds for _, seconds in ordered],
        "seconds": sum(part.provenance["seconds"] for part in parts),
        "device": sorted({str(part.provenance["device"]) for part in parts}),
        "events": _events(parts),
        "merged_from": [part.fingerprint for part in parts],
    }
    grams, positions, risks = arrays.values()
    return Curvature.from_groups(first.units, grams, positions, risks, provenance)


def _events(parts: list[Curvature]) -> list[str]:
    events = [
        f"shard {number}: {event}"
        for number, part in enumerate(parts, start=1)
        for event in part.provenance["events"]
    ]
    for name in _RUNTIME:
        values = [part.provenance["runtime"][name] for part in parts]
        if len(set(values)) > 1:
            events.append(
                f"the shards ran with {name} {', '.join(map(str, values))}: the last digits may "
                "differ from those of one build"
            )
            log.warning(events[-1])
    return events
