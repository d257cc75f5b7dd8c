"""Every kind of stored file: a field that means nothing is refused, and so is damage.

With a bit flipped or its end cut off, a file is refused or reads as before.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.base.errors import FileFormatError
from cocurve_lab.base.schema import COUNT, TEXT, nullable, require_fields
from cocurve_lab.base.storage import dump_npz, dump_plain, load_npz, load_plain
from cocurve_lab.evaluation.report import EvaluationReport
from cocurve_lab.extensions.pretrained.kept import read_plans, write_plans
from cocurve_lab.measuring.plan_memory import FileKind, PlanMemory
from cocurve_lab.methods.base import Evidence
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.models.loading import load_tokenizer
from cocurve_studies.tables import kept_rows
from helpers.builds import build, stop_after
from helpers.problems import make_units, random_curvature
from helpers.seals import fields_of, reseal, sealed
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

UNITS = make_units()
EVERY_CHECK = list(HealthCheck)
SIZE = len(UNITS)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"name": "x"},
        {"count": True, "name": "x"},
        {"count": 2**53, "name": "x"},
        {"count": 1, "name": 2},
        {"count": 1, "name": "x", "more": 1},
    ],
)
def test_fields_are_checked(content: Any) -> None:
    schema = {"count": COUNT, "name": nullable(TEXT)}
    assert require_fields({"count": 3, "name": None}, schema) == {"count": 3, "name": None}
    with pytest.raises(FileFormatError):
        require_fields(content, schema)


class Kind(NamedTuple):
    """A kind of stored file: its content, how somebody forges it, and how it is read."""

    path: Path
    content: dict[str, Any]
    write: Callable[[dict[str, Any]], Any]
    read: Callable[[], Any]  # what can be compared


def pickled(path: Path, name: str, read: Callable[[], Any]) -> Kind:
    content = load_plain(path, format_name=name, version=1)
    return Kind(path, content, lambda c: path.write_bytes(dump_plain(c)), read)


def in_json(path: Path, read: Callable[[], Any]) -> Kind:
    content = fields_of(path.read_text())
    return Kind(path, content, lambda c: path.write_text(sealed(c)), read)


def curvature(path: Path) -> cl.Curvature:
    """An H of four groups, saved."""
    known = {"top_r": 256, "sequences_done": 4, "num_sequences": 4, "seed": 0}
    made = random_curvature(UNITS, groups=4).with_provenance(**known)
    made.save(path)
    return made


def h_pickle(folder: Path) -> Kind:
    path = folder / "H.pkl"
    curvature(path)
    return pickled(path, "cocurve-curvature", lambda: cl.Curvature.load(path).fingerprint)


def h_archive(folder: Path) -> Kind:
    path = folder / "H.npz"
    curvature(path)
    content = load_npz(path, format_name="cocurve-curvature", version=1)
    return Kind(
        path,
        content,
        lambda c: path.write_bytes(dump_npz(c)),
        lambda: cl.Curvature.load(path).fingerprint,
    )


def checkpoint(folder: Path) -> Kind:
    """Three of five sequences of a build."""
    text, path = tiny_text(5, 20), folder / "H.ckpt"
    options: dict[str, Any] = {"text": text, "checkpoint": path, "groups": 2}
    build(**options, on_sequence=stop_after(3))
    return pickled(path, "cocurve-build", lambda: build(**options))


def evidence(folder: Path) -> Kind:
    path = Evidence("wanda-sp", UNITS, {"scores": np.ones(SIZE)}).save(folder / "e.pkl")
    return pickled(path, "cocurve-evidence", lambda: repr(Evidence.load(path).arrays))


def plan_memory(folder: Path) -> Kind:
    kind, path = FileKind("test-plans", 1, "plans"), folder / "plans.ckpt"
    PlanMemory.open(kind, path, (4, 2), dict).add(["a"], 1, np.ones((1, 2)))
    return pickled(
        path, "test-plans", lambda: repr(PlanMemory.open(kind, path, (4, 2), dict).values)
    )


def study_table(folder: Path) -> Kind:
    rows = [{"plan": "a", "kl": 0.123456, "n": number} for number in range(20)]
    kept_rows(folder, "edges", {}, lambda: rows)
    (path,) = folder.iterdir()
    return in_json(path, lambda: kept_rows(folder, "edges", {}, lambda: rows))


def kept_plans(folder: Path) -> Kind:
    path, h = folder / "kept.json", curvature(folder / "H.npz")
    known = h.with_provenance(model_fingerprint="0" * 64)
    write_plans(path, "0" * 64, {}, [KEPT])
    return in_json(path, lambda: repr(read_plans(path, known).plans[0].kl))


def pruned_folder(name: str, folder: Path) -> Kind:
    """A file of a pruned model's folder; the content is that of the manifest."""
    model = tiny_model(layers=1)
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [1])
    small = cl.prune(model, plan)
    place = cl.save_pruned(small, folder / "small", tokenizer=word_tokenizer())
    manifest = place / MANIFEST

    def write(content: dict[str, Any]) -> None:
        manifest.write_text(json.dumps(content))
        reseal(place)

    def read() -> Any:
        pruned: Any = cl.load_pruned(place, device="cpu")
        weights = {n: w.numpy().tobytes() for n, w in pruned.state_dict().items()}
        rules = load_tokenizer(place).backend_tokenizer.to_str()
        return weights, pruned.cocurve_manifest, rules, pruned.config.to_json_string()

    return Kind(place / name, fields_of(manifest.read_text()), write, read)


