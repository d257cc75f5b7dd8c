"""What one sees after a picture, in a sentence: computed from the H or the table at hand.

A sentence in a notebook's text is true for every model. One that is not stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.solver.protection import opening_guards
from cocurve_lab.solver.selection import Selection

from .findings import percent
from .lazy import AnswerTable, DataFrame
from .shared import solved
from .tables import table_of

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
Pair = tuple[Selection, Selection]  # the plans of lambda 0 and 1


def guess(options: Sequence[str], answer: str) -> Any:
    """Ask for one of `options`; the answer shows only after a choice, and nothing is stored."""
    import ipywidgets

    ask = ipywidgets.ToggleButtons(options=options, value=None)
    said = ipywidgets.HTML()

    def tell(change: Any) -> None:
        said.value = f"<pre>You: {change.new}. {escape(answer)}</pre>"

    ask.observe(tell, "value")
    return ipywidgets.VBox([ask, said])


def right_by_ability(asked: AnswerTable) -> str:
    """Tell which ability loses an answer first, and the right answers of each, plan by plan."""
    counts = {name: asked.right[:, asked.of(name)].sum(axis=1) for name in asked.capabilities}
    first = {name: np.flatnonzero(right < right[0])[:1] for name, right in counts.items()}
    soonest = min((int(at[0]) for at in first.values() if len(at)), default=None)
    lost = [name for name, at in first.items() if len(at) and at[0] == soonest]
    shares = [plan.requested_ratio for plan in asked.selections]
    where = "" if soonest is None else f" at {percent(shares[soonest])}"
    lines = [f"Here: {' and '.join(lost) or 'none'}{where}.", ""]
    lines.append(f"{'right answers':14}" + "".join(f"{share:>7.0%}" for share in shares))
    lines += [f"{name:14}" + "".join(f"{n:>7}" for n in right) for name, right in counts.items()]
    return "\n".join(lines)


def pairs(curvature: Curvature, ratios: Sequence[float] = RATIOS) -> dict[float, Pair]:
    """Solve at lambda 0 and 1 under the opening guards, where both reach the ratio.

    Returns:
        ratio -> the two plans.
    """
    found, guards = {}, opening_guards(curvature.units)
    for ratio in ratios:
        zero, one = (solved(curvature, ratio, strength, guards)[0] for strength in (0.0, 1.0))
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


def trade_table(
    curvatures: Mapping[str, Curvature], ratios: Sequence[float] = (0.1, 0.15, 0.2, 0.25, 0.3)
) -> DataFrame:
    """Count what the plans of lambda 0 and 1 remove, by H and ratio.

    Returns:
        One row per H and ratio: of, requested_ratio, then the attention units, FFN groups and
        bridges that each of the two plans removes.
    """
    return table_of(
        {"of": name, "requested_ratio": ratio}
        | {
            f"{words}, λ {strength}": len(some & set(plan.pruned))
            for words, some in _sorts(curvature).items()
            for strength, plan in enumerate(plans)
        }
        for name, curvature in curvatures.items()
        for ratio, plans in pairs(curvature, ratios).items()
    )


def _sorts(curvature: Curvature) -> dict[str, set[int]]:
    kinds = curvature.units.kinds
    sorts = {"attention": kinds == "attention", "FFN": kinds == "ffn"}
    found = {name: set(np.flatnonzero(mask).tolist()) for name, mask in sorts.items()}
    return found | {"bridges": set(bridge_units(curvature))}


def bridge_fate(curvature: Curvature, ratios: Sequence[float] = RATIOS) -> str:
    """Say which bridges the plans of lambda 0 and 1 remove."""
    bridges, units = set(bridge_units(curvature)), curvature.units
    lines = []
    for ratio, (zero, one) in pairs(curvature, ratios).items():
        gone = [bridges & set(plan.pruned) for plan in (zero, one)]
        kept, taken = (
            ", ".join(units[u].name for u in sorted(some)) or "none"
            for some in (gone[0] - gone[1], gone[1] - gone[0])
        )
        lines.append(
            f"{percent(ratio)}: of {len(bridges)} bridges λ 0 removes {len(gone[0])}, λ 1 "
            f"{len(gone[1])} (kept by the edges alone: {kept}; removed by them alone: {taken})."
        )
    return "\n".join(lines) or "No plan reaches any of these ratios."


def _apart(zero: Selection, one: Selection) -> int:
    return len(set(zero.pruned) ^ set(one.pruned))
