"""Claims about the certainty of H, beside the error bars and tables of the studies.

The paper judges certainty by perplexity; claims on intervals, units and optimism are the lab's.
"""

from __future__ import annotations

import math

import numpy as np

from cocurve_lab.curvature.uncertainty import ENOUGH
from cocurve_lab.extensions.analysis.gate import Gate
from cocurve_lab.extensions.analysis.stability import Convergence, Stability
from cocurve_lab.measuring.results import mean_and_error

from ..findings import Claim, Finding, Measured
from ..tables import Table, column, pick
from .sensitivity import sensitivity_summary

SENSITIVITY = 'appendix "Sensitivity to the Surrogate Budget"'

# figures of the paper
THRESHOLD = 0.12  # FFN redundancy from which its text damps the edges
DEFAULT_ROWS = 128  # sequences of its calibration
BAND = 0.05  # of perplexity, over calibration size and top-r
SEED_SPREAD = 0.22 / 13.11  # standard deviation over mean of perplexity, three seeds
# our readings of its words
SAME_PLAN = 0.9  # overlap from which we call two plans the same selection
OTHER_TEXT = 0.1  # of KL, that a plan of another text may cost more
SAME_MATRIX = 0.05  # relative Frobenius distance up to which we call H nearly unchanged

REDUNDANCY = Claim(
    "error bars",
    f"the FFN redundancy tells on which side of {THRESHOLD:g} a model lies",
    'section "Scope of Applicability"',
    lab=True,
)
STABLE = Claim(
    "stability",
    f"the selection is not sensitive to the text (we say: {SAME_PLAN:.0%} overlap)",
    SENSITIVITY,
    (SAME_PLAN, 1.0),
    lab=True,
)
CONVERGED = Claim(
    "convergence",
    f"the default calibration of {DEFAULT_ROWS} sequences sits in the stable interior",
    SENSITIVITY,
    lab=True,
)
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
SAME_UNITS = Claim(
    "sensitivity",
    f"the selection is not an artifact of the draw (we say: {SAME_PLAN:.0%} overlap)",
    SENSITIVITY,
    (SAME_PLAN, math.inf),
    lab=True,
)
PURPOSE = Claim(
    "purpose",
    f"a plan is for any text (we say: another text's costs at most {OTHER_TEXT:.0%} more KL)",
    SENSITIVITY,
    (-math.inf, OTHER_TEXT),
    lab=True,
)


def redundancy_finding(gate: Gate, groups: int) -> Finding:
    """Judge whether the interval of `redundancy_gate` lies on one side of the paper's threshold."""
    low, high = gate.interval
    apart = groups >= ENOUGH and (high < THRESHOLD or low >= THRESHOLD)
    clean = "unknown" if gate.corrected is None else f"{gate.corrected:.3f}"
    ours = (
        f"{gate.redundancy:.3f}, without sampling noise (two halves of the text) {clean}, with "
        f"two standard errors on either side {max(0.0, low):.3f} to {high:.3f} from {groups} groups"
    )
    return REDUNDANCY.given(ours, True if apart else None)


def stability_finding(stability: Stability) -> Finding:
    """From `selection_stability`: the overlap of plans from other text, in 95 % of the draws."""
    overlaps = stability.overlaps
    low, high = np.quantile(overlaps, (0.025, 0.975)) if overlaps.size else (math.nan, math.nan)
    verdict = True if low >= SAME_PLAN else False if high < SAME_PLAN else None
    ours = (
        f"overlap {stability.mean_overlap:.0%} (95% of draws: {low:.0%} to {high:.0%}), "
        f"{len(stability.contested())} units contested; the plan prunes {len(stability.selection)}"
    )
    return STABLE.given(ours, verdict if stability.trustworthy else None)


def convergence_finding(convergence: Convergence, rows: int) -> Finding:
    """Judge whether H of so many rows is in the "stable interior"; from `is_converged`.

    If H of fewer rows than the paper's default is not converged, that says nothing on the claim.
    """
    enough = convergence.groups >= ENOUGH and (convergence.converged or rows >= DEFAULT_ROWS)
    ours = f"{rows} rows: {convergence.reason.rstrip('.')}"
    return CONVERGED.given(ours, convergence.converged if enough else None)


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
        overlap = mean_and_error(column(pick(rows, knob="seed", is_base=False), "overlap"))
        found.append(SAME_UNITS.on(_share(*overlap), ours="plans of other draws share {}"))
    return found


def _share(value: float, error: float = 0.0) -> Measured:
    bar = f" ± {error:.1%}" if error and math.isfinite(error) else ""
    return Measured(value, error, words=f"{value:.1%}{bar}")


def purpose_findings(table: Table) -> list[Finding]:
    """Judge, per lambda, what the plan of one text costs on another; from `kept_purposes`.

    The paired error is that of the judge's rows; other rows would have made another H.
    """
    known = [row for row in pick(table) if not row["own"] and row["share_error"] is not None]
    found = []
    for strength in dict.fromkeys(row["interaction_strength"] for row in known):
        measured = []
        for row in pick(known, interaction_strength=strength):
            words = f"{row['calibrated_on']} on {row['judged_on']} {row['share']:+.0%} "
            words += f"± {row['share_error']:.0%}"
            measured.append(Measured(row["share"], row["share_error"], words=words))
        ours = f"KL over that of the text's own plan, λ {strength:g}: {{}}"
        found.append(PURPOSE.on(*measured, ours=ours))
    return found
