"""The embedded model and the terminal demo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.cli import demo
from cocurve_lab.models.identity import demo_folder
from data.make import measure

DATA = Path(__file__).resolve().parents[2] / "data"
BAR = {"stories": 0.90, "knowledge": 0.95, "code": 0.95, "commonsense": 0.90, "arithmetic": 0.90}


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


def test_demo_runs_the_verbs_and_prints_both_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.demo(rows="2") == 0
    shown = capsys.readouterr().out
    for expected in ("$ cocurve evaluate", "KL(demo || model)", "\ndense ", "\npruned "):
        assert expected in shown
