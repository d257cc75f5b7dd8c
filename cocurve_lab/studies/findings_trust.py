"""What the paper says of trusting the edges, beside what the tables of the studies show.

One function per study. Verdicts go by two standard errors, so the same cell says other things of
another model. Where a claim is about several plans, one clear failure is enough against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from scipy.stats import rankdata

from ..choosing import RELEASED
from .choices import strength_summary
from .fidelity import ACROSS, POOL, sequence_values
from .fidelity_summary import correlations, fidelity_summary, resampled_means
from .findings import Finding, Verdict, every, within
from .saturation import PAIRS, saturation_summary
from .tables import Row, Table, column, pick
from .views import plus_minus

FIDELITY = 'App. "Surrogate Fidelity"'
TRUST = 'Section "A trust-region view"'
TRUST_APPENDIX = 'App. "Trust-Region View"'
NEAR = 0.1  # a prediction that is right to second order: measured / predicted this close to 1
TIMES = 2.0  # a prediction of a plan's size is called accurate within this factor
ABOVE, BELOW = (0.0, math.inf), (-math.inf, 0.0)


def judged(value: float | None, error: float | None, low: float, high: float) -> Verdict:
    """`within`; None where value or error is unknown."""
    if value is None or error is None or not math.isfinite(value) or not math.isfinite(error):
        return None
    return within(value, error, low, high)


def percent(ratio: float) -> str:
    return f"{ratio:.0%}"


# Does the prediction hold -----------------------------------------------------------------------


def single_unit_findings(table: Table) -> list[Finding]:
    """Of `single_unit_fidelity`: the median of measured / predicted, its error over units."""
    ratios = column(table, "ratio").astype(float)
    ratios = ratios[np.isfinite(ratios)]
    middle, error = None, None
    if len(ratios) > 1:
        draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        middle, error = float(np.median(ratios)), float(np.median(draws, axis=1).std(ddof=1))
    away = float((np.abs(ratios - 1) > NEAR).mean()) if len(ratios) else math.nan
    return [
        Finding(
            "single units",
            f"½ H_uu is the KL of removing u alone, to second order (here: within {NEAR:.0%})",
            'Prop. "Fisher quadratic"',
            f"median measured / predicted {plus_minus(middle, error)}; {away:.0%} of "
            f"{len(ratios)} units are off by more than {NEAR:.0%}",
            judged(middle, error, 1 - NEAR, 1 + NEAR),
        )
    ]


def fidelity_findings(table: Table, draws: int = 2000) -> list[Finding]:
    """Of `fidelity_study`: order and size across ratios, order within one budget, the gap."""
    rows = {(r["group"], r["statistic"]): r for r in fidelity_summary(table, draws)}
    full, inf = f"{ACROSS}, lambda 1", math.inf
    asked = [
        (full, "spearman", "across ratios predicted and measured rise together: Spearman 1.00", 1),
        (full, "pearson", "across ratios Pearson is 0.95", 0.95),
        (POOL, "spearman", "plans of one budget are ranked: Spearman 0.81", 0.81),
        (
            POOL,
            "random over structured",
            "random plans of that budget cost far more: about 3 times",
            3,
        ),
    ]
    found = []
    for group, name, claim, least in asked:
        row, rounding = rows.get((group, name)), 0.005 if least <= 1 else 0.5
        if row is not None:
            found.append(_statistic("fidelity", claim, row, least - rounding, inf))
    gap = rows.get((full, "gap exponent in units"))
    if gap is not None:
        claim = "the gap widens super-linearly, at most as the cube of the units removed"
        found.append(_statistic("fidelity", f"{claim} (exponent 1 to 3)", gap, 1, 3))
    ratio = rows.get((POOL, "median_ratio"))
    if ratio is not None:
        claim = f"the joint prediction ½ sᵀHs is accurate (here: within a factor of {TIMES:g})"
        found.append(_statistic("fidelity", claim, ratio, 1 / TIMES, TIMES))
    return [*found, *_without_edges(table, draws)]


def _statistic(study: str, claim: str, row: Row, low: float, high: float) -> Finding:
    errors = [e for e in (row["standard_error"], row["fit_error"]) if e is not None]
    error = math.hypot(*errors) if errors else None
    ours = f"{row['statistic']} {plus_minus(row['value'], error)} ({row['points']} points)"
    return Finding(study, claim, FIDELITY, ours, judged(row["value"], error, low, high))


def _without_edges(table: Table, draws: int) -> list[Finding]:
    """Whether ½ sᵀHs orders the pool better than its diagonal alone; paired over draws of text."""
    pool = pick(table, group=POOL)
    if len(pool) < 3:
        return []
    measured = rankdata(resampled_means(sequence_values(pool), draws, 0), axis=1)
    full, alone = (
        correlations(rankdata(column(pool, name)), measured) for name in ("predicted", "diagonal")
    )
    gain = (full - alone)[np.isfinite(full - alone)]
    error = float(gain[1:].std(ddof=1)) if len(gain) > 2 else None
    value = float(gain[0]) if len(gain) else None
    return [
        Finding(
            "fidelity",
            "the order within a budget comes from co-pruning, not from the units alone",
            FIDELITY,
            f"Spearman {full[0]:.3f} with edges, {alone[0]:.3f} with the diagonal alone: "
            f"{plus_minus(value, error)} gained",
            judged(value, error, *ABOVE),
        )
    ]


def saturation_findings(table: Table, draws: int = 2000) -> list[Finding]:
    """Of `pair_saturation`: the factor of a pair, and whether H_uv has the interaction's sign."""
    rows = {(r["group"], r["statistic"]): r for r in saturation_summary(table, draws)}
    factor = rows[PAIRS[0], "median factor"]
    claim = "two losses saturate: the pair costs 0.92 of the sum, below 1"
    found = [_statistic("pairs", claim, factor, 0, 1)]
    both = "strongest, both signs"
    sign, chance = rows.get((both, "sign agreement")), rows.get((both, "agreement by chance"))
    if sign is not None and chance is not None and sign["value"] is not None:
        gain = sign["value"] - chance["value"]
        found.append(
            Finding(
                "pairs",
                "the sign of H_uv says whether a pair is worse or better than the sum",
                "eq. (quadratic)",
                f"{sign['value']:.0%} of {sign['points']} strongest pairs, "
                f"{chance['value']:.0%} by chance: {plus_minus(gain, sign['standard_error'])}",
                judged(gain, sign["standard_error"], *ABOVE),
            )
        )
    return found


