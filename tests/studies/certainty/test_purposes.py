"""One budget on several texts: values as measured by hand, and a plan beside that of the text."""

from __future__ import annotations

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.tables import pick
from cocurve_studies import kept_curvature
from cocurve_studies.certainty import purposes
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
    assert {row["own"] for row in purposes.others(table)} == {False}


def test_a_judge_may_not_have_been_calibrated_on() -> None:
    rows = tiny_text(2)
    with pytest.raises(cl.MismatchError):
        purposes.purpose_table(MODEL, UNITS, {"a": (rows, rows)}, 0.3, progress=False)


def test_rows_are_cut_apart() -> None:
    words = [" ".join(f"w{n % 90}" for n in range(at, at + 30)) for at in range(60)]
    cut = purposes.cut_texts({"words": words}, word_tokenizer(), 3, 2, 12)["words"]
    assert [len(part) for part in cut] == [3, 2]
    cut[1].require_disjoint(cut[0])


def test_what_ships_with_a_model_makes_the_same_table() -> None:
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    table = purposes.kept_purposes(curvature, 0.2)
    assert table is not None
    names = set(purposes.KEPT)
    assert {row["calibrated_on"] for row in table} == {row["judged_on"] for row in table} == names
    assert len(table) == len(names) ** 2 * len(purposes.STRENGTHS)
    small = cl.Curvature(np.eye(len(UNITS)), UNITS)
    assert purposes.kept_purposes(small, 0.2) is None
