"""The positions where the teacher is sure: counted by the build, kept in H, and warned of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.base.tables import WIDTH
from helpers.problems import interrupt_at
from helpers.tiny_models import (
    GROUPS,
    full_logits,
    masked_by_hand,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
)

TEXT = tiny_text(5, 20, 9)
SURE = ("group_sure_positions", "group_sure_risks")


def sharp_model(factor: float) -> PreTrainedModel:
    """A tiny model whose logits are multiplied by a factor: the larger, the surer."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def build(model: PreTrainedModel, text: cl.CalibrationSet = TEXT, **more: Any) -> cl.Curvature:
    units, progress = cl.enumerate_units(model, GROUPS), more.pop("progress", False)
    checkpoint = more.pop("checkpoint", None)
    options = cl.BuildOptions(**({"groups": 3, "checkpoint_seconds": 0} | more))
    return cl.estimate_curvature(
        model, units, text, 32, options=options, progress=progress, checkpoint=checkpoint
    )


def require_same_counts(a: cl.Curvature, b: cl.Curvature) -> None:
    for name in ("matrix", "group_risks", *SURE):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.saturation == b.saturation is not None


def test_the_counts_are_those_of_naive_full_passes() -> None:
    model = sharp_model(20)
    wide, units = tiny_double(model), units_by_hand(model)
    sure, risks = np.zeros(3, int), np.zeros((3, len(units)))
    everything = np.zeros(len(units))
    for number, (ids, positions) in enumerate(zip(TEXT.input_ids, TEXT.positions, strict=True)):
        teacher = full_logits(wide, ids[None])[0, positions]
        support = teacher.topk(32, dim=-1).indices
        log_p = torch.log_softmax(teacher.gather(-1, support), dim=-1)
        mine = log_p.exp().amax(dim=-1) > 0.99
        sure[number % 3] += int(mine.sum())
        for u, unit in enumerate(units):
            with masked_by_hand(wide, [unit]):
                masked = full_logits(wide, ids[None])[0, positions].gather(-1, support)
            kl = (log_p.exp() * (log_p - torch.log_softmax(masked, dim=-1))).sum(dim=-1)
            risks[number % 3, u] += float(kl[mine].sum())
            everything[u] += float(kl.sum())
    found = build(model)
    assert 0 < sure.sum() < TEXT.positions.numel()  # some are, some are not
    np.testing.assert_array_equal(found.group_sure_positions, sure)
    np.testing.assert_allclose(found.group_sure_risks, risks, rtol=1e-3, atol=1e-7)
    assert found.saturation is not None
    assert found.saturation.positions == pytest.approx(sure.sum() / TEXT.positions.numel())
    assert found.saturation.risk == pytest.approx(risks.sum() / everything.sum(), rel=1e-4)


def test_merged_resumed_and_stored_counts_are_those_of_one_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp_model(20)
    whole = build(model)
    shards = [build(model, shard=(number, 2)) for number in (1, 2)]
    require_same_counts(cl.Curvature.merge(shards), whole)

    file = tmp_path / "build"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, KeyboardInterrupt())
        assert build(model, checkpoint=file).provenance["sequences_done"] == 2
    require_same_counts(build(model, checkpoint=file), whole)

    for suffix in (".pkl", ".npz"):
        require_same_counts(cl.Curvature.load(whole.save(tmp_path / f"H{suffix}")), whole)
    evidence = cl.get_method("cocurve").adopt(whole)
    assert {*SURE} <= set(evidence.arrays)

    halves = [build(model, TEXT.rows(0, 2)), build(model, TEXT.rows(2, 5))]
    merged = cl.Curvature.merge(halves)
    assert merged.saturation is not None
    assert whole.saturation is not None
    assert merged.saturation.positions == whole.saturation.positions
    assert merged.saturation.risk == pytest.approx(whole.saturation.risk)


def test_a_saturated_teacher_is_warned_of_and_another_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for factor, saturated in ((1, False), (100, True)):
        model = sharp_model(factor)
        found = build(model, progress=True)
        assert found.saturation is not None
        assert found.saturation.saturated is saturated
        warning = found.saturation.warning
        assert bool(warning) is saturated
        said = [capsys.readouterr().out, cl.redundancy_gate(found).reason]
        if saturated:
            assert f"at {found.saturation.positions:.0%} of its positions" in warning
            assert f"carry {found.saturation.risk:.0%} of the measured KL" in warning
            assert all(warning in " ".join(text.split()) for text in said)  # printed in folds
            assert max(map(len, said[0].splitlines())) <= WIDTH
            assert "saturated" in repr(found)
            build(model)
            assert (
                warning[:40] not in capsys.readouterr().out
            )  # nothing is printed without progress
        else:
            assert not any("saturated" in text for text in (*said, repr(found)))
    folder, units = tmp_path / "H", cl.enumerate_units(model, GROUPS)
    for _ in range(2):  # built, then loaded
        cl.load_or_estimate(folder, model, units, TEXT, 32)
        assert warning in " ".join(capsys.readouterr().out.split())


def test_the_rule_is_one_half_of_either_share() -> None:
    from cocurve_lab.curvature.saturation import Saturation

    assert not Saturation(0.5, 0.5).saturated
    assert Saturation(0.51, 0.0).saturated
    assert Saturation(0.0, 0.51).saturated
    assert not Saturation(0.2, math.nan).saturated
