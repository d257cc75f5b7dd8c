"""Rows of the demo model's own texts, for the benchmarks."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

import cocurve_lab as cl
from cocurve_lab.models.identity import demo_folder


def demo_rows(
    name: str, count: int, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> cl.CalibrationSet:
    """`count` rows of "calibration", "held_out" or "test", every position scored."""
    return cl.CalibrationSet.from_file(
        demo_folder().parent / "texts" / f"{name}.jsonl",
        tokenizer,
        num_sequences=count,
        positions_per_sequence="all",
        seed=seed,
    )
