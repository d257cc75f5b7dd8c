"""Merging of builds: whole builds over different sequences, or the shards of one build.

A build sums the Grams of its sequences into groups, each in the order of the sequences. A shard
owns whole groups, a contiguous range of them. So no sum is ever split, and merging shards copies
groups without adding anything: the result has the bits of one build. Whole builds are added group
by group. `Curvature.merge` is the way in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base.errors import InputError, MismatchError
from ..base.storage import require_settings
from ..base.text_windows import joined
from .groups import Groups
from .settings import MAY_BE_ABSENT, MERGE_KEYS, Facts, Shard, settings_of

Built = Any  # a Curvature, whose file imports this one
log = logging.getLogger(__name__)
# not settings, but they decide the order of floating-point sums and so the last bits
_RUNTIME = ("device_kind", "num_threads", "units_per_batch")
_OF_EACH_ROW = ("row_fingerprints", "sequence_seconds", "sequence_losses")
_OF_A_SHARD = {"shard", "groups", "num_sequences", "sequences_done"}


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
            f"split. Take at most {groups} shards, or build with more groups, "
            "up to the number of sequences."
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


def progress_of(curvature: Built) -> tuple[int, int]:
    """Return the number of sequences done, and the total of its build or shard."""
    facts = curvature.provenance
    mine = shard_sequences(facts.get("shard"), facts["groups"], facts["num_sequences"])
    return facts["sequences_done"], len(mine)


# Whole builds -------------------------------------------------------------------------------------


def sum_builds(parts: Sequence[Built]) -> tuple[Groups, Facts]:
    """Add whole builds over disjoint sequences, group by group."""
    if not parts:
        raise InputError("merge needs at least one curvature, got none.")
    found = [_mergeable(part, parts[0], number) for number, part in enumerate(parts)]
    facts = [part.provenance for part in parts]
    rows = [row for each in facts for row in each["row_fingerprints"]]
    if len(set(rows)) != len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise MismatchError(
            f"a sequence (fingerprint {twice[:12]}) occurs twice in the parts: it would count "
            "twice. Merge builds over disjoint sequences."
        )
    groups = _added(found)
    merged = facts[0] | {
        "row_fingerprints": rows,
        "text_windows": joined(each.get("text_windows") for each in facts),
        "num_sequences": len(rows),
        "sequences_done": len(rows),
        "calibration_fingerprint": None,  # there is no single calibration set any more
        "groups": len(groups),
        "complete": all(each.get("complete", True) for each in facts),
        "seconds": sum(each.get("seconds", 0.0) for each in facts),
        "events": [event for each in facts for event in each.get("events", [])],
        "device": sorted({str(each.get("device")) for each in facts}),
        "merged_from": [part.fingerprint for part in parts],
    }
    merged.pop("sequence_losses", None)
    if all("sequence_losses" in each for each in facts):
        merged["sequence_losses"] = [loss for each in facts for loss in each["sequence_losses"]]
    return groups, merged


def _mergeable(part: Built, first: Built, number: int) -> Groups:
    """Return the groups of a part that can be merged with the first one."""
    groups = part.groups
    # without the marks of its rows, a sequence counted twice could not be noticed
    if groups is None or groups.risks is None or "row_fingerprints" not in part.provenance:
        raise InputError(
            f"part {number} lacks the sums of a build, or the marks of its rows, so it cannot be "
            "merged. Merge what estimate_curvature built."
        )
    first.units.require_same(part.units, mine="part 0", theirs=f"part {number}")
    shared = {key: first.provenance.get(key) for key in MERGE_KEYS}
    require_settings(part.provenance, shared, f"part {number}")
    return groups


def _added(parts: Sequence[Groups]) -> Groups:
    """Add sums group by group, in the order of the parts; groups that a part lacks are empty."""
    sums = {}
    for name in parts[0].arrays:
        if all(name in part.arrays for part in parts):
            arrays = [part.arrays[name] for part in parts]
            sums[name] = np.zeros_like(max(arrays, key=len))
            for array in arrays:
                sums[name][: len(array)] += array
    return Groups(**sums)


# Shards of one build ------------------------------------------------------------------------------


def join_shards(parts: Sequence[Built]) -> tuple[Groups, Facts]:
    """Assemble the shards of one build, taking each group from the shard that owns it."""
    if not parts:
        raise InputError("merging needs the shards of a build, got none.")
    for number, part in enumerate(parts):
        _require_finished(part, number)
    shards = [tuple(part.provenance["shard"]) for part in parts]
    named, count = ", ".join(f"{number}/{of}" for number, of in shards), shards[0][1]
    if len(set(shards)) < len(shards) or any(of != count for _, of in shards):
        raise MismatchError(f"the parts are shards {named}. Give each shard of one build once.")
    missing = [str(n) for n in range(1, count + 1) if (n, count) not in shards]
    if missing:
        raise InputError(
            f"the parts are shards {named}, so {', '.join(missing)} of {count} are missing. Build "
            f"with shard {missing[0]}/{count} first."
        )
    wanted = MAY_BE_ABSENT | settings_of(parts[0].provenance)
    for number, part in enumerate(parts):
        parts[0].units.require_same(part.units, mine="part 0", theirs=f"part {number}")
        require_settings(part.provenance, wanted, f"part {number}")
    return _assemble(sorted(parts, key=lambda part: part.provenance["shard"][0]))


def _require_finished(part: Built, number: int) -> None:
    """Raise InputError unless a part is a finished shard."""
    facts = part.provenance
    if part.groups is None or not facts.keys() >= _OF_A_SHARD:
        raise InputError(
            f"part {number} is not a shard but a whole build. Merge the shards first, and then the "
            "result with other builds."
        )
    done, mine = progress_of(part)
    if done < mine:
        raise InputError(
            f"shard {facts['shard'][0]} of {facts['shard'][1]} has {done} of its {mine} sequences. "
            "Build it again with the same checkpoint to continue."
        )


def _assemble(parts: list[Built]) -> tuple[Groups, Facts]:
    # back into the order of sequences, so that provenance too is that of one build
    rows: dict[str, dict[int, Any]] = {name: {} for name in _OF_EACH_ROW}
    for part in parts:
        facts = part.provenance
        numbers = shard_sequences(facts["shard"], facts["groups"], facts["num_sequences"])
        for name, values in rows.items():
            values |= dict(zip(numbers, facts[name], strict=True))
    ordered = {name: [values[n] for n in sorted(values)] for name, values in rows.items()}
    first = parts[0].provenance
    merged = {key: first[key] for key in first if key not in ("shard", "sequence_losses")}
    merged |= {
        "complete": True,
        "sequences_done": len(ordered["row_fingerprints"]),
        "text_windows": joined(part.provenance.get("text_windows") for part in parts),
        "seconds": sum(part.provenance["seconds"] for part in parts),
        "device": sorted({str(part.provenance["device"]) for part in parts}),
        "events": _events(parts),
        "merged_from": [part.fingerprint for part in parts],
        **ordered,
    }
    # a group is of one shard alone: what the others add to it is 0, which changes no bit
    return _added([part.groups for part in parts]), merged


def _events(parts: list[Built]) -> list[str]:
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
