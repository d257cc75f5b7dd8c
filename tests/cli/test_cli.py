"""The command line: a whole run in a folder, exit codes, nothing overwritten, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import cocurve_lab as cl
from cocurve_lab.base import progress
from cocurve_lab.calibration import default_rows
from cocurve_lab.cli import DONE, FAILED, INTERRUPTED, USAGE, main
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.estimator import build as build_module
from cocurve_lab.estimator.files import build_path
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring import risk
from cocurve_lab.measuring.risk import compare_models
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.models.loading import demo_folder
from helpers.problems import interrupt_at
from helpers.release import Shape, write_release
from helpers.tiny_models import CONTEXT, GROUPS, tiny_model, word_tokenizer
from helpers.waiting import eventually

ROWS = 6
CUT = ["--length", "20", "--sequences", str(ROWS)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer, and two texts beside it."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model().save_pretrained(folder / "model")
    word_tokenizer(CONTEXT).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for name in ("calibration", "held_out"):
        words = rng.integers(90, size=(40, 15))
        documents = [" ".join(f"w{n}" for n in row) for row in words]
        (folder / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": document}) for document in documents)
        )
    return folder


def build_command(place: Path, out: Path, *more: str) -> list[str]:
    settings = ["--top-r", "32", "--ffn-groups", str(GROUPS), "--groups", "4", "--device", "cpu"]
    text = ["--calibration", str(place / "calibration.jsonl"), *CUT, "--threads", "1"]
    return ["build", str(place / "model"), *text, *settings, "--out", str(out), *more]


def the_h_in(folder: Path) -> cl.Curvature:
    (path,) = (file for file in folder.glob("H_*.pkl") if "shard" not in file.name)
    return cl.Curvature.load(path)


@pytest.fixture(scope="module")
def built(place: Path) -> Path:
    """The folder of one build."""
    assert main(build_command(place, place / "H")) == DONE
    return place / "H"


def notebook(place: Path, folder: Path) -> cl.Curvature:
    """What a notebook does with the folder."""
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    calibration, _ = cl.default_calibration(
        str(place / "model"),
        tokenizer,
        ROWS,
        2,
        text_file=place / "calibration.jsonl",
        seq_len=20,
        positions_per_sequence="all",
    )
    units = cl.enumerate_units(model, GROUPS)
    options = cl.BuildOptions(groups=4)
    return cl.load_or_estimate(folder, model, units, calibration, 32, options=options)


# A whole run ------------------------------------------------------------------------------------


def test_without_an_end_token_one_is_named_or_one_document_suffices(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "place"
    tiny_model().save_pretrained(folder / "model")
    word_tokenizer(CONTEXT, eos=None).save_pretrained(folder / "model")
    shutil.copy(place / "calibration.jsonl", folder)
    assert main(build_command(folder, tmp_path / "a")) == FAILED
    assert "no end token to join another with. Name one with eos= (--eos" in capsys.readouterr().err
    assert main(build_command(folder, tmp_path / "a", "--eos", "no such")) == FAILED
    assert main(build_command(folder, tmp_path / "a", "--eos", "<end>")) == DONE
    by_text = the_h_in(tmp_path / "a")
    assert main(build_command(folder, tmp_path / "b", "--eos", "0", "--top-r", "1000000")) == DONE
    by_id = the_h_in(tmp_path / "b")
    row_marks = by_id.provenance["row_fingerprints"]
    assert row_marks == by_text.provenance["row_fingerprints"]
    assert row_marks == the_h_in(built).provenance["row_fingerprints"]
    assert by_id.provenance["top_r"] == 97  # the whole vocabulary
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"text": " ".join(f"w{n % 90}" for n in range(200))}))
    text = ["evaluate", str(folder / "model"), "--against", str(folder / "model"), "--text"]
    assert main([*text, str(one), *CUT]) == DONE
    assert main([*text, str(folder / "calibration.jsonl"), *CUT]) == FAILED
    assert main([*text, str(folder / "calibration.jsonl"), *CUT, "--eos", "<end>"]) == DONE


def test_two_shards_and_merge_are_one_build_and_a_notebook_finds_it(
    place: Path,
    built: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in (2, 1):
        assert main(build_command(place, tmp_path, "--shard", f"{number}/2")) == DONE
        if number == 2:
            assert main(["merge", str(tmp_path)]) == FAILED
            assert "of 2 shards, 1 is missing" in capsys.readouterr().err
    assert main(["merge", str(tmp_path)]) == DONE
    assert "Saved H to" in capsys.readouterr().out
    whole, merged = the_h_in(built), the_h_in(tmp_path)
    assert np.array_equal(merged.matrix, whole.matrix)
    assert np.array_equal(merged.group_grams, whole.group_grams)
    assert merged.fingerprint == whole.fingerprint
    assert [p.name for p in tmp_path.glob("H_*") if "shard" not in p.name] == [
        p.name for p in built.glob("H_*")
    ]
    monkeypatch.setattr(features, "gram_matrix", None)  # nothing may be built from here on
    assert np.array_equal(notebook(place, tmp_path).matrix, whole.matrix)
    assert "nothing was rebuilt" in capsys.readouterr().out
    for again in (["merge", str(tmp_path)], build_command(place, tmp_path, "--shard", "1/2")):
        assert main(again) == DONE
        assert "nothing was rebuilt" in capsys.readouterr().out


def test_from_h_to_a_smaller_model(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, smaller, dense = tmp_path / "plan.json", tmp_path / "smaller", str(place / "model")
    text = ["--text", str(place / "held_out.jsonl"), "--length", "20", "--sequences", "3"]
    assert main(["solve", str(built), "--ratio", "0.3", "--out", str(plan)]) == DONE
    selection = cl.Selection.from_json(plan.read_text())
    assert selection.pruned == cl.solve_greedy(the_h_in(built), 0.3).pruned
    prune = ["prune", dense, str(plan), "--out", str(smaller), "--verify", "--device", "cpu", *text]
    assert main(prune) == DONE
    assert "computes what the masked model computes" in capsys.readouterr().out
    evaluate = ["evaluate", str(smaller), "--against", dense, "--device", "cpu", *text, "--json"]
    assert main(evaluate) == DONE
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "KL: 3 of 3 rows" in said.err
    assert "perplexity: " in said.err
    model, tokenizer = cl.load_model(dense, device="cpu")
    rows = cl.CalibrationSet.from_file(
        place / "held_out.jsonl",
        tokenizer,
        num_sequences=3,
        seq_len=20,
        positions_per_sequence="all",
    )
    assert found["kl"]["mean"] == pytest.approx(cl.pruning_risk(model, selection, rows), rel=1e-4)
    assert found["kl"]["rows"] == 3
    documents = [json.loads(x)["text"] for x in (place / "held_out.jsonl").read_text().split("\n")]
    expected = cl.perplexity(cl.load_pruned(smaller, device="cpu"), tokenizer, documents)
    assert found["perplexity"]["value"] == pytest.approx(expected.value, rel=1e-6)
    for again, word in (
        (["solve", str(built), "--ratio", "0.3", "--out", str(plan)], "already holds this plan"),
        (prune, "already holds this plan"),
    ):
        assert main(again) == DONE
        assert word in capsys.readouterr().out


def test_a_pruned_folder_becomes_one_gguf_file(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the embedded model: GGUF knows its tokenizer."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    plan, smaller, path = tmp_path / "plan.json", tmp_path / "smaller", tmp_path / "a.gguf"
    units = cl.enumerate_units(cl.load_model("demo", device="cpu")[0])
    plan.write_text(cl.Selection.from_pruned(units, range(0, 160, 7)).to_json())
    assert main(["prune", "demo", str(plan), "--out", str(smaller), "--device", "cpu"]) == DONE
    assert main(["export", str(smaller), "--gguf", str(path), "--dtype", "f16"]) == DONE
    assert gguf.GGUFReader(path).tensors
    before = path.read_bytes()
    assert main(["export", str(smaller), "--gguf", str(path)]) == FAILED
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_budgets_of_solve_reach_the_solver(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curvature = the_h_in(built)
    total = curvature.units.total_parameters
    assert total is not None
    wanted = int(0.8 * total)
    out = [str(tmp_path / f"{n}.json") for n in range(5)]
    h = ["solve", str(next(built.glob("H_*.pkl")))]
    assert main([*h, "--parameters", str(wanted), "--out", out[0]]) == DONE
    left = total - cl.Selection.from_json(Path(out[0]).read_text()).pruned_cost
    assert 0 < left <= wanted
    size = ["--size", f"{wanted * 2} B", "--dtype", "bfloat16"]
    assert main([*h, *size, "--out", out[1]]) == DONE
    assert Path(out[1]).exists()
    assert main([*h, "--ratio", "0.2", "--lambda", "0", "--uniform", "--out", out[2]]) == DONE
    uniform = cl.Selection.from_json(Path(out[2]).read_text())
    removed = np.bincount(uniform.units.layers[list(uniform.pruned)], minlength=3)
    assert len(set(removed.tolist())) == 1
    assert uniform.interaction_strength == 0
    assert main([*h, "--ratio", "0.2", "--gate", "--out", out[3]]) == DONE
    gated = cl.Selection.from_json(Path(out[3]).read_text())
    assert gated.interaction_strength == cl.redundancy_gate(curvature).recommended
    machine = ["--tensor-parallel", "2", "--align", "2", "--depth", "block"]
    assert main([*h, "--ratio", "0.2", *machine, "--out", out[4]]) == DONE
    guards = cl.Selection.from_json(Path(out[4]).read_text()).guards
    assert guards == cl.Guards(tensor_parallel=2, align=2, depth="block")
    capsys.readouterr()
    assert main([*h, "--ratio", "1.5", "--out", str(tmp_path / "no")]) == FAILED
    assert "ratio is 1.5" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_solve_on_the_shifts_prices_the_plan_elsewhere(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curvature, h = the_h_in(built), ["solve", str(next(built.glob("H_*.pkl"))), "--ratio", "0.3"]
    capsys.readouterr()
    for name, expected in (
        ("H", cl.solve_greedy(curvature, 0.3)),
        ("pair-kl", cl.solve_greedy(curvature.pair_kl("fit"), 0.3)),
        ("additive-kl", curvature.additive().solve(0.3, part="fit")),
    ):
        out = tmp_path / f"{name}.json"
        assert main([*h, "--surrogate", name, "--out", str(out)]) == DONE
        assert cl.Selection.from_json(out.read_text()).pruned == expected.pruned
        price = curvature.additive().predict(expected, "price")
        whose = "of the text of H" if name == "H" else "that it was not solved on"
        assert f"{whose}: {price:.4g} ±" in capsys.readouterr().out
    no = ["--surrogate", "additive-kl", "--uniform", "--out", str(tmp_path / "no")]
    assert main([*h, *no]) == FAILED
    assert "--uniform does not go with additive-kl" in capsys.readouterr().err


# Search -----------------------------------------------------------------------------------------


def search_command(place: Path, built: Path, out: Path, *more: str) -> list[str]:
    text = ["--calibration", str(place / "calibration.jsonl"), *CUT, "--rows", "4"]
    budget = ["--held-out", "3", "--evaluations", "60", "--device", "cpu", "--out", str(out)]
    return ["search", str(place / "model"), str(built), *text, *budget, *more]


def texts(place: Path) -> tuple[Any, cl.CalibrationSet, cl.CalibrationSet]:
    """The model, and the rows that the command measures on."""
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    calibration, held_out = cl.default_calibration(
        str(place / "model"), tokenizer, ROWS, 3, text_file=place / "calibration.jsonl",
        seq_len=20, positions_per_sequence="all",
    )  # fmt: skip
    return model, calibration, held_out


def test_search_writes_the_plan_that_search_plan_finds(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curvature = the_h_in(built)
    model, calibration, held_out = texts(place)
    for more, start, proposer in (
        (["--ratio", "0.3", "--lambda", "0"], cl.solve_greedy(curvature, 0.3, 0.0), curvature),
        (
            ["--ratio", "0.3", "--surrogate", "additive-kl"],
            curvature.additive().solve(0.3, part="fit"),
            curvature.pair_kl(),
        ),
    ):
        out = tmp_path / f"{len(more)}{more[-1]}.json"
        assert main(search_command(place, built, out, *more)) == DONE
        expected = cl.search_plan(
            model, start, calibration.rows(0, 4), held_out=held_out, evaluations=60,
            surrogate=proposer, progress=False,
        )  # fmt: skip
        assert expected.selection.pruned == cl.Selection.from_json(out.read_text()).pruned
        said = capsys.readouterr().out
        assert f"KL {expected.kl:.5f}" in said
        assert f"Saved to {out}." in said
    assert main(search_command(place, built, out, *more)) == FAILED
    assert "it is not overwritten" in capsys.readouterr().err


def test_search_from_a_plan_can_refit_every_plan(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = cl.solve_greedy(the_h_in(built), 0.3, guards=cl.Guards(protect_first=1))
    (tmp_path / "plan.json").write_text(start.to_json())
    more = ["--plan", str(tmp_path / "plan.json"), "--refit", "--refit-rows", "2"]
    more += ["--checkpoint", str(tmp_path / "measured")]
    assert main(search_command(place, built, tmp_path / "out.json", *more)) == DONE
    found = cl.Selection.from_json((tmp_path / "out.json").read_text())
    assert found.guards == start.guards
    assert found.realized_ratio >= 0.3
    model, calibration, held_out = texts(place)
    refitted = cl.repair(model, found, calibration.rows(4, 6))  # not the rows of the search
    kl = compare_models(model, refitted, held_out).kl.mean()
    assert f"KL {kl:.5f}" in (said := capsys.readouterr().out)
    assert "after repair on 3 held-out rows" in said
    assert all("_refit_" in file.name for file in (tmp_path / "measured").iterdir())


def test_verbs_that_only_measure_take_a_streamed_model(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    assert main(build_command(place, tmp_path / "H", "--stream")) == DONE
    assert "of weights are read for each sequence" in " ".join(capsys.readouterr().out.split())
    assert np.array_equal(the_h_in(tmp_path / "H").matrix, the_h_in(built).matrix)
    text = ["--text", str(place / "held_out.jsonl"), "--length", "20", "--sequences", "3"]
    model, found = str(place / "model"), []
    evaluate = ["evaluate", model, "--against", model, *text, "--device", "cpu", "--json"]
    for number, more in enumerate(([], ["--stream"])):
        assert main([*evaluate, *more]) == DONE
        perplexity = json.loads(capsys.readouterr().out)["perplexity"]
        out = tmp_path / f"{number}.json"
        assert main(search_command(place, built, out, "--ratio", "0.3", *more)) == DONE
        found.append((perplexity, out.read_text()))
        capsys.readouterr()
    assert found[0] == found[1]


def test_workers_of_a_streamed_build_read_the_same_place(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cocurve_lab.extensions.big_models import cluster

    seen: list[Any] = []

    def refuse(workers: int, *, source: str | None, **_: Any) -> None:
        seen.append(source)
        raise cl.InputError("that is enough")

    monkeypatch.setattr(cluster, "ray_executor", refuse)
    monkeypatch.chdir(place)
    for model, more, source in (
        ("model", ["--stream"], str(place / "model")),
        ("model", [], None),
        ("model", ["--stream", "--ray-source", "elsewhere"], "elsewhere"),
        ("owner/name", ["--stream"], "owner/name"),
    ):
        assert main(["build", model, "--out", str(tmp_path / "H"), "--ray", "2", *more]) == FAILED
        assert "that is enough" in capsys.readouterr().err
        assert seen.pop() == source


def test_a_model_that_cannot_be_streamed_is_a_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    tiny_model().save_pretrained(tmp_path / "model")
    word_tokenizer(CONTEXT).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "model" / "pytorch_model.bin")
    file.unlink()
    shutil.copy(place / "calibration.jsonl", tmp_path)
    assert main(build_command(tmp_path, tmp_path / "H", "--stream")) == FAILED
    assert "holds no .safetensors weights, which stream=True reads" in capsys.readouterr().err
    assert main(["compress", "demo", "--out", str(tmp_path / "H"), "--stream"]) == USAGE
    assert not (tmp_path / "H").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_search_says_what_is_kept_and_goes_on(
    place: Path,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, asked = risk._Engine.measure, []

    def measure(engine: Any, *arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 12:
            signal.raise_signal(signal.SIGINT)
        return real(engine, *arguments)

    whole, command = tmp_path / "whole.json", ["--ratio", "0.3"]
    assert main(search_command(place, built, whole, *command)) == DONE
    monkeypatch.setattr(risk._Engine, "measure", measure)
    out, more = tmp_path / "out.json", [*command, "--checkpoint", str(tmp_path / "my measured")]
    assert main(search_command(place, built, out, *command)) == INTERRUPTED
    assert "nothing is kept. With --checkpoint FOLDER" in capsys.readouterr().err
    asked.clear()
    assert main(search_command(place, built, out, *more)) == INTERRUPTED
    said = capsys.readouterr().err
    assert "To resume:\n  cocurve search " in said
    assert "--checkpoint '" in said
    assert not out.exists()
    interrupted = len(asked)
    asked.clear()
    monkeypatch.setattr(risk._Engine, "measure", lambda *a: (asked.append(1), real(*a))[1])
    assert main(search_command(place, built, out, *more)) == DONE
    again = len(asked)
    assert out.read_text() == whole.read_text()
    asked.clear()
    assert main(search_command(place, built, tmp_path / "once.json", *command)) == DONE
    assert again < len(asked)
    assert interrupted == 12


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ratio", "0.3", "--refit-rows", "3"], "--refit-rows is 3. Add --refit"),
        (["--ratio", "0.3", "--rows", "0"], "--rows is 0. Give at least 1"),
        (
            ["--ratio", "0.3", "--refit", "--refit-rows", "3"],
            "--rows 4 leaves 2 of 6 rows to refit",
        ),
        (["--ratio", "0.3", "--refit", "--rows", "6"], "--rows 6 leaves 0 of 6 rows to refit"),
        (["--plan", "nowhere.json"], "there is no plan nowhere.json"),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    place: Path,
    built: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert main(search_command(place, built, tmp_path / "out.json", *more)) == FAILED
    assert message in capsys.readouterr().err


# Inventory --------------------------------------------------------------------------------------


def test_inventory_reads_the_configuration_alone(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_bytes((place / "model" / "config.json").read_bytes())  # no weights beside it
    units = cl.enumerate_units(tiny_model(), GROUPS)
    groups = ["--ffn-groups", str(GROUPS)]
    assert main(["inventory", "--config", str(config), *groups, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "LlamaForCausalLM"
    assert found["units"] == len(units)
    assert found["removable_parameters"] == units.total_cost
    assert found["parameters"] == units.total_parameters
    for layer in found["layers"]:
        for kind in ("attention", "ffn"):
            mine = (units.layers == layer["layer"]) & (units.kinds == kind)
            assert layer[kind]["units"] == mine.sum()
            assert layer[kind]["parameters"] == units.costs[mine].sum()
    assert main(["inventory", str(place / "model"), *groups]) == DONE
    said = capsys.readouterr().out
    assert f"M = {len(units)} units" in said
    assert "0 to 2" in said  # equal layers share a line


def test_inventory_of_a_pruned_folder_counts_what_stays(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = cl.load_model(place / "model", device="cpu")
    units = cl.enumerate_units(model, GROUPS)
    pruned = cl.prune(model, cl.Selection.from_pruned(units, [0, 7, 8]))
    cl.save_pruned(pruned, tmp_path / "smaller")
    for weights in (tmp_path / "smaller").glob("*.safetensors"):
        weights.write_bytes(b"")  # they are not read
    command = ["inventory", str(tmp_path / "smaller"), "--ffn-groups", str(GROUPS), "--json"]
    assert main(command) == DONE
    found = json.loads(capsys.readouterr().out)
    left = cl.enumerate_units(pruned, GROUPS)
    assert found["removable_parameters"] == left.total_cost
    assert found["layers"][0]["attention"]["units"] == 1


# Nothing is overwritten, and errors are sentences -----------------------------------------------


def test_what_exists_is_never_overwritten(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "taken"
    plan.write_text("mine")
    folder.mkdir()
    (folder / "mine").write_text("mine")
    assert main(["solve", str(built), "--ratio", "0.2", "--out", str(plan)]) == FAILED
    assert "exists and holds something else; it is not overwritten" in capsys.readouterr().err
    assert plan.read_text() == "mine"
    units = cl.enumerate_units(tiny_model(), GROUPS)
    other = tmp_path / "other.json"
    other.write_text(cl.Selection.from_pruned(units, [3]).to_json())
    assert main(["prune", str(place / "model"), str(other), "--out", str(folder)]) == FAILED
    assert "is not this plan's model; it is not overwritten" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ([], USAGE, "required: VERB"),
        (["fly"], USAGE, "invalid choice: 'fly'"),
        (["build", "demo"], USAGE, "required: --out"),
        (["build", "demo", "--out", "H", "--shard", "3/2"], USAGE, "shards count from 1"),
        (["build", "demo", "--out", "H", "--shard", "half"], USAGE, "'half' is not of the form"),
        (["build", "demo", "--out", "H", "--positions", "some"], USAGE, "neither a number nor all"),
        (["build", "demo", "--out", "H", "--checkpoint-seconds", "nan"], FAILED, "seconds is nan"),
        (["build", "demo", "--out", "H", "--calibration", "no.jsonl"], FAILED, "no text no.jsonl"),
        (["build", "demo", "--out", "/dev/null"], FAILED, "nothing can be written into /dev/null"),
        (["build", "demo", "--out", "/dev/null/H"], FAILED, "nothing can be written into"),
        (["solve", "H", "--out", "p"], USAGE, "one of the arguments --ratio"),
        (["solve", "H", "--ratio", "0.2", "--size", "1 GB", "--out", "p"], USAGE, "not allowed"),
        (["build", "demo", "--out", "H", "--shard", "1/17"], FAILED, "at most 16 shards"),
        (["build", "no-such/folder/here", "--out", "H"], FAILED, "no-such/folder/here"),
        (["solve", "nowhere", "--ratio", "0.2", "--out", "p"], FAILED, "there is no nowhere"),
        (["prune", "demo", "nowhere", "--out", "f"], FAILED, "there is no plan nowhere"),
        (["solve", ".", "--size", "5 MB", "--out", "p"], FAILED, "for example --dtype bfloat16."),
        (
            ["solve", ".", "--ratio", "0", "--dtype", "float16", "--out", "p"],
            FAILED,
            "--dtype float16 is only used with --size or --kv-cache",
        ),
        (["export", "f", "--gguf", "g", "--dtype", "bf16"], USAGE, "invalid choice: 'bf16'"),
        (["export", "f", "--gguf", "/dev/null/g"], FAILED, "nothing can be written into /dev/null"),
        (["evaluate", "demo", "--text", "no.jsonl"], FAILED, "there is no text no.jsonl"),
        (["evaluate", "demo", "--text", "."], FAILED, ". is a folder"),
        (
            ["evaluate", "demo", "--suite", "demo", "--report", "/dev/null/r"],
            FAILED,
            "nothing can be written into",
        ),
        (["merge", "nowhere"], FAILED, "there is no nowhere"),
        (["merge", "."], FAILED, "holds no finished shards"),
        (["solve", ".", "--ratio", "0.2", "--out", "p"], FAILED, "holds no H"),
        (["evaluate", "demo", "--report", "r"], FAILED, "--report keeps what --suite measures"),
        (["evaluate", "demo", "--tasks", "x.jsonl"], FAILED, "--tasks names the files of --suite"),
        (["evaluate", "demo", "--suite", "local"], FAILED, "Give both, or neither"),
        (
            ["evaluate", "demo", "--suite", "local", "--tasks", "no.jsonl"],
            FAILED,
            "there is no task file no.jsonl",
        ),
        (["export", "nowhere", "--gguf", "g"], FAILED, "there is no folder nowhere"),
        (["merge", "~no-such-user/x"], FAILED, "there is no ~no-such-user/x"),
        (["evaluate", "demo", "--data", "hub"], FAILED, "is for the datasets of --suite paper"),
        (["evaluate", "demo", "--allow-code-execution"], FAILED, "is for programs of a --suite"),
        (["inventory", "--config", "nowhere.json"], FAILED, "there is no nowhere.json"),
        (["inventory", "--paper", "--disk", "3"], FAILED, "--disk 3 is for --build. Add --build"),
        (["inventory", "--paper", "--build", "--disk", "0"], FAILED, "Give a number above 0."),
        (["inventory", "demo", "--build", "--share", "nan"], FAILED, "--share is nan. Give"),
        (["inventory", "demo", "--build", "--share", "2"], FAILED, "above 0, at most 1."),
    ],
    ids=lambda value: " ".join(value).replace("/", "|") if isinstance(value, list) else "",
)
def test_bad_command_lines_say_what_is_wrong(
    command: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_recover_trains_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from transformers import Trainer

    model, _ = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [u.name for u in units if u.name.startswith("L2.ffn")])
    cl.save_pruned(cl.prune(model, plan), tmp_path / "smaller")
    out = tmp_path / "trained"
    command = ["recover", str(tmp_path / "smaller"), "--against", "demo", "--out", str(out)]
    command += ["--sequences", "16", "--length", "64", "--held-out", "3", "--epochs", "2"]
    command += ["--device", "cpu"]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", stop)
        assert main(command) == INTERRUPTED
    said = capsys.readouterr().err
    assert f"the state is in {out}.state" in said
    assert "cocurve recover" in said
    assert not out.exists()
    assert main(command) == DONE
    assert "trained on 16 rows; the weights are those of epoch" in capsys.readouterr().out
    assert not Path(f"{out}.state").exists()
    trained: Any = cl.load_pruned(out)
    assert trained.cocurve_manifest["recovery"]["sequences"] == 16
    assert main(command) == FAILED
    assert "is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb",
    [
        *("", "inventory", "build", "merge", "solve", "search", "prune", "evaluate"),
        *("recover", "export", "paper"),
    ],
)
def test_help_explains_every_verb_with_an_example(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "--help"]) == DONE
    said = capsys.readouterr().out
    assert f"  cocurve {verb or 'build'} " in said  # an example to copy
    assert len(said.splitlines()) > 12


def test_a_report_that_exists_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cocurve_lab.cli.common.load_model", None)
    report = tmp_path / "report.json"
    report.write_text("mine")
    assert main(["evaluate", "demo", "--suite", "demo", "--report", str(report)]) == FAILED
    assert f"{report} exists; it is not overwritten" in capsys.readouterr().err
    assert report.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=["full", "forbidden"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_build_that_cannot_be_written_is_a_failure_that_says_what_is_kept(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    number: int,
    checkpointed: bool,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    command = build_command(place, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cl.Curvature, "save", refuse)
        if not checkpointed:
            patch.setattr(build_module, "write_atomically", refuse)
        assert main(command) == FAILED
    assert not list(tmp_path.glob("H_*.pkl"))
    said = capfd.readouterr().err
    assert "no H could be written into" in said
    assert ("keeps the finished sequences" in said) is checkpointed
    assert ("None of the 6 finished sequences is kept" in said) is not checkpointed
    assert ("free some space" in caplog.text) is (number == errno.ENOSPC)
    assert os.strerror(number) in caplog.text
    if checkpointed:
        monkeypatch.setattr(features, "gram_matrix", None)  # the checkpoint holds all of it
        assert main(command) == DONE
        assert len(list(tmp_path.glob("H_*.pkl"))) == 1


def test_a_folder_without_h_says_how_to_get_one(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    solve = ["solve", str(tmp_path), "--ratio", "0.2", "--out", str(tmp_path / "p")]
    for name, advice in (
        ("mine", "Build one: cocurve build"),
        ("H_model_0.ckpt", "It holds an unfinished build"),
        ("H_model_0.shard-1-of-2.pkl", "Merge its shards"),
    ):
        (tmp_path / name).touch()
        assert main(solve) == FAILED
        said = capsys.readouterr().err
        assert advice in said
        assert "of one" not in said


# What is there already --------------------------------------------------------------------------


@pytest.fixture
def pruned(place: Path, tmp_path: Path) -> list[str]:
    """The command that made a pruned folder."""
    units = cl.enumerate_units(tiny_model(), GROUPS)
    (tmp_path / "plan.json").write_text(cl.Selection.from_pruned(units, [0, 7, 8]).to_json())
    command = ["prune", str(place / "model"), str(tmp_path / "plan.json")]
    command += ["--out", str(tmp_path / "smaller"), "--device", "cpu"]
    assert main(command) == DONE
    return command


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_folder_of_the_same_plan_is_the_same_only_for_model_and_dtype(
    place: Path, pruned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tmp_path / "smaller")
    other = tiny_model()
    other.get_input_embeddings().weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    word_tokenizer(CONTEXT).save_pretrained(tmp_path / "other")
    cases = (
        (pruned, DONE, "already holds this plan"),
        (["prune", str(tmp_path / "other"), *pruned[2:]], FAILED, "plan of another dense model"),
        ([*pruned, "--dtype", "bfloat16"], FAILED, "holds this plan in float32, not bfloat16"),
    )
    for command, code, message in cases:
        capsys.readouterr()
        assert main(command) == code
        said = capsys.readouterr()
        assert message in said.out + said.err
        assert contents(tmp_path / "smaller") == before


def half(place: Path, folder: Path) -> tuple[Path, Path]:
    """A model whose files are bfloat16, and a plan of it."""
    model = tiny_model(dtype=torch.bfloat16)
    model.save_pretrained(folder / "half", max_shard_size="20KB")
    word_tokenizer(CONTEXT).save_pretrained(folder / "half")
    units = cl.enumerate_units(model, GROUPS)
    (folder / "plan.json").write_text(cl.Selection.from_pruned(units, [0, 7, 8]).to_json())
    return folder / "half", folder / "plan.json"


def test_pruning_keeps_the_dtype_of_the_files_and_loads_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = half(place, tmp_path)
    prune = ["prune", str(model), str(plan), "--out"]
    text = ["--text", str(place / "held_out.jsonl"), "--length", "20", "--device", "cpu"]
    assert main([*prune, str(tmp_path / "verified"), "--verify", *text]) == DONE
    monkeypatch.setattr("cocurve_lab.cli.common.load_model", None)
    assert main([*prune, str(tmp_path / "smaller")]) == DONE
    assert contents(tmp_path / "smaller") == contents(tmp_path / "verified")
    manifest = json.loads((tmp_path / "smaller" / "cocurve_manifest.json").read_text())
    assert manifest["dtype"] == "bfloat16"
    assert main([*prune, str(tmp_path / "wide"), "--dtype", "float32"]) == DONE
    assert cl.load_pruned(tmp_path / "wide").dtype == torch.float32


def test_a_published_mask_or_h_makes_a_smaller_model(place: Path, tmp_path: Path) -> None:
    shape = Shape("tiny", 3, 32, 8, heads=4, kv_heads=2, width=42, groups=GROUPS)
    release, plan = tmp_path / "release", tmp_path / "plan.json"
    write_release(release, shape, (20,))
    assert main(["solve", str(release), "--ratio", "0.2", "--out", str(plan)]) == DONE
    solved = cl.solve_greedy(cl.Curvature.from_release(release), 0.2)
    published = cl.Selection.from_release(release, 0.2)
    for source, expected in ((plan, solved), (release / "r20", published)):
        out = tmp_path / source.name.partition(".")[0]
        assert main(["prune", str(place / "model"), str(source), "--out", str(out)]) == DONE
        manifest = json.loads((out / MANIFEST).read_text())
        assert manifest["selection_fingerprint"] == expected.fingerprint


def test_pickled_weights_are_loaded_to_be_pruned(place: Path, tmp_path: Path) -> None:
    model, plan = half(place, tmp_path)
    loaded, _ = cl.load_model(model, device="cpu", dtype="bfloat16")
    for file in model.glob("*.safetensors*"):
        file.unlink()
    torch.save(loaded.state_dict(), model / "pytorch_model.bin")
    command = ["prune", str(model), str(plan), "--out", str(tmp_path / "smaller")]
    assert main([*command, "--device", "cpu", "--dtype", "bfloat16"]) == DONE
    assert cl.load_pruned(tmp_path / "smaller").num_parameters() < loaded.num_parameters()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda shard: shard.unlink(), "names model-00002-of-.* which is not there"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-9]), "truncated or damaged"),
    ],
    ids=["missing", "truncated"],
)
def test_a_damaged_model_is_a_sentence_and_nothing_is_written(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    model, plan = half(place, tmp_path)
    spoil(sorted(model.glob("model-*.safetensors"))[1])
    assert main(["prune", str(model), str(plan), "--out", str(tmp_path / "smaller")]) == FAILED
    assert re.search(message, capsys.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == {"half", "plan.json"}


def test_verify_checks_a_folder_that_is_there_already(
    place: Path, pruned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["--verify", "--text", str(place / "held_out.jsonl"), "--length", "20"]
    assert main([*pruned, *text]) == DONE
    assert "it computes what the masked model computes" in capsys.readouterr().out
    weights = tmp_path / "smaller" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in sorted(tensors) if "norm" in name)
    save_file(tensors | {name: 3 * tensors[name]}, weights, {"format": "pt"})
    assert main([*pruned, *text]) == FAILED


def test_prune_refits_on_text(
    place: Path, pruned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(place / "held_out.jsonl")
    refit = ["--refit", "--calibration", text, "--calibration-sequences", "3", "--length", "20"]
    capsys.readouterr()
    for command, message in (
        ([*pruned, *refit], "holds this plan without a refit"),
        ([*pruned, "--calibration", text], "Add --refit"),
        ([*pruned, "--refit", "--calibration", "nowhere"], "there is no text nowhere"),
    ):
        assert main(command) == FAILED
        assert message in capsys.readouterr().err
    own = [str(tmp_path / "refitted") if part.endswith("smaller") else part for part in pruned]
    assert main([*own, *refit, "--verify", "--text", text]) == DONE
    assert "masked model computes before the refit; refitted on 3 rows" in capsys.readouterr().out
    loaded: Any = cl.load_pruned(tmp_path / "refitted")
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    rows = default_rows("other", tokenizer, 3, text, seq_len=20, positions_per_sequence="all")
    plan = cl.Selection.from_json((tmp_path / "plan.json").read_text())
    expected = cl.repair(model, plan, rows, options=RepairOptions(progress=False))
    assert loaded.cocurve_manifest["repair"]["sequences"] == 3
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())
    assert main([*own, *refit]) == DONE
    assert "already holds this plan" in capsys.readouterr().out
    assert main(own) == FAILED
    assert "holds this plan refitted on 3 rows" in capsys.readouterr().err


def test_prune_leaves_a_model_on_disk_to_verify_or_refit_it(
    place: Path, pruned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    text = ["--text", str(place / "held_out.jsonl"), "--length", "20"]
    refit = ["--refit", "--calibration", text[1], "--calibration-sequences", "3"]
    capsys.readouterr()

    def command(name: str, *more: str) -> list[str]:
        own = [str(tmp_path / name) if part.endswith("smaller") else part for part in pruned]
        return [*own, *text, *more]

    for options, message in (
        ([], "which run the model. Without them it stays on disk anyway"),
        ([*refit, "--verify"], "not both: a refitted model computes something else"),
    ):
        assert main(command("wrong", "--stream", *options)) == FAILED
        assert message in capsys.readouterr().err
    for verb, said in ((["--verify"], "masked model computes"), (refit, "refitted on 3 rows")):
        kinds = ("loaded" + verb[0], []), ("streamed" + verb[0], ["--stream"])
        for name, more in kinds:
            assert main(command(name, *verb, *more)) == DONE
            assert said in capsys.readouterr().out
        assert contents(tmp_path / kinds[0][0]) == contents(tmp_path / kinds[1][0])
        assert main(command(kinds[1][0], *verb, "--stream")) == DONE
        assert "already holds this plan" in capsys.readouterr().out
    small, dense = str(tmp_path / kinds[1][0]), str(place / "model")
    found = []
    for more in ([], ["--stream"]):
        command_line = ["evaluate", small, "--against", dense, *text, "--sequences", "3", "--json"]
        assert main([*command_line, "--device", "cpu", *more]) == DONE
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["kl"]["mean"] > 0
    assert not (tmp_path / "wrong").exists()


REMOTE = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer_config.json",
            json.dumps(REMOTE),
            "comes with its own code, which is not run",
        ),
        ("tokenizer.json", "{broken", "cannot be loaded ("),
        ("tokenizer.json", "{}", "cannot be loaded ("),
    ],
    ids=["code", "broken", "empty"],
)
def test_a_tokenizer_that_cannot_be_read_is_refused_without_a_question(
    place: Path,
    pruned: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    message: str,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    (tmp_path / "smaller" / "own.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "smaller" / name).write_text(content)
    text = ["--text", str(place / "held_out.jsonl"), "--device", "cpu"]
    for command in (
        ["evaluate", str(tmp_path / "smaller"), *text],
        ["export", str(tmp_path / "smaller"), "--gguf", str(tmp_path / "g")],
    ):
        assert main(command) == FAILED
        said = capsys.readouterr().err
        assert f"the tokenizer of '{tmp_path / 'smaller'}' {message}" in said
        assert not asked


def test_a_folder_without_a_tokenizer_asks_for_one(
    place: Path, pruned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "smaller").glob("tokenizer*"):
        file.unlink()
    evaluate = ["evaluate", str(tmp_path / "smaller"), "--text", str(place / "held_out.jsonl")]
    assert main([*evaluate, "--device", "cpu"]) == FAILED
    assert "smaller holds no tokenizer. Give --tokenizer" in capsys.readouterr().err
    assert main([*evaluate, "--device", "cpu", "--tokenizer", str(place / "model")]) == DONE
    export = ["export", str(tmp_path / "smaller"), "--gguf", str(tmp_path / "ids.gguf")]
    assert main(export) == FAILED
    assert "or --no-tokenizer for a file that takes token ids only" in capsys.readouterr().err
    assert main([*export, "--tokenizer", str(place / "model")]) == FAILED
    assert "WordLevel model; only BPE" in capsys.readouterr().err
    assert main([*export, "--no-tokenizer"]) == DONE
    assert "tokenizer none/default" in capsys.readouterr().out


def test_a_folder_with_a_tokenizer_keeps_to_it(
    place: Path, pruned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["--text", str(place / "held_out.jsonl"), "--device", "cpu", "--json"]
    found = []
    for more in ([], ["--tokenizer", "demo"]):
        assert main(["evaluate", str(tmp_path / "smaller"), *text, *more]) == DONE
        found.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert found[0] == found[1]
    assert not any(name.startswith("window") for name in found[0])


def test_the_home_folder_is_found_in_every_option(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell expands ~/H, but not --out=~/H."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(built)
    shutil.copytree(built, tmp_path / "H")
    assert main(["solve", "~/H", "--ratio", "0.3", "--out=~/plans/plan.json"]) == DONE
    assert (tmp_path / "plans" / "plan.json").exists()
    model = tiny_model()
    plan = cl.Selection.from_json((tmp_path / "plans" / "plan.json").read_text())
    cl.save_pruned(cl.prune(model, plan), "~/smaller")
    assert cl.load_pruned("~/smaller").num_parameters() < model.num_parameters()
    assert (tmp_path / "smaller").is_dir()
    assert not (built / "~").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda manifest: "garbage", "is damaged"),
        (lambda manifest: "[]", "is damaged"),
        (lambda manifest: _without(manifest, "dense_fingerprint"), "dense_fingerprint is missing"),
    ],
    ids=["garbage", "a list", "no fingerprint"],
)
def test_a_folder_with_another_manifest_is_refused_in_words(
    pruned: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Callable[[str], str],
    message: str,
) -> None:
    path = tmp_path / "smaller" / MANIFEST
    path.write_text(content(path.read_text()))
    before = contents(tmp_path / "smaller")
    assert main(pruned) == FAILED
    assert message in capsys.readouterr().err
    assert contents(tmp_path / "smaller") == before


def _without(text: str, key: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text).items() if name != key})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xff\xfe\0", "is not UTF-8"),
        (b"[" * 200_000, "it is not JSON"),
        (b"{}", "its format is None"),
    ],
    ids=["binary", "deep", "empty"],
)
def test_what_is_no_plan_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], payload: bytes, message: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(payload)
    assert main(["prune", "demo", str(path), "--out", str(tmp_path / "f")]) == FAILED
    said = capsys.readouterr().err
    assert message in said
    assert str(path) in said


# Hostile input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", [["inventory"], ["prune", "plan", "--out", "out"]], ids=["inventory", "prune"]
)
@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "64"}, {"num_hidden_layers": 10**7}, {"hidden_act": "nope"}, {"dtype": 7}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_hostile_model_is_a_sentence(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    changes: dict[str, Any],
) -> None:
    model = shutil.copytree(place / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    units = cl.enumerate_units(tiny_model(), GROUPS)
    (tmp_path / "plan").write_text(cl.Selection.from_pruned(units, [0]).to_json())
    rest = [str(tmp_path / word) if word in ("plan", "out") else word for word in verb[1:]]
    assert main([verb[0], str(model), *rest]) == FAILED
    said = capsys.readouterr().err
    assert f"cocurve {verb[0]}: the configuration of " in said
    assert "did not expect" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ' + "[" * 100_000, "line 1 of"),
        (json.dumps({"text": "w1 " * 4_000_000}), "a text of 12,000,000 characters"),
        ('{"text": "\\ud800"}', "cannot be written as UTF-8"),
    ],
    ids=["deep", "long", "surrogate"],
)
def test_a_hostile_text_is_a_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(line)
    command = build_command(place, tmp_path / "H")
    command[command.index("--calibration") + 1] = str(text)
    assert main(command) == FAILED
    assert re.match(f"cocurve build: .*{said}", capsys.readouterr().err)


def test_a_million_threads_are_refused_before_torch_ends_the_process(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = build_command(place, tmp_path)
    command[command.index("--threads") + 1] = "1000000"
    assert main(command) == FAILED
    assert "num_threads is 1,000,000; torch ends the process" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["m.shard-1-of-2", "m_x.shard-1-of-2", "m" * 250, "ä" * 120])
def test_h_of_a_model_of_any_name_is_found_again(
    place: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model, out = shutil.copytree(place / "model", tmp_path / name), tmp_path / "H"
    command = build_command(place, out)
    command[1] = str(model)
    for number in (1, 2):
        assert main([*command, "--shard", f"{number}/2"]) == DONE
    for file in out.glob("H_*"):
        if "-of-2.pkl" not in file.name:
            file.unlink()  # what the second shard has merged
    assert main(["merge", str(out)]) == DONE
    assert main(["solve", str(out), "--ratio", "0.2", "--out", str(tmp_path / "plan")]) == DONE
    assert main(command) == DONE
    assert "nothing was rebuilt" in capsys.readouterr().out


def test_the_file_of_h_stays_in_its_folder_whatever_the_model_is_called(tmp_path: Path) -> None:
    for name in ("../../elsewhere", "C:\\elsewhere", "", "/"):
        assert build_path(tmp_path, name, {}).resolve().parent == tmp_path.resolve()


def test_an_error_that_nobody_foresaw_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("first line\nsecond line")

    monkeypatch.setattr("cocurve_lab.models.loading.shapes_only", fail)
    monkeypatch.delenv("COCURVE_DEBUG", raising=False)
    assert main(["inventory", "demo"]) == FAILED
    said = capsys.readouterr().err
    assert said.startswith("cocurve inventory: LookupError: first line second line. This is an ")
    assert said.count("\n") == 1
    monkeypatch.setenv("COCURVE_DEBUG", "1")
    with pytest.raises(LookupError):
        main(["inventory", "demo"])


# Interruption -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("number", "background"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["ctrl-c", "sigterm", "sigterm in the background"],
)
def test_an_interrupted_build_says_how_to_go_on_and_does(
    place: Path,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    background: bool,
) -> None:
    if background:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fixture puts it back
    before = [signal.getsignal(either) for either in (signal.SIGINT, signal.SIGTERM)]
    command = build_command(place, tmp_path / "my H")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, number)
        assert main(command) == INTERRUPTED
    said = capsys.readouterr().err
    assert f"4 of {ROWS} sequences are kept" in said
    assert f"\n  cocurve {' '.join(command[:1])} " in said
    assert "--out '" in said  # quoted, ready to paste
    assert [signal.getsignal(either) for either in (signal.SIGINT, signal.SIGTERM)] == before
    assert main(command) == DONE
    assert np.array_equal(the_h_in(tmp_path / "my H").matrix, the_h_in(built).matrix)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_before_anything_is_done_says_so(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt_at(monkeypatch, 0, signal.SIGINT)
    assert main(build_command(place, tmp_path)) == INTERRUPTED
    assert "interrupted before anything was done; nothing is left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("ctrl_c")
def test_a_build_with_another_setting_tells_of_the_unfinished_one(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, signal.SIGINT)
        assert main(build_command(place, tmp_path)) == INTERRUPTED
    (unfinished,) = tmp_path.glob("*.ckpt")
    assert "Unfinished" not in capsys.readouterr().out
    assert main(build_command(place, tmp_path, "--top-r", "31")) == DONE
    assert f"left as it is: {unfinished.name}." in capsys.readouterr().out
    (tmp_path / "H_model_0123456789.ckpt").touch()
    assert main(build_command(place, tmp_path)) == DONE  # goes on, and need not tell
    assert "left as it is" not in capsys.readouterr().out
    assert not unfinished.exists()


@pytest.mark.parametrize("device", ["cuda:99", "hpu", "foo"])
def test_a_device_that_cannot_be_used_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    assert main(build_command(place, tmp_path, "--device", device)) == FAILED
    assert f"device '{device}' cannot be used (" in capsys.readouterr().err


def test_a_log_file_gets_lines_and_no_carriage_returns(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "SECONDS_APART", 0.0)
    assert main(build_command(place, tmp_path)) == DONE
    said = capsys.readouterr().err
    assert "\r" not in said
    assert f"{ROWS * 18} of {ROWS * 18} ablations (100%)" in said
    assert ", about " in said


TERMINATED = """
import sys, time
import torch
torch.set_num_threads(1)
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.cli import main
real = features.gram_matrix
def slow(features):
    time.sleep(0.3)
    return real(features)
