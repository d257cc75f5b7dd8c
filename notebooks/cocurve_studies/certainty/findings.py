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

from ..claims import Claim, evaluate
from ..findings import Finding
from ..tables import Row, Rows, Table, column, pick
from .coverage import on_most_text
from .sensitivity import sensitivity_summary

SENSITIVITY = 'appendix "Sensitivity to the Surrogate Budget"'

# figures of the paper
THRESHOLD = 0.12  # FFN redundancy from which its text damps the edges
DEFAULT_ROWS = 128  # sequences of its calibration
BAND = 0.05  # of perplexity, over calibration size and top-r
SEED_SPREAD = 0.22 / 13.11  # standard deviation over mean of perplexity, three seeds
SOURCE_CHANGE = 12.91 / 12.58 - 1  # of perplexity, C4 against WikiText-2
# our readings of its words
SAME_PLAN = 0.9  # overlap from which we call two plans the same selection
SHORTFALL = 0.05  # of coverage, that a test of intervals must be able to see
OTHER_TEXT = 0.1  # of KL, that a plan of another text may cost more
SAME_MATRIX = 0.05  # relative Frobenius distance up to which we call H nearly unchanged


def redundancy_finding(gate: Gate, groups: int, threshold: float = THRESHOLD) -> Finding:
    """From `redundancy_gate` of an H of so many groups: the side of the threshold, if one is known.

    It agrees where the whole interval of the gate lies on one side.
    """
    low, high = gate.interval
    apart = high < threshold or low >= threshold
    told = "unknown" if gate.corrected is None else f"{gate.corrected:.3f}"
    ends = f"{max(0.0, low):.3f} to {high:.3f}"
    return Finding(
        study="error bars",
        claim=f"the FFN redundancy tells on which side of {threshold:g} a model lies",
        where='section "Scope of Applicability"',
        ours=(
            f"{gate.redundancy:.3f}, without sampling noise (two halves of the text) {told}, with "
            f"two standard errors on either side {ends} from {groups} groups"
        ),
        agrees=True if apart and groups >= ENOUGH else None,
        lab=True,
    )


COVERAGE = Claim(
    "coverage",
    "an interval of {confidence:.0%} holds the truth in {confidence:.0%} of calibrations",
    "Busing et al. 1999, the jackknife",
    "{name}: {coverage:.1%} ± {coverage_error:.1%} of calibrations of {size} rows in {groups} "
    "groups",
    "verdict",
    lab=True,
)


def coverage_findings(table: Table) -> list[Finding]:
    """From `coverage_study`: coverage against confidence, per statistic, at most rows and groups.

    A share within two simulation errors of the confidence agrees, if enough draws were made to see
    a shortfall of five points. (That error is of a single value; for a mean over many values it is
    an upper bound.)
    """
    rows = []
    for name, row in on_most_text(table).items():
        reach = 2 * row["coverage_error"]
        holds = abs(row["coverage"] - row["confidence"]) <= reach
        verdict = None if holds and reach > SHORTFALL else holds
        rows.append(row | {"name": name.replace("_", " "), "verdict": verdict})
    return evaluate(COVERAGE, rows)


def stability_finding(stability: Stability) -> Finding:
    """From `selection_stability`: the overlap of plans from other text, in 95 % of the draws."""
    overlaps = stability.overlaps
    low, high = np.quantile(overlaps, (0.025, 0.975)) if overlaps.size else (math.nan, math.nan)
    told = {True: low >= SAME_PLAN, False: high < SAME_PLAN}
    verdict = next((answer for answer, holds in told.items() if holds), None)
    return Finding(
        study="stability",
        claim=f"the selection is not sensitive to the text (we say: {SAME_PLAN:.0%} overlap)",
        where=SENSITIVITY,
        ours=(
            f"overlap {stability.mean_overlap:.0%} (95% of draws: {low:.0%} to {high:.0%}), "
            f"{len(stability.contested())} units contested; the plan prunes "
            f"{len(stability.selection)}"
        ),
        agrees=verdict if stability.trustworthy else None,
        lab=True,
    )


def convergence_finding(convergence: Convergence, rows: int) -> Finding:
    """Judge whether H of so many rows is in the "stable interior"; from `is_converged`.

    If H of fewer rows than the paper's default is not converged, that says nothing on the claim.
    """
    enough = convergence.groups >= ENOUGH and (convergence.converged or rows >= DEFAULT_ROWS)
    return Finding(
        study="convergence",
        claim=f"the default calibration of {DEFAULT_ROWS} sequences sits in the stable interior",
        where=SENSITIVITY,
        ours=f"{rows} rows: {convergence.reason.rstrip('.')}",
        agrees=convergence.converged if enough else None,
        lab=True,
    )


def _budget(claim: str, where: str, ours: str, low: float, high: float, lab: bool = False) -> Claim:
    """Make a claim about one number in the column `value`."""
    return Claim("sensitivity", claim, where, ours, "value", (low, high), lab=lab)


