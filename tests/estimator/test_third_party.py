"""A checkpoint we did not make: Karpathy's stories260K, GQA, converted by others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import cocurve_lab as cl
from helpers.tiny_models import naive_build, relative_error, units_by_hand

ASSETS = Path(__file__).resolve().parents[3] / "shared" / "assets"
MODEL, STORIES = ASSETS / "tinystories_260k", ASSETS / "text" / "tinystories.txt"
pytestmark = pytest.mark.skipif(
    not MODEL.is_dir() or not STORIES.is_file(),
    reason=f"the third-party checkpoint is not at {MODEL}",
)


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return cl.load_model(MODEL, device="cpu")


@pytest.fixture(scope="module")
def model(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> PreTrainedModel:
    return loaded[0]


@pytest.fixture(scope="module")
def stories(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> tuple[cl.CalibrationSet, cl.CalibrationSet]:
    parts = cl.CalibrationSet.from_file(
        STORIES, loaded[1], num_sequences=24, seq_len=128, positions_per_sequence="all"
    ).split(held_out=8)
    return parts[0], parts[1]


@pytest.fixture(scope="module")
def curvature(
    model: PreTrainedModel, stories: tuple[cl.CalibrationSet, cl.CalibrationSet]
) -> cl.Curvature:
    units = cl.enumerate_units(model, ffn_groups=8)
    return cl.estimate_curvature(model, units, stories[0], progress=False)


def story_documents(tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    documents = STORIES.read_text(encoding="utf-8").split("<|endoftext|>")
    texts = [text.strip() for text in documents if text.strip()]
    return [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]


def test_it_is_what_its_card_says(model: PreTrainedModel) -> None:
    units = cl.enumerate_units(model, ffn_groups=8)
    assert (model.dtype, model.training) == (torch.float32, False)
    assert not any(p.requires_grad for p in model.parameters())
    assert len(units) == 5 * (4 + 8)
    assert [tuple(u) for u in units_by_hand(model, 8)] == [
        (u.layer, u.kind, u.start, u.stop) for u in units
    ]
    sizes = {u.stop - u.start for u in units if u.kind == "ffn"}
    assert sizes == {21, 22}  # 172 channels in 8 groups


@torch.no_grad()
def test_its_loss_on_its_own_stories(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = loaded
    total = count = 0.0
    for ids in story_documents(tokenizer):
        ids = ids[:, :512]
        logp = torch.log_softmax(model(ids).logits[0, :-1].double(), dim=-1)
        total -= float(logp.gather(-1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    assert total / count == pytest.approx(1.505, abs=0.002)  # as its card states


def test_replay_is_naive_full_passes(
    model: PreTrainedModel, stories: tuple[cl.CalibrationSet, cl.CalibrationSet]
) -> None:
    ids = stories[0].input_ids[:2, :64]
    draws = torch.tensor([[3, 9, 30, 62], [0, 1, 40, 55]])
    units = cl.enumerate_units(model, ffn_groups=8)
    for text in (cl.CalibrationSet(ids), cl.CalibrationSet(ids, draws)):
        for top_r in (32, 512):
            found = cl.estimate_curvature(model, units, text, top_r, progress=False)
            expected, risks = naive_build(model, text, top_r, groups=8)
            assert relative_error(found.matrix, expected) <= 1e-5
            np.testing.assert_allclose(found.single_unit_risk, risks, rtol=1e-3)


def test_a_quarter_is_removed_and_verified(
    model: PreTrainedModel,
    curvature: cl.Curvature,
    stories: tuple[cl.CalibrationSet, cl.CalibrationSet],
) -> None:
    plan = cl.solve_greedy(curvature, ratio=0.25)
    pruned = cl.prune(model, plan)
    found = cl.check_equivalence(model, pruned, plan, stories[1])
    assert found.max_abs_difference < 1e-4
    assert model.num_parameters() - pruned.num_parameters() == plan.pruned_cost
    assert 0.25 <= plan.realized_ratio < 0.28


def test_the_plan_is_better_than_chance_on_unseen_stories(
    model: PreTrainedModel,
    curvature: cl.Curvature,
    stories: tuple[cl.CalibrationSet, cl.CalibrationSet],
) -> None:
    plan = cl.solve_greedy(curvature, ratio=0.25)
    rng = np.random.default_rng(0)
    random = []
    for _ in range(4):
        order = rng.permutation(60)
        running = np.cumsum(plan.units.costs[order])
        count = int(np.searchsorted(running, 0.25 * plan.units.total_cost)) + 1
        random.append(cl.Selection.from_pruned(plan.units, order[:count].tolist()))
    table = cl.measure_plans(
        model, [plan, *random], stories[1], calibrated_on=curvature, progress=False
    )
    assert table.mean[0] < 0.75 * table.mean[1:].min()
    assert plan.predicted_risk is not None
    assert table.mean[0] / 3 < plan.predicted_risk < 3 * table.mean[0]


def test_its_text_still_reads_after_pruning(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], curvature: cl.Curvature
) -> None:
    model, tokenizer = loaded
    pruned = cl.prune(model, cl.solve_greedy(curvature, ratio=0.25))
    known = set(STORIES.read_text(encoding="utf-8").lower().split())
    begins = ("Once upon a time, there was a little girl", "One day, a dog", "Tom and Sam")

    def share_of_words(writer: PreTrainedModel) -> float:
        words = []
        for begin in begins:
            ids = tokenizer(begin, return_tensors="pt")["input_ids"]
            out = writer.generate(ids, max_new_tokens=80, do_sample=False)
            written = tokenizer.decode(out[0, ids.shape[1] :]).lower().split()[1:-1]
            assert len(written) > 10
            words += written
        assert len(set(words)) > len(words) / 4  # not one word over and over
        return sum(word in known for word in words) / len(words)

    assert share_of_words(model) > 0.95
    assert share_of_words(pruned) > 0.7
