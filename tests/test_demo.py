"""The embedded model and the terminal demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cocurve_lab as cl
from cocurve_lab import demo

DATA = Path(__file__).resolve().parents[1] / "data"
FAMILIES = ("stories", "commonsense", "knowledge", "arithmetic", "code")


def test_the_embedded_model_is_a_small_half_precision_folder() -> None:
    folder = cl.demo_folder()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    assert (folder / "README.md").exists()
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {torch.float16}
    model, tokenizer = cl.load_model("demo")
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 6e6
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert tokenizer.model_max_length == model.config.max_position_embeddings


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "stories"])
def test_the_embedded_model_answers_test_prompts(family: str) -> None:
    """A sample of the shipped prompts; the card states all of them."""
    model, tokenizer = cl.load_model("demo")
    lines = (DATA / "prompts" / f"{family}.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines[:: max(1, len(lines) // 24)]][:24]
    right = sum(
        cl.continue_text(model, tokenizer, row["prompt"], 12).strip().split("\n")[0].split(".")[0]
        == row["answer"]
        for row in asked
    )
    assert right / len(asked) >= 0.8


def test_random_pruning_at_40_percent_destroys_it_and_a_plan_does_not() -> None:
    model, tokenizer = cl.load_model("demo")
    units = cl.enumerate_units(model)
    text, held_out = cl.default_calibration("demo", tokenizer, 4, 4, positions_per_sequence="all")
    curvature = cl.estimate_curvature(model, units, text, progress=False)
    plans = [cl.solve_greedy(curvature, 0.4), *(demo.random_plan(units, 0.4, s) for s in range(3))]
    table = cl.measure_plans(model, plans, held_out, progress=False, calibrated_on=curvature)
    assert table.mean[0] < table.mean[1:].min() / 2


def test_demo_command_prints_the_table_and_both_texts(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["--rows", "2", "--held-out", "2", "--ratios", "0.2"])
    shown = capsys.readouterr().out
    for expected in ("lambda 0", "lambda 1", "random", "masked = pruned", "dense ", "pruned "):
        assert expected in shown


def test_random_plan_reaches_the_ratio_and_no_further_than_a_unit() -> None:
    model, _ = cl.load_model("demo")
    units = cl.enumerate_units(model)
    for ratio in (0.0, 0.2, 0.5):
        plan = demo.random_plan(units, ratio, seed=1)
        assert ratio <= plan.realized_ratio < ratio + units.costs.max() / units.total_cost
