"""Held-out text: what was seen before is found by content, and other text is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.base.text_windows import MOST, is_record, joined, read, record, windows
from cocurve_lab.extensions.texts.documents import read_documents
from cocurve_lab.models.identity import demo_folder
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

TEXTS = Path(__file__).resolve().parents[2] / "shared" / "assets" / "text"


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


def own(name: str) -> list[str]:
    return read_documents(demo_folder().parent / "texts" / f"{name}.jsonl")


def lines(name: str) -> list[str]:
    text = (TEXTS / name).read_text()
    parts = text.splitlines() if name.startswith("c4") else re.split(r"\n\s*\n", text)
    return [part for part in parts if part.strip()]


PAIRS: dict[str, Any] = {
    "demo": lambda: (own("calibration"), own("held_out")),
    "demo test": lambda: (own("calibration"), own("test")),
    "WikiText": lambda: (lines("wikitext2_valid.txt"), lines("wikitext2_test.txt")),
    "C4": lambda: (lines("c4_slice.txt")[::2], lines("c4_slice.txt")[1::2]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_text_that_shares_no_document_is_not_refused(name: str) -> None:
    if not name.startswith("demo") and not TEXTS.is_dir():
        pytest.skip(f"{TEXTS} is not on this machine")
    tokenizer = cl.load_model("demo")[1]
    built, judge = PAIRS[name]()
    for length in (24, 64, 256):
        sets = [
            cl.CalibrationSet.from_texts(docs, tokenizer, rows * 256 // length, length, "all")
            for docs, rows in ((built, 96), (judge, 12))
        ]
        found = sets[1].require_disjoint(sets[0])
        share = re.search(r"\((\d+\.\d+)% of it seen before\)", found.source)
        assert (float(share[1]) if share else 0.0) < 5


# What is stored -----------------------------------------------------------------------------------


def built() -> tuple[Any, cl.CalibrationSet, cl.Curvature]:
    model, text = tiny_model(), tiny_text(6, 24)
    units = cl.enumerate_units(model, GROUPS)
    return model, text, cl.estimate_curvature(model, units, text, 16, progress=False)


def test_a_search_knows_the_text_of_its_plan(tmp_path: Path) -> None:
    model, text, curvature = built()
    assert curvature.provenance["text_windows"] == text.text_windows
    path = tmp_path / "H.npz"
    curvature.save(path)
    plan = cl.solve_greedy(cl.Curvature.load(path), 0.3)
    plan = cl.Selection.from_json(plan.to_json())
    assert plan.text_windows == text.text_windows

    def search(ids: torch.Tensor, start: cl.Selection, **more: Any) -> Any:
        rows, judge = cl.CalibrationSet(drawn(3, 24, 1)), cl.CalibrationSet(ids)
        judge = judge.assume_unseen() if more.pop("unseen", False) else judge
        options = {"held_out": judge, "evaluations": 6, "progress": False}
        return cl.search_plan(model, start, rows, **options, **more)

    shifted = torch.cat([text.input_ids[:3, 1:], text.input_ids[:3, :1]], 1)
    for more in ({}, {"surrogate": curvature}, {"unseen": True}):
        with pytest.raises(cl.MismatchError):
            search(shifted, plan, **more)
    fresh = drawn(3, 24, 2)
    found = search(fresh, plan)
    assert "seen" not in found.held_out.source
    drawn_plan = found.held_out.selections[-1]
    if drawn_plan is not plan:  # it was chosen on the rows of the search too
        assert has_share(drawn_plan.text_windows, drawn(3, 24, 1))
    lost = plan.with_made(text_windows=None)
    with pytest.raises(cl.MismatchError, match="assume_unseen"):
        search(fresh, lost)
    assert "assumed to be unseen" in repr(search(fresh, lost, unseen=True))


def has_share(known: str | None, ids: torch.Tensor) -> bool:
    return known is not None and bool(np.isin(windows(ids.numpy()), read(known)).all())


def test_h_without_a_record_is_unknown_and_of_an_earlier_version_told() -> None:
    model, text, curvature = built()
    fresh = cl.CalibrationSet(drawn(3, 24, 2))
    bare = cl.Curvature(curvature.matrix, curvature.units)
    with pytest.raises(cl.MismatchError, match="assume_unseen"):
        fresh.require_disjoint(bare)
    said = fresh.assume_unseen()
    assert "assumed to be unseen" in said.rows(0, 2).require_disjoint(bare).source
    older = curvature.with_provenance(text_windows=None)
    assert "wholes only" in fresh.require_disjoint(older).source
    with pytest.raises(cl.MismatchError):
        text.rows(1, 2).assume_unseen().require_disjoint(older)
    table = cl.measure_plans(
        model, [cl.solve_greedy(curvature, 0.3)], said, calibrated_on=bare, progress=False
    )
    assert "assumed to be unseen" in table.source


def test_a_small_share_is_stated() -> None:
    ids, other = drawn(4, 64, 1), drawn(4, 64, 2)
    other[2, :20] = ids[0, 5:25]
    found = cl.CalibrationSet(other).require_disjoint(cl.CalibrationSet(ids))
    assert f"{13 / (4 * 57):.2%} of it seen before" in found.source


def test_a_plan_on_no_text_is_on_none() -> None:
    units = make_units()
    assert cl.solve_greedy(random_curvature(units), 0.2).text_windows == ""
    assert cl.Selection.from_pruned(units, [0]).text_windows is None
