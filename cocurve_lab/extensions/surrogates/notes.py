"""Notes to show beside a matrix that is not the paper's H."""

from __future__ import annotations

import math

from ...curvature.matrix import STAGED, Curvature
from .pair_kl import PAIR_KL

TRUSTED_STRENGTH = 0.5  # the largest lambda at which the plans of a preview are worth a look


def note_of(curvature: Curvature, view: str = "instrument") -> str:
    """Return a note to show beside a matrix in a view; empty for the paper's H."""
    temperature = curvature.provenance.get("temperature", 1)
    if curvature.surrogate == STAGED:
        return (
            f"H of the model without {len(curvature.removed)} units: what removing more adds to "
            "the KL of the whole model, a departure from the paper."
        )
    if curvature.surrogate == PAIR_KL:
        return (
            "Pair KL, not the paper's H: edges are the KL of pairs, from the shifts of their units "
            "at some positions. Correlations may exceed 1. A predicted risk below 0 is not a price."
        )
    if curvature.refit_ratio:
        return (
            "H of a model that will be refitted: the other units of a block make up for each "
            f"ablation as if {curvature.refit_ratio:.0%} of them were gone, a departure from the "
            "paper. Risks are those after a refit."
        )
    if temperature != 1:
        return (
            f"H of a softened teacher: logits divided by {temperature:g}, a departure from the "
            "paper. Risks are those of the softened distributions."
        )
    return preview_note(curvature, view)


def preview_note(curvature: Curvature, view: str = "instrument") -> str:
    """Describe the limits of a preview in a few sentences; empty if H is not a preview.

    The note states `probes`, `rank` and `noise_floor` of the provenance; a number that is missing
    or not finite is reported as not recorded. `view` is what shows the matrix, "instrument" or
    "picture".
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
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]
