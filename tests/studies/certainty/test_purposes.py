"""One budget on several texts: values as measured by hand, and a plan beside that of the text."""

from __future__ import annotations

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import kept_curvature
from cocurve_studies.certainty import purposes
from cocurve_studies.tables import pick
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

MODEL = tiny_model()
UNITS = cl.enumerate_units(MODEL, GROUPS)
TEXTS = {name: (tiny_text(2, seed=n), tiny_text(3, seed=n + 5)) for n, name in enumerate("ab")}


def test_every_plan_is_judged_on_every_text() -> None:
    table = purposes.purpose_table(MODEL, UNITS, TEXTS, 0.3, top_r=16, progress=False)
    assert len(table) == 2 * 2 * 2
    plans = {
        name: cl.solve_greedy(
            cl.estimate_curvature(MODEL, UNITS, rows, 16, progress=False), 0.3, 1.0
        )
        for name, (rows, _) in TEXTS.items()
    }
    kl = cl.measure_plans(MODEL, [plans["a"], plans["b"]], TEXTS["a"][1], progress=False).kl
    (row,) = pick(table, calibrated_on="b", judged_on="a", interaction_strength=1.0)
    assert row["kl"] == pytest.approx(kl[1].mean())
    assert row["against_own"] == pytest.approx((kl[1] - kl[0]).mean())
    paired = (kl[1] - kl[0]).std(ddof=1) / np.sqrt(3)
    assert row["against_own_error"] == pytest.approx(paired)
    assert row["share"] == pytest.approx(kl[1].mean() / kl[0].mean() - 1)
    assert all(row["against_own"] == 0 for row in pick(table, own=True))
    assert {row["own"] for row in pick(purposes.others(table))} == {False}


def test_a_judge_may_not_have_been_calibrated_on() -> None:
    rows = tiny_text(2)
    with pytest.raises(cl.MismatchError):
        purposes.purpose_table(MODEL, UNITS, {"a": (rows, rows)}, 0.3, progress=False)


def test_no_document_is_calibrated_on_and_judged() -> None:
    documents = [" ".join([f"w{word}"] * 30) for word in range(40)]  # each of a word of its own
    cut = purposes.purpose_texts("any", {"words": documents}, word_tokenizer(), 3, 2, 12)
    rows, judge = cut["words"]
    assert (len(rows), len(judge)) == (3, 2)
    ends = word_tokenizer().eos_token_id
    shared = set(rows.input_ids.flatten().tolist()) & set(judge.input_ids.flatten().tolist())
    assert shared <= {ends}


def test_the_texts_of_the_demo_model_can_be_judged_on_as_the_notebook_cuts_them() -> None:
    _, tokenizer = cl.load_model("demo")
    texts = purposes.purpose_texts("demo", {"mixed": []}, tokenizer, 16, 16, 64)
    assert list(texts) == ["mixed", "stories", "arithmetic"]
    for rows, judge in texts.values():
        assert rows.input_ids.shape == judge.input_ids.shape == (16, 64)
        judge.require_disjoint(rows)


def test_what_ships_with_a_model_makes_the_same_table() -> None:
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    table = purposes.kept_purposes(curvature, 0.2)
    assert table is not None
    names = set(purposes.KEPT)
    assert (
        {row["calibrated_on"] for row in pick(table)}
        == {row["judged_on"] for row in pick(table)}
        == names
    )
    assert len(table) == len(names) ** 2 * len(purposes.STRENGTHS)
    small = cl.Curvature(np.eye(len(UNITS)), UNITS)
    assert purposes.kept_purposes(small, 0.2) is None
