"""Builds on paper: what is announced for a machine that is not here, against real small builds."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cocurve_lab as cl
from cocurve_lab.estimator import batches, replay, worker
from cocurve_lab.extensions.big_models import forecast as on_paper
from cocurve_lab.extensions.big_models.forecast import (
    build_on_paper,
    rate_here,
    row_operations,
    rows_of,
)
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.layers import weights_of
from cocurve_lab.models.loading import shapes_only
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

# large enough that products outweigh what has the size of one vector
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 168, "layers": 4}


def build(model: Any, text: cl.CalibrationSet, **options: Any) -> cl.Curvature:
    units = cl.enumerate_units(model, GROUPS)
    chosen = cl.BuildOptions(**options)
    return cl.estimate_curvature(model, units, text, 16, progress=False, options=chosen)


CASES = product(("llama", "mistral", "qwen2", "phi3"), ((48, 6), (48, 47), (20, 12)), (True,))


@pytest.mark.parametrize(("family", "lengths", "kept"), [*CASES, ("llama", (48, 6), False)])
def test_operations_are_those_that_torch_counts(
    family: str, lengths: tuple[int, int], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:  # the traces of a row, which are then computed twice
        for module in (replay, on_paper):
            monkeypatch.setattr(module, "TRACE_BYTES", 0)
    own = {"head_dim": 12} if family == "mistral" else {}
    model = tiny_model(family, attention="eager", **SIZES, **own)
    text = tiny_text(1, *lengths)
    build(model, text)  # what is checked once is checked now
    with FlopCounterMode(display=False) as counter:
        build(model, text)
    units = cl.enumerate_units(model, GROUPS)
    counted = row_operations(describe(model), units, text, 16, causal=False)
    assert np.isclose(counted, counter.get_total_flops(), rtol=0.05 if kept else 0.01)
    assert row_operations(describe(model), units, text, 16) < counted


def test_a_build_on_paper_is_the_streamed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    model, text = tiny_model(**SIZES), tiny_text(2, 20, 6)
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    shapes = shapes_only(tmp_path)
    assert all(weight.is_meta for weight in shapes.parameters())
    own, _ = cl.load_model(tmp_path, device="cpu", stream=True)
    stream, units = weights_of(own), cl.enumerate_units(own, GROUPS)
    assert stream is not None
    around = sum(p.numel() for p in own.parameters() if not p.is_meta) * 4
    fixed = batches.memory_needed(describe(own), units, text, 16, 1)
    state = 20 * 64 * 4
    seen: list[int] = []
    for states in (7, 24):
        memory = around + fixed + states * state
        found = build_on_paper(shapes, units, text, 16, memory)
        assert found.streamed
        assert found.memory <= memory - around
        monkeypatch.setattr(batches, "free_memory", lambda _, free=memory - around: free)
        monkeypatch.setattr(batches, "_LARGEST_CPU_BATCH", 1000)  # on paper it is a GPU
        monkeypatch.setattr(worker.Worker, "seconds", lambda self: None)
        build(own, text)
        before = stream.bytes_read
        real = build(own, text)
        assert stream.bytes_read - before == 2 * found.bytes_read
        assert real.provenance["runtime"]["units_per_batch"] == found.units_per_batch
        seen.append(found.sweeps)
    assert seen[0] > seen[1] > 1, seen


def test_files_are_read_once_if_they_fit_somewhere() -> None:
    model, text = tiny_model(**SIZES), tiny_text(2, 20, 6)
    large, small = (
        build_on_paper(model, cl.enumerate_units(model, GROUPS), text, 16, memory)
        for memory in (1e12, 0)
    )
    assert (large.streamed, large.sweeps, large.bytes_read) == (False, 0, 0)
    assert large.weights == 4 * model.num_parameters()
    assert large.hours_computing(7, large.operations / 3600) == pytest.approx(7)
    assert small.streamed
    assert small.bytes_read > small.weights / 2
    rate, host = small.weights / 3600, small.weights
    assert large.hours_reading(100, rate, 0) == small.hours_reading(100, rate, host) == 1
    many = small.hours_reading(100, rate, host - 1)
    assert many == pytest.approx(100 * small.bytes_read / small.weights)


def test_rows_on_paper_are_checked_like_rows_of_text() -> None:
    rows = rows_of(3, 32, "all")
    assert (len(rows), rows.seq_len, rows.positions_per_sequence) == (3, 32, 31)
    with pytest.raises(cl.InputError):
        rows_of(3, 32, 32)
    assert torch.equal(rows_of(1, 9, 8).positions, torch.arange(8)[None])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2", "mixtral", "lfm2", "llava"])
def test_the_rate_of_this_machine_is_that_of_a_layer(family: str) -> None:
    model = shapes_only(tiny_model(family, "mha", max_position_embeddings=512).config)
    rate = rate_here(model, seconds=0.05)
    assert 1e6 < rate < 1e13
    assert all(weight.is_meta for weight in model.parameters())  # the model itself is as it was
