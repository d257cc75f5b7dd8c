"""What a refit brings to plans of SmolLM2, from the measurements that ship.

`tests/benchmarks/bench_refits.py` made them: every plan is refitted on the same rows, and judged on
twelve rows of each of four texts that no refit, search or H has seen. Two texts are of the kinds
that the refit read, two of other kinds.
"""

from __future__ import annotations

import numpy as np

from cocurve_lab.extensions.pretrained.kept import KeptPlan, kept_curvature, kept_folder, read_plans
from cocurve_lab.measuring.results import mean_and_error

from ..tables import Table, table_of

TEXTS = {"c4": "C4", "wikitext": "WikiText", "stories": "stories", "manual": "the manual"}
REFITS = dict.fromkeys(("removed", "plan", "way", *TEXTS.values(), "perplexity", "right"), "")


def kept_refits() -> Table:
    """Read the measurements of plans of SmolLM2 as cut and refitted.

    Returns:
        A row per plan and way, with the KL on each text, mean and standard error over rows in nats
        per token, the perplexity on WikiText, and the number of right answers to 30 questions.
    """
    rows = []
    for (ratio, name, way), plan in sorted(_plans().items(), key=lambda each: each[0][0]):
        row: dict[str, object] = {"removed": f"{ratio:.0%}", "plan": name, "way": way}
        for text, title in TEXTS.items():
            row[title], row[f"{title}_error"] = mean_and_error(plan.kl[text])
        row["perplexity"] = float(np.exp(plan.nll["wikitext"].mean()))
        rows.append(row | {"right": sum(count for count, _ in plan.right.values())})
    return table_of(rows)


def level_after_refit() -> list[str]:
    """Say for each ratio which plans are level with the best one after the refit.

    A plan is level if its mean KL over all rows of all texts is within two paired standard errors
    of the lowest.
    """
    found = _plans()
    lines = []
    for ratio in sorted({ratio for ratio, _, _ in found}):
        risks = {
            name: np.concatenate([plan.kl[text] for text in TEXTS])
            for (removed, name, way), plan in found.items()
            if (removed, way) == (ratio, "refitted")
        }
        best = min(risks, key=lambda name: float(risks[name].mean()))
        changes = {name: mean_and_error(kl - risks[best]) for name, kl in risks.items()}
        level = [name for name, (more, error) in changes.items() if more <= 2 * error]
        others = [name for name in level if name != best]
        beside = (
            f"; level with it: {', '.join(others)}" if others else "; no other is level with it"
        )
        lines.append(f"{ratio:.0%} refitted: {best} has the lowest KL{beside}.")
    return lines


def _plans() -> dict[tuple[float, str, str], KeptPlan]:
    """The kept plans by ratio, name and way."""
    curvature = kept_curvature("smollm2")
    assert curvature is not None  # it ships
    found = {}
    for plan in read_plans(kept_folder() / "refitted.json", curvature).plans:
        name, _, way = plan.name.partition(" | ")
        found[plan.selection.requested_ratio or 0.0, name, way] = plan
    return found
