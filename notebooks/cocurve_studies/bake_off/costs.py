"""What a budget counts: parameters, floating-point operations, or bytes of KV cache.

A plan of H spends a share of one of the three (`Target.costs`), and saves some of the other two.
"""

from __future__ import annotations

import numpy as np

from cocurve_lab.extensions.pretrained.kept import kept_curvature, kept_plans
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.targets import flop_costs, kv_cache_costs

from ..tables import Table, table_of

CONTEXT = 2048  # tokens that a token attends to
COSTS = ("FLOPs", "KV cache")
TEXTS = {"c4": "C4", "wikitext": "WikiText"}
SAVINGS = dict.fromkeys(("plan", "parameters", *COSTS, *TEXTS.values()), "")


def other_costs(units: UnitSet) -> dict[str, np.ndarray]:
    """Return what each unit costs in FLOPs and in bytes of KV cache, per token [M] int64."""
    return {"FLOPs": flop_costs(units, CONTEXT), "KV cache": kv_cache_costs(units, "bfloat16")}


def kept_savings() -> Table:
    """Read what plans of SmolLM2 save, and what they cost, by what their budget counts.

    Returns:
        A row per plan of H at lambda 0 and 1 without guards: the shares of removable parameters,
        FLOPs and KV cache that it removes, and its KL on each text, mean and standard error over
        rows in nats per token.
    """
    curvature = kept_curvature("smollm2")
    kept = None if curvature is None else kept_plans(curvature)
    assert kept is not None  # it ships
    units = kept.plans[0].selection.units
    costs = {"parameters": units.costs} | other_costs(units)
    rows = []
    for plan in kept.plans:
        name, ratio = plan.name, plan.selection.requested_ratio
        if name in ("H, lambda 0", "H, lambda 1") and ratio in (0.1, 0.2, 0.3):
            name = f"parameters {ratio:.0%}, {name[3:]}"
        elif not name.startswith(COSTS):
            continue
        row: dict[str, object] = {"plan": name}
        for what, cost in costs.items():
            row[what] = f"{cost[list(plan.selection.pruned)].sum() / cost.sum():.0%}"
        for text, title in TEXTS.items():
            row[title], row[f"{title}_error"] = mean_and_error(plan.every_row(text))
        rows.append(row)
    return table_of(sorted(rows, key=lambda row: str(row["plan"]).split()[-3:]))
