"""Claims about bridges, edges and the structure of H, beside the tables of the studies."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binomtest

from cocurve_lab.measuring.results import mean_and_error

from ..findings import (
    BELOW,
    Claim,
    Finding,
    Measured,
    column_of,
    nearest,
    number,
    percent,
)
from ..tables import Row, Rows, Table, brief, column, pick, plus_minus

_MECHANISM = 'appendix "Mechanism Analysis"'
_ABLATIONS, _KINDS, _CAUSAL = "Table ablation-full", "Table ablation-edge", "Table bridge-causal"
_BOTH, _SOLVER = f"{_ABLATIONS}, {_KINDS}", 'appendix "Solver Guarantees"'
_SIGNS = 'appendix "Extended Ablations", (iii)'
_WHY = 'section "Why Cross-Module Edges Matter"'
HALF, PAR = (0.5, math.inf), (0.5, 2.0)


# Bridges ------------------------------------------------------------------------------------------
COUNT = Claim(
    "bridges",
    "87 of 768 units (11 %) are bridges, without saying where low and high begin",
    _MECHANISM,
)
DECOUPLED = Claim(
    "bridges",
    "saliency and connectivity are decoupled, correlation 0.63",
    _MECHANISM,
    (-1, 0.63),
)
PROTECTED = Claim("bridges", "diagonal pruning removes bridges that the edges protect", _MECHANISM)
COMPARABLE = Claim(
    "bridges",
    "the strongest edge of its example is comparable to its saliency (0.7 of it)",
    _MECHANISM,
    HALF,
)
OTHER_MODULE = Claim(
    "bridges", "the strongest edges of its example run to the other module", _MECHANISM
)


def bridge_findings(table: Table, edges: Table) -> list[Finding]:
    """Judge claims about the number of bridges, their place in plans, and their strongest edges.

    Args:
        table: from `bridge_table`, with the median/median pair of thresholds.
        edges: from `bridge_edges`.
    """
    rows = pick(table)
    middle = (pick(table, saliency_quantile=0.5, connectivity_quantile=0.5) or rows)[0]
    shares = column(table, "bridges") / column(table, "units")
    reached = bool(shares.min() <= 87 / 768 <= shares.max())
    ours = f"{middle['bridges']} of {middle['units']} at median and median, "
    ours += f"{shares.min():.0%} to {shares.max():.0%} by threshold"
    found = [COUNT.given(ours, None if reached else False)]
    value, error = middle["correlation"], number(middle["correlation_error"])
    words = f"{value:.2f} ± {error:.2f}, of ranks {middle['rank_correlation']:.2f}"
    found.append(DECOUPLED.on(Measured(value, error, words=words)))
    diagonal, edge = middle["pruned_by_diagonal"], middle["pruned_by_edges"]
    more = sum(row["pruned_by_diagonal"] > row["pruned_by_edges"] for row in rows)
    fewer = sum(row["pruned_by_diagonal"] < row["pruned_by_edges"] for row in rows)
    ours = f"λ = 0 removes {diagonal} of {middle['bridges']}, λ = 1 removes {edge}; over all "
    ours += f"thresholds λ = 0 removes more {more} times, fewer {fewer} times"
    # as if no bridge were in both plans, the most that can be: errs on the side of doubt
    found.append(PROTECTED.given(ours, more_than_half(diagonal, diagonal + edge)))
    strongest = pick(edges, rank=1)
    size = np.array([row["to_saliency"] for row in strongest if row["to_saliency"] is not None])
    mean, error = mean_and_error(size) if len(size) else (math.nan, math.nan)
    words = f"{mean:.2f} ± {error:.2f} of the saliency, mean over {len(size)} bridges"
    found.append(COMPARABLE.on(Measured(mean, error, words=words)))
    cross, count = sum(row["cross_module"] for row in strongest), len(strongest)
    ours = f"{cross} of {count} strongest edges do"
    return [*found, OTHER_MODULE.given(ours, more_than_half(cross, count))]


def more_than_half(some: int, of: int) -> bool | None:
    """Tell whether some are more than half, by a sign test; None where chance may decide."""
    return 2 * some > of if of and binomtest(some, of).pvalue < 0.05 else None


# Causal test --------------------------------------------------------------------------------------
DAMAGE = {  # outcome, family -> the claim
    ("accuracy", "all"): Claim(
        "causal",
        "bridges forced out instead of controls cost 10.5 points of MMLU (all questions here)",
        _CAUSAL,
        BELOW,
    ),
    ("accuracy", "code"): Claim(
        "causal",
        "bridges forced out instead of controls cost all of code, 0.075 of pass@1",
        _CAUSAL,
        BELOW,
    ),
    ("perplexity", "all"): Claim(
        "causal", "perplexity moves the other way, bridge - control = -2.1", _CAUSAL, BELOW
    ),
    ("kl", "all"): Claim(
        "causal", "connectivity, not saliency, drives the damage (it gives no KL)", _CAUSAL
    ),
}


def causal_findings(table: Table) -> list[Finding]:
    """Judge bridge - control, at every pair of thresholds; from `causal_study`."""
    found = []
    for (outcome, family), claim in DAMAGE.items():
        measured = []
        for row in pick(table, outcome=outcome, family=family):
            # if no question is answered differently, that says little about the next one
            error = row["difference_error"] or None
            words = plus_minus(row["difference"], row["difference_error"])
            words += f" ({row['pairs']} pairs)"
            measured.append(Measured(row["difference"], error, words=words))
        found.append(claim.on(*measured, ours=f"{outcome}: {{}}"))
    return found


# Edge variants ------------------------------------------------------------------------------------
def _edges(claim: str, where: str, share: float | None = None) -> Claim:
    return (
        Claim("edges", claim, where)
        if share is None
        else Claim("edges", claim, where, (-share, share))
    )


# the variant, and the claim: it is worse than the method
WORSE = (
    (
        "diagonal",
        _edges("full H beats the diagonal: 12.91 to 13.08, on Mistral 8.10 to 13.26", _BOTH),
    ),
    (
        "within module",
        _edges("without cross edges it is worse: 15.01 to 12.91", _ABLATIONS),
    ),
    ("head-only", _edges("head-only pruning is worse: 1526 to 8.10", _KINDS)),
    ("FFN-only", _edges("FFN-only pruning is worse: 9.10 to 8.10", _KINDS)),
    (
        "plain",
        _edges("choosing per cost is the well-behaved rule (no number)", _SOLVER),
    ),
)
# variants, and the claim about each: its perplexity is more than twice that of the method
COLLAPSE = (
    ("cross block, no diagonal", "ffn block, no diagonal"),
    Claim(
        "edges",
        "one isolated block without the diagonal collapses the model (2531, 924)",
        _ABLATIONS,
        (2.0, math.inf),
    ),
)
# the variant, and the claim: it is as good, within a share of the method's perplexity
SAME = (
    (
        "within layer",
        _edges("same-layer edges alone stay within noise (12.21 to 12.91)", _ABLATIONS, 0.1),
    ),
    ("adjacent layers", _edges("adjacent layers alone too (11.84 to 12.91)", _ABLATIONS, 0.1)),
    (
        "clipped",
        _edges("clipped edges give the same perplexity as signed ones", _SIGNS, 0.001),
    ),
    (
        "absolute",
        _edges("absolute edges give the same perplexity as signed ones", _SIGNS, 0.001),
    ),
)


def edge_findings(table: Table) -> list[Finding]:
    """Judge claims of tables ablation-edge and ablation-full at the ratio nearest to 20 %.

    Args:
        table: from `edge_study`. Perplexity is that of the text at hand, a share is of the
            method's. Errors are over rows and draws of H where the study made draws.
    """
    rows = {row["variant"]: row for row in nearest(pick(table)) if row["measured"] is not None}
    found = []
    for variant, claim in WORSE:
        measured = [column_of(rows[variant], "perplexity_difference")] if variant in rows else []
        found.append(claim.on(*measured, ours=f"perplexity {variant} - full H: {{}}"))
    method = rows["full H"]["perplexity"]
    names, claim = COLLAPSE
    measured = [_scaled(rows[name], method, 1.0, name) for name in names if name in rows]
    found.append(claim.on(*measured, ours="perplexity over that of full H: {}"))
    for variant, claim in SAME:
        measured = [_scaled(rows[variant], method, 0.0, variant)] if variant in rows else []
        found.append(claim.on(*measured, ours="change as a share of the perplexity of full H: {}"))
    return found


def _scaled(row: Row, scale: float, base: float, name: str) -> Measured:
    """Return base + the change of perplexity as a share of the method's."""
    value = base + row["perplexity_difference"] / scale
    error = number(row["perplexity_difference_error"]) / scale
    degrees = row.get("perplexity_difference_degrees", math.inf)
    return Measured(value, error, degrees, f"{name} {value:.3g} ± {error:.2g}")