def report(folder: Path) -> Kind:
    path = folder / "report.json"
    made = EvaluationReport("local", {"a": {"acc": 0.5}}, {"a": {"acc": None}})
    path.write_text(made.to_json())
    return in_json(path, lambda: EvaluationReport.from_json(text_of(path)).values)


def plan(folder: Path) -> Kind:
    path = folder / "plan.json"
    path.write_text(PLAN.to_json())
    return in_json(path, lambda: cl.Selection.from_json(text_of(path)).to_json())


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


KEPT = {
    "name": "H",
    "requested_ratio": 0.2,
    "interaction_strength": 0.5,
    "pruned": [1, 4],
    "kl": {"c4": [0.25, 0.5]},
    "nll": {"c4": [3.0, 3.5]},
    "right": {"capitals": [3, 4]},
}
PLAN = cl.solve_greedy(random_curvature(UNITS), 0.2)
FOLDER = (MANIFEST, "config.json", "model.safetensors", "tokenizer.json")
KINDS: dict[str, Callable[[Path], Kind]] = {
    "H": h_pickle,
    "H.npz": h_archive,
    "checkpoint": checkpoint,
    "evidence": evidence,
    "memory": plan_memory,
    "table": study_table,
    "kept plans": kept_plans,
    "report": report,
    "plan": plan,
} | {name: partial(pruned_folder, name) for name in FOLDER}
H = random_curvature(UNITS, groups=4)
MATRIX, GRAMS = H.matrix.copy(), H.groups.grams.copy()
MATRIX[0, 0] += 0.5  # its groups contradict it
GRAMS[2, 3, 4] *= 1.5
# of each kind, values of fields, "part.field"; `...` takes the field away
WRONG: list[tuple[str, str, Any]] = [
    ("H", "version", 2),
    ("H", "format", "cocurve-selection"),
    ("H", "units", None),
    ("H", "units", {"units": [[]], "ffn_groups": 1, "total_parameters": None}),
    ("H", "matrix", ...),
    ("H", "matrix", np.eye(3)),
    ("H", "matrix", "text"),
    ("H", "matrix", MATRIX),
    ("H", "matrix", np.eye(SIZE, dtype=np.int64)),
    ("H", "matrix", np.ones(SIZE)),
    ("H", "units.units", [["ffn", 10**7, 0, 0, 1, 1]]),
    ("H", "units.units", [["ffn", 0, 0, 0, 1, "1"]]),
    ("H", "units.model_layers", "32"),
    ("H", "units.total_parameters", -1),
    ("H", "extra", 1),
    ("H", "group_grams", np.zeros((4, SIZE, SIZE), np.float32)),
    ("H", "group_grams", np.full((4, SIZE, SIZE), np.nan)),
    ("H", "group_grams", np.zeros((4, 2, 2))),
    ("H", "group_grams", GRAMS),
    ("H", "group_risks", np.zeros((3, SIZE))),
    ("H", "group_positions", np.array([-1, 60, 1, 0])),
    ("H", "group_sure_positions", np.full(4, 10**6)),
    ("H", "provenance.top_r", "256"),
    ("H", "provenance.row_fingerprints", 4),
    ("H", "provenance.num_sequences", 3),
    ("H", "provenance.sequences_done", 3),
    ("H", "provenance.shard", [3, 2]),
    ("H", "provenance.seconds", -1.0),
    ("H.npz", "matrix", np.ones(SIZE)),
    ("H.npz", "provenance.top_r", "256"),
    ("checkpoint", "done", 5),
    ("checkpoint", "positions", np.array([19, 38])),
    ("checkpoint", "grams", np.zeros((2, 3, 3))),
    ("checkpoint", "risks", np.full((2, 18), np.nan)),
    ("checkpoint", "seconds", ["1"] * 3),
    ("checkpoint", "seconds", [1.0]),
    ("checkpoint", "runtime.num_threads", "2"),
    ("checkpoint", "runtime.num_threads", 0),
    ("checkpoint", "settings", {}),
    ("checkpoint", "events", 3),
    ("checkpoint", "extra", 3),
    ("evidence", "arrays", {"scores": [1.0]}),
    ("evidence", "method", 3),
    ("evidence", "units", {}),
    ("evidence", "more", 1),
    *(
        ("memory", "values", values)
        for values in ({"a": np.zeros((3, 2))}, {"a": np.zeros((4, 2), "f4")}, {"a": [1.0]}, [])
    ),
    *(("table", "rows", rows) for rows in (3, [3], [{"a": [1]}], {"a": 1})),
    (MANIFEST, "selection_fingerprint", '"; import os'),
    (MANIFEST, "weights_since_pruning", "fine"),
    (MANIFEST, "pruned_units", ["L0.ffn[1]\n"]),
    (MANIFEST, "pruned_units", 3),
    (MANIFEST, "gains", {"L0.ffn[1]": "1"}),
    (MANIFEST, "gains", {"x": 1.0}),
    (MANIFEST, "guards", 1),
    (MANIFEST, "realized_ratio", "0.2"),
    (MANIFEST, "removed_parameters", -1),
    (MANIFEST, "layers", {}),
    (MANIFEST, "layers", [3]),
    (MANIFEST, "earlier_rounds", [1]),
    (MANIFEST, "loads_with", "pickle"),
    (MANIFEST, "base_model", ["x"]),
    (MANIFEST, "repair", 3),
    (MANIFEST, "repair", {"method": "refit"}),
    (MANIFEST, "version", [2]),
    ("report", "values", {"a": 1}),
    ("report", "values", {"a": {"acc": "1"}}),
    ("report", "suite", None),
    ("report", "samples", {"a": -1}),
    ("report", "errors", {"a": {"acc": []}}),
    ("report", "averaged", {"a": 1}),
    ("report", "settings", []),
    ("report", "failed", [1]),
    ("report", "extra", 1),
    ("plan", "node_terms", [-5.0] * len(PLAN.pruned)),
    ("plan", "requested_ratio", 0.9),
    ("plan", "units.units", [["ffn", 2**62, 0, 0, 1, 1]]),
    ("plan", "units.units", [["ffn", 10**6, 0, 0, 1, 1]]),
    ("plan", "units.units", [[["ffn"], 0, 0, 0, 1, 1]]),
    ("plan", "guards.kinds", [["ffn"]]),
    ("plan", "uniform", [["ffn"]]),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """One file of each kind, which reads back when it is written anew."""
    found = {kind: make(tmp_path_factory.mktemp("kind")) for kind, make in KINDS.items()}
    for kind, file in found.items():
        file.write(file.content)
        if kind != "checkpoint":  # which would go on to its end
            file.read()
    return found


@pytest.mark.parametrize(("kind", "field", "value"), WRONG)
def test_a_field_that_means_nothing_is_refused(
    kind: str, field: str, value: Any, files: dict[str, Kind]
) -> None:
    content = copy.deepcopy(files[kind].content)
    *outer, last = field.split(".")
    part = content[outer[0]] if outer else content
    part[last] = value
    if value is ...:
        del part[last]
    files[kind].write(content)
    with pytest.raises(FileFormatError):
        files[kind].read()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "checkpoint"])
