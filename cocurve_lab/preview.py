"""What must be said wherever an H from random probes is shown."""

from __future__ import annotations

import math

from .curvature import Curvature

TRUSTED_STRENGTH = (
    0.5  # the largest lambda at which the edges of a preview choose plans worth a look
)


def preview_note(curvature: Curvature, view: str = "instrument") -> str:
    """What a preview of H is worth, in three sentences; empty where H is not a preview.

    States the number of probes, their rank among the M units, and the mean |correlation| that pure
    probe noise reads (`probes`, `rank` and `noise_floor` of the provenance); says of a number that
    is not there, or not finite, that it is not recorded.

    Args:
        curvature: H [M, M]; `Curvature.is_preview` decides.
        view: what shows it and must be made again on the real H: "instrument" or "picture".
    """
    if not curvature.is_preview:
        return ""
    known = curvature.provenance
    probes, rank = _number(known.get("probes")), _number(known.get("rank"))
    floor = _number(known.get("noise_floor"))
    count = "random probes, their number not recorded," if probes is None else f"{probes:g} probes"
    of = "rank not recorded" if rank is None else f"rank {rank:g} of {len(curvature.units)}"
    noise = (
        "its noise floor not recorded"
        if floor is None
        else f"where noise alone reads a mean |correlation| of {floor:.2g}"
    )
    return (
        f"Preview: H from {count} ({of}), {noise}. It comes from gradients, for infinitesimal "
        f"changes and not for removals; lambda above {TRUSTED_STRENGTH:g} is not to be trusted and "
        f"the gate says nothing. Build H by ablations and make the {view} again."
    )


def _number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]