BANDS = _budget(
    f"perplexity moves within a band of {BAND:.0%} over a 4x range of {{what}}",
    'table "sensitivity"',
    "{value:.1%} ± {value_error:.1%} over {least} to {most}",
    low=-math.inf,
    high=BAND,
)
UNCHANGED = _budget(
    f"top-r beyond {{base}} leaves H nearly unchanged (we say: {SAME_MATRIX:.0%})",
    'appendix "Extended Ablations" (iv)',
    "H moves by {value:.1%} in Frobenius norm{beside}",
    low=-math.inf,
    high=SAME_MATRIX,
)
SPREAD = _budget(
    f"perplexity 13.11 ± 0.22 over seeds, a spread of {SEED_SPREAD:.1%}",
    'table "seedvar"',
    "{value:.1%} ± {value_error:.1%} over {count} draws of text",
    low=-math.inf,
    high=SEED_SPREAD,
)
SAME_UNITS = _budget(
    f"the selection is not an artifact of the draw (we say: {SAME_PLAN:.0%} overlap)",
    SENSITIVITY,
    "plans of other draws share {value:.0%}{shown} of their units",
    low=SAME_PLAN,
    high=math.inf,
    lab=True,
)
OTHER_SOURCE = _budget(
    f"another calibration source changes perplexity by {SOURCE_CHANGE:.1%}",
    SENSITIVITY,
    "{source}: {moved:+.1%} ± {value_error:.1%} (KL {difference:+.3f} ± {difference_error:.3f} "
    "nats per token, paired)",
    low=-math.inf,
    high=SOURCE_CHANGE,
)


def sensitivity_findings(table: Table, strength: float | None = None) -> list[Finding]:
    """Judge claims on the budget of H, at one lambda (None: the largest); from `sensitivity_study`.

    The error bar of a change of perplexity is the spread between builds on other text of the same
    kind, from the knob "seed", times the square root of two, because both builds have it. The
    paired errors over held-out rows omit that spread. Without the knob nothing can be told.
    """
    top = max(row["interaction_strength"] for row in pick(table)) if strength is None else strength
    rows = pick(table, interaction_strength=top)
    summary = {row["knob"]: row for row in pick(sensitivity_summary(rows))}
    seeds = summary.get("seed")
    spread = seeds["perplexity_std"] / seeds["perplexity_mean"] if seeds else math.nan
    both = math.sqrt(2) * spread
    bands: Rows = []
    for knob, what in (("rows", "calibration size"), ("top_r", "top-r")):
        if knob in summary:
            values = sorted(row["value"] for row in pick(rows, knob=knob))
            row = {"what": what, "least": values[0], "most": values[-1]}
            bands.append(row | {"value": summary[knob]["band"], "value_error": both})
    found = evaluate(BANDS, bands) + evaluate(UNCHANGED, _unchanged(rows))
    if seeds:
        count = seeds["values"]
        error = spread / math.sqrt(2 * (count - 1))  # of a standard deviation from so many values
        found += evaluate(SPREAD, [{"value": spread, "value_error": error, "count": count}])
        found += evaluate(SAME_UNITS, [_overlap(pick(rows, knob="seed", is_base=False))])
    if "source" in summary:
        found += evaluate(
            OTHER_SOURCE, [_source(pick(rows, knob="source")) | {"value_error": both}]
        )
    return found


def _unchanged(rows: Rows) -> Rows:
    knob = pick(rows, knob="top_r")
    base = next((row["value"] for row in knob if row["is_base"]), math.inf)
    moved = [row["matrix_distance"] for row in knob if row["value"] > base]
    others = [row["matrix_distance"] for row in pick(rows, knob="seed", is_base=False)]
    beside = f"; other text moves it by {np.mean(others):.0%}" if others else ""
    row = {"base": base, "beside": beside, "value_error": 0.0}
    return [row | {"value": max(moved)}] if moved else []


def _overlap(rows: Rows) -> Row:
    mean, error = mean_and_error(column(rows, "overlap"))
    shown = f" ± {error:.0%}" if len(rows) > 1 else ""
    return {"value": mean, "value_error": error, "shown": shown}


def _source(rows: Rows) -> Row:
    """Return the source whose perplexity is furthest from the base's."""
    (base,) = pick(rows, is_base=True)
    others = pick(rows, is_base=False)
    worst = max(others, key=lambda row: abs(row["perplexity"] - base["perplexity"]))
    moved = worst["perplexity"] / base["perplexity"] - 1
    return worst | {"source": worst["value"], "moved": moved, "value": abs(moved)}


PURPOSE = Claim(
    "purpose",
    f"a plan is for any text (we say: another text's costs at most {OTHER_TEXT:.0%} more KL)",
    SENSITIVITY,
    "KL over that of the text's own plan, λ {strength:g}: {each}",
    "share",
    (-math.inf, OTHER_TEXT),
    each="{calibrated_on} on {judged_on} {share:+.0%} ± {share_error:.0%}",
    lab=True,
)


def purpose_findings(table: Table) -> list[Finding]:
    """Judge, per lambda, what the plan of one text costs on another; from `purpose_table`.

    The paired error is that of the judge's rows; other rows would have made another H.
    """
    known = [row for row in pick(table) if not row["own"] and row["share_error"] is not None]
    return [
        finding
        for strength in dict.fromkeys(row["interaction_strength"] for row in known)
        for finding in evaluate(
            PURPOSE, pick(known, interaction_strength=strength), strength=strength
        )
    ]
