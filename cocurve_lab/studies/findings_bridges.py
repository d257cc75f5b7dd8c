"""Findings about bridge units and the matched-pair test: one per claim of the paper.

A verdict needs two standard errors; where one claim is tested several times, more (`strict`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest, norm

from .findings import Finding, within
from .tables import Row, Table, column, pick

_BELOW_ZERO = float(np.nextafter(0, -1))
_MECHANISM = 'appendix "Mechanism Analysis"'


def strict(count: int) -> float:
    """Standard errors at which one of `count` comparisons errs as rarely as one does at two."""
    return float(norm.isf(norm.sf(2.0) / max(count, 1)))


def below_zero(value: float, error: float, factor: float = 2.0) -> bool | None:
    """Whether a value is negative; None within its error, or where nothing varied at all."""
    return within(value, error, -math.inf, _BELOW_ZERO, factor) if error > 0 else None


def combined(verdicts: Iterable[bool | None]) -> bool | None:
    """One verdict of several tests of one claim: None where they contradict, or none can tell."""
    told = {verdict for verdict in verdicts if verdict is not None}
    return told.pop() if len(told) == 1 else None


def number(value: Any) -> float:
    """A cell as a float; None is NaN."""
    return math.nan if value is None else float(value)


# Bridges ------------------------------------------------------------------------------------------


def bridge_findings(table: Table, edges: Table) -> list[Finding]:
    """How many bridges, whether diagonal pruning takes them, and where their edges run.

    Args:
        table: of `bridge_table`, with the median/median pair of thresholds.
        edges: of `bridge_edges`.
    """
    study = "bridges"
    middle = (pick(table, saliency_quantile=0.5, connectivity_quantile=0.5) or table)[0]
    shares = column(table, "bridges") / column(table, "units")
    reached = bool(shares.min() <= 87 / 768 <= shares.max())
    correlation, error = middle["correlation"], number(middle["correlation_error"])
    diagonal, edge = middle["pruned_by_diagonal"], middle["pruned_by_edges"]
    more = sum(row["pruned_by_diagonal"] > row["pruned_by_edges"] for row in table)
    fewer = sum(row["pruned_by_diagonal"] < row["pruned_by_edges"] for row in table)
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
            f"of {middle['bridges']}, the plan of λ = 0 removes {diagonal} and that of λ = 1 "
            f"{edge}; over all thresholds λ = 0 removes more {more} times, fewer {fewer} times",
            diagonal > edge if middle["bridges"] else None,
        ),
        *_edge_findings([row for row in edges if row["rank"] == 1]),
    ]


def _edge_findings(strongest: Table) -> list[Finding]:
    """From the strongest edge of each bridge."""
    size = np.array([row["to_saliency"] for row in strongest if row["to_saliency"] is not None])
    cross, count = sum(row["cross_module"] for row in strongest), len(strongest)
    mean = float(size.mean()) if len(size) else math.nan
    error = float(size.std(ddof=1) / math.sqrt(len(size))) if len(size) > 1 else math.nan
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


# Causal test --------------------------------------------------------------------------------------


def causal_findings(table: Table) -> list[Finding]:
    """Bridge - control against table bridge-causal: its greedy fill, and every other fill.

    Args:
        table: of `causal_study`. Errors here count the spread over seeds too.
    """
    measured = [row for row in table if row["seed"] is None and row["outcome"] is not None]
    paper = pick(measured, fill="greedy")
    where = "Table bridge-causal"
    code = pick(paper, outcome="accuracy", family="code")
    accuracy = pick(measured, outcome="accuracy", family="all")
    others = [row for row in accuracy if row["fill"] != "greedy"]
    kl = pick(paper, outcome="kl", family="all")
    wider = [row["predicted_difference"] for row in pick(measured, outcome="kl", family="all")]
    findings = [
        Finding(
            "causal",
            f"bridges forced out instead of controls cost {claim}",
            where,
            _differences(rows, "accuracy"),
            _all_below(rows),
        )
        for claim, rows in (
            ("10.5 points of MMLU (all questions here; its greedy fill)", _of(paper, "accuracy")),
            ("all of code, 0.075 of pass@1 (greedy fill)", code),
            ("accuracy with another fill too (not tried in the paper)", others),
        )
        if rows
    ]
    text = _of(paper, "perplexity")
    return [
        *findings,
        Finding(
            "causal",
            "perplexity moves the other way, bridge - control = -2.1",
            where,
            _differences(text, "perplexity"),
            _all_below(text),
        ),
        Finding(
            "causal",
            "connectivity, not saliency, drives the damage (it gives no KL)",
            where,
            f"{_differences(kl, 'KL in nats per token')}; H predicts {_span(wider)}",
            _all_below(kl, sign=-1),
        ),
    ]


def _of(rows: Table, outcome: str) -> Table:
    return pick(rows, outcome=outcome, family="all")


def _error(row: Row) -> float:
    """Of the mean over seeds: text or questions, and which seeds were drawn."""
    spread = row["seed_spread"] or 0.0
    return float(math.hypot(row["standard_error"], spread / math.sqrt(row["seeds"])))


def _differences(rows: Table, unit: str) -> str:
    parts = [
        f"{row['difference']:+.3f} ± {_error(row):.3f} ({row['fill']}, {row['pairs']} pairs)"
        for row in rows
    ]
    return f"{unit}: " + "; ".join(parts) if parts else "no arms could be measured"


def _all_below(rows: Table, sign: int = 1) -> bool | None:
    factor = strict(len(rows))
    return combined(below_zero(sign * row["difference"], _error(row), factor) for row in rows)


def _span(values: Sequence[float]) -> str:
    return f"{min(values):+.4f} to {max(values):+.4f}" if values else "nothing"
