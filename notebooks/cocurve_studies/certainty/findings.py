"""The paper's claims about the certainty of H, beside the error bars and tables of the studies."""

from __future__ import annotations

import math

import numpy as np

from cocurve_lab.base.tables import Table, column, pick
from cocurve_lab.curvature.uncertainty import ENOUGH, Jackknife
from cocurve_lab.extensions.analysis.stability import Convergence, Stability

from ..findings import ABOVE, Finding, covered, judged_column, within
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
SAME_MATRIX = 0.05  # relative Frobenius distance up to which we call H nearly unchanged


def redundancy_finding(redundancy: Jackknife, threshold: float = THRESHOLD) -> Finding:
    """From `jackknife(_, "ffn_redundancy")`: the side of the gate's threshold, if one is known.

    It agrees where the interval and the estimate itself, which the bias lifts, lie on one side.
    """
    low, high = (float(end) for end in redundancy.interval)
    ends = (low, high, float(redundancy.estimate))
    apart = max(ends) < threshold or min(ends) >= threshold
    return Finding(
        study="error bars",
        claim=f"the FFN redundancy tells on which side of {threshold:g} a model lies",
        where='section "Scope of Applicability"',
        ours=(
            f"{float(redundancy.estimate):.3f}, corrected for its bias "
            f"{float(redundancy.corrected):.3f}, {redundancy.confidence:.0%} interval {low:.3f} to "
            f"{high:.3f} from {redundancy.groups} groups"
        ),
        agrees=True if apart and redundancy.groups >= ENOUGH else None,
    )


def coverage_findings(table: Table) -> list[Finding]:
    """From `coverage_study`: coverage against confidence, per statistic, at most rows and groups.

    A share within two simulation errors of the confidence agrees, if enough draws were made to see
    a shortfall of five points. (That error is of a single value; for a mean over many values it is
    an upper bound.)
    """
    found = []
    for name in dict.fromkeys(row["statistic"] for row in table):
        row = max(pick(table, statistic=name), key=lambda r: (r["size"], r["groups"]))
        aim, reach = row["confidence"], 2 * row["coverage_error"]
        holds = abs(row["coverage"] - aim) <= reach
        found.append(
            Finding(
                study="coverage",
                claim=f"an interval of {aim:.0%} holds the truth in {aim:.0%} of calibrations",
                where="Busing et al. 1999, the jackknife",
                ours=(
                    f"{name.replace('_', ' ')}: {row['coverage']:.1%} ± "
                    f"{row['coverage_error']:.1%} of calibrations of {row['size']} rows in "
                    f"{row['groups']} groups"
                ),
                agrees=None if holds and reach > SHORTFALL else holds,
            )
        )
    return found


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
    )


def convergence_finding(convergence: Convergence, rows: int) -> Finding:
    """From `is_converged`: whether H of so many rows is in the "stable interior".

    If H of fewer rows than the paper's default is not converged, that says nothing on the claim.
    """
    enough = convergence.groups >= ENOUGH and (convergence.converged or rows >= DEFAULT_ROWS)
    return Finding(
        study="convergence",
        claim=f"the default calibration of {DEFAULT_ROWS} sequences sits in the stable interior",
        where=SENSITIVITY,
        ours=f"{rows} rows: {convergence.reason.rstrip('.')}",
        agrees=convergence.converged if enough else None,
    )


def sensitivity_findings(table: Table, strength: float | None = None) -> list[Finding]:
    """From `sensitivity_study`: claims on the budget of H, at one lambda (None: the largest).

    The error bar of a change of perplexity is the spread between builds on other text of the same
    kind, from the knob "seed", times the square root of two, because both builds have it. The
    paired errors over held-out rows omit that spread. Without the knob nothing can be told.
    """
    top = max(row["interaction_strength"] for row in table) if strength is None else strength
    rows = pick(table, interaction_strength=top)
    summary = {row["knob"]: row for row in sensitivity_summary(rows)}
    seeds = summary.get("seed")
    spread = seeds["perplexity_std"] / seeds["perplexity_mean"] if seeds else math.nan
    found = [
        _band(pick(rows, knob=knob), what, summary[knob]["band"], spread)
        for knob, what in (("rows", "calibration size"), ("top_r", "top-r"))
        if knob in summary
    ]
    found += _unchanged(rows)
    if seeds:
        found += [_seed_spread(spread, seeds["values"]), _seed_overlap(pick(rows, knob="seed"))]
    if "source" in summary:
        found.append(_source(pick(rows, knob="source"), spread))
    return found


