"""The dense model's perplexity on the rows of a build: measured, stored, and told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.curvature.settings import BuildOptions
from cocurve_lab.estimator.risks import told_fit
from helpers.builds import stop_after
from helpers.tiny_models import (
    GROUPS,
    VOCAB,
    full_logits,
    tiny_model,
    tiny_text,
)

ONE = {"seq_len": 12, "positions_per_sequence": "all"}


def by_hand(model: Any, text: cl.CalibrationSet) -> list[float]:
    logs = torch.log_softmax(full_logits(model, text.input_ids).double(), dim=-1)
    found = []
    for number, row in enumerate(text.input_ids):
        nats = [-logs[number, t, row[t + 1]].item() for t in text.scored[number].tolist()]
        found.append(sum(nats) / len(nats))
    return found


def build(model: Any, text: cl.CalibrationSet, **options: Any) -> cl.Curvature:
    units = cl.enumerate_units(model, GROUPS)
    progress = options.pop("progress", False)
    checkpoint = options.pop("checkpoint", None)
    return cl.estimate_curvature(
        model, units, text, 16, progress=progress, checkpoint=checkpoint,
        options=BuildOptions(**options),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_of_each_row_is_that_of_full_passes(family: str, tmp_path: Path) -> None:
    model, text = tiny_model(family), tiny_text(3, 12)
    found = build(model, text)
    assert found.provenance["sequence_losses"] == pytest.approx(by_hand(model, text), abs=1e-5)
    found.save(tmp_path / "H.pkl")
    kept = cl.Curvature.load(tmp_path / "H.pkl").provenance
    assert kept["sequence_losses"] == found.provenance["sequence_losses"]


def test_losses_are_resumed_and_merged(tmp_path: Path) -> None:
    model, text = tiny_model(), tiny_text(4, 12)
    expected = pytest.approx(by_hand(model, text), abs=1e-5)

    file = tmp_path / "build.pkl"
    part = build(model, text, checkpoint=file, on_sequence=stop_after(2))
    assert len(part.provenance["sequence_losses"]) == 2
    assert build(model, text, checkpoint=file).provenance["sequence_losses"] == expected
    shards = [build(model, text, shard=(n, 2)) for n in (1, 2)]
    merged = merge_shards(shards)
    assert merged.provenance["sequence_losses"] == expected
    halves = [build(model, text.rows(a, a + 2)) for a in (0, 2)]
    assert cl.Curvature.merge(halves).provenance["sequence_losses"] == expected


def test_a_text_that_the_model_does_not_know_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    build(tiny_model(), tiny_text(2, 12), progress=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "perplexity on 2 rows is" in said
    assert f"near the {VOCAB} of a uniform guess" in said
    assert "first row is" in told_fit([2.0], VOCAB)
    assert f"{math.exp(2.0):.4g}" in told_fit([1.0, 3.0], VOCAB)
    assert "guess" not in told_fit([1.0, 3.0], VOCAB)
    assert told_fit([], VOCAB) == ""
