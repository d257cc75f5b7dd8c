"""Builds put together: whole ones over different sequences, or the shards of one.

A build sums the Grams of its sequences into groups, each in the order of the sequences. A shard
does whole groups, a contiguous range of them, so no sum is ever split: putting shards together only
assembles. `Curvature.merge` is the way in; this file works on anything that has the parts of an H.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import InputError, MismatchError
from ..models.units import UnitSet
from ..storage import require_settings

log = logging.getLogger(__name__)
_RUNTIME = ("device_kind", "num_threads", "units_per_batch")  # they decide the last bits
_MERGE_KEYS = (
    "model_fingerprint",
    "model_dtype",
    "top_r",
    "seq_len",
    "positions_per_sequence",
    "method",
)


class Part(Protocol):
    """What is read of a `Curvature` that is put together with others."""

    @property
    def units(self) -> UnitSet: ...
    @property
    def provenance(self) -> dict[str, Any]: ...
    @property
    def group_grams(self) -> np.ndarray | None: ...
    @property
    def group_positions(self) -> np.ndarray | None: ...
    @property
    def group_risks(self) -> np.ndarray | None: ...
    @property
    def fingerprint(self) -> str: ...


# units, group Grams, positions and risks, provenance: the arguments of `Curvature.from_groups`
Combined = tuple[UnitSet, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


# Shards ------------------------------------------------------------------------------------------

Shard = tuple[int, int]  # (number from 1, how many there are)

# what decides which H a build gives: the keys of `estimate.build_settings`
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


def progress_of(curvature: Part) -> tuple[int, int]:
    """Sequences done, and how many its build or shard has in all."""
    settings, shard = curvature.provenance, curvature.provenance.get("shard")
    mine = shard_sequences(
        None if shard is None else tuple(shard), settings["groups"], settings["num_sequences"]
    )
    return settings["sequences_done"], len(mine)


def settings_of(curvature: Part) -> dict[str, Any]:
    """The settings a curvature was built with, from its provenance."""
    return {key: curvature.provenance.get(key) for key in SETTINGS}


# Putting together --------------------------------------------------------------------------------


def sum_builds(parts: Sequence[Part]) -> Combined:
    """Add up whole builds over disjoint sequences; see `Curvature.merge`."""
    if not parts:
        raise InputError("merge needs at least one curvature, got none.")
    first = parts[0]
    for number, part in enumerate(parts):
        _require_mergeable(part, first, number)
    rows = [row for part in parts for row in part.provenance["row_fingerprints"]]
    if len(set(rows)) != len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise MismatchError(
            f"a sequence (fingerprint {twice[:12]}) occurs twice in the parts: it would count "
            "twice. Merge builds over disjoint sequences."
        )
    grams, positions, risks = (
        _sum_groups([getattr(part, name) for part in parts])
        for name in ("group_grams", "group_positions", "group_risks")
    )
    provenance = first.provenance | {
        "row_fingerprints": rows,
        "num_sequences": len(rows),
        "sequences_done": len(rows),
        "calibration_fingerprint": None,  # no one calibration set any more
        "groups": len(grams),
        "complete": all(part.provenance.get("complete", True) for part in parts),
        "seconds": sum(part.provenance.get("seconds", 0.0) for part in parts),
        "events": [event for part in parts for event in part.provenance.get("events", [])],
        "device": sorted({str(part.provenance.get("device")) for part in parts}),
        "merged_from": [part.fingerprint for part in parts],
    }
    return first.units, grams, positions, risks, provenance


def _require_mergeable(part: Part, first: Part, number: int) -> None:
    if part.provenance.get("method", "ablation") != "ablation":
        raise InputError(
            f"part {number} is of method {part.provenance['method']!r}; only builds by ablations "
            "are merged. A preview is made again in seconds."
        )
    if part.group_grams is None or part.group_positions is None or part.group_risks is None:
        raise InputError(
            f"part {number} has no group Grams, so it cannot be merged. Merge curvatures from "
            "estimate_curvature."
        )
    first.units.require_same(part.units, mine="part 0", theirs=f"part {number}")
    shared = {key: first.provenance.get(key) for key in _MERGE_KEYS}
    require_settings(part.provenance, shared, f"part {number}")
    if "row_fingerprints" not in part.provenance:
        raise InputError(
            f"part {number} does not say which sequences it was built on, so a sequence counted "
            "twice could not be noticed. Merge curvatures from estimate_curvature."
        )


def _sum_groups(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Sum [G, ...] over parts, added in their order; missing groups count as empty."""
    largest = max(arrays, key=len)
    total = np.zeros_like(largest)
    for array in arrays:
        total[: len(array)] += array
    return total


def join_shards(parts: Sequence[Part]) -> Combined:
    """Put all shards of one build together: to the bit what one process would have built.

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
    found: dict[int, Part] = {}
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


def _require_shard(part: Part, number: int) -> None:
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


def _assemble(parts: list[Part]) -> Combined:
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
    return first.units, grams, positions, risks, provenance


def _events(parts: list[Part]) -> list[str]:
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
