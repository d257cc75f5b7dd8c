"""Sizes against counting by hand; the verdict on made-up speeds. No timing is asserted."""

from __future__ import annotations

from typing import Any

import torch

import cocurve_lab as cl
from cocurve_lab.evaluation.efficiency import (
    EfficiencyOptions,
    measure_efficiency,
    speed_verdict,
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
    assert found.verdict in repr(found)


def test_the_prefill_has_the_papers_length_where_the_context_allows() -> None:
    model = tiny_model(layers=1, max_position_embeddings=4096)
    options = EfficiencyOptions(batch_sizes=(1,), new_tokens=1, repeats=1, progress=False)
    assert "2048 prompt tokens" in measure_efficiency(model, model, options).protocol


def test_half_precision_takes_half_the_bytes() -> None:
    model = tiny_model(layers=1, dtype=torch.bfloat16)
    rows = measure_efficiency(model, model, SHORT).rows
    assert rows[1]["dense"] == 2 * rows[0]["dense"]
    assert rows[1]["ratio"] == 1


def speeds(
    decode: list[float], prefill: float = 1.2, parameters: float = 0.8
) -> list[dict[str, Any]]:
    def row(quantity: str, ratio: float, batch: int | None) -> dict[str, Any]:
        quartiles = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
        return {"quantity": quantity, "batch_size": batch} | quartiles

    timed = [row("decode", ratio, batch) for ratio, batch in zip(decode, (1, 8), strict=True)]
    return [row("parameters", parameters, None), row("prefill", prefill, 1), *timed]


def test_the_verdict_says_what_is_faster_and_why_not() -> None:
    faster, slower = speed_verdict(speeds([1.1, 0.97])).split("No clear speed-up")
    assert "prefill at batch 1 1.20x (1.19 to 1.21)" in faster
    assert "decode at batch 1" in faster
    assert "decode at batch 8 0.97x" in slower
    assert "20.0% of the parameters are gone" in slower
    assert "by 1.25x at most" in slower
    assert "No clear" not in speed_verdict(speeds([1.1, 1.3]))
    assert "Faster" not in speed_verdict(speeds([0.9, 0.9], prefill=1.0))
    assert "1.0% of the parameters" in speed_verdict(speeds([1.0, 1.0], parameters=0.99))
