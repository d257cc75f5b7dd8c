"""Size and speed of several plans' pruned models, and whether plans of one budget differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict

import torch

from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from cocurve_lab.models.identity import model_device
from cocurve_lab.models.runtime import device_name, require_one_device
from cocurve_lab.pruner.cutting import cut
from cocurve_lab.solver.selection import Selection

from ..lazy import DataFrame, PreTrainedModel
from ..shared import marks
from ..tables import Row, Rows, Table, kept_table, pick, table_of


def speed_table(
    model: PreTrainedModel,
    plans: Mapping[str, Selection],
    options: EfficiencyOptions | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """Measure size and speed of each plan's pruned model, timed in turn with the dense one.

    Args:
        model: the dense model.
        plans: label -> plan.
        options: batch sizes, lengths, repeats.
        cache: folder that keeps the table; None keeps nothing. Times belong to the machine and its
            load on that day: delete the table to take them again.

    Returns:
        The rows of `Efficiency` with method, requested_ratio and realized_ratio.
    """
    options = options or EfficiencyOptions()
    require_one_device(model)

    def compute() -> Rows:
        rows: Rows = []
        for label, plan in plans.items():
            measured = measure_efficiency(model, cut(model, plan), options)
            own = {
                "method": label,
                "requested_ratio": plan.requested_ratio,
                "realized_ratio": plan.realized_ratio,
            }
            rows += [own | row for row in measured.rows]
        return rows

    settings = marks(
        model,
        **timing_marks(model, options),
        threads=options.threads or torch.get_num_threads(),
        plans=[[label, plan.fingerprint] for label, plan in plans.items()],
    )
    return kept_table(cache, "speed", settings, compute)


def timing_marks(model: PreTrainedModel, options: EfficiencyOptions) -> Row:
    """Return what timings depend on beside the model and the plan, for `kept_table`."""
    return {
        "device": device_name(model_device(model)),
        "options": asdict(options) | {"progress": None, "batch_sizes": list(options.batch_sizes)},
    }


def speed_summary(table: Table) -> DataFrame:
    """Summarize whether plans of one budget differ in speed, by ratio, quantity and batch size.

    `lowest` and `highest` are the slowest and the fastest plan's median ratio to the dense model.
    `apart` says whether plans differ by more: the fastest and the slowest are further from
    each other than the sum of the widths of their quartile ranges. (Ranges that just miss each
    other say little: of many plans, two do so by chance.) `faster` counts plans whose lower
    quartile is above 1.
    """
    timed = [row for row in pick(table) if row["quantity"] in ("prefill", "decode")]
    keys = dict.fromkeys((r["requested_ratio"], r["quantity"], r["batch_size"]) for r in timed)
    rows: Rows = []
    for ratio, quantity, batch in keys:
        mine = pick(timed, requested_ratio=ratio, quantity=quantity, batch_size=batch)
        slow, fast = (end(mine, key=lambda row: float(row["ratio"])) for end in (min, max))
        rows.append(
            {
                "requested_ratio": ratio,
                "quantity": quantity,
                "batch_size": batch,
                "plans": len(mine),
                "lowest": slow["ratio"],
                "highest": fast["ratio"],
                "apart": bool(fast["ratio"] - slow["ratio"] > _width(fast) + _width(slow)),
                "faster": sum(row["low"] > 1 for row in mine),
            }
        )
    return table_of(rows)


def _width(row: Row) -> float:
    return float(row["high"] - row["low"])
