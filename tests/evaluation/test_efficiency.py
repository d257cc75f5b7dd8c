"""Sizes against counting by hand, and speeds with their quartiles."""

from __future__ import annotations

import torch

import cocurve_lab as cl
from cocurve_lab.evaluation.efficiency import (
    EfficiencyOptions,
    measure_efficiency,
)
from helpers.tiny_models import tiny_model

SHORT = EfficiencyOptions(batch_sizes=(1, 2), new_tokens=2, repeats=2, progress=False)


def test_sizes_are_those_counted_by_hand() -> None:
    model = tiny_model(layers=2)
    units = cl.enumerate_units(model, 4)
    plan = cl.Selection.from_pruned(units, [0, 2, 3])  # one of two KV heads, two FFN groups
    pruned = cl.prune(model, plan)
    found = measure_efficiency(model, pruned, SHORT)
    gone = units[0].cost + units[2].cost + units[3].cost
    rows = {(row["quantity"], row["batch_size"]): row for row in found.rows}
    assert rows["parameters", None]["dense"] - rows["parameters", None]["pruned"] == gone
    assert rows["weights", None]["pruned"] == 4 * rows["parameters", None]["pruned"]
    # two layers, two KV heads of 8, keys and values, four bytes; one head of one layer is gone
    assert rows["KV cache per token", None]["dense"] == 2 * 2 * 8 * 2 * 4
    assert rows["KV cache per token", None]["ratio"] == 0.75
    for batch in (1, 2):
        for quantity in ("prefill", "decode"):
            row = rows[quantity, batch]
            assert row["dense"] > 0
            assert row["low"] <= row["ratio"] <= row["high"]
            assert row["repeats"] == 2
    assert "62 prompt tokens" in found.protocol


def test_half_precision_takes_half_the_bytes() -> None:
    model = tiny_model(layers=1, dtype=torch.bfloat16)
    rows = measure_efficiency(model, model, SHORT).rows
    assert rows[1]["dense"] == 2 * rows[0]["dense"]
    assert rows[1]["ratio"] == 1
