"""Findings about edge variants, the structure of H and the propositions: one per claim.

A verdict needs two standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .findings import Finding, within
from .findings_bridges import below_zero, combined, number
from .tables import Row, Table, pick

PAPER_RATIO = 0.2  # of its ablations
_MECHANISM = 'appendix "Mechanism Analysis"'
_ABLATIONS, _KINDS = "Table ablation-full", "Table ablation-edge"
_BOTH, _SOLVER = f"{_ABLATIONS}, {_KINDS}", 'appendix "Solver Guarantees"'
_SIGNS = 'appendix "Extended Ablations", (iii)'
_BELOW_ZERO = float(np.nextafter(0, -1))


# Edge variants ------------------------------------------------------------------------------------


def edge_findings(table: Table) -> list[Finding]:
    """What edges buy, against tables ablation-edge and ablation-full.

    Args:
        table: of `edge_study`. Verdicts are at the ratio nearest 20 %, the paper's; the text gives
            every ratio. Perplexity is that of the text at hand, a share is of the method's.
    """
    ratios = list(dict.fromkeys(row["requested_ratio"] for row in table))
    nearest = min(ratios, key=lambda ratio: abs(ratio - PAPER_RATIO))
    worse = (
        (_BOTH, "full H beats the diagonal: 12.91 to 13.08, on Mistral 8.10 to 13.26", "diagonal"),
        (_ABLATIONS, "without cross edges it is worse: 15.01 to 12.91", "within module"),
        (
            _ABLATIONS,
            "and worse than without any edge: 15.01 to 13.08",
            "within module",
            "diagonal",
        ),
        (_KINDS, "head-only pruning is worse: 1526 to 8.10", "head-only"),
        (_KINDS, "FFN-only pruning is worse: 9.10 to 8.10", "FFN-only"),
        (_SOLVER, "choosing per cost is the well-behaved rule (no number)", "plain"),
    )
    findings = [
        Finding("edges", claim, where, *_worse(table, nearest, *variants))
        for where, claim, *variants in worse
    ]
    blocks = ("cross block", "ffn block")
    bare = [f"{block}, no diagonal" for block in blocks]
    same = (
        ("same-layer edges alone stay within noise (12.21 to 12.91)", "within layer", 0.1),
        ("adjacent layers alone too (11.84 to 12.91)", "adjacent layers", 0.1),
        ("clipped edges give the same perplexity as signed ones", "clipped", 0.001),
        ("absolute edges give the same perplexity as signed ones", "absolute", 0.001),
    )
    return [
        *findings,
        Finding(
            "edges",
            "one isolated block without the diagonal collapses the model (2531, 924)",
            _ABLATIONS,
            *_collapse(table, nearest, bare),
        ),
        Finding(
            "edges",
            "an isolated block of edges mis-ranks (its diagonal was zeroed too; here it is kept)",
            _ABLATIONS,
            *_collapse(table, nearest, blocks),
        ),
        *(
            Finding("edges", claim, _ABLATIONS, *_same(table, nearest, variant, margin))
            for claim, variant, margin in same
        ),
    ]


def _variant(table: Table, ratio: float, name: str) -> Row | None:
    """A measured row; None where that variant has no plan or was not asked for."""
    rows = pick(table, requested_ratio=ratio, variant=name)
    return rows[0] if rows and rows[0]["measured"] is not None else None


def _by_ratio(table: Table, say: str, variant: str, other: str = "") -> str:
    parts = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in table):
        value, error = _change(table, ratio, variant, other)
        known = f"{value:+.3g} ± {error:.2g}" if math.isfinite(value) else "no plan"
        parts.append(f"{known} at {ratio:.0%}")
    return f"{say} " + ", ".join(parts)


def _change(table: Table, ratio: float, variant: str, other: str = "") -> tuple[float, float]:
    """Perplexity of a variant less that of another (else the method), and its paired error.

    Between two variants the error is the sum of theirs against the method, the most it can be.
    """
    rows = [_variant(table, ratio, name) for name in (variant, *([other] if other else []))]
    if any(row is None for row in rows):
        return math.nan, math.nan
    values = [row["perplexity_difference"] for row in rows if row]
    errors = [number(row["perplexity_difference_error"]) for row in rows if row]
    return values[0] - sum(values[1:]), sum(errors)


def _worse(table: Table, ratio: float, variant: str, other: str = "") -> tuple[str, bool | None]:
    value, error = _change(table, ratio, variant, other)
    against = f"perplexity {variant} - {other or 'full H'}:"
    # equal plans differ by exactly 0 ± 0: not worse
    verdict = within(-value, error, -math.inf, _BELOW_ZERO)
    return _by_ratio(table, against, variant, other), verdict


def _same(table: Table, ratio: float, variant: str, margin: float) -> tuple[str, bool | None]:
    value, error = _change(table, ratio, variant)
    method = _variant(table, ratio, "full H")
    scale = method["perplexity"] if method else math.nan
    verdict = within(value / scale, error / scale, -margin, margin)
    return _by_ratio(
        table, f"within {margin:.1%}? perplexity {variant} - full H:", variant
    ), verdict


def _collapse(table: Table, ratio: float, variants: Sequence[str]) -> tuple[str, bool | None]:
    """Collapse here: more than twice the perplexity of the method."""
    method = _variant(table, ratio, "full H")
    verdicts, parts = [], []
    for name in variants:
        row = _variant(table, ratio, name)
        if row is None or method is None:
            continue
        scale = method["perplexity"]
        error = (row["perplexity_difference_error"] or 0.0) / scale
        verdicts.append(within(row["perplexity"] / scale, error, 2, math.inf))
        parts.append(f"{name} {row['perplexity'] / scale:.2f}")
    text = f"perplexity over that of full H at {ratio:.0%}: {', '.join(parts) or 'no plan'}"
    return text, combined(verdicts)


# Structure of H -----------------------------------------------------------------------------------


def structure_findings(blocks: Table, budgets: Table) -> list[Finding]:
    """Block means of the correlation, and where the plan of the largest lambda spends its budget.

    Args:
        blocks: of `block_table`.
        budgets: of `budget_table`.
    """
    whole = {row["block"]: row for row in pick(blocks, reach="all")}
    findings = []
    if len(whole) == 3:
        mean = {block: row["mean_absolute"] for block, row in whole.items()}
        error = {block: number(row["mean_absolute_error"]) for block, row in whole.items()}
        inside = mean["attention"] + mean["ffn"]
        share = 2 * mean["cross"] / inside
        parts = math.hypot(error["attention"], error["ffn"]) / inside
        spread = share * math.hypot(error["cross"] / mean["cross"], parts)
        listed = ", ".join(f"{block} {mean[block]:.3f} ± {error[block]:.3f}" for block in mean)
        findings = [
            Finding(
                "blocks",
                "cross-module edges (mean |ρ| 0.086) are on a par with those inside (0.10, 0.07)",
                'section "Why Cross-Module Edges Matter"',
                f"{listed}: cross over inside {share:.2f} ± {spread:.2f}",
                within(share, spread, 0.5, 2),
            ),
            Finding(
                "blocks",
                "FFN redundancy below 0.10, where it says that edges help (its 8B: 0.074)",
                "Table ffncorr",
                f"{mean['ffn']:.3f} ± {error['ffn']:.3f}",
                within(mean["ffn"], error["ffn"], 0, 0.10),
            ),
        ]
    return findings + _budget_findings([row for row in budgets if not row["note"]])


def _budget_findings(rows: Table) -> list[Finding]:
    if not rows:
        return []
    strongest = max(row["interaction_strength"] for row in rows)
    rows = pick(rows, interaction_strength=strongest)
    middle = (max(row["layer"] for row in rows) + 1) / 2
    findings = []
    for half, heavy, light in (("early", "ffn", "attention"), ("late", "attention", "ffn")):
        mine = [row for row in rows if (row["layer"] < middle) == (half == "early")]
        share, error = {}, 0.0
        for kind in (heavy, light):
            some = pick(mine, kind=kind)
            share[kind] = float(np.mean([row["share"] for row in some])) if some else math.nan
            error += float(np.mean([number(row["error"]) for row in some])) if some else math.nan
        listed = ", ".join(f"{kind} {value:.1%}" for kind, value in share.items())
        findings.append(
            Finding(
                "budgets",
                f"plans are {heavy.upper() if heavy == 'ffn' else heavy}-heavy in {half} layers",
                _MECHANISM,
                f"removed there at λ = {strongest:g}: {listed}, difference ± at most {error:.1%}",
                below_zero(share[light] - share[heavy], error),
            )
        )
    return findings


def proposition_findings(table: Table) -> list[Finding]:
    """The paper's propositions, from `proposition_table`."""
    balance = [row for row in table if row["quantity"].endswith("the mean correlation")]
    over = pick(table, proposition="overshoot")
    gram = pick(table, proposition="gram")
    mass = pick(table, quantity="share of |H| off the diagonal")
    strongest = max((row["interaction_strength"] or 0.0 for row in table), default=0.0)
    positive = [
        row
        for row in pick(table, quantity="share of positive edges", interaction_strength=strongest)
        if row["ratio"] == min((r["ratio"] for r in over), key=lambda r: abs(r - PAPER_RATIO))
    ]
    spread = pick(table, quantity="single-unit KL CV, FFN")
    near = [_inside(row, 0.5 * row["reference"], 2 * row["reference"]) for row in balance]
    text = "; ".join(
        f"{row['value']:.2f} for {row['reference']:.2f} (|S| = {row['units']})" for row in balance
    )
    return [
        Finding(
            "propositions",
            "H is a Gram matrix: no negative eigenvalue",
            'Prop. "Gram equivalence"',
            f"smallest over largest eigenvalue {gram[0]['value']:.1e}",
            all(row["holds"] for row in gram),
        ),
        Finding(
            "propositions",
            "edges over diagonal are about 2 |S| |ρ|",
            'Prop. "Edge-to-diagonal balance"',
            f"{text}; within a factor of 2 counts as about",
            False if False in near else combined(near) if None not in near else None,
        ),
        Finding(
            "propositions",
            "a plan overshoots its ratio by at most one unit",
            'Prop. "Overshoot bound"',
            f"at most {max(row['value'] for row in over):.2%}, a unit is "
            f"{over[0]['reference']:.2%} of the cost",
            all(row["holds"] for row in over),
        ),
        *(_finding("H is far from diagonal", "Fig. evidence", row, 0.5) for row in mass),
        *(
            _finding("edges in a plan are predominantly positive", _SIGNS, row, 0.5)
            for row in positive
        ),
        *(
            _finding(
                "where edges help, saliency is well differentiated (the model where they do not "
                "help has an FFN CV of 0.084)",
                'section "Scope of Applicability"',
                row,
                0.084,
            )
            for row in spread
        ),
    ]


def _inside(row: Row, low: float, high: float) -> bool | None:
    return within(row["value"], number(row["standard_error"]), low, high)


def _finding(claim: str, where: str, row: Row, low: float) -> Finding:
    error = row["standard_error"]
    ours = f"{row['quantity']} {row['value']:.2f}" + ("" if error is None else f" ± {error:.2f}")
    return Finding("propositions", claim, where, ours, _inside(row, low, math.inf))