features.gram_matrix = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_terminated_job_keeps_its_checkpoint_and_resumes_to_the_same_bits(
    place: Path, built: Path, tmp_path: Path
) -> None:
    command = build_command(place, tmp_path, "--checkpoint-seconds", "0")
    job = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, *command], stderr=subprocess.PIPE, text=True
    )
    eventually(lambda: list(tmp_path.glob("*.ckpt")) or job.poll() is not None, seconds=120)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode == INTERRUPTED, said
    assert "sequences are kept" in said
    assert "Traceback" not in said
    assert list(tmp_path.glob("*.ckpt"))
    assert not list(tmp_path.glob("H_*.pkl"))
    assert main(command) == DONE
    assert np.array_equal(the_h_in(tmp_path).matrix, the_h_in(built).matrix)
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.slow
def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cocurve_lab", "inventory", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=_with_path())
    assert done.returncode == DONE, done.stderr
    assert json.loads(done.stdout)["units"] == 160


def _with_path() -> dict[str, str]:
    """The package, also where it is not installed."""
    root = str(Path(cl.__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": root}


ROOT = Path(__file__).resolve().parents[2]
PAPER = {  # name: class, M, removable parameters; M as in the paper where it states one
    "Llama-3.2-3B": ("LlamaForCausalLM", 672, 2_818_572_288),
    "Llama-3.1-8B-Instruct": ("LlamaForCausalLM", 768, 6_979_321_856),
    "Llama-3.1-70B-Instruct": ("LlamaForCausalLM", 1920, 68_451_041_280),
    "Mistral-7B-v0.3": ("MistralForCausalLM", 768, 6_979_321_856),
    "Mistral-Nemo-Base-2407": ("MistralForCausalLM", 960, 10_905_190_400),
    "Mistral-Small-24B-Base-2501": ("MistralForCausalLM", 960, 22_229_811_200),
    "Falcon3-7B-Base": ("LlamaForCausalLM", 560, 6_650_068_992),
    "Falcon3-10B-Base": ("LlamaForCausalLM", 800, 9_500_098_560),
    "Yi-1.5-9B": ("LlamaForCausalLM", 960, 8_304_721_920),
    "phi-4": ("Phi3ForCausalLM", 1040, 13_631_488_000),
    "Qwen2.5-14B": ("Qwen2ForCausalLM", 1152, 13_212_401_664),
    "Qwen2.5-32B": ("Qwen2ForCausalLM", 1536, 31_206_080_512),
}


def test_every_model_of_the_paper_has_its_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inventory", "--paper"]) == DONE
    printed = capsys.readouterr().out.splitlines()
    for name, (kind, units, cost) in PAPER.items():
        row = f"| {name} | {kind} | {units:,} | {cost:,} |"
        assert [line for line in printed if line.startswith(row)], row
    assert len(printed) == 2 + len(PAPER)
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in printed)


def test_builds_of_large_models_are_told_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((demo_folder().parent / "paper_models.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values["Llama-3.1-70B-Instruct"]))
    command = ["inventory", "--config", str(file), "--build"]
    assert main([*command, "--host-memory", "100", "--disk", "2", "--json"]) == DONE
    paper, few = json.loads(capsys.readouterr().out)
    assert (paper["rows"], paper["positions"]) == (128, 64)
    assert (few["rows"], few["positions"]) == (12, "all")
    for table in (paper, few):
        builds = table["builds"]
        assert [build["gpu"].split(", ")[1] for build in builds] == [
            *("24 GB", "48 GB", "80 GB", "141 GB")
        ]
        assert all(build["streamed"] for build in builds)
        sweeps = [build["sweeps_per_row"] for build in builds]
        assert sweeps == sorted(sweeps, reverse=True)
        assert sweeps[0] < 100  # even the smallest one lets many ablations advance together
        for build in builds:
            assert build["weight_bytes"] == 2 * 70_553_706_496
            size = int(build["gpu"].split(", ")[1].removesuffix(" GB")) * 1e9
            assert build["memory_bytes"] < size - 2 * 2 * 128256 * 8192  # beside both embeddings
            read = table["rows"] * build["bytes_read_per_row"]  # more than 100 GB: every time
            assert build["hours_reading"] == pytest.approx(read / 2e9 / 3600)
    assert main([*command, "--host-memory", "150"]) == DONE
    said = capsys.readouterr().out
    assert "150 GB of host memory; files that fit there are read once" in said
    assert said.count("| 0.013 |") == 8  # 141 GB at 3 GB/s, on four GPUs in two settings
    one = ["inventory", "demo", "--build"]
    assert main(one) == DONE
    assert capsys.readouterr().out.count("| loaded | - | - |") == 8


def test_removable_parameters_follow_from_the_configuration() -> None:
    """The totals once more, by hand: attention and FFN of each layer, biases on q, k, v."""
    for name, values in json.loads((ROOT / "data" / "paper_models.json").read_text()).items():
        hidden, width = values["hidden_size"], values["intermediate_size"]
        queries, groups = values["num_attention_heads"], values["num_key_value_heads"]
        head = values.get("head_dim", hidden // queries)
        attention = 2 * hidden * head * (queries + groups)
        biases = head * (queries + 2 * groups) if values["model_type"] == "qwen2" else 0
        layer = attention + biases + 3 * hidden * width
        assert PAPER[name][1] == values["num_hidden_layers"] * (groups + 16)
        assert PAPER[name][2] == values["num_hidden_layers"] * layer