def _band(rows: Table, what: str, band: float, spread: float) -> Finding:
    values = sorted(row["value"] for row in rows)
    error = math.sqrt(2) * spread
    return Finding(
        study="sensitivity",
        claim=f"perplexity moves within a band of {BAND:.0%} over a 4x range of {what}",
        where='table "sensitivity"',
        ours=f"{band:.1%} ± {error:.1%} over {values[0]} to {values[-1]}",
        agrees=within(band, error, -math.inf, BAND),
    )


def _unchanged(rows: Table) -> list[Finding]:
    knob = pick(rows, knob="top_r")
    base = next((row["value"] for row in knob if row["is_base"]), math.inf)
    larger = [row for row in knob if row["value"] > base]
    if not larger:
        return []
    distance = max(row["matrix_distance"] for row in larger)
    others = [row["matrix_distance"] for row in pick(rows, knob="seed") if not row["is_base"]]
    beside = f"; other text moves it by {np.mean(others):.0%}" if others else ""
    return [
        Finding(
            study="sensitivity",
            claim=f"top-r beyond {base} leaves H nearly unchanged (we say: {SAME_MATRIX:.0%})",
            where='appendix "Extended Ablations" (iv)',
            ours=f"H moves by {distance:.1%} in Frobenius norm{beside}",
            agrees=within(distance, 0, -math.inf, SAME_MATRIX),
        )
    ]


def _seed_spread(spread: float, count: int) -> Finding:
    error = spread / math.sqrt(2 * (count - 1))  # of a standard deviation from so many values
    return Finding(
        study="sensitivity",
        claim=f"perplexity 13.11 ± 0.22 over seeds, a spread of {SEED_SPREAD:.1%}",
        where='table "seedvar"',
        ours=f"{spread:.1%} ± {error:.1%} over {count} draws of text",
        agrees=within(spread, error, -math.inf, SEED_SPREAD),
    )


def _seed_overlap(rows: Table) -> Finding:
    overlaps = column([row for row in rows if not row["is_base"]], "overlap")
    many = len(overlaps) > 1
    error = float(overlaps.std(ddof=1) / math.sqrt(len(overlaps))) if many else math.nan
    shown = f" ± {error:.0%}" if many else ""
    return Finding(
        study="sensitivity",
        claim=f"the selection is not an artifact of the draw (we say: {SAME_PLAN:.0%} overlap)",
        where=SENSITIVITY,
        ours=f"plans of other draws share {overlaps.mean():.0%}{shown} of their units",
        agrees=within(float(overlaps.mean()), error, SAME_PLAN, math.inf),
    )


def _source(rows: Table, spread: float) -> Finding:
    base = next(row for row in rows if row["is_base"])
    others = [row for row in rows if not row["is_base"]]
    worst = max(others, key=lambda row: abs(row["perplexity"] - base["perplexity"]))
    change, error = worst["perplexity"] / base["perplexity"] - 1, math.sqrt(2) * spread
    return Finding(
        study="sensitivity",
        claim=f"another calibration source changes perplexity by {SOURCE_CHANGE:.1%}",
        where=SENSITIVITY,
        ours=(
            f"{worst['value']}: {change:+.1%} ± {error:.1%} (KL {worst['difference']:+.3f} ± "
            f"{worst['difference_error']:.3f} nats per token, paired)"
        ),
        agrees=within(abs(change), error, -math.inf, SOURCE_CHANGE),
    )


def preview_findings(table: Table) -> list[Finding]:
    """From `measure_infinitesimal`: plans of a preview, per lambda, at the largest ratio.

    Rows on which greedy stalled are omitted. The paired error is that of the held-out rows
    and, where the study made draws, of the text that both were built on. Other random signs of the
    probes would have made other plans.
    """
    measured = [row for row in table if row["difference"] is not None]
    found = []
    for strength in dict.fromkeys(row["interaction_strength"] for row in measured):
        row = max(pick(measured, interaction_strength=strength), key=lambda r: r["requested_ratio"])
        found.append(
            Finding(
                study="preview",
                claim=(
                    "finite ablations stand in for derivatives (here: their plans cost less than "
                    "those of derivatives)"
                ),
                where="Introduction",
                ours=(
                    f"{row['requested_ratio']:.0%}, lambda {strength:g}: KL of the preview's plan "
                    f"{row['difference']:+.3f} ± {row['difference_error']:.3f} nats per token, "
                    f"paired, of these two builds{covered(row, 'difference')}"
                ),
                agrees=judged_column(row, "difference", *ABOVE),
            )
        )
    return found
