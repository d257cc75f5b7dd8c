"""Merging of builds: whole builds over different sequences, or the shards of one build.

A build sums the Grams of its sequences into groups, each in the order of the sequences. A shard
owns whole groups, a contiguous range of them. So no sum is ever split, and merging shards copies
groups without adding anything: the result has the bits of one build. Whole builds are added group
by group. `Curvature.merge` is the way in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..base.arguments import as_int
from ..base.errors import InputError, MismatchError
from ..base.storage import require_settings
from ..base.text_windows import joined
from ..models.units import UnitSet
from .settings import MAY_BE_ABSENT, MERGE_KEYS, Shard, as_shard, settings_of

log = logging.getLogger(__name__)
# not settings, but they decide the order of floating-point sums and so the last bits
_RUNTIME = ("device_kind", "num_threads", "units_per_batch")
_NEEDED = {"group_grams", "group_positions", "group_risks"}  # of every build by ablations


class Buildable(Protocol):
    """The part of a `Curvature` that merging reads: matrix.py imports this file."""

    @property
    def units(self) -> UnitSet: ...
    @property
    def provenance(self) -> dict[str, Any]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def grouped(self) -> dict[str, np.ndarray]: ...


# Shards: which sequences each has -----------------------------------------------------------------


def shard_groups(shard: Shard, groups: int) -> list[int]:
    """Return the groups that shard (i, n) owns; shards differ in size by at most one group."""
    number, count = shard
    if not 1 <= number <= count:
        raise InputError(
            f"shard is {number}/{count}, but shards count from 1. Give one from 1/{count} to "
            f"{count}/{count}."
        )
    if count > groups:
        raise InputError(
            f"{count} shards cannot share {groups} groups of sequences, because groups are never "
            f"split. Take at most {groups} shards, or build with more groups (--groups; "
            "BuildOptions(groups=...)), up to the number of sequences."
        )
    return np.array_split(np.arange(groups), count)[number - 1].tolist()


def shard_sequences(shard: Shard | None, groups: int, sequences: int) -> list[int]:
    """Return the numbers of the sequences of a shard in order; all of them for None."""
    if shard is None:
        return list(range(sequences))
    # sequence i belongs to group i mod G: a shard thus has sequences from all over the text, and
    # each group is summed in the same order as in one build
    mine = set(shard_groups(shard, groups))
    return [number for number in range(sequences) if number % groups in mine]


def progress_of(curvature: Buildable) -> tuple[int, int]:
    """Return the number of sequences done, and the total of its build or shard."""
    facts = curvature.provenance  # of a file, which may be anybody's
    done, sequences = (
        as_int(facts.get(name), name) for name in ("sequences_done", "num_sequences")
    )
    groups = as_int(facts.get("groups"), "groups", 1)
    shard = None if facts.get("shard") is None else as_shard(facts["shard"], "shard")
    return done, len(shard_sequences(shard, groups, sequences))


# Whole builds -------------------------------------------------------------------------------------


def sum_builds(parts: Sequence[Buildable]) -> dict[str, Any]:
    """Add whole builds over disjoint sequences: the arguments of `Curvature.from_groups`."""
    if not parts:
        raise InputError("merge needs at least one curvature, got none.")
    for number, part in enumerate(parts):
        _require_mergeable(part, parts[0], number)
    facts = [part.provenance for part in parts]
    rows = [row for each in facts for row in each["row_fingerprints"]]
    if len(set(rows)) != len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise MismatchError(
            f"a sequence (fingerprint {twice[:12]}) occurs twice in the parts: it would count "
            "twice. Merge builds over disjoint sequences."
        )
    sums = {name: _sum_groups([part.grouped[name] for part in parts]) for name in _in_all(parts)}
    provenance = facts[0] | {
        "row_fingerprints": rows,
        "text_windows": joined(each.get("text_windows") for each in facts),
        "num_sequences": len(rows),
        "sequences_done": len(rows),
        "calibration_fingerprint": None,  # there is no single calibration set any more
        "groups": len(sums["group_grams"]),
        "complete": all(each.get("complete", True) for each in facts),
        "seconds": sum(each.get("seconds", 0.0) for each in facts),
        "events": [event for each in facts for event in each.get("events", [])],
        "device": sorted({str(each.get("device")) for each in facts}),
        "merged_from": [part.fingerprint for part in parts],
    }
    _join_losses(provenance, facts)
    return {"units": parts[0].units, "provenance": provenance, **sums}


def _join_losses(provenance: dict[str, Any], facts: Sequence[dict[str, Any]]) -> None:
    """Set the dense losses of a merged H, in the order of its parts, where all have them."""
    known = [each["sequence_losses"] for each in facts if "sequence_losses" in each]
    provenance.pop("sequence_losses", None)
    if len(known) == len(facts):
        provenance["sequence_losses"] = [loss for losses in known for loss in losses]


def _in_all(parts: Sequence[Buildable]) -> list[str]:
    return [name for name in parts[0].grouped if all(name in part.grouped for part in parts)]


def _require_mergeable(part: Buildable, first: Buildable, number: int) -> None:
    method = part.provenance.get("method", "ablation")
    lacks = "group Grams" if not set(part.grouped) >= _NEEDED else ""
    # without their marks, a sequence counted twice could not be noticed
    lacks = lacks or ("row_fingerprints" if "row_fingerprints" not in part.provenance else "")
    if method != "ablation" or lacks:
        fact = f"has no {lacks}" if lacks else f"is of method {method!r}"
        raise InputError(
            f"part {number} {fact}, so it cannot be merged. Merge builds by ablations, from "
            "estimate_curvature."
        )
    first.units.require_same(part.units, mine="part 0", theirs=f"part {number}")
    shared = {key: first.provenance.get(key) for key in MERGE_KEYS}
    require_settings(part.provenance, shared, f"part {number}")


def _sum_groups(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Sum [G, ...] over parts, in their order; groups that a part lacks count as empty."""
    total = np.zeros_like(max(arrays, key=len))
    for array in arrays:
        total[: len(array)] += array
    return total


