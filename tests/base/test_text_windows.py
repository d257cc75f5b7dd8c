"""Held-out text: what was seen before is found by content, and other text is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.base.text_windows import MOST, is_record, joined, read, record, windows
from helpers.tiny_models import GROUPS, tiny_model, tiny_text


def drawn(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def has_seen(ids: torch.Tensor, built: torch.Tensor) -> bool:
    try:
        cl.CalibrationSet(ids).require_disjoint(cl.CalibrationSet(built))
    except cl.MismatchError:
        return True
    return False


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(24, 200),
    leaked=st.integers(1, 4),
    way=st.sampled_from(["shift", "cut", "edit", "order", "shorter"]),
    by=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_a_changed_copy_is_found(length: int, leaked: int, way: str, by: int, seed: int) -> None:
    built, fresh = drawn(8, length, seed), drawn(4, length, seed + 100)
    rows = built[:leaked]
    if way == "shift":
        rows = torch.cat([rows[:, by:], fresh[:leaked, :by]], 1)
    elif way == "cut":  # half of the row
        rows = torch.cat([rows[:, : (length + 1) // 2], fresh[:leaked, (length + 1) // 2 :]], 1)
    elif way == "edit":  # one token changed
        rows = rows.clone()
        rows[:, by * length // 13] = 4
    elif way == "order":
        rows = rows.flip(0)
    else:
        rows = rows[:, by // 4 :]
        fresh = fresh[:, by // 4 :]
    assert has_seen(rows, built)
    if length >= 64:  # one such row among others
        assert has_seen(torch.cat([rows[:1], fresh[:, : rows.shape[1]]]), built)
    assert not has_seen(fresh, built)


def test_a_full_record_still_finds_a_row() -> None:
    built = torch.randint(5, 30_000, (128, 1024), generator=torch.Generator().manual_seed(0))
    fresh = torch.randint(5, 30_000, (16, 1024), generator=torch.Generator().manual_seed(1))
    marks = cl.CalibrationSet(built).text_windows
    assert len(read(marks)) == MOST
    assert len(marks) <= 50_000
    assert not has_seen(fresh, built)
    fresh[7, 100:800] = built[3, 7:707]
    assert has_seen(fresh, built)


def test_joined_records_are_those_of_the_whole() -> None:
    found = windows(np.random.default_rng(0).integers(0, 9_000, (64, 300)))
    parts = [record(found[start::3]) for start in range(3)]
    assert joined(parts) == record(found)
    assert joined([*parts, None]) is None
    assert joined(["", record(found[:0])]) == record(windows(np.zeros((2, 5), np.int64))) == ""


@pytest.mark.parametrize("text", ["x", "AAAA", 3, ["AAAAAAAA"], "AAAAAAAB" * 2, "/////////" * 2])
def test_other_values_are_no_record(text: Any) -> None:
    assert not is_record(text)


# What is stored -----------------------------------------------------------------------------------


def test_a_plan_knows_the_text_of_its_h(tmp_path: Path) -> None:
    model, text = tiny_model(), tiny_text(6, 24)
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, text, 16, progress=False)
    again = cl.Curvature.load(curvature.save(tmp_path / "H.npz"))
    plan = cl.Selection.from_json(cl.solve_greedy(again, 0.3).to_json())
    assert plan.text_windows == curvature.provenance["text_windows"] == text.text_windows

    def search(ids: torch.Tensor, start: cl.Selection, **more: Any) -> Any:
        options = {"held_out": cl.CalibrationSet(ids), "evaluations": 6, "progress": False} | more
        return cl.search_plan(model, start, cl.CalibrationSet(drawn(3, 24, 1)), **options)

    shifted = torch.cat([text.input_ids[:3, 1:], text.input_ids[:3, :1]], 1)
    fresh, lost = drawn(3, 24, 2), plan.with_made(text_windows=None)
    assumed = cl.CalibrationSet(shifted).assume_unseen()
    for ids, start, more in (
        (shifted, plan, {}),
        (shifted, plan, {"surrogate": curvature}),
        (shifted, plan, {"held_out": assumed}),
        (fresh, lost, {}),
    ):
        with pytest.raises(cl.MismatchError):
            search(ids, start, **more)
    best = search(fresh, plan).held_out.selections[-1]
    seen = read(best.text_windows)  # it was chosen on the rows of the search too
    assert best is plan or np.isin(windows(drawn(3, 24, 1).numpy()), seen).all()
    search(fresh, lost, held_out=cl.CalibrationSet(fresh).assume_unseen())
