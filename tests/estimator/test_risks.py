"""What a build measures beside H: risks over the full vocabulary, losses, and sure positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Saturation
from cocurve_lab.estimator import risks
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from cocurve_lab.models import logits
from helpers.builds import build, require_same_bits, stop_after
from helpers.tiny_models import (
    VOCAB,
    full_logits,
    masked_by_hand,
    naive_risk,
    sharper,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
)

TEXT = tiny_text(4, 20, 6)


# Risks over the full vocabulary -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt2"])  # a tied head
def test_risks_are_those_of_naive_full_passes(family: str) -> None:
    model = tiny_model(family)
    support, full = (build(model, TEXT, 8, full_vocabulary=each) for each in (False, True))
    expected = [naive_risk(model, [unit], TEXT).mean() for unit in units_by_hand(model)]
    np.testing.assert_allclose(full.single_unit_risk, expected, rtol=5e-4, atol=1e-9)
    assert not np.allclose(support.single_unit_risk, expected, rtol=5e-4)
    np.testing.assert_array_equal(full.group_grams, support.group_grams)  # H keeps its bits
    assert (support.risk_support, full.risk_support) == ("the top-8 support", "the full vocabulary")
    assert measured_diagonal(full).saliency / 2 == pytest.approx(full.single_unit_risk)


def test_the_pieces_of_the_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(top_r=8, full_vocabulary=True)
    with monkeypatch.context() as patch:
        patch.setattr(logits, "LOGIT_BYTES", 4 * VOCAB * 2)  # two rows of logits at a time
        found = build(top_r=8, full_vocabulary=True).single_unit_risk
    np.testing.assert_allclose(found, whole.single_unit_risk, rtol=1e-5)
    # a support that is the vocabulary is not measured twice
    monkeypatch.setattr(risks.FullVocabulary, "kl", None)
    require_same_bits(build(top_r=VOCAB, full_vocabulary=True), build(top_r=VOCAB))


# The dense model's loss ---------------------------------------------------------------------------


def losses_by_hand(model: Any, text: cl.CalibrationSet) -> list[float]:
    logs = torch.log_softmax(full_logits(model, text.input_ids).double(), dim=-1)
    found = []
    for number, row in enumerate(text.input_ids):
        nats = [-logs[number, t, row[t + 1]].item() for t in text.scored[number].tolist()]
        found.append(sum(nats) / len(nats))
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_of_each_row_is_that_of_full_passes(family: str) -> None:
    model, text = tiny_model(family), tiny_text(3, 12)
    found = build(model, text).provenance["sequence_losses"]
    assert found == pytest.approx(losses_by_hand(model, text), abs=1e-5)


# Sure positions -----------------------------------------------------------------------------------

ROWS = tiny_text(5, 20, 9)
SURE = ("sure_positions", "sure_risks")


def sure_build(factor: float = 20, text: cl.CalibrationSet = ROWS, **options: Any) -> cl.Curvature:
    return build(sharper(factor), text, **({"groups": 3, "checkpoint_seconds": 0} | options))


def require_same_counts(a: cl.Curvature, b: cl.Curvature) -> None:
    require_same_bits(a, b)
    for name in SURE:
        np.testing.assert_array_equal(getattr(a.groups, name), getattr(b.groups, name))
    assert a.saturation == b.saturation is not None
    assert a.provenance["sequence_losses"] == b.provenance["sequence_losses"]


def test_the_counts_are_those_of_naive_full_passes() -> None:
    model = sharper(20)
    wide, units = tiny_double(model), units_by_hand(model)
    sure, shares = np.zeros(3, int), np.zeros((3, len(units)))
    everything = 0.0
    for number, (ids, positions) in enumerate(zip(ROWS.input_ids, ROWS.positions, strict=True)):
        teacher = full_logits(wide, ids[None])[0, positions]
        support = teacher.topk(32, dim=-1).indices
        log_p = torch.log_softmax(teacher.gather(-1, support), dim=-1)
        mine = log_p.exp().amax(dim=-1) > 0.99
        sure[number % 3] += int(mine.sum())
        for u, unit in enumerate(units):
            with masked_by_hand(wide, [unit]):
                masked = full_logits(wide, ids[None])[0, positions].gather(-1, support)
            kl = (log_p.exp() * (log_p - torch.log_softmax(masked, dim=-1))).sum(dim=-1)
            shares[number % 3, u] += float(kl[mine].sum())
            everything += float(kl.sum())
    found = sure_build()
    assert 0 < sure.sum() < ROWS.positions.numel()  # some are, some are not
    np.testing.assert_array_equal(found.groups.sure_positions, sure)
    np.testing.assert_allclose(found.groups.sure_risks, shares, rtol=1e-3, atol=1e-7)
    assert found.saturation.positions == pytest.approx(sure.sum() / ROWS.positions.numel())
    assert found.saturation.risk == pytest.approx(shares.sum() / everything, rel=1e-4)


def test_merged_resumed_and_stored_counts_are_those_of_one_build(tmp_path: Path) -> None:
    whole, file = sure_build(), tmp_path / "build"
    require_same_counts(cl.Curvature.merge([sure_build(shard=(n, 2)) for n in (1, 2)]), whole)
    sure_build(checkpoint=file, on_sequence=stop_after(2))
    require_same_counts(sure_build(checkpoint=file), whole)
    for suffix in (".pkl", ".npz"):
        require_same_counts(cl.Curvature.load(whole.save(tmp_path / f"H{suffix}")), whole)
    assert {f"group_{name}" for name in SURE} <= set(cl.get_method("cocurve").adopt(whole).arrays)
    merged = cl.Curvature.merge([sure_build(text=ROWS.rows(a, b)) for a, b in ((0, 2), (2, 5))])
    assert merged.saturation.positions == whole.saturation.positions
    assert merged.saturation.risk == pytest.approx(whole.saturation.risk)


@pytest.mark.parametrize(("factor", "saturated"), [(1, False), (100, True)])
def test_a_saturated_teacher_is_warned_of_and_another_is_not(
    capsys: pytest.CaptureFixture[str], factor: float, saturated: bool
) -> None:
    found = sure_build(factor, progress=True)
    assert found.saturation.saturated is bool(found.saturation.warning) is saturated
    printed = " ".join(capsys.readouterr().out.split())  # printed in lines
    assert ("saturated" in printed) is saturated


@pytest.mark.parametrize(
    ("shares", "saturated"),
    [((0.5, 0.5), False), ((0.51, 0.0), True), ((0.0, 0.51), True), ((0.2, math.nan), False)],
)
def test_the_rule_is_one_half_of_either_share(shares: tuple[float, float], saturated: bool) -> None:
    assert Saturation(*shares).saturated is saturated
