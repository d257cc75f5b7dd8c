"""Every kind of stored file: with a bit flipped or its end cut off, refused or equal."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab import cli
from cocurve_lab.base.storage import SUM
from cocurve_lab.evaluation.report import EvaluationReport
from cocurve_lab.extensions.pretrained.kept import read_plans, write_plans
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.models.loading import load_tokenizer
from cocurve_studies.tables import kept_rows
from helpers.problems import make_units, random_curvature
from helpers.seals import fields_of
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

TEXT = tiny_text(3, 16, 4)
ROWS = [{"plan": "a", "kl": 0.123456, "n": i} for i in range(20)]
KEPT = {
    "name": "H",
    "requested_ratio": 0.2,
    "interaction_strength": 0.5,
    "pruned": [1, 4],
    "kl": {"c4": [0.25, 0.5]},
    "nll": {"c4": [3.0, 3.5]},
    "right": {"capitals": [3, 4]},
    "replies": ["Paris"],
}


class Stored(NamedTuple):
    """A file, and how to read what is in it."""

    path: Path
    load: Callable[[], Any]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stored]:
    place, model = tmp_path_factory.mktemp("stored"), tiny_model()
    h = cl.estimate_curvature(model, cl.enumerate_units(model, GROUPS), TEXT, progress=False)
    plan, report = cl.solve_greedy(h, 0.3), EvaluationReport("local", {"a": {"acc": 0.5}})
    paths = {name: place / name for name in NAMES if "." in name}
    paths["plan.json"].write_text(plan.to_json())
    paths["report.json"].write_text(report.to_json())
    write_plans(paths["kept.json"], h.provenance["model_fingerprint"], {}, ["Where?"], [KEPT])
    kept: Any = {"checkpoint": paths["plans.ckpt"], "progress": False}
    cl.measure_plans(model, [plan], TEXT, **kept)
    for name in ("H.pkl", "H.npz"):
        h.save(paths[name])
    kept_rows(place, "study", {"a": 1}, lambda: ROWS)
    (paths["table"],) = place.glob("study_*.json")
    folder = cl.save_pruned(cl.prune(model, plan), place / "small", tokenizer=word_tokenizer())

    def whole() -> Any:
        pruned: Any = cl.load_pruned(folder, device="cpu")
        weights = {n: w.numpy().tobytes() for n, w in pruned.state_dict().items()}
        rules = load_tokenizer(folder).backend_tokenizer.to_str()
        return weights, pruned.cocurve_manifest, rules, pruned.config.to_json_string()

    found = {name: Stored(folder / name, whole) for name in FOLDER}
    loads: dict[str, Callable[[], Any]] = {
        "plan.json": lambda: cl.Selection.from_json(text_of(paths["plan.json"])).to_json(),
        "report.json": lambda: EvaluationReport.from_json(text_of(paths["report.json"])).values,
        "kept.json": lambda: repr(read_plans(paths["kept.json"], h).plans[0].kl),
        "plans.ckpt": lambda: cl.measure_plans(model, [plan], TEXT, **kept).kl.tolist(),
        "H.pkl": lambda: cl.Curvature.load(paths["H.pkl"]).fingerprint,
        "H.npz": lambda: cl.Curvature.load(paths["H.npz"]).fingerprint,
        "table": lambda: kept_rows(place, "study", {"a": 1}, lambda: ROWS),
    }
    return found | {name: Stored(paths[name], load) for name, load in loads.items()}


FOLDER = (MANIFEST, "config.json", "model.safetensors", "tokenizer.json")
NAMES = ("plan.json", "report.json", "table", "kept.json", "H.pkl", "H.npz", "plans.ckpt")
NO_HURRY: Any = {"max_examples": 30, "deadline": None, "database": None}


@pytest.mark.parametrize("name", [*NAMES, *FOLDER])
def test_a_damaged_file_is_refused_or_equal(name: str, stored: dict[str, Stored]) -> None:
    file = stored[name]
    sound, content = file.path.read_bytes(), file.load()

    @settings(**NO_HURRY, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(sound) - 1), st.integers(0, 7), st.booleans())
    def damage(place: int, bit: int, cut: bool) -> None:
        flipped = sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :]
        file.path.write_bytes(sound[:place] if cut else flipped)
        with suppress(cl.CocurveError, OSError):
            assert file.load() == content

    try:
        damage()
    finally:
        file.path.write_bytes(sound)
    assert file.load() == content


def test_a_flipped_weight_is_named(stored: dict[str, Stored], tmp_path: Path, capsys: Any) -> None:
    file = stored["model.safetensors"].path
    sound = file.read_bytes()
    file.write_bytes(sound[:-2] + bytes([sound[-2] ^ 64]) + sound[-1:])
    try:
        with pytest.raises(cl.FileFormatError, match="does not match its checksum"):
            cl.load_pruned(file.parent, device="cpu")
        pytest.importorskip("accelerate")
        with pytest.raises(cl.FileFormatError, match="does not match its checksum"):
            cl.load_pruned(file.parent, device="cpu", stream=True)(TEXT.input_ids)
        (tmp_path / "A").mkdir()
        tiny_model().save_pretrained(tmp_path / "A")
        word_tokenizer().save_pretrained(tmp_path / "A")
        plan = ("prune", str(tmp_path / "A"), str(stored["plan.json"].path))
        assert cli.main([*plan, "--out", str(file.parent)]) == 1
        assert "does not match its checksum" in capsys.readouterr().err
    finally:
        file.write_bytes(sound)
    assert cli.main([*plan, "--out", str(file.parent)]) == 0
    assert "already holds" in capsys.readouterr().out


def test_what_was_changed_beside_the_weights_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [1, 5])
    folder = cl.save_pruned(cl.prune(model, plan), tmp_path / "small", tokenizer=word_tokenizer())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for read in (cl.load_pruned, load_tokenizer):
        with pytest.raises(cl.FileFormatError, match="beside it was changed or added"):
            read(folder)
    (folder / "chat_template.jinja").unlink()
    assert cl.load_pruned(folder).num_parameters() < model.num_parameters()


@pytest.mark.parametrize("name", ["report.json", "table", "kept.json", MANIFEST])
def test_a_file_without_its_checksum_is_refused(name: str, stored: dict[str, Stored]) -> None:
    file = stored[name]
    sound = file.path.read_text()
    file.path.write_text(json.dumps(fields_of(sound)))
    try:
        with pytest.raises(cl.FileFormatError, match="it has no checksum"):
            file.load()
    finally:
        file.path.write_text(sound)


def test_a_plan_changed_by_hand_loses_its_origin_and_its_predicted_risk() -> None:
    model = tiny_model()
    h = cl.estimate_curvature(model, cl.enumerate_units(model, GROUPS), TEXT, progress=False)
    plan = cl.solve_greedy(h, 0.3)
    content = json.loads(plan.to_json())
    content["pruned"][0] = next(
        u for u in plan.kept if plan.units.costs[u] >= plan.units.costs[plan.pruned[0]]
    )
    with pytest.raises(cl.FileFormatError, match=f"remove its {SUM}"):
        cl.Selection.from_json(json.dumps(content))
    by_hand = cl.Selection.from_json(json.dumps(fields_of(json.dumps(content))))
    assert by_hand.origin is by_hand.predicted_risk is by_hand.curvature_fingerprint is None


def test_plans_are_equal_by_what_they_hold() -> None:
    h = random_curvature(make_units())
    plan = cl.solve_greedy(h, 0.3)
    same = [pickle.loads(pickle.dumps(plan)), cl.solve_greedy(h, 0.3)]
    assert same == [plan, plan]
    assert {plan, *same} == {plan}
    assert plan != cl.solve_greedy(h, 0.3, interaction_strength=0.0)
    assert plan != 3