# Structure of H -----------------------------------------------------------------------------------
ON_A_PAR = Claim(
    "blocks",
    "cross-module edges (mean |ρ| 0.086) are on a par with those inside (0.10, 0.07)",
    _WHY,
    PAR,
)
LOW = Claim(
    "blocks",
    "FFN redundancy below 0.10, where it says that edges help (its 8B: 0.074)",
    "Table ffncorr",
    (-math.inf, 0.10),
)
HEAVY = Claim("budgets", "plans are {heavy}-heavy in {half} layers", _MECHANISM)


def structure_findings(blocks: Table, budgets: Table) -> list[Finding]:
    """Judge the mean correlation of blocks, and budgets at the largest lambda.

    Args:
        blocks: from `block_table`.
        budgets: from `budget_table`.
    """
    whole = {row["block"]: row for row in pick(blocks, reach="all")}
    findings = _budget_findings(pick(budgets))
    if len(whole) < 3:
        return findings
    mean = {  # without sampling noise, where that is known
        block: row["mean_absolute"] if row["corrected"] is None else row["corrected"]
        for block, row in whole.items()
    }
    error = {block: number(row["mean_absolute_error"]) for block, row in whole.items()}
    inside = mean["attention"] + mean["ffn"]
    share = 2 * mean["cross"] / inside
    parts = math.hypot(error["attention"], error["ffn"]) / inside
    spread = share * math.hypot(error["cross"] / mean["cross"], parts)
    listed = {block: f"{mean[block]:.3f} ± {error[block]:.3f}" for block in mean}
    words = ", ".join(f"{block} {value}" for block, value in listed.items())
    words += f": cross over inside {share:.2f} ± {spread:.2f}"
    noisy = f"{listed['ffn']}, with sampling noise {whole['ffn']['mean_absolute']:.3f}"
    return [
        ON_A_PAR.on(Measured(share, spread, words=words)),
        LOW.on(Measured(mean["ffn"], error["ffn"], words=noisy)),
        *findings,
    ]


