"""A checkpoint we did not make: Karpathy's stories260K, GQA, converted by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.models.loading import load_tokenizer

ASSETS = Path(__file__).resolve().parents[3] / "shared" / "assets"
MODEL, STORIES = ASSETS / "tinystories_260k", ASSETS / "text" / "tinystories.txt"
pytestmark = pytest.mark.skipif(
    not MODEL.is_dir() or not STORIES.is_file(),
    reason=f"the third-party checkpoint is not at {MODEL}",
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return cl.load_model(MODEL, device="cpu")[0]


@pytest.fixture(scope="module")
def stories() -> tuple[cl.CalibrationSet, cl.CalibrationSet]:
    rows: Any = {"num_sequences": 24, "seq_len": 128, "positions_per_sequence": "all"}
    parts = cl.CalibrationSet.from_file(STORIES, load_tokenizer(MODEL), **rows).split(held_out=8)
    return parts[0], parts[1]


@torch.no_grad()
def test_its_loss_on_its_own_stories(model: PreTrainedModel) -> None:
    texts = [t.strip() for t in STORIES.read_text(encoding="utf-8").split("<|endoftext|>")]
    stories = load_tokenizer(MODEL)([t for t in texts if t])["input_ids"]
    rows = sorted((torch.tensor(ids[:512]) for ids in stories), key=len)
    losses = []
    for start in range(0, len(rows), 32):
        ids = pad_sequence(rows[start : start + 32], batch_first=True, padding_value=-100)
        logits = model(ids.clamp(min=0), use_cache=False).logits[:, :-1].double()
        losses.append(cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none"))
    total = sum(float(part.sum()) for part in losses)
    count = sum(len(row) - 1 for row in rows)
    assert total / count == pytest.approx(1.505, abs=0.002)  # as its card states


def test_the_plan_is_better_than_chance_on_unseen_stories(
    model: PreTrainedModel, stories: tuple[cl.CalibrationSet, cl.CalibrationSet]
) -> None:
    units = cl.enumerate_units(model, ffn_groups=8)
    curvature = cl.estimate_curvature(model, units, stories[0], progress=False)
    plan = cl.solve_greedy(curvature, ratio=0.25)
    cl.check_equivalence(model, cl.prune(model, plan), plan, stories[1])
    drawn = cl.get_method("random")
    random = [
        drawn.select(
            drawn.measure(model, units, stories[0], seed=seed, progress=False), units, 0.25
        )
        for seed in range(4)
    ]
    table = cl.measure_plans(
        model, [plan, *random], stories[1], calibrated_on=curvature, progress=False
    )
    assert table.mean[0] < 0.75 * table.mean[1:].min()
    assert table.mean[0] / 3 < plan.predicted_risk < 3 * table.mean[0]