# Which lambda -----------------------------------------------------------------------------------


def strength_findings(table: Table) -> list[Finding]:
    """Of `strength_study`: what edges bring at each ratio, the floor, the gate, and b/E."""
    rows = [row for row in strength_summary(table) if row["edge_benefit"] is not None]
    found = []
    for row in rows:
        benefit, error = row["edge_benefit"], row["edge_benefit_error"]
        ours = f"KL(λ 0) - KL(λ 1) = {plus_minus(benefit, error)} nats per token"
        claim = f"at {percent(row['requested_ratio'])} the edges help: λ = 1 costs less than λ = 0"
        where = 'Section "Ablations: the edge term is decisive"'
        found.append(Finding("lambda", claim, where, ours, judged(benefit, error, *ABOVE)))
    agree = [_gate_agrees(row) for row in rows]
    told = ", ".join(f"{percent(r['requested_ratio'])}: {plus_minus(r['gate'])}" for r in rows)
    claim = "the redundancy gate tells from H alone whether edges help"
    found.append(Finding("gate", claim, 'App. "Scope"', f"recommended λ, {told}", every(agree)))
    claims: list[tuple[str, str, Callable[[Row], Verdict], str]] = [
        (
            "λ = 0 is a floor: what is chosen on held-out text is never worse",
            TRUST,
            lambda r: judged(r["lambda_0_behind"], r["lambda_0_behind_error"], *ABOVE),
            "lambda_0_behind",
        ),
        (
            "the edge mass E is positive",
            TRUST_APPENDIX,
            lambda r: bool(r["edge_mass"] > 0),
            "edge_mass",
        ),
        (
            "the remainder b is not negative",
            TRUST_APPENDIX,
            lambda r: judged(r["remainder"], r["error_lambda_1"], *ABOVE),
            "remainder",
        ),
        (
            "1 - b/E is a λ between 0 and 1",
            "eq. (lambdastar)",
            lambda r: judged(r["printed"], r["fitting_error"], 0, 1),
            "printed",
        ),
    ]
    found += [
        Finding("lambda", claim, where, _by_ratio(rows, name), every(map(judge, rows)))
        for claim, where, judge, name in claims
    ]
    return [*found, *_walk(table)]


def _gate_agrees(row: Row) -> Verdict:
    helps = judged(row["edge_benefit"], row["edge_benefit_error"], *ABOVE)
    return None if helps is None or row["gate"] is None else helps == (row["gate"] > 0)


def _by_ratio(rows: Table, name: str) -> str:
    return ", ".join(f"{percent(r['requested_ratio'])}: {plus_minus(r[name])}" for r in rows)


def _walk(table: Table) -> list[Finding]:
    """The best lambda by ratio, where plans within two errors of the winner count as best too."""
    spans = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in table):
        raced = pick(table, requested_ratio=ratio, role="candidate", stopped_early=False)
        tied = [r for r in raced if r["difference"] <= 2 * r["difference_error"]]
        spans.append((ratio, min(r["start"] for r in tied), max(r["stop"] for r in tied)))
    ours = ", ".join(f"{percent(ratio)}: {low:.3g} to {high:.3g}" for ratio, low, high in spans)
    steps = [
        # the next range lies below, above, or the two meet
        True if after[2] < before[1] else (False if after[1] > before[2] else None)
        for before, after in pairwise(spans)
    ]
    low, high = min(RELEASED.values()), max(RELEASED.values())
    twenty = [span for span in spans if math.isclose(span[0], 0.2)]
    found = [Finding("lambda", "the best λ falls with the ratio", TRUST, ours, every(steps))]
    for _, start, stop in twenty:
        apart = start > high or stop < low
        inside = low <= start and stop <= high
        claim = f"at 20 % λ is {low:.2f} to {high:.2f}"
        verdict = False if apart else (True if inside else None)
        ours = f"as good as the best: {start:.3g} to {stop:.3g}"
        found.append(Finding("lambda", claim, "the authors' release, 3 models", ours, verdict))
    return found
