"""What a budget counts: parameters, floating-point operations, or bytes of KV cache.

A plan of H spends a share of one of the three (`Target.costs`), and saves some of the other two.
"""

from __future__ import annotations

import numpy as np

from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.targets import flop_costs, kv_cache_costs

from ..paper.shipped import COMPARED, MEASURED, ONE, ZERO, shipped
from ..tables import Table, table_of

CONTEXT = 2048  # tokens that a token attends to
COSTS = ("FLOPs", "KV cache")
SAVINGS = dict.fromkeys(("plan", "parameters", *COSTS, *COMPARED.values()), "")


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
    found = shipped()
    units = found.curvature.units
    costs = {"parameters": units.costs} | other_costs(units)
    rows = []
    for plan in found.kept.plans:
        name, ratio = plan.name, plan.selection.requested_ratio
        if name in (ZERO, ONE) and ratio in MEASURED:
            name = f"parameters {ratio:.0%}, {name[3:]}"
        elif not name.startswith(COSTS):
            continue
        row: dict[str, object] = {"plan": name}
        for what, cost in costs.items():
            row[what] = f"{cost[list(plan.selection.pruned)].sum() / cost.sum():.0%}"
        for text, title in COMPARED.items():
            row[title], row[f"{title}_error"] = mean_and_error(plan.every_row(text))
        rows.append(row)
    # by share, then lambda: the last words of a name
    return table_of(sorted(rows, key=lambda row: str(row["plan"]).split()[-3:]))
