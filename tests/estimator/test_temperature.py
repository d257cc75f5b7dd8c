"""A softened teacher: logits divided by a temperature, stated wherever H is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import merge_shards
from helpers.tiny_models import tiny_model, tiny_text

TEXT = tiny_text(4, 20, 6)


def build(model: Any = None, **options: Any) -> cl.Curvature:
    rest = {"checkpoint": options.pop("checkpoint", None), "progress": False}
    return cl.estimate_curvature(
        model or tiny_model(), None, TEXT, 16, options=cl.BuildOptions(**options), **rest
    )


@pytest.mark.parametrize("full", [False, True])
def test_a_temperature_divides_the_logits(full: bool) -> None:
    """Against a model whose head is divided by it."""
    cooler = tiny_model()
    with torch.no_grad():
        cooler.lm_head.weight /= 2.5
    expected = build(cooler, full_vocabulary=full)
    found = build(temperature=2.5, full_vocabulary=full)
    np.testing.assert_allclose(found.matrix, expected.matrix, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(found.single_unit_risk, expected.single_unit_risk, rtol=1e-3)
    np.testing.assert_allclose(
        found.pair_kl().matrix, expected.pair_kl().matrix, rtol=0.01, atol=1e-6
    )
    assert not np.allclose(found.matrix, build().matrix, rtol=0.1)


def test_h_says_that_its_teacher_is_softened(tmp_path: Path) -> None:
    soft = build(temperature=2)
    assert "logits divided by 2, a departure from the paper" in soft.note()
    assert cl.Curvature.load(soft.save(tmp_path / "H.pkl")).provenance["temperature"] == 2
    assert "temperature" not in build(temperature=1.0).provenance
    assert build().note() == ""


def test_builds_of_two_temperatures_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "H.ckpt"
    build(temperature=2, checkpoint=path)
    with pytest.raises(cl.MismatchError, match="temperature is 2"):
        build(checkpoint=path)
    one, two = build(shard=(1, 2)), build(shard=(2, 2), temperature=2)
    with pytest.raises(cl.MismatchError, match="temperature is 2"):
        merge_shards([one, two])


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), "2"])
def test_other_temperatures_are_refused(wrong: Any) -> None:
    with pytest.raises(cl.InputError, match="temperature is"):
        cl.BuildOptions(temperature=wrong)
