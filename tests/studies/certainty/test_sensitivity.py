"""Sensitivity to the budget of H: every variant is the build it claims to be, on its own text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_studies.certainty import sensitivity
from cocurve_studies.certainty.resampling import of_groups
from cocurve_studies.certainty.sensitivity import (
    SensitivityOptions,
    outside,
    sensitivity_study,
    sensitivity_summary,
    text_sources,
)
from cocurve_studies.tables import Table, pick
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import (
    naive_build,
    naive_risk,
    relative_error,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

HELD_OUT = tiny_text(5, seed=9)
OPTIONS = SensitivityOptions(
    rows=3,
    positions=8,
    top_r=20,
    ffn_groups=4,
    seq_len=24,
    row_counts=(1, 5),
    position_counts=(4, "all", 99),
    top_rs=(10, 97, 500),
    group_counts=(2,),
    draws=2,
    interaction_strengths=(0.0, 1.0),
)


def words(seed: int, low: int = 0, high: int = 90) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{n}" for n in rng.integers(low, high, 40)) for _ in range(10)]


def study(texts: Mapping[str, list[str]] | None = None, **changes: Any) -> Table:
    given = {"mixed": words(0), "narrow": words(1, 0, 5)} if texts is None else texts
    settings = {"options": OPTIONS, "progress": False} | changes
    return sensitivity_study(tiny_model(), word_tokenizer(), given, HELD_OUT, **settings)


def calibration(rows: int, positions: Any = 8, source: int = 0) -> cl.CalibrationSet:
    settings = {"num_sequences": rows, "seq_len": 24, "positions_per_sequence": positions}
    return cl.CalibrationSet.from_texts(words(source), word_tokenizer(), **settings)


@pytest.fixture(scope="module")
def table() -> Table:
    return study()


def test_the_knobs_and_their_values(table: Table) -> None:
    found: dict[str, list[Any]] = {}
    for row in pick(table, interaction_strength=1.0):
        found.setdefault(row["knob"], []).append(row["value"])
    assert found == {
        "top_r": [20, 10, 97],  # 500 is above the vocabulary of 97
        "positions": [8, 4, 23],  # all, and 99: a row of 24 tokens has 23
        "ffn_groups": [4, 2],
        "source": ["mixed", "narrow"],
        "rows": [3, 1, 5],
        "seed": [0, 1],
    }
    firsts = [pick(table, knob=knob)[0] for knob in found]
    assert all(row["is_base"] and row["matrix_distance"] == 0 for row in firsts)
    assert sum(row["is_base"] for row in pick(table)) == 2 * len(found)


def test_distances_are_those_of_builds_done_one_by_one(table: Table) -> None:
    model = tiny_model()
    base = naive_build(model, calibration(3), 20)[0]
    later = cl.CalibrationSet(calibration(6).input_ids[3:], calibration(6).scored[3:])
    expected: dict[tuple[str, float], Any] = {
        ("top_r", 97): naive_build(model, calibration(3), 97)[0],
        ("rows", 1): naive_build(model, calibration(1), 20)[0],
        ("rows", 5): naive_build(model, calibration(5), 20)[0],
        ("positions", 23): naive_build(model, calibration(3, "all"), 20)[0],
        ("seed", 1): naive_build(model, later, 20)[0],
    }
    for (knob, value), matrix in expected.items():
        row = pick(table, knob=knob, value=value)[0]
        assert row["matrix_distance"] == pytest.approx(relative_error(matrix, base), rel=1e-3)


def test_plans_are_measured_on_the_held_out_text(table: Table) -> None:
    model = tiny_model()
    for groups in (4, 2):  # other units than the base's
        units = cl.enumerate_units(model, groups)
        built = cl.estimate_curvature(model, units, calibration(3), 20, progress=False)
        plan = cl.solve_greedy(built, 0.2, 1.0)
        (row,) = pick(table, knob="ffn_groups", value=groups, interaction_strength=1.0)
        slow = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
        assert row["kl"] == pytest.approx(slow.mean(), rel=1e-3)
        assert row["kl_error"] == pytest.approx(slow.std(ddof=1) / np.sqrt(5), rel=1e-2)
        assert row["units"] == len(units)
    assert row["matrix_distance"] is None
    assert row["overlap"] is None
    (base,) = pick(table, knob="ffn_groups", value=4, interaction_strength=1.0)
    assert row["difference"] == pytest.approx(row["kl"] - base["kl"], abs=1e-12)


def test_the_same_text_under_another_name_changes_nothing() -> None:
    one = {"a": words(0), "b": words(0), "c": words(3, 0, 5)}
    rows = pick(study(one), knob="source", interaction_strength=1.0)
    assert rows[1]["matrix_distance"] == pytest.approx(0, abs=1e-6)
    assert (rows[1]["overlap"], rows[1]["difference"]) == (1.0, 0.0)
    assert rows[2]["matrix_distance"] > 0.05


def test_some_groups_are_a_build_on_their_rows() -> None:
    model, text = tiny_model(), tiny_text(5)
    units = cl.enumerate_units(model, 4)
    options = cl.BuildOptions(groups=5)
    whole = cl.estimate_curvature(model, units, text, 20, progress=False, options=options)
    part = of_groups(whole, [1, 2])
    alone = cl.estimate_curvature(model, units, text.rows(1, 3), 20, progress=False)
    np.testing.assert_allclose(part.matrix, alone.matrix, rtol=1e-4, atol=1e-9)
    assert part.provenance["row_fingerprints"] == text.row_fingerprints[1:3]
    with pytest.raises(cl.MismatchError):
        text.rows(2, 3).require_disjoint(part)
    text.rows(3, 4).require_disjoint(part)
    with pytest.raises(cl.InputError, match="with group Grams"):
        of_groups(cl.Curvature(whole.matrix, units), [0])
    with pytest.raises(cl.InputError, match="no scored position"):
        of_groups(random_curvature(make_units(), groups=3), [])


def test_the_summary_says_the_band_and_the_spread() -> None:
    def row(value: int, perplexity: float, difference: float, overlap: float | None) -> Any:
        names = {"knob": "seed", "value": value, "interaction_strength": 1.0}
        names |= {"is_base": value == 0, "kl": perplexity / 100, "perplexity": perplexity}
        return names | {"difference": difference, "difference_error": 0.5, "overlap": overlap}

    table = [row(0, 10.0, 0.0, 1.0), row(1, 10.5, -2.0, 0.7), row(2, 11.0, 1.0, None)]
    lonely = [row(0, 10.0, 0.0, 1.0) | {"knob": "source"}]
    (found,) = pick(sensitivity_summary(table + lonely))
    assert found["band"] == pytest.approx(0.1)
    assert (found["perplexity_mean"], found["perplexity_std"]) == (10.5, 0.5)
    assert found["kl_std"] == pytest.approx(0.005)
    assert (found["largest_difference"], found["largest_difference_error"]) == (-2.0, 0.5)
    assert (found["values"], found["lowest_overlap"]) == (3, 0.7)


# Documents by source, and none that is in the held-out text --------------------------------------

TOKENIZER = word_tokenizer()
DOCUMENTS = [" ".join(f"w{(7 * n + k * k) % 90}" for k in range(30)) for n in range(12)]


def rows(documents: list[str], count: int, length: int = 20) -> cl.CalibrationSet:
    return cl.CalibrationSet.from_texts(iter(documents), TOKENIZER, count, length, "all")


def test_documents_across_rows_are_found() -> None:
    held_out = rows(DOCUMENTS[:3], 4)  # 93 tokens, cut into rows of 20
    assert outside(DOCUMENTS, TOKENIZER, held_out) == DOCUMENTS[3:]
    # a document shares the beginning only of another number: 1 is not 12
    assert outside(["w1"], TOKENIZER, rows(["w12 w13 w14 w15"] * 8, 2)) == ["w1"]
    assert outside([""], TOKENIZER, held_out) == []


def test_a_text_file_without_its_held_out_part(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(DOCUMENTS))
    _, held_out = cl.default_calibration(
        "any", TOKENIZER, 5, 3, text_file=path, seq_len=20, positions_per_sequence="all"
    )
    sources = text_sources("any", TOKENIZER, held_out, path)
    assert list(sources) == ["text"]
    kept = sources["text"]
    assert 0 < len(kept) < len(DOCUMENTS)
    ids = " ".join(map(str, held_out.input_ids.flatten().tolist()))
    for document in DOCUMENTS:
        first = " ".join(str(int(word[1:]) + 2) for word in document.split()[:16])
        assert (first in ids) == (document not in kept)
    path.write_text(DOCUMENTS[0])
    with pytest.raises(cl.InputError, match="all 1 documents are in the held-out text"):
        text_sources("any", TOKENIZER, rows(DOCUMENTS[:1], 1), path)


def test_the_hub_is_read_where_calibration_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def stream(dataset: str, *, name: str | None, split: str, field_name: str) -> Iterator[str]:
        asked.append(split)
        yield from DOCUMENTS

    monkeypatch.setattr(sensitivity, "stream_hub", stream)
    held_out = rows(DOCUMENTS[1:2], 1)
    found = text_sources("any", TOKENIZER, held_out, documents=4)
    assert found == {"text": [DOCUMENTS[0], *DOCUMENTS[2:4]]}
    assert asked == ["validation"]


def test_the_embedded_text_by_family() -> None:
    _, tokenizer = cl.load_model("demo")
    _, held_out = cl.default_calibration("demo", tokenizer, 1, 2, positions_per_sequence="all")
    sources = text_sources("demo", tokenizer, held_out)
    assert list(sources) == ["mixed", "stories", "code"]
    assert set(sources["stories"]) | set(sources["code"]) < set(sources["mixed"])
    assert not set(sources["stories"]) & set(sources["code"])
