"""Single-unit risks over the full vocabulary: naive passes, the bits of H, files, shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.settings import BuildOptions, settings_of
from cocurve_lab.estimator import risks
from cocurve_lab.estimator.estimate import load_or_estimate
from cocurve_lab.solver.variants import measured_diagonal
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, VOCAB, naive_risk, tiny_model, tiny_text, units_by_hand

TEXT = tiny_text(4, 20, 6)


def build(text: cl.CalibrationSet = TEXT, family: str = "llama", **options: Any) -> cl.Curvature:
    model = tiny_model(family)
    rest = {"progress": False, "checkpoint": options.pop("checkpoint", None)}
    top_r = options.pop("top_r", 8)
    units = cl.enumerate_units(model, GROUPS)
    return cl.estimate_curvature(model, units, text, top_r, options=BuildOptions(**options), **rest)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])  # capped logits, a tied head
def test_risks_are_those_of_naive_full_passes(family: str) -> None:
    model = tiny_model(family)
    found = build(family=family, full_vocabulary=True).single_unit_risk
    expected = [naive_risk(model, [unit], TEXT).mean() for unit in units_by_hand(model)]
    np.testing.assert_allclose(found, expected, rtol=5e-4, atol=1e-9)
    support = build(family=family).single_unit_risk
    assert not np.allclose(support, expected, rtol=5e-4)


def test_h_keeps_its_bits_and_says_what_its_risks_are_over() -> None:
    support, full = build(), build(full_vocabulary=True)
    np.testing.assert_array_equal(full.group_grams, support.group_grams)
    np.testing.assert_array_equal(full.matrix, support.matrix)
    assert (support.risk_support, full.risk_support) == ("the top-8 support", "the full vocabulary")
    assert random_curvature(make_units()).risk_support == "the top-r support"
    assert measured_diagonal(full).saliency / 2 == pytest.approx(full.single_unit_risk)


def test_the_pieces_of_the_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(full_vocabulary=True)
    monkeypatch.setattr(risks, "LOGIT_BYTES", 4 * VOCAB * 2)  # two rows of logits at a time
    np.testing.assert_allclose(
        build(full_vocabulary=True).single_unit_risk, whole.single_unit_risk, rtol=1e-5
    )


def test_a_support_that_is_the_vocabulary_is_not_measured_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(risks.FullVocabulary, "kl", None)
    every = build(top_r=VOCAB, full_vocabulary=True)
    np.testing.assert_array_equal(every.group_risks, build(top_r=VOCAB).group_risks)


def test_a_file_of_its_own_which_keeps_the_support(tmp_path: Path) -> None:
    model = tiny_model()
    inputs = (tmp_path, model, cl.enumerate_units(model, GROUPS), TEXT, 8)
    support = load_or_estimate(*inputs, progress=False)
    full = load_or_estimate(*inputs, progress=False, options=BuildOptions(full_vocabulary=True))
    assert len(list(tmp_path.glob("H_*.pkl"))) == 2
    again = load_or_estimate(*inputs, progress=False, options=BuildOptions(full_vocabulary=True))
    assert again.risk_support == "the full vocabulary"
    np.testing.assert_array_equal(again.group_risks, full.group_risks)
    # a build on the support is named and described as before there was a choice
    assert "risk_support" not in support.provenance
    assert "risk_support" not in settings_of(support.provenance)
    assert settings_of(full.provenance)["risk_support"] == "full vocabulary"


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_on_the_other_support_is_refused(tmp_path: Path, first: bool) -> None:
    path = tmp_path / "build.ckpt"
    build(checkpoint=path, full_vocabulary=first, checkpoint_seconds=0)
    with pytest.raises(cl.MismatchError, match="risk_support"):
        build(checkpoint=path, full_vocabulary=not first)


def test_merged_builds_agree_on_the_support() -> None:
    halves = [TEXT.rows(0, 2), TEXT.rows(2, 4)]
    merged = cl.Curvature.merge([build(half, full_vocabulary=True) for half in halves])
    whole = build(full_vocabulary=True)
    assert merged.risk_support == "the full vocabulary"
    assert merged.single_unit_risk == pytest.approx(whole.single_unit_risk)
    for order in ((True, False), (False, True)):
        parts = [build(h, full_vocabulary=f) for h, f in zip(halves, order, strict=True)]
        with pytest.raises(cl.MismatchError, match="risk_support"):
            cl.Curvature.merge(parts)


def test_shards_agree_on_the_support() -> None:
    whole = build(full_vocabulary=True)
    merged = cl.Curvature.merge([build(shard=(i, 2), full_vocabulary=True) for i in (1, 2)])
    np.testing.assert_array_equal(merged.group_risks, whole.group_risks)
    assert merged.risk_support == "the full vocabulary"
    for order in ((True, False), (False, True)):
        parts = [build(shard=(i, 2), full_vocabulary=f) for i, f in zip((1, 2), order, strict=True)]
        with pytest.raises(cl.MismatchError, match="risk_support"):
            cl.Curvature.merge(parts)
