"""Claims about the certainty of H, which the paper judges by perplexity, beside the tables."""

from __future__ import annotations

import math

from ..findings import Claim, Finding, Measured
from ..tables import Table, pick
from .sensitivity import sensitivity_summary

# figures of the paper
BAND = 0.05  # of perplexity, over calibration size and top-r
SEED_SPREAD = 0.22 / 13.11  # standard deviation over mean of perplexity, three seeds
SAME_MATRIX = 0.05  # relative Frobenius distance up to which we call H "nearly unchanged"

BANDS = Claim(
    "sensitivity",
    f"perplexity moves within a band of {BAND:.0%} over a 4x range of {{what}}",
    'table "sensitivity"',
    (-math.inf, BAND),
)
UNCHANGED = Claim(
    "sensitivity",
    f"a larger top-r leaves H nearly unchanged (we say: {SAME_MATRIX:.0%})",
    'appendix "Extended Ablations" (iv)',
    (-math.inf, SAME_MATRIX),
)
SPREAD = Claim(
    "sensitivity",
    f"perplexity 13.11 ± 0.22 over seeds, a spread of {SEED_SPREAD:.1%}",
    'table "seedvar"',
    (-math.inf, SEED_SPREAD),
)


def sensitivity_findings(table: Table) -> list[Finding]:
    """Judge claims on the budget of H at the largest lambda; from `sensitivity_study`.

    The error bar of a change of perplexity is the spread between builds on other text of the same
    kind, from the knob "seed", times the square root of two, because both builds have it. The
    paired errors over held-out rows omit that spread. Without the knob nothing can be told.
    """
    top = max(row["interaction_strength"] for row in pick(table))
    rows = pick(table, interaction_strength=top)
    summary = {row["knob"]: row for row in pick(sensitivity_summary(rows))}
    seeds = summary.get("seed")
    spread = seeds["perplexity_std"] / seeds["perplexity_mean"] if seeds else math.nan
    both = math.sqrt(2) * spread
    found = []
    for knob, what in (("rows", "calibration size"), ("top_r", "top-r")):
        if knob in summary:
            values = sorted(row["value"] for row in pick(rows, knob=knob))
            ours = f"{{}} over {values[0]} to {values[-1]}"
            found.append(BANDS.on(_share(summary[knob]["band"], both), ours=ours, what=what))
    base = next((row["value"] for row in pick(rows, knob="top_r", is_base=True)), math.inf)
    moved = [r["matrix_distance"] for r in pick(rows, knob="top_r") if r["value"] > base]
    if moved:
        found.append(UNCHANGED.on(_share(max(moved)), ours="H moves by {} in Frobenius norm"))
    if seeds:
        count = seeds["values"]
        error = spread / math.sqrt(2 * (count - 1))  # of a standard deviation from so many values
        found.append(SPREAD.on(_share(spread, error), ours=f"{{}} over {count} draws of text"))
    return found


def _share(value: float, error: float = 0.0) -> Measured:
    bar = f" ± {error:.1%}" if error and math.isfinite(error) else ""
    return Measured(value, error, words=f"{value:.1%}{bar}")
