"""What a file may hold: each kind of stored file names the field that it cannot mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.errors import FileFormatError
from cocurve_lab.base.schema import COUNT, TEXT, nullable, require_fields
from cocurve_lab.base.storage import dump_npz, dump_plain, load_plain
from cocurve_lab.evaluation.report import EvaluationReport
from cocurve_lab.measuring.plan_memory import FileKind, PlanMemory
from cocurve_lab.methods.base import Evidence
from cocurve_lab.solver.solve import longest
from cocurve_studies.tables import kept_rows
from helpers.problems import make_units, random_curvature
from helpers.seals import fields_of, reseal, sealed
from helpers.tiny_models import tiny_model

UNITS = make_units()
SIZE = len(UNITS)


def test_a_field_is_named_with_its_value() -> None:
    schema = {"count": COUNT, "name": nullable(TEXT)}
    assert require_fields({"count": 3, "name": None}, schema) == {"count": 3, "name": None}
    for content, said in (
        ([], r"its content is \[\], not an object"),
        ({"name": "x"}, "count is missing"),
        ({"count": True, "name": "x"}, "count is True, not a whole number from 0"),
        ({"count": 2**53, "name": "x"}, "count is 9007199254740992, not a whole number"),
        ({"count": 1, "name": 2}, "name is 2, not text, or null"),
        ({"count": 1, "name": "x", "more": 1}, "no field is called 'more'"),
    ):
        with pytest.raises(FileFormatError, match=said):
            require_fields(content, schema)
    with pytest.raises(FileFormatError, match=r"part\.count is missing"):
        require_fields({}, schema, inside="part")


# H ------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    """The stored content of an H of four groups."""
    curvature = random_curvature(UNITS, groups=4)
    known = {"top_r": 256, "sequences_done": 4, "num_sequences": 4, "seed": 0}
    return curvature.with_provenance(**known)._to_plain()


def changed(name: str, value: Any) -> dict[str, Any]:
    """The content with one field, "part.field", replaced."""
    content = good()
    *outer, last = name.split(".")
    (content[outer[0]] if outer else content)[last] = value
    return content


WRONG_H = {
    "matrix as text": ("matrix", "text", "matrix is 'text'"),
    "matrix of integers": ("matrix", np.eye(SIZE, dtype=np.int64), "matrix is an array of int64"),
    "matrix in one dimension": ("matrix", np.ones(SIZE), "matrix is an array of float64 and shape"),
    "layer of no model": (
        "units.units", [["ffn", 10**7, 0, 0, 1, 1]], "the units reach layer 10000000"
    ),
    "cost as text": ("units.units", [["ffn", 0, 0, 0, 1, "1"]], "units.units is"),
    "layers as text": ("units.model_layers", "32", "units.model_layers is '32'"),
    "parameters below 0": ("units.total_parameters", -1, "units.total_parameters is -1"),
    "an unknown field": ("extra", 1, "no field is called 'extra'"),
    "grams in float32": (
        "group_grams", np.zeros((4, SIZE, SIZE), np.float32), "group_grams is an array of float32"
    ),
    "grams with NaN": ("group_grams", np.full((4, SIZE, SIZE), np.nan), "group_grams is an array"),
    "grams of other units": ("group_grams", np.zeros((4, 2, 2)), "group_grams has shape"),
    "risks of other groups": ("group_risks", np.zeros((3, SIZE)), "group_risks has shape"),
    "positions below 0": ("group_positions", np.array([-1, 60, 1, 0]), "group_positions has -1"),
    "more sure positions than positions": (
        "group_sure_positions", np.full(4, 10**6), "group_sure_positions are not among"
    ),
    "top_r as text": ("provenance.top_r", "256", "provenance.top_r is '256'"),
    "rows as a number": ("provenance.row_fingerprints", 4, "provenance.row_fingerprints is 4"),
    "more done than there are": (
        "provenance.num_sequences", 3, "sequences_done is 4 of 3 sequences"
    ),
    "another number of rows": (
        "provenance.sequences_done", 3, "sequences_done is 3, but 4 row_fingerprints"
    ),
    "a shard of none": ("provenance.shard", [3, 2], r"provenance.shard is \[3, 2\]"),
    "seconds below 0": ("provenance.seconds", -1.0, "provenance.seconds is -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".pkl", ".npz"])
@pytest.mark.parametrize("name", WRONG_H)
def test_a_field_of_a_stored_curvature_is_named(name: str, suffix: str, tmp_path: Path) -> None:
    field, value, said = WRONG_H[name]
    dump = dump_npz if suffix == ".npz" else dump_plain
    path = tmp_path / f"H{suffix}"
    path.write_bytes(dump(good()))
    cl.Curvature.load(path)
    path.write_bytes(dump(changed(field, value)))
    with pytest.raises(FileFormatError, match=rf"H\{suffix}: .*{said}"):
        cl.Curvature.load(path)


def test_a_matrix_that_its_own_groups_contradict_is_refused(tmp_path: Path) -> None:
    """A bit of H[0, 0] flipped, and the checksum made right again."""
    content = good()
    matrix = content["matrix"].copy()
    matrix[0, 0] += 0.5
    path = tmp_path / "H.pkl"
    path.write_bytes(dump_plain(content | {"matrix": matrix}))
    with pytest.raises(FileFormatError, match=r"H\[0, 0\] is .* group Grams .* 0.5 away"):
        cl.Curvature.load(path)
    grams = content["group_grams"].copy()
    grams[2, 3, 4] *= 1.5
    path.write_bytes(dump_plain(content | {"group_grams": grams}))
    with pytest.raises(FileFormatError, match=r"H\[3, 4\] is .* group Grams"):
        cl.Curvature.load(path)


def test_a_merged_curvature_agrees_with_its_groups(tmp_path: Path) -> None:
    one, two = (random_curvature(UNITS, seed, groups=4) for seed in (1, 2))
    two = two.with_provenance(row_fingerprints=["e", "f", "g", "h"])
    merged = cl.Curvature.merge([one, two])
    again = cl.Curvature.load(merged.save(tmp_path / "H.pkl"))
    np.testing.assert_array_equal(again.matrix, merged.matrix)


@pytest.mark.parametrize("matrix", [np.eye(SIZE) * 1j, np.full((SIZE, SIZE), "1")])
def test_a_matrix_of_other_than_real_numbers_is_refused(matrix: np.ndarray) -> None:
    with pytest.raises(cl.InputError, match="entries are real numbers"):
        cl.Curvature(matrix, UNITS)


# Checkpoints --------------------------------------------------------------------------------------


def interrupted(path: Path, text: cl.CalibrationSet) -> Callable[[], cl.Curvature]:
    """Leave a checkpoint of three of five sequences; return what resumes it."""
    model = tiny_model()

    def resume(**options: Any) -> cl.Curvature:
        options = {"checkpoint_seconds": 0.0, "groups": 2} | options
        return cl.estimate_curvature(
            model,
            None,
            text,
            32,
            checkpoint=path,
            progress=False,
            options=cl.BuildOptions(**options),
        )

    resume(on_sequence=lambda build: "Enough." if build.done == 3 else None)
    return resume


CHECKPOINTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "all done by its word": (
        lambda c: c.update(done=5, seconds=[1.0] * 5), "5 sequences are done, but its sums"
    ),
    "positions of another group": (
        lambda c: c.update(positions=c["positions"][::-1].copy()), "but its sums, seconds or losses"
    ),
    "grams of another size": (lambda c: c.update(grams=np.zeros((2, 3, 3))), "grams has shape"),
    "NaN": (lambda c: c["risks"].fill(np.nan), "risks is an array"),
    "seconds as text": (lambda c: c.update(seconds=["1"] * 3), "seconds is"),
    "threads as text": (lambda c: c["runtime"].update(num_threads="2"), "runtime.num_threads is"),
    "no threads": (lambda c: c["runtime"].update(num_threads=0), "runtime.num_threads is 0"),
    "no settings": (lambda c: c.update(settings={}), "settings.model_fingerprint is missing"),
    "events as a number": (lambda c: c.update(events=3), "events is 3"),
    "a strange field": (lambda c: c.update(extra=3), "no field is called 'extra'"),
}  # fmt: skip


def test_what_a_checkpoint_cannot_mean_is_named(tmp_path: Path) -> None:
    ids = torch.randint(0, 40, (5, 20), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "H.ckpt"
    resume = interrupted(path, cl.CalibrationSet(ids))
    whole = path.read_bytes()
    for name, (spoil, said) in CHECKPOINTS.items():
        path.write_bytes(whole)
        content = load_plain(path, format_name="cocurve-build", version=1)
        spoil(content)
        path.write_bytes(dump_plain(content))
        path.with_name("H.ckpt.previous").unlink(missing_ok=True)
        with pytest.raises(FileFormatError, match=said):
            resume()
        assert path.exists(), name
    path.write_bytes(whole)
    assert resume().provenance["sequences_done"] == 5


# The others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arrays": {"scores": [1.0]}}, "arrays is"),
        ({"method": 3}, "method is 3"),
        ({"units": {}}, "units.units is missing"),
        ({"more": 1}, "no field is called 'more'"),
    ],
)
def test_evidence(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = Evidence("wanda-sp", UNITS, {"scores": np.ones(SIZE)}).save(tmp_path / "e.pkl")
    assert Evidence.load(path).method == "wanda-sp"
    content = load_plain(path, format_name="cocurve-evidence", version=1)
    path.write_bytes(dump_plain(content | change))
    with pytest.raises(FileFormatError, match=rf"e\.pkl: {said}"):
        Evidence.load(path)


@pytest.mark.parametrize(
    "values",
    [{"a": np.zeros((3, 2))}, {"a": np.zeros((4, 2), np.float32)}, {"a": [1.0]}, []],
)  # fmt: skip
def test_plan_memory(values: Any, tmp_path: Path) -> None:
    kind, path = FileKind("test-plans", 1, "plans"), tmp_path / "plans.ckpt"
    memory = PlanMemory.open(kind, path, (4, 2), dict)
    memory.add(["a"], 1, np.ones((1, 2)))
    assert list(PlanMemory.open(kind, path, (4, 2), dict).values) == ["a"]
    content = load_plain(path, format_name="test-plans", version=1)
    path.write_bytes(dump_plain(content | {"values": values}))
    with pytest.raises(FileFormatError, match=r"plans\.ckpt: values is "):
        PlanMemory.open(kind, path, (4, 2), dict)


@pytest.mark.parametrize("rows", [3, [3], [{"a": [1]}], {"a": 1}])
def test_study_tables(rows: Any, tmp_path: Path) -> None:
    kept_rows(tmp_path, "edges", {}, lambda: [{"a": 1}])
    (file,) = tmp_path.iterdir()
    file.write_text(sealed(fields_of(file.read_text()) | {"rows": rows}))
    with pytest.raises(FileFormatError, match=r"rows is .* not a list of rows"):
        kept_rows(tmp_path, "edges", {}, list)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"selection_fingerprint": '"; import os'}, "selection_fingerprint is"),
        ({"weights_since_pruning": "fine"}, "weights_since_pruning is 'fine'"),
        ({"pruned_units": ["L0.ffn[1]\n"]}, "pruned_units is"),
        ({"pruned_units": 3}, "pruned_units is 3"),
        ({"gains": {"L0.ffn[1]": "1"}}, "gains is"),
        ({"gains": {"x": 1.0}}, "gains is"),
        ({"guards": 1}, "guards is 1"),
        ({"realized_ratio": "0.2"}, "realized_ratio is '0.2'"),
        ({"removed_parameters": -1}, "removed_parameters is -1"),
        ({"layers": {}}, "layers is"),
        ({"layers": [3]}, r"layers is \[3\]"),
        ({"earlier_rounds": [1]}, r"earlier_rounds is \[1\]"),
        ({"loads_with": "pickle"}, "loads_with is 'pickle'"),
        ({"base_model": ["x"]}, "base_model is"),
        ({"repair": 3}, "repair is 3"),
        ({"repair": {"method": "refit"}}, r"repair\.sequential is missing"),
        ({"version": [2]}, r"version \[2\]"),
    ],
)
def test_manifest(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [1])
    folder = cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    path = folder / "cocurve_manifest.json"
    path.write_text(json.dumps(fields_of(path.read_text()) | change))
    reseal(folder)
    with pytest.raises(FileFormatError, match=f"cocurve_manifest.json: .*{said}"):
        cl.load_pruned(folder)


@pytest.mark.parametrize(
    "change",
    [{"values": {"a": 1}}, {"values": {"a": {"acc": "1"}}}, {"suite": None}, {"samples": {"a": -1}},
     {"errors": {"a": {"acc": []}}}, {"averaged": {"a": 1}}, {"settings": []}, {"failed": [1]},
     {"extra": 1}],
)  # fmt: skip
def test_evaluation_reports(change: dict[str, Any]) -> None:
    report = EvaluationReport("local", {"a": {"acc": 0.5}}, {"a": {"acc": None}})
    text = report.to_json()
    assert EvaluationReport.from_json(text) == report
    with pytest.raises(FileFormatError, match="not an evaluation report"):
        EvaluationReport.from_json(sealed(fields_of(text) | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"node_terms": [-5.0]}, "node_terms has -5, but 1/2 H_uu is never negative"),
        ({"requested_ratio": 0.9}, "requested_ratio is 0.9, but its units come to"),
        ({"layer": 2**62}, "units.units is"),
        ({"layer": 10**6}, "the units reach layer 1000000"),
        ({"guards": {"kinds": [["ffn"]]}}, "guards.kinds is"),
        ({"uniform": [["ffn"]]}, "uniform is"),
        ({"units": {"units": [[["ffn"], 0, 0, 0, 1, 1]], "ffn_groups": 1}}, "units.units is"),
    ],
)
def test_plans(change: dict[str, Any], said: str) -> None:
    content = fields_of(cl.solve_greedy(random_curvature(UNITS), 0.2).to_json())
    if "layer" in change:
        content["units"]["units"][-1][1] = change.pop("layer")
    if "node_terms" in change:
        change = {"node_terms": change["node_terms"] * len(content["pruned"])}
    with pytest.raises(FileFormatError, match=f"not a selection: {said}"):
        cl.Selection.from_json(sealed(content | change))


def test_the_longest_run_under_guards_can_be_stored() -> None:
    run = longest(random_curvature(UNITS), cl.Guards(layer_cap=0.4), 0.8)
    assert run.realized_ratio < 0.8
    assert cl.Selection.from_json(run.to_json()).pruned == run.pruned