def _budget_findings(rows: Rows) -> list[Finding]:
    strongest = max((row["interaction_strength"] for row in rows), default=0.0)
    rows = pick(rows, interaction_strength=strongest)
    middle = (max((row["layer"] for row in rows), default=0) + 1) / 2
    findings = []
    for half, heavy, light in (("early", "ffn", "attention"), ("late", "attention", "ffn")):
        mine = [row for row in rows if (row["layer"] < middle) == (half == "early")]
        some = {kind: pick(mine, kind=kind) for kind in (heavy, light)}
        if not all(some.values()):
            continue
        share = {kind: float(np.mean(column(part, "share"))) for kind, part in some.items()}
        errors = [np.mean([number(row["share_error"]) for row in p]) for p in some.values()]
        error = float(sum(errors))
        words = f"removed there at λ = {strongest:g}: "
        words += ", ".join(f"{kind} {value:.1%}" for kind, value in share.items())
        words += f", difference ± at most {error:.1%}"
        gap = Measured(share[heavy] - share[light], error or None, words=words)
        name = "FFN" if heavy == "ffn" else heavy
        findings.append(HEAVY.on(gap, heavy=name, half=half))
    return findings


# Propositions -------------------------------------------------------------------------------------
GRAM = Claim(
    "propositions", "H is a Gram matrix: no negative eigenvalue", 'Prop. "Gram equivalence"'
)
BALANCE = Claim(
    "propositions",
    "edges over diagonal are about 2 |S| |ρ|",
    'Prop. "Edge-to-diagonal balance"',
    PAR,
)
STATISTIC = Claim(
    "propositions",
    "the weighted mean correlation of the diagonal's plan, by which it errs, is the statistic of "
    "the gate",
    'Prop. "The diagonal omission"',
    PAR,
)
OVERSHOOT = Claim(
    "propositions", "a plan overshoots its ratio by at most one unit", 'Prop. "Overshoot bound"'
)
FAR = Claim("propositions", "H is far from diagonal", "Fig. evidence", HALF)
POSITIVE = Claim("propositions", "edges in a plan are predominantly positive", _SIGNS, HALF)
DIFFERENT = Claim(
    "propositions",
    "where edges help, saliency is well differentiated (the model where they do not help has an "
    "FFN CV of 0.084)",
    'section "Scope of Applicability"',
    (0.084, math.inf),
)


def proposition_findings(table: Table) -> list[Finding]:
    """Judge the propositions of `proposition_table`; of plans those nearest to 20 %."""
    rows = {name: pick(table, quantity=name) for name in dict.fromkeys(column(table, "quantity"))}
    (gram,), over = rows["smallest eigenvalue over the largest"], rows["overshoot"]
    found = [
        GRAM.given(f"smallest over largest eigenvalue {brief(gram['value'], 2)}", gram["holds"])
    ]
    measured = [
        _ratio(row, f"{row['value']:.2f} for {row['reference']:.2f} (|S| = {row['units']})")
        for row in rows["edge over diagonal"]
    ]
    within = "{}; within a factor of 2 counts as about"
    found.append(BALANCE.on(*measured, ours=within))
    for row in nearest(rows["weighted mean correlation"]):
        words = f"{row['value']:.4f} ± {number(row['value_error']):.4f} at "
        words += f"{percent(row['requested_ratio'])}, FFN redundancy {row['reference']:.4f}"
        ours = "{}; within a factor of 2 counts as the same"
        found.append(STATISTIC.on(_ratio(row, words), ours=ours))
    most = max(over, key=lambda row: row["value"])
    ours = f"at most {most['value']:.2%}, a unit is {most['reference']:.2%} of the cost"
    found.append(OVERSHOOT.given(ours, all(row["holds"] for row in over)))
    for claim, name in (
        (FAR, "share of |H| off the diagonal"),
        (POSITIVE, "share of positive edges"),
        (DIFFERENT, "single-unit KL CV, FFN"),
    ):
        some = rows.get(name, [])
        for row in nearest(some) if name == "share of positive edges" else some:
            words = f"{name} {row['value']:.2f} ± {number(row['value_error']):.2f}"
            found.append(claim.on(Measured(row["value"], row["value_error"], words=words)))
    return found


def _ratio(row: Row, words: str) -> Measured:
    """Return a value over its reference; the reference is taken as exact."""
    error = None if row["value_error"] is None else row["value_error"] / row["reference"]
    return Measured(row["value"] / row["reference"], error, words=words)
