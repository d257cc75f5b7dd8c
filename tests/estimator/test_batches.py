"""Blocks of ablations that advance together, and builds on weights that come layer by layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.estimator import batches
from cocurve_lab.estimator.replay import Replay
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.layers import weights_of
from helpers import builds
from helpers.builds import require_same_bits
from helpers.tiny_models import (
    GROUPS,
    tiny_model,
    tiny_text,
    write_model,
)

TEXT = tiny_text(2, 20, 6)


def build(model: PreTrainedModel, text: cl.CalibrationSet = TEXT, **options: Any) -> cl.Curvature:
    return builds.build(model, text, 16, **options)


def streamed(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The same model, its layers left in files."""
    write_model(folder, model, max_shard_size="20KB")
    dtype = str(model.dtype).removeprefix("torch.")
    return cl.load_model(folder, device="cpu", dtype=dtype, stream=True)[0]


@pytest.mark.parametrize(
    ("family", "heads"),
    [("llama", "gqa"), ("phi3", "mqa"), ("gemma2", "gqa"), ("gpt2", "mha"), ("opt_350m", "mha")],
)
def test_all_ablations_of_a_row_ride_together_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, family: str, heads: str
) -> None:
    model = tiny_model(family, heads)
    expected = build(model, units_per_batch=3)
    runs: list[int] = []
    real = Replay.ride

    def counted(self: Replay, batches: Any) -> Any:
        runs.append(sum(map(len, batches)))
        return real(self, batches)

    monkeypatch.setattr(Replay, "ride", counted)
    for block in (7, 1000):
        runs.clear()
        monkeypatch.setattr(batches.Room, "block", lambda *_, block=block: block)
        require_same_bits(build(model, units_per_batch=3), expected)
        assert max(runs) == len(expected.units) if block == 1000 else 3 < max(runs) <= block


def test_a_block_that_does_not_fit_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    expected = build(model, units_per_batch=2)
    real, calls = Replay._started, count()

    def tight(self: Replay, units: Any) -> torch.Tensor:
        if next(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, units)

    monkeypatch.setattr(Replay, "_started", tight)
    monkeypatch.setattr(batches.Room, "block", lambda *_: 8)
    found = build(model, units_per_batch=4)
    assert found.provenance["runtime"]["units_per_batch"] == 2
    assert np.allclose(found.matrix, expected.matrix, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("family", "full"),
    [("llama", True), ("gemma2", False), ("gpt_neox", False), ("gpt2", True), ("opt_350m", False)],
)
def test_h_of_a_streamed_model_has_the_bits_of_the_loaded_one(
    tmp_path: Path, family: str, full: bool
) -> None:
    model = tiny_model(family, "gqa" if family in ("llama", "gemma2") else "mha")
    own = streamed(tmp_path, model)
    found = build(own, full_vocabulary=full)
    require_same_bits(found, build(model, full_vocabulary=full))
    assert found.matrix.trace() > 0


def test_a_block_reads_each_layer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(tmp_path, tiny_model())
    stream = weights_of(model)
    layer = stream.bytes_present // 2
    build(model)  # what is checked once is checked now
    # the teacher's pass reads 3 layers, and blocks that start in layers 0, 1 and 2 read 3, 2 and 1
    for block, layers in ((1000, 3 + 3), (6, 3 + 3 + 2 + 1)):
        monkeypatch.setattr(batches.Room, "block", lambda *_, block=block: block)
        before = stream.bytes_read
        build(model)
        assert stream.bytes_read - before == 2 * layers * layer  # 2 rows


def test_batch_and_block_follow_from_numbers_alone() -> None:
    architecture, units = describe(tiny_model()), cl.enumerate_units(tiny_model(), GROUPS)
    room = replace(batches.Room.of(architecture, units, TEXT, 16), device_kind="cuda")
    fixed, row, state = room.fixed, room.row, 20 * 32 * 4
    assert room.state == state

    def found(free: float, coming: int = 0, device: str = "cuda") -> tuple[int, int]:
        own = replace(room, free=free, coming=coming, fixed=fixed + coming, device_kind=device)
        batch = own.batch(units)
        return batch, own.block(units, batch)

    assert found(1e12) == found(1e12, device="mps") == (6, 1)  # a layer has 2 + 4 units
    assert found(0) == found(0, 100) == (1, 1)
    assert found(2 * (fixed + 3.5 * row)) == (3, 1)  # half of the free memory
    # the weights that come are there in full; half of what is left is for ablations, and half of
    # that for batches
    assert found(fixed + 100 + 4 * 3.5 * row, 100)[0] == 3
    assert found(1e12, 100) == (6, len(units))
    free = fixed + 100 + 2 * row + 2 * 7.5 * state
    assert replace(room, free=free, coming=100, fixed=fixed + 100).block(units, 2) == 7
    many = cl.enumerate_units(tiny_model(), 32)
    assert replace(room, free=1e12, device_kind="cpu").batch(many) == 24  # of 34