# Shards of one build ------------------------------------------------------------------------------


def join_shards(parts: Sequence[Buildable]) -> dict[str, Any]:
    """Assemble the shards of one build: the arguments of `Curvature.from_groups`."""
    if not parts:
        raise InputError("merging needs the shards of a build, got none.")
    found: dict[int, Buildable] = {}
    for number, part in enumerate(parts):
        _require_shard(part, number)
        (index, count), wanted = part.provenance["shard"], parts[0].provenance["shard"][1]
        what = f"part {number} (shard {index} of {count})"
        if count != wanted or index in found:
            fact = "is given twice" if index in found else f"is not one of {wanted}, as part 0 is"
            raise MismatchError(f"{what} {fact}. Give each shard of one build once.")
        parts[0].units.require_same(part.units, mine="part 0", theirs=what)
        require_settings(part.provenance, MAY_BE_ABSENT | settings_of(parts[0].provenance), what)
        found[index] = part
    missing = [str(index) for index in range(1, count + 1) if index not in found]
    if missing:
        raise InputError(
            f"of {count} shards, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing. Build with shard {missing[0]}/{count} first."
        )
    return _assemble([found[index] for index in sorted(found)])


def _require_shard(part: Buildable, number: int) -> None:
    shard = part.provenance.get("shard")
    if shard is None:
        raise InputError(
            f"part {number} is not a shard but a whole build. Merge the shards first, and then the "
            "result with other builds."
        )
    try:
        done, mine = progress_of(part)
    except InputError as error:
        raise InputError(f"part {number} is no shard of a build: {error}") from None
    if done < mine:
        raise InputError(
            f"shard {shard[0]} of {shard[1]} has {done} of its {mine} sequences. Build it "
            "again with the same checkpoint to continue."
        )


def _assemble(parts: list[Buildable]) -> dict[str, Any]:
    """Take each group from the shard that owns it."""
    first = parts[0]
    # copy, do not add: summation order changes the last bits
    arrays = {name: np.zeros_like(first.grouped[name]) for name in _in_all(parts)}
    # back into the order of sequences, so that provenance too is that of one build
    rows: dict[int, tuple[Any, ...]] = {}
    for part in parts:
        settings, shard = part.provenance, tuple(part.provenance["shard"])
        mine = shard_groups(shard, settings["groups"])
        for name, array in arrays.items():
            array[mine] = part.grouped[name][mine]
        numbers = shard_sequences(shard, settings["groups"], settings["num_sequences"])
        losses = settings.get("sequence_losses") or [None] * len(numbers)
        seconds = settings["sequence_seconds"]
        values = zip(settings["row_fingerprints"], seconds, losses, strict=True)
        rows |= dict(zip(numbers, values, strict=True))
    ordered = [rows[number] for number in sorted(rows)]
    provenance = {key: value for key, value in first.provenance.items() if key != "shard"}
    provenance |= {
        "complete": True,
        "sequences_done": len(ordered),
        "row_fingerprints": [row for row, *_ in ordered],
        "text_windows": joined(part.provenance.get("text_windows") for part in parts),
        "sequence_seconds": [seconds for _, seconds, _ in ordered],
        "seconds": sum(part.provenance["seconds"] for part in parts),
        "device": sorted({str(part.provenance["device"]) for part in parts}),
        "events": _events(parts),
        "merged_from": [part.fingerprint for part in parts],
    }
    losses = [{"sequence_losses": [loss]} if loss is not None else {} for *_, loss in ordered]
    _join_losses(provenance, losses)
    return {"units": first.units, "provenance": provenance, **arrays}


def _events(parts: list[Buildable]) -> list[str]:
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
