"""What one sees after a picture, in a sentence: computed from the H or the table at hand.

A sentence in a notebook's text is true for every model. One that is not stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cocurve_lab.base.tables import Table, pick
from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.solver.selection import Selection

from .findings import percent
from .shared import solved

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
Pair = tuple[Selection, Selection]  # the plans of lambda 0 and 1


def pairs(curvature: Curvature, ratios: Sequence[float] = RATIOS) -> dict[float, Pair]:
    """Solve at lambda 0 and 1, without guards; a ratio that one of them does not reach is left out.

    Returns:
        ratio -> the two plans.
    """
    found = {}
    for ratio in ratios:
        zero, one = (solved(curvature, ratio, strength)[0] for strength in (0.0, 1.0))
        if zero is not None and one is not None:
            found[ratio] = zero, one
    return found


def lambda_changes(curvature: Curvature, ratios: Sequence[float] = RATIOS) -> str:
    """Say in how many units lambda 1 differs from lambda 0, by ratio, and where in most."""
    plans = pairs(curvature, ratios)
    if not plans:
        return "No plan reaches any of these ratios."
    apart = {ratio: _apart(*pair) for ratio, pair in plans.items()}
    told = ", ".join(f"{count} at {percent(ratio)}" for ratio, count in apart.items())
    most = max(apart.values())
    where = " and ".join(percent(ratio) for ratio, count in apart.items() if count == most)
    most_told = f"most at {where}" if most else "none: edges change nothing here"
    return f"Units in one of the plans of λ 0 and λ 1 only: {told}; {most_told}."


def bridge_fate(curvature: Curvature, ratios: Sequence[float] = RATIOS) -> str:
    """Say which bridges the plans of lambda 0 and 1 remove, and whether attention takes part."""
    bridges, units = set(bridge_units(curvature)), curvature.units
    lines = []
    for ratio, (zero, one) in pairs(curvature, ratios).items():
        gone = [bridges & set(plan.pruned) for plan in (zero, one)]
        kept, taken = (
            ", ".join(units[u].name for u in sorted(some)) or "none"
            for some in (gone[0] - gone[1], gone[1] - gone[0])
        )
        heads = [sum(units[u].kind == "attention" for u in plan.pruned) for plan in (zero, one)]
        lines.append(
            f"{percent(ratio)}: of {len(bridges)} bridges λ 0 removes {len(gone[0])}, λ 1 "
            f"{len(gone[1])} (kept by the edges alone: {kept}; removed by them alone: {taken}); "
            f"attention units removed: {heads[0]} and {heads[1]}."
        )
    return "\n".join(lines) or "No plan reaches any of these ratios."


def _apart(zero: Selection, one: Selection) -> int:
    return len(set(zero.pruned) ^ set(one.pruned))


# Notebook 08 --------------------------------------------------------------------------------------
def intervals(table: Table) -> str:
    """From `interval_table`: the span of saliencies, the intervals, and neighbors that overlap."""
    ranked = sorted((r for r in table if r["saliency"] > 0), key=lambda row: row["saliency"])
    if len(ranked) < 2:
        return "Fewer than two units have a saliency."
    span = ranked[-1]["saliency"] / ranked[0]["saliency"]
    width = np.median([(row["high"] - row["low"]) / row["saliency"] for row in ranked])
    meet = sum(a["high"] >= b["low"] for a, b in pairwise(ranked))
    return (
        f"The largest saliency is {span:.3g} times the smallest. Half of the intervals are longer "
        f"than {width:.0%} of their saliency. Of {len(ranked) - 1} pairs of neighbors in the "
        f"ranking, {meet} overlap."
    )


def settling(table: Table) -> str:
    """From `stability_table`: optimism and overlap on the least and on the most text."""
    parts = []
    for strength in dict.fromkeys(row["interaction_strength"] for row in table):
        rows = sorted(pick(table, interaction_strength=strength), key=lambda row: row["groups"])
        first, last = rows[0], rows[-1]
        parts.append(
            f"λ {strength:g}, {first['groups']} to {last['groups']} rows: optimism "
            f"{first['optimism']:.0%} to {last['optimism']:.0%}, overlap of halves "
            f"{first['halves_overlap']:.0%} to {last['halves_overlap']:.0%}."
        )
    return "\n".join(parts)


def stopping(table: Table) -> str:
    """From `stopping_study`: the rows from which each error stayed within the tolerance."""
    told = []
    names = {"risk_error": "predicted risk", "saliency_error": "saliency", "optimism": "optimism"}
    for name, words in names.items():
        # NaN, while a single group is there, is not within
        out = [not row[name] <= row["tolerance"] for row in table]
        last = max((place for place, outside in enumerate(out) if outside), default=-1)
        rows = None if last == len(table) - 1 else table[last + 1]["rows"]
        told.append(f"{words} {'never' if rows is None else f'from {rows} rows on'}")
    return f"Within {table[0]['tolerance']:.0%} to the end: {', '.join(told)}."
