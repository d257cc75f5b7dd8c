"""Builds in shards: the bits of one build, and what is no set of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.curvature.merging import shard_sequences
from cocurve_lab.curvature.settings import SETTINGS, BuildOptions
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.estimator.estimate import build_settings, complete_shards, files_in
from helpers.builds import ROWS, build_of_seven, require_same_bits, stop_after
from helpers.tiny_models import GROUPS, tiny_model, tiny_text


def shards(count: int, **options: Any) -> list[cl.Curvature]:
    return [build_of_seven(shard=(number, count), **options) for number in range(1, count + 1)]


@pytest.mark.parametrize(("groups", "count"), [(16, 1), (16, 3), (5, 5), (4, 3)])
def test_shards_share_the_sequences_and_split_no_group(groups: int, count: int) -> None:
    parts = [shard_sequences((i, count), groups, 23) for i in range(1, count + 1)]
    assert sorted(number for part in parts for number in part) == list(range(23))
    owned = [{number % groups for number in part} for part in parts]
    assert sum(map(len, owned)) == groups
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    assert all(part == sorted(part) for part in parts)


def test_every_setting_of_a_build_is_compared_between_shards() -> None:
    model, text = tiny_model(), tiny_text(2, 20, 6)
    units = cl.enumerate_units(model, GROUPS)
    settings = build_settings(model, units, text, 32, BuildOptions())
    assert sorted(settings) == sorted(SETTINGS)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merged_shards_are_one_build_to_the_bit(count: int) -> None:
    whole = build_of_seven()
    merged = cl.Curvature.merge(shards(count)[::-1])  # in any order
    require_same_bits(merged, whole)
    assert merged.fingerprint == whole.fingerprint
    for key in (*SETTINGS, "row_fingerprints", "sequences_done", "complete", "runtime", "seed"):
        assert merged.provenance[key] == whole.provenance[key], key
    assert len(merged.provenance["sequence_seconds"]) == ROWS
    assert "shard" not in merged.provenance


def test_a_shard_says_what_it_is_and_is_h_over_its_rows() -> None:
    part, text = build_of_seven(shard=(2, 3)), tiny_text(ROWS, 20, 6)
    assert part.provenance["complete"] is False
    assert part.provenance["row_fingerprints"] == text.row_fingerprints[2:4]
    np.testing.assert_allclose(part.matrix, build_of_seven(text=text.rows(2, 4)).matrix, rtol=1e-12)


SHARDS = [
    ((), cl.InputError),
    (({"shard": (1, 3)},), cl.InputError),
    (({"shard": (1, 2)}, {"shard": (1, 2)}), cl.MismatchError),
    (({"shard": (1, 2)}, {"shard": (1, 3)}), cl.MismatchError),
    (({"shard": (1, 2)}, {}), cl.InputError),
    *(
        (({"shard": (1, 2)}, {"shard": (2, 2), **change}), cl.MismatchError)
        for change in (
            {"model": tiny_model(seed=1)},
            {"text": tiny_text(ROWS, 20, 6, seed=1)},
            {"groups": 4},
            {"full_vocabulary": True},
        )
    ),
]


@pytest.mark.parametrize("case", range(len(SHARDS)))
def test_shards_that_are_not_all_of_one_build_are_refused(case: int) -> None:
    options, error = SHARDS[case]
    parts = [build_of_seven(**each) for each in options]
    for merge in (merge_shards, cl.Curvature.merge):
        with pytest.raises(error):
            merge(parts)


def test_an_interrupted_shard_is_refused_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "shard.ckpt"
    part = build_of_seven(checkpoint=path, shard=(1, 2), on_sequence=stop_after(2))
    other = build_of_seven(shard=(2, 2))
    with pytest.raises(cl.InputError):
        merge_shards([part, other])
    resumed = build_of_seven(checkpoint=path, shard=(1, 2))
    assert resumed.provenance["sequences_done"] == 5
    require_same_bits(merge_shards([resumed, other]), build_of_seven())


def test_shards_run_differently_are_merged_with_a_note() -> None:
    one, two = (
        build_of_seven(shard=(1, 2), units_per_batch=2),
        build_of_seven(shard=(2, 2), units_per_batch=3),
    )
    merged = merge_shards([one, two])
    assert any("units_per_batch" in event for event in merged.provenance["events"])
    whole = build_of_seven()
    scale = np.sqrt(np.outer(whole.matrix.diagonal(), whole.matrix.diagonal()))
    assert (np.abs(merged.matrix - whole.matrix) < 1e-6 * scale).all()  # float32 features


def estimate_in(folder: Path, **options: Any) -> cl.Curvature:
    model = tiny_model()
    return cl.load_or_estimate(
        folder,
        model,
        cl.enumerate_units(model, GROUPS),
        tiny_text(ROWS, 20, 6),
        32,
        options=BuildOptions(groups=5, **options),
    )


def test_a_notebook_finds_the_shards_of_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        estimate_in(tmp_path, shard=(number, 2))
    names = sorted(path.name.split(".", 1)[1] for path in tmp_path.iterdir())
    assert names == [f"shard-{i}-of-2.pkl" for i in (1, 2)]  # no checkpoint left behind
    monkeypatch.setattr(features, "gram_matrix", None)  # nothing may be built from here on
    estimate_in(tmp_path, shard=(2, 2))
    found = estimate_in(tmp_path)
    assert len(list(tmp_path.glob("*.pkl"))) == 3  # the shards stay
    monkeypatch.undo()
    require_same_bits(found, build_of_seven())


def test_a_damaged_shard_matters_only_where_its_set_is_whole(tmp_path: Path) -> None:
    estimate_in(tmp_path, shard=(1, 2))
    (damaged,) = tmp_path.glob("*.pkl")
    damaged.write_bytes(b"damaged")
    estimate_in(tmp_path, shard=(2, 3))
    require_same_bits(estimate_in(tmp_path), build_of_seven())
    (whole,) = files_in(tmp_path).whole
    whole.unlink()
    estimate_in(tmp_path, shard=(2, 2))
    with pytest.raises(cl.FileFormatError):
        estimate_in(tmp_path)


@pytest.mark.parametrize(
    ("names", "complete"),
    [
        ([], []),
        (["H_a_1f.shard-1-of-2.pkl", "H_a_1f.shard-1-of-3.pkl", "H_a_1f.shard-2-of-3.pkl"], []),
        (["H_a_1f.shard-2-of-2.pkl", "H_b_1f.shard-2-of-2.pkl"], []),  # one shard, two names
        (["H_a_1f.shard-1-of-2.pkl", "H_a_2f.shard-2-of-2.pkl"], []),  # of two builds
        (["H_a_1f.shard-1-of-2.pkl", "H_a_1f.shard-2-of-2.ckpt"], []),
        (["H_a_1f.shard-1-of-2.pkl", "H_a_1f.shard-2-of-2 copy.pkl"], []),
        (["H_a_1f.shard-0-of-1.pkl", "H_a_1f.shard-1-of-1.pkl.previous"], []),
        (["H_x-3.1_a_1f.shard-1-of-2.pkl", "H_b_1f.shard-2-of-2.pkl", "H_b_1f.ckpt"], [0, 1]),
        ([f"H_a_1f.shard-{number}-of-11.pkl" for number in range(1, 12)], list(range(11))),
    ],
    ids=["none", "missing", "twice", "foreign", "unfinished", "copy", "odd", "two", "eleven"],
)
def test_names_tell_what_lies_in_a_folder(
    tmp_path: Path, names: list[str], complete: list[int]
) -> None:
    for name in [*names, "mine.pkl"]:
        (tmp_path / name).touch()
    found = complete_shards(tmp_path / "H_a_1f.pkl")
    assert sorted(path.name for path in found) == sorted(names[number] for number in complete)
    files = files_in(tmp_path)
    assert files.whole == []
    assert [path.name for path in files.checkpoints] == [n for n in names if n.endswith(".ckpt")]
    (tmp_path / "H_a_1f.pkl").touch()
    assert files_in(tmp_path).whole == [tmp_path / "H_a_1f.pkl"]