def test_a_damaged_file_is_refused_or_equal(kind: str, files: dict[str, Kind]) -> None:
    file = files[kind]
    file.write(file.content)
    sound, content = file.path.read_bytes(), file.read()

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=EVERY_CHECK)
    @given(st.integers(0, len(sound) - 1), st.integers(0, 7), st.booleans())
    def damage(place: int, bit: int, cut: bool) -> None:
        flipped = sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :]
        file.path.write_bytes(sound[:place] if cut else flipped)
        with suppress(cl.CocurveError, OSError):
            assert file.read() == content

    try:
        damage()
    finally:
        file.path.write_bytes(sound)


@pytest.mark.parametrize("kind", ["report", "table", "kept plans", MANIFEST])
def test_a_file_without_its_checksum_is_refused(kind: str, files: dict[str, Kind]) -> None:
    files[kind].path.write_text(json.dumps(files[kind].content))
    with pytest.raises(cl.FileFormatError):
        files[kind].read()


def test_a_folder_that_was_changed_beside_its_manifest_is_refused(files: dict[str, Kind]) -> None:
    file = files["model.safetensors"]
    folder, sound = file.path.parent, file.path.read_bytes()
    added = folder / "chat_template.jinja"
    added.write_text("{{ messages }}")
    for read in (cl.load_pruned, load_tokenizer):
        with pytest.raises(cl.FileFormatError):
            read(folder)
    added.unlink()
    # a weight that is read when its layer runs
    file.path.write_bytes(sound[:-2] + bytes([sound[-2] ^ 64]) + sound[-1:])
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(folder, device="cpu", stream=True)(tiny_text(1).input_ids)
