"""The embedded model and the terminal demo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cocurve_lab as cl
from cocurve_lab.cli import demo
from cocurve_lab.extensions.judging.agreement import random_plan
from cocurve_lab.models.identity import demo_folder
from data.make import measure

DATA = Path(__file__).resolve().parents[2] / "data"
BAR = {"stories": 0.90, "knowledge": 0.95, "code": 0.95, "commonsense": 0.90, "arithmetic": 0.90}


def test_the_embedded_model_is_a_small_half_precision_folder() -> None:
    folder = demo_folder()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    assert (folder / "README.md").exists()
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    model, tokenizer = cl.load_model("demo")
    assert 3e6 <= model.num_parameters() <= 6e6
    assert len(cl.enumerate_units(model)) >= 160
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert tokenizer.model_max_length == model.config.max_position_embeddings


@pytest.mark.slow
@pytest.mark.parametrize("family", BAR)
def test_the_card_is_true_and_the_bar_is_met(family: str) -> None:
    """Exact match on all shipped test prompts: what the card says, and at least the bar."""
    model, tokenizer = cl.load_model("demo")
    stated = json.loads((demo_folder() / "training.json").read_text())["capability"][family]
    asked = [one for one in cl.demo_questions(10**6) if one.capability == family]
    assert len(asked) == len((DATA / "prompts" / f"{family}.jsonl").read_text().splitlines())
    said = measure.replies(model, tokenizer, [one.prompt for one in asked])
    right = [reply == one.answer for reply, one in zip(said, asked, strict=True)]
    assert right == [one.is_right(reply) for reply, one in zip(said, asked, strict=True)]
    share = np.mean(right)
    assert share == pytest.approx(stated, abs=0.011)
    assert share >= BAR[family]


@pytest.mark.slow
def test_it_has_choices_and_has_learned_them() -> None:
    """On whole held-out documents: mostly unsure, and as good as the generator allows."""
    model, tokenizer = cl.load_model("demo")
    found = measure.held_out(model, tokenizer)["all"]
    stated = json.loads((demo_folder() / "training.json").read_text())["held_out"]["all"]
    assert found == pytest.approx(stated, abs=2e-3)
    assert found["entropy"] >= 1.5
    assert found["sure"] <= 0.25
    assert found["loss"] <= 1.1 * found["drawn"]


@pytest.mark.slow
def test_at_40_percent_random_plans_destroy_it_and_a_plan_holds() -> None:
    """By KL on held-out text, and by what the model still answers."""
    model, tokenizer = cl.load_model("demo")
    curvature = cl.Curvature.load(demo_folder() / "H_16_rows.npz")
    _, held_out = cl.default_calibration("demo", tokenizer, 16, 4, positions_per_sequence="all")
    units = curvature.units
    plans = [cl.solve_greedy(curvature, 0.4), *(random_plan(units, 0.4, s) for s in range(2))]
    table = cl.measure_plans(model, plans, held_out, progress=False, calibrated_on=curvature)
    assert table.mean[0] < table.mean[1:].min() / 2

    asked, shares = cl.demo_questions(20), []
    for plan in plans:
        said = measure.replies(cl.prune(model, plan), tokenizer, [one.prompt for one in asked])
        right = [one.is_right(reply) for reply, one in zip(said, asked, strict=True)]
        shares.append(float(np.mean(right)))
    assert shares[0] > 1.5 * max(shares[1:])
    assert np.mean(shares[1:]) < 0.4


def test_demo_runs_the_verbs_and_prints_both_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.demo(rows="2") == 0
    shown = capsys.readouterr().out
    for expected in ("$ cocurve evaluate", "KL(demo || model)", "\ndense ", "\npruned "):
        assert expected in shown
