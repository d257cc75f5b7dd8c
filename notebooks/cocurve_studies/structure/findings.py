"""Claims about bridges, edges and the structure of H, beside the tables of the studies.

A verdict needs two standard errors. `every` judges a claim that is tested several times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import binomtest

from cocurve_lab.measuring.results import mean_and_error

from ..claims import Claim, evaluate
from ..draws import carried
from ..findings import (
    ABOVE,
    BELOW,
    Finding,
    Judge,
    Verdict,
    covered,
    every,
    judged,
    judged_column,
    number,
    within,
)
from ..tables import Row, Rows, Table, brief, column, pick
from .edges import ACTIVATIONS

PAPER_RATIO = 0.2  # of its ablations

_MECHANISM = 'appendix "Mechanism Analysis"'
_ABLATIONS, _KINDS = "Table ablation-full", "Table ablation-edge"
_BOTH, _SOLVER = f"{_ABLATIONS}, {_KINDS}", 'appendix "Solver Guarantees"'
_SIGNS = 'appendix "Extended Ablations", (iii)'
_MASS, _POSITIVE = "share of |H| off the diagonal", "share of positive edges"
_WEIGHTED = "weighted mean correlation"  # of a plan


# Bridges ------------------------------------------------------------------------------------------
def bridge_findings(table: Table, edges: Table) -> list[Finding]:
    """Judge claims about the number of bridges, their place in plans, and their strongest edges.

    Args:
        table: from `bridge_table`, with the median/median pair of thresholds.
        edges: from `bridge_edges`.
    """
    study = "bridges"
    middle = (pick(table, saliency_quantile=0.5, connectivity_quantile=0.5) or pick(table))[0]
    shares = column(table, "bridges") / column(table, "units")
    reached = bool(shares.min() <= 87 / 768 <= shares.max())
    correlation, error = middle["correlation"], number(middle["correlation_error"])
    diagonal, edge = middle["pruned_by_diagonal"], middle["pruned_by_edges"]
    more = sum(row["pruned_by_diagonal"] > row["pruned_by_edges"] for row in pick(table))
    fewer = sum(row["pruned_by_diagonal"] < row["pruned_by_edges"] for row in pick(table))
    return [
        Finding(
            study,
            "87 of 768 units (11 %) are bridges, without saying where low and high begin",
            _MECHANISM,
            f"{middle['bridges']} of {middle['units']} at median and median, "
            f"{shares.min():.0%} to {shares.max():.0%} by threshold",
            None if reached else False,
        ),
        Finding(
            study,
            "saliency and connectivity are decoupled, correlation 0.63",
            _MECHANISM,
            f"{correlation:.2f} ± {error:.2f}, of ranks {middle['rank_correlation']:.2f}",
            within(correlation, error, -1, 0.63),
        ),
        Finding(
            study,
            "diagonal pruning removes bridges that the edges protect",
            _MECHANISM,
            f"λ = 0 removes {diagonal} of {middle['bridges']}, λ = 1 removes {edge}; over all "
            f"thresholds λ = 0 removes more {more} times, fewer {fewer} times",
            _removes_more(diagonal, edge),
        ),
        *_edge_findings(pick(edges, rank=1)),
    ]


def _removes_more(diagonal: int, edges: int) -> Verdict:
    """Tell which plan removes more of the bridges: a sign test on those that only one removes.

    As if none were in both plans, the most that can be: the test errs on the side of doubt.
    """
    both = diagonal + edges
    return diagonal > edges if both and binomtest(diagonal, both).pvalue < 0.05 else None


def _edge_findings(strongest: Rows) -> list[Finding]:
    """Judge claims about the strongest edge of each bridge."""
    size = np.array([row["to_saliency"] for row in strongest if row["to_saliency"] is not None])
    cross, count = sum(row["cross_module"] for row in strongest), len(strongest)
    mean, error = mean_and_error(size) if len(size) else (math.nan, math.nan)
    sure = count > 0 and binomtest(cross, count).pvalue < 0.05
    return [
        Finding(
            "bridges",
            "the strongest edge of its example is comparable to its saliency (0.7 of it)",
            _MECHANISM,
            f"{mean:.2f} ± {error:.2f} of the saliency, mean over {len(size)} bridges",
            within(mean, error, 0.5, math.inf),
        ),
        Finding(
            "bridges",
            "the strongest edges of its example run to the other module",
            _MECHANISM,
            f"{cross} of {count} strongest edges do",
            2 * cross > count if sure else None,
        ),
    ]


def below_zero(value: float, error: float, factor: float = 2.0) -> Verdict:
    """Tell whether a value is negative; None within its error, and where nothing varied at all.

    If no question is answered differently, that says little about the next question.
    """
    return judged(value, error or None, *BELOW, factor)


# Causal test --------------------------------------------------------------------------------------
_NO_ARMS, _CAUSAL = "no arms could be measured", "Table bridge-causal"


def _damage(
    claim: str,
    unit: str,
    more: str = "",
    nothing: str | None = _NO_ARMS,
    lab: bool = False,
    **rows: str,
) -> Claim:
    """Make a claim about the damage of the bridge arms: below 0 if they cost more (KL: above)."""
    return Claim(
        "causal",
        claim,
        _CAUSAL,
        f"{unit}: {{each}}{more}",
        "difference",
        ABOVE if rows["outcome"] == "kl" else BELOW,
        rows,
        error="error",
        each="{difference:+.3f}{shown} ({fill}, {pairs} pairs)",
        between="; ",
        nothing=nothing and nothing + more,
        lab=lab,
    )


_FORCED = "bridges forced out instead of controls cost {}".format
_MMLU = _FORCED("10.5 points of MMLU (all questions here; its greedy fill)")
_CODE = _FORCED("all of code, 0.075 of pass@1 (greedy fill)")
_OTHER = _FORCED("accuracy with another fill too (not tried in the paper)")
_PERPLEXITY = "perplexity moves the other way, bridge - control = -2.1"
_CONNECTIVITY = "connectivity, not saliency, drives the damage (it gives no KL)"
DAMAGE = (
    _damage(_MMLU, "accuracy", nothing=None, outcome="accuracy", family="all", by="greedy"),
    _damage(_CODE, "accuracy", nothing=None, outcome="accuracy", family="code", by="greedy"),
    _damage(
        _OTHER,
        "accuracy",
        nothing=None,
        lab=True,
        outcome="accuracy",
        family="all",
        by="another",
    ),
    _damage(_PERPLEXITY, "perplexity", outcome="perplexity", family="all", by="greedy"),
    _damage(
        _CONNECTIVITY,
        "KL in nats per token",
        "; H predicts {predicted}",
        outcome="kl",
        family="all",
        by="greedy",
    ),
)


def causal_findings(table: Table) -> list[Finding]:
    """Claims of table bridge-causal about bridge - control: its greedy fill, and every other fill.

    Args:
        table: from `causal_study`. Errors here count the spread over seeds too.
    """
    rows = []
    for row in pick(table):
        if row["seed"] is None and row["outcome"] is not None:
            spread = row["seed_spread"] or 0.0  # which seeds were drawn
            error = math.hypot(number(row["difference_error"]), spread / math.sqrt(row["seeds"]))
            shown = f" ± {error:.3f}" if math.isfinite(error) else " (error unknown)"
            by = "greedy" if row["fill"] == "greedy" else "another"
            # if no question is answered differently, that says little about the next one
            rows.append(row | {"error": error or None, "shown": shown, "by": by})
    kl = pick(rows, outcome="kl", family="all")
    values = [row["predicted_difference"] for row in kl]
    predicted = f"{min(values):+.4f} to {max(values):+.4f}" if values else "nothing"
    return evaluate(DAMAGE, rows, predicted=predicted)


# Edge variants ------------------------------------------------------------------------------------
# claim, where, the variant that is worse, and what it is compared with, if not with the method
WORSE = (
    ("full H beats the diagonal: 12.91 to 13.08, on Mistral 8.10 to 13.26", _BOTH, "diagonal"),
    ("without cross edges it is worse: 15.01 to 12.91", _ABLATIONS, "within module"),
    (
        "and worse than without any edge: 15.01 to 13.08",
        _ABLATIONS,
        "within module",
        "diagonal",
    ),
    ("head-only pruning is worse: 1526 to 8.10", _KINDS, "head-only"),
    ("FFN-only pruning is worse: 9.10 to 8.10", _KINDS, "FFN-only"),
    ("choosing per cost is the well-behaved rule (no number)", _SOLVER, "plain"),
)
COLLAPSE = (  # claim, variants, and whether it is the lab's
    (
        "one isolated block without the diagonal collapses the model (2531, 924)",
        ("cross block, no diagonal", "ffn block, no diagonal"),
        False,
    ),
    (
        "an isolated block of edges mis-ranks (its diagonal was zeroed too; here it is kept)",
        ("cross block", "ffn block"),
        True,
    ),
)
SAME = (  # claim, variant, and the share of the method's perplexity that counts as the same
    ("same-layer edges alone stay within noise (12.21 to 12.91)", "within layer", 0.1),
    ("adjacent layers alone too (11.84 to 12.91)", "adjacent layers", 0.1),
    ("clipped edges give the same perplexity as signed ones", "clipped", 0.001),
    ("absolute edges give the same perplexity as signed ones", "absolute", 0.001),
)


def edge_findings(table: Table) -> list[Finding]:
    """Judge claims of tables ablation-edge and ablation-full about what the edges are worth.

    Args:
        table: from `edge_study`. Verdicts are at the ratio nearest 20 %, the paper's; the text
            gives every ratio. Perplexity is that of the text at hand, a share is of the method's.
            Errors are over rows and draws of H where the study made draws, else over rows alone.
    """
    ratios = dict.fromkeys(row["requested_ratio"] for row in pick(table))
    nearest = min(ratios, key=lambda ratio: abs(ratio - PAPER_RATIO))
    found: list[tuple[str, str, tuple[str, Verdict], bool]] = [
        *((claim, where, _moved(table, nearest, *names), False) for claim, where, *names in WORSE),
        *(
            (claim, _ABLATIONS, _collapse(table, nearest, names), lab)
            for claim, names, lab in COLLAPSE
        ),
        *(
            (claim, _ABLATIONS, _moved(table, nearest, name, margin=margin), False)
            for claim, name, margin in SAME
        ),
    ]
    return [Finding("edges", claim, where, *said, lab) for claim, where, said, lab in found]


_HEURISTIC = 'section "From heuristic edges to derived edges"'
_ACTIVATIONS = (
    Claim(
        "activations",
        "correlation of activations is not pruning dependence (here: ranks of its edges and of "
        "those of H correlate by less than 0.5)",
        _HEURISTIC,
        "{each}",
        "spearman",
        (-math.inf, 0.5),
        {"block": "all"},
        each="{variant} {plain}",
        nothing=None,
        lab=True,
    ),
    Claim(
        "activations",
        "a plan on such edges and the diagonal of H costs more than the plan on H",
        _HEURISTIC,
        "KL less that of H, nats per token: {each}",
        "difference",
        ABOVE,
        {"axis": ACTIVATIONS},
        each="{variant} {change} at {ratio}",
        between="; ",
        nothing=None,
        lab=True,
    ),
)


def activation_findings(table: Table, agreement: Table) -> list[Finding]:
    """Judge edges by activation correlation: claims of the lab, the paper has no number.

    Args:
        table: from `edge_study` with `EdgeOptions.correlations`.
        agreement: from `edge_agreement`.
    """
    done = [row for row in pick(table) if row["measured"] is not None]
    return [*evaluate(_ACTIVATIONS[0], agreement), *evaluate(_ACTIVATIONS[1], done)]


def _variant(table: Table, ratio: float, name: str) -> Row | None:
    """Return a measured row; None where that variant has no plan or was not asked for."""
    rows = pick(table, requested_ratio=ratio, variant=name)
    return rows[0] if rows and rows[0]["measured"] is not None else None


def _change(table: Table, ratio: float, variant: str, other: str = "") -> Row:
    """Return the perplexity of a variant less that of another (else the method), with its error.

    Between two variants the error is the sum of theirs against the method, the most it can be; it
    has the fewer degrees of freedom of the two.
    """
    rows = [_variant(table, ratio, name) for name in (variant, *([other] if other else []))]
    if any(row is None for row in rows):
        return {"change": None, "change_error": None}
    changes = [carried(row, "perplexity_difference", "change") for row in rows if row]
    if len(changes) == 1:
        return changes[0]
    first, second = changes
    whole = {"change": first["change"] - second["change"]}
    for name in first.keys() & second.keys() - {"change"}:
        pair = (first[name], second[name])
        if name == "change_note":
            whole[name] = " ".join(dict.fromkeys(filter(None, pair)))
        elif None in pair:
            whole[name] = None
        else:
            fewer = name in ("change_degrees", "change_draws")
            whole[name] = min(pair) if fewer else sum(pair)
    return whole


def _moved(
    table: Table, ratio: float, variant: str, other: str = "", *, margin: float | None = None
) -> tuple[str, Verdict]:
    """The change of perplexity at every ratio, and whether it is a rise, or within a share."""
    parts = []
    for each in dict.fromkeys(row["requested_ratio"] for row in pick(table)):
        change, known = _change(table, each, variant, other), "no plan"
        if change["change"] is not None:
            known = f"{change['change']:+.3g} ± {number(change['change_error']):.2g}"
            known += covered(change, "change")
        parts.append(f"{known} at {each:.0%}")
    told = f"perplexity {variant} - {other or 'full H'}: {', '.join(parts)}"
    # equal plans differ by exactly 0 ± 0: not worse, so 0 is no part of the range
    low, high = ABOVE
    if margin is not None:
        method = _variant(table, ratio, "full H")
        high = margin * method["perplexity"] if method else math.nan
        low, told = -high, f"within {margin:.1%}? {told}"
    return told, judged_column(_change(table, ratio, variant, other), "change", low, high)


def _collapse(table: Table, ratio: float, variants: Sequence[str]) -> tuple[str, Verdict]:
    """Collapse here: more than twice the perplexity of the method, of every variant."""
    method = _variant(table, ratio, "full H")
    judges: list[Judge] = []
    parts = []
    for name in variants:
        row = _variant(table, ratio, name)
        if row is None or method is None:
            continue
        scale = method["perplexity"]
        error = (row["perplexity_difference_error"] or 0.0) / scale
        degrees = row.get("perplexity_difference_degrees", math.inf)
        judges.append(
            partial(judged, row["perplexity"] / scale, error, 2, math.inf, degrees=degrees)
        )
        parts.append(f"{name} {row['perplexity'] / scale:.2f}")
    text = f"perplexity over that of full H at {ratio:.0%}: {', '.join(parts) or 'no plan'}"
    return text, every(judges)


# Structure of H -----------------------------------------------------------------------------------
def structure_findings(blocks: Table, budgets: Table) -> list[Finding]:
    """Judge claims about the mean correlation of blocks, and about budgets at the largest lambda.

    Args:
        blocks: from `block_table`.
        budgets: from `budget_table`.
    """
    whole = {row["block"]: row for row in pick(blocks, reach="all")}
    findings = []
    if len(whole) == 3:
        mean = {  # without sampling noise, where that is known
            block: row["mean_absolute"] if row["corrected"] is None else row["corrected"]
            for block, row in whole.items()
        }
        error = {block: number(row["mean_absolute_error"]) for block, row in whole.items()}
        inside = mean["attention"] + mean["ffn"]
        share = 2 * mean["cross"] / inside
        parts = math.hypot(error["attention"], error["ffn"]) / inside
        spread = share * math.hypot(error["cross"] / mean["cross"], parts)
        listed = ", ".join(f"{block} {mean[block]:.3f} ± {error[block]:.3f}" for block in mean)
        plain = f", with sampling noise {whole['ffn']['mean_absolute']:.3f}"
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
                f"{mean['ffn']:.3f} ± {error['ffn']:.3f}{plain}",
                within(mean["ffn"], error["ffn"], -math.inf, 0.10),
            ),
        ]
    return findings + _budget_findings(pick(budgets, note=""))


def _budget_findings(rows: Rows) -> list[Finding]:
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
            error += (
                float(np.mean([number(row["share_error"]) for row in some])) if some else math.nan
            )
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


def _share(claim: str, where: str, low: float, **rows: Any) -> Claim:
    """Make a claim about one quantity of the propositions: it is above `low`."""
    above = (low, math.inf)
    return Claim("propositions", claim, where, "{quantity} {shown}", "value", above, rows)


PROPOSITIONS = (
    Claim(
        "propositions",
        "H is a Gram matrix: no negative eigenvalue",
        'Prop. "Gram equivalence"',
        "smallest over largest eigenvalue {shown}",
        "holds",
        rows={"proposition": "gram"},
    ),
    Claim(
        "propositions",
        "edges over diagonal are about 2 |S| |ρ|",
        'Prop. "Edge-to-diagonal balance"',
        "{each}; within a factor of 2 counts as about",
        "value",
        ("half", "twice"),
        {"quantity": "edge over diagonal, by the mean correlation"},
        each="{value:.2f} for {reference:.2f} (|S| = {units})",
        between="; ",
    ),
    Claim(
        "propositions",
        "the weighted mean correlation of the diagonal's plan, by which it errs, is the statistic "
        "of the gate",
        'Prop. "The diagonal omission"',
        "{shown} at {ratio}, FFN redundancy {reference:.4f}; within a factor of 2 counts as the "
        "same",
        "value",
        ("half", "twice"),
        {"quantity": _WEIGHTED},
    ),
    Claim(
        "propositions",
        "a plan overshoots its ratio by at most one unit",
        'Prop. "Overshoot bound"',
        "at most {value:.2%}, a unit is {reference:.2%} of the cost",
        "holds",
        rows={"proposition": "overshoot"},
    ),
    _share("H is far from diagonal", "Fig. evidence", 0.5, quantity=_MASS),
    _share("edges in a plan are predominantly positive", _SIGNS, 0.5, quantity=_POSITIVE),
    _share(
        "where edges help, saliency is well differentiated (the model where they do not help has "
        "an FFN CV of 0.084)",
        'section "Scope of Applicability"',
        0.084,
        quantity="single-unit KL CV, FFN",
    ),
)


def proposition_findings(table: Table) -> list[Finding]:
    """Judge the propositions of `proposition_table`; of plans those nearest to 20 %."""
    gram, over = pick(table, proposition="gram"), pick(table, proposition="overshoot")
    strongest = max((row["interaction_strength"] or 0.0 for row in pick(table)), default=0.0)
    nearest = min((r["requested_ratio"] for r in over), key=lambda r: abs(r - PAPER_RATIO))
    rows = [
        gram[0] | {"shown": brief(gram[0]["value"], 2), "holds": all(row["holds"] for row in gram)},
        max(over, key=lambda row: row["value"]) | {"holds": all(row["holds"] for row in over)},
    ]
    for row in pick(table):
        if row["proposition"] in ("gram", "overshoot"):
            continue
        # the weighted mean is about the plan of a selector without edges
        wanted = {_POSITIVE: (nearest, strongest), _WEIGHTED: (nearest, 0.0)}
        mine = row["requested_ratio"], row["interaction_strength"]
        if wanted.get(row["quantity"], mine) != mine:
            continue
        reference, error = row["reference"] or 0.0, row["value_error"]
        places = 4 if row["quantity"] == _WEIGHTED else 2
        shown = f"{row['value']:.{places}f}"
        shown += "" if error is None else f" ± {error:.{places}f}"
        rows.append(row | {"half": 0.5 * reference, "twice": 2 * reference, "shown": shown})
    return evaluate(PROPOSITIONS, rows)
