"""The command line: a whole run in a folder, exit codes, nothing overwritten, nothing lost."""

from __future__ import annotations

import errno
import json
import os
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
from cocurve_lab.cli import DONE, FAILED, INTERRUPTED, USAGE, main, opening
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.estimator import build as build_module
from cocurve_lab.estimator.estimate import build_path
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.extensions.texts.documents import default_rows
from cocurve_lab.measuring import risk
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.solver.targets import flop_costs
from helpers.problems import interrupt_at
from helpers.release import Shape, write_release
from helpers.seals import reseal
from helpers.tiny_models import CONTEXT, GROUPS, tiny_model, word_tokenizer
from helpers.waiting import eventually

ROWS = 6
CUT = ["--length", "20", "--sequences", str(ROWS)]
CPU = ["--device", "cpu"]
Run = Callable[..., Any]


@pytest.fixture
def cocurve(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; check its exit code, and return what it wrote: `out` and `err`."""

    def run(*words: Any, code: int = DONE) -> Any:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return said

    return run


def write_model(folder: Path, model: Any = None, eos: str | None = "<end>", **how: Any) -> Path:
    """A model and its tokenizer in a folder."""
    (model or tiny_model()).save_pretrained(folder, **how)
    word_tokenizer(CONTEXT, eos=eos).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer, and two texts beside it."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "model")
    rng = np.random.default_rng(0)
    for name in ("calibration", "held_out"):
        documents = [" ".join(f"w{n}" for n in row) for row in rng.integers(90, size=(40, 15))]
        lines = (json.dumps({"text": document}) for document in documents)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def build_command(place: Path, out: Path, *more: str) -> list[str]:
    settings = ["--top-r", "32", "--ffn-groups", str(GROUPS), "--groups", "4", *CPU]
    text = ["--calibration", str(place / "calibration.jsonl"), *CUT, "--threads", "1"]
    return ["build", str(place / "model"), *text, *settings, "--out", str(out), *more]


def the_h_in(folder: Path) -> cl.Curvature:
    (path,) = (file for file in folder.glob("H_*.pkl") if "shard" not in file.name)
    return cl.Curvature.load(path)


def plan_in(path: Path) -> cl.Selection:
    return cl.Selection.from_json(path.read_text())


@pytest.fixture(scope="module")
def built(place: Path) -> Path:
    """The folder of one build."""
    assert main(build_command(place, place / "H")) == DONE
    return place / "H"


def texts(place: Path, held_out: int) -> tuple[Any, cl.CalibrationSet, cl.CalibrationSet]:
    """The model, and the rows that the commands build and measure on."""
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    cut: Any = {"seq_len": 20, "positions_per_sequence": "all"}
    file = place / "calibration.jsonl"
    rows = cl.default_calibration(
        str(place / "model"), tokenizer, ROWS, held_out, text_file=file, **cut
    )
    return model, *rows


def test_a_model_without_a_chat_template_is_not_asked_through_one(
    place: Path, cocurve: Run
) -> None:
    suite = ["evaluate", place / "model", "--suite", "demo", *CPU, "--chat"]
    assert "no chat template" in cocurve(*suite, code=FAILED).err


# A whole run ------------------------------------------------------------------------------------


def test_without_an_end_token_one_is_named_or_one_document_suffices(
    place: Path, built: Path, tmp_path: Path, cocurve: Run
) -> None:
    model = write_model(tmp_path / "place" / "model", eos=None)
    text = shutil.copy(place / "calibration.jsonl", model.parent)
    assert "--eos" in cocurve(*build_command(model.parent, tmp_path / "a"), code=FAILED).err
    cocurve(*build_command(model.parent, tmp_path / "a", "--eos", "no such"), code=FAILED)
    cocurve(*build_command(model.parent, tmp_path / "a", "--eos", "<end>"))
    cocurve(*build_command(model.parent, tmp_path / "b", "--eos", "0", "--top-r", "1000000"))
    by_text, by_id, own = (the_h_in(folder) for folder in (tmp_path / "a", tmp_path / "b", built))
    row_marks = by_id.provenance["row_fingerprints"]
    assert row_marks == by_text.provenance["row_fingerprints"]
    assert row_marks == own.provenance["row_fingerprints"]
    assert by_id.provenance["top_r"] == 97  # the whole vocabulary
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"text": " ".join(f"w{n % 90}" for n in range(200))}))
    evaluate = ["evaluate", model, "--against", model, *CUT, "--text"]
    cocurve(*evaluate, one)
    cocurve(*evaluate, text, code=FAILED)
    cocurve(*evaluate, text, "--eos", "<end>")


def test_two_shards_and_merge_are_one_build_and_a_notebook_finds_it(
    place: Path, built: Path, tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cocurve(*build_command(place, tmp_path, "--shard", "2/2"))
    cocurve("merge", tmp_path, code=FAILED)
    cocurve(*build_command(place, tmp_path, "--shard", "1/2"))
    cocurve("merge", tmp_path)
    whole, merged = the_h_in(built), the_h_in(tmp_path)
    assert np.array_equal(merged.matrix, whole.matrix)
    assert np.array_equal(merged.group_grams, whole.group_grams)
    assert merged.fingerprint == whole.fingerprint
    names = [[p.name for p in at.glob("H_*") if "shard" not in p.name] for at in (tmp_path, built)]
    assert names[0] == names[1]
    monkeypatch.setattr(features, "gram_matrix", None)  # nothing may be built from here on
    for again in (["merge", tmp_path], build_command(place, tmp_path, "--shard", "1/2")):
        assert "nothing was rebuilt" in cocurve(*again).out
    model, calibration, _ = texts(place, 2)
    units, options = cl.enumerate_units(model, GROUPS), cl.BuildOptions(groups=4)
    found = cl.load_or_estimate(tmp_path, model, units, calibration, 32, options=options)
    assert np.array_equal(found.matrix, whole.matrix)


def test_from_h_to_a_smaller_model(place: Path, built: Path, tmp_path: Path, cocurve: Run) -> None:
    plan, smaller, dense = tmp_path / "plan.json", tmp_path / "smaller", place / "model"
    text = ["--text", place / "held_out.jsonl", "--length", "20", "--sequences", "3", *CPU]
    solve = ["solve", built, "--ratio", "0.3", "--out", plan]
    prune = ["prune", dense, plan, "--out", smaller, "--verify", *text]
    cocurve(*solve)
    selection = plan_in(plan)
    assert selection.pruned == cl.solve_greedy(the_h_in(built), 0.3).pruned
    assert "computes what the masked model computes" in cocurve(*prune).out
    said = cocurve("evaluate", smaller, "--against", dense, *text, "--json")
    found = json.loads(said.out)
    assert "KL: 3 of 3 rows" in said.err
    model, tokenizer = cl.load_model(dense, device="cpu")
    file, cut = place / "held_out.jsonl", {"seq_len": 20, "positions_per_sequence": "all"}
    rows = cl.CalibrationSet.from_file(file, tokenizer, num_sequences=3, **cut)  # type: ignore[arg-type]
    assert found["kl"]["mean"] == pytest.approx(cl.pruning_risk(model, selection, rows), rel=1e-4)
    assert found["kl"]["rows"] == 3
    documents = [json.loads(line)["text"] for line in file.read_text().split("\n")]
    some = PerplexityOptions(tokens=60)  # as many as the rows have
    for name, one in (("perplexity", cl.load_pruned(smaller)), ("dense_perplexity", model)):
        expected = cl.perplexity(one, tokenizer, documents, options=some)
        assert found[name]["value"] == pytest.approx(expected.value, rel=1e-6)
        assert found[name]["tokens"] == expected.tokens <= 60
    for again in (solve, prune):
        assert "already holds this plan" in cocurve(*again).out


def test_a_pruned_folder_becomes_one_gguf_file(tmp_path: Path, cocurve: Run) -> None:
    """On the embedded model: GGUF knows its tokenizer."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    plan, smaller, path = tmp_path / "plan.json", tmp_path / "smaller", tmp_path / "a.gguf"
    units = cl.enumerate_units(cl.load_model("demo", device="cpu")[0])
    plan.write_text(cl.Selection.from_pruned(units, range(0, 160, 7)).to_json())
    cocurve("prune", "demo", plan, "--out", smaller, *CPU)
    cocurve("export", smaller, "--gguf", path, "--dtype", "f16")
    assert gguf.GGUFReader(path).tensors
    before = path.read_bytes()
    cocurve("export", smaller, "--gguf", path, code=FAILED)
    assert path.read_bytes() == before


def test_budgets_of_solve_reach_the_solver(built: Path, tmp_path: Path, cocurve: Run) -> None:
    curvature, h = the_h_in(built), next(built.glob("H_*.pkl"))
    total: Any = curvature.units.total_parameters
    wanted = int(0.8 * total)

    def solved(*options: Any) -> cl.Selection:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        cocurve("solve", h, *options, "--out", out)
        return plan_in(out)

    assert 0 < total - solved("--parameters", wanted).pruned_cost <= wanted
    assert (
        0 < total - solved("--size", f"{2 * wanted} B", "--dtype", "bfloat16").pruned_cost <= wanted
    )
    uniform = solved("--ratio", "0.2", "--lambda", "0", "--uniform")
    removed = np.bincount(uniform.units.layers[list(uniform.pruned)], minlength=3)
    assert len(set(removed.tolist())) == 1
    assert uniform.interaction_strength == 0
    gated = solved("--ratio", "0.2", "--gate").interaction_strength
    assert gated == cl.redundancy_gate(curvature).recommended
    machine = ["--tensor-parallel", "2", "--align", "2", "--depth", "block"]
    rule = solved("--ratio", "0.2", *machine).made.rule
    assert rule == "aligned to tensor_parallel=2, align=2, depth='block'"
    flops = solved("--ratio", "0.2", "--cost", "flops", "--context", "7")
    costs = flop_costs(curvature.units, 7)
    assert flops.pruned == cl.solve_greedy(curvature, cl.Target(ratio=0.2, costs=costs)).pruned
    said = cocurve("solve", h, "--parameters", wanted, "--cost", "flops", "--out", "n", code=FAILED)
    assert "--cost flops counts a share. Give --ratio" in said.err
    cocurve("solve", h, "--ratio", "1.5", "--out", tmp_path / "no", code=FAILED)
    assert not (tmp_path / "no").exists()


# Search -----------------------------------------------------------------------------------------


def search_command(place: Path, built: Path, out: Path, *more: str) -> list[str]:
    text = ["--calibration", str(place / "calibration.jsonl"), *CUT, "--rows", "4"]
    budget = ["--held-out", "3", "--evaluations", "60", *CPU, "--out", str(out)]
    return ["search", str(place / "model"), str(built), *text, *budget, *more]


def test_search_writes_the_plan_that_search_plan_finds(
    place: Path, built: Path, tmp_path: Path, cocurve: Run
) -> None:
    h, out = the_h_in(built), tmp_path / "found.json"
    model, calibration, held_out = texts(place, 3)
    command = search_command(place, built, out, "--ratio", "0.3", "--lambda", "0")
    start = cl.solve_greedy(h, 0.3, 0.0)
    said = cocurve(*command).out
    expected = cl.search_plan(
        model,
        start,
        calibration.rows(0, 4),
        held_out=held_out,
        evaluations=60,
        surrogate=h,
        progress=False,
    )
    assert plan_in(out).pruned == expected.selection.pruned
    assert f"{expected.kl:.5f}" in said
    cocurve(*command, code=FAILED)


def test_search_from_a_plan_keeps_its_guards(
    place: Path, built: Path, tmp_path: Path, cocurve: Run
) -> None:
    start = cl.solve_greedy(the_h_in(built), 0.3, guards=cl.Guards(protect_first=1))
    (tmp_path / "plan.json").write_text(start.to_json())
    more = ["--plan", str(tmp_path / "plan.json"), "--checkpoint", str(tmp_path / "measured")]
    cocurve(*search_command(place, built, tmp_path / "out.json", *more))
    found = plan_in(tmp_path / "out.json")
    assert found.guards == start.guards
    assert found.realized_ratio >= 0.3
    assert list((tmp_path / "measured").iterdir())


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_search_says_what_is_kept_and_goes_on(
    place: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    real, asked = risk._Engine.measure, []

    def measure(engine: Any, *arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == stop:
            signal.raise_signal(signal.SIGINT)
        return real(engine, *arguments)

    def command(name: str, *more: str) -> list[str]:
        return search_command(place, built, tmp_path / name, "--ratio", "0.3", *more)

    monkeypatch.setattr(risk._Engine, "measure", measure)
    stop, checkpoint = 0, ["--checkpoint", str(tmp_path / "my measured")]
    cocurve(*command("whole"))
    whole = len(asked)
    for more, kept in (([], "--checkpoint FOLDER"), (checkpoint, "To resume: cocurve search ")):
        asked.clear()
        stop = 12
        assert kept in cocurve(*command("out", *more), code=INTERRUPTED).err
        assert not (tmp_path / "out").exists()
    asked.clear()
    stop = 0
    cocurve(*command("out", *checkpoint))
    assert (tmp_path / "out").read_text() == (tmp_path / "whole").read_text()
    assert len(asked) < whole  # what was measured is not measured again


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--ratio 0.3 --rows 0", "--rows is 0"),
        ("--plan nowhere.json", "nowhere.json"),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    place: Path, built: Path, tmp_path: Path, cocurve: Run, more: str, named: str
) -> None:
    command = search_command(place, built, tmp_path / "out.json", *more.split())
    assert named in cocurve(*command, code=FAILED).err


# Streaming --------------------------------------------------------------------------------------


def test_verbs_that_only_measure_take_a_streamed_model(
    place: Path, built: Path, tmp_path: Path, cocurve: Run
) -> None:
    pytest.importorskip("accelerate")
    cocurve(*build_command(place, tmp_path / "H", "--stream"))
    assert np.array_equal(the_h_in(tmp_path / "H").matrix, the_h_in(built).matrix)
    text = ["--text", place / "held_out.jsonl", "--length", "20", "--sequences", "3"]
    model, found = place / "model", []
    for number, more in enumerate(([], ["--stream"])):
        said = cocurve("evaluate", model, "--against", model, *text, *CPU, "--json", *more).out
        cocurve(*search_command(place, built, tmp_path / f"{number}", "--ratio", "0.3", *more))
        found.append((json.loads(said)["perplexity"], (tmp_path / f"{number}").read_text()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("model", "more", "source"),
    [
        ("model", ["--stream"], "{place}/model"),
        ("model", [], None),
        ("model", ["--stream", "--ray-source", "elsewhere"], "elsewhere"),
        ("owner/name", ["--stream"], "owner/name"),
    ],
)
def test_workers_of_a_streamed_build_read_the_same_place(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run,
    model: str, more: list[str], source: str | None,
) -> None:  # fmt: skip
    from cocurve_lab.extensions.big_models import cluster

    seen: list[Any] = []

    def refuse(workers: int, *, source: str | None, **_: Any) -> None:
        seen.append(source)
        raise cl.InputError("that is enough")

    monkeypatch.setattr(cluster, "RayWorkers", refuse)
    monkeypatch.chdir(place)
    cocurve("build", model, "--out", tmp_path / "H", "--ray", "2", *more, code=FAILED)
    assert seen == [source and source.format(place=place)]


def test_a_model_that_cannot_be_streamed_is_a_sentence(
    place: Path, tmp_path: Path, cocurve: Run
) -> None:
    pytest.importorskip("accelerate")
    file = write_model(tmp_path / "model") / "model.safetensors"
    torch.save(load_file(file), tmp_path / "model" / "pytorch_model.bin")
    file.unlink()
    shutil.copy(place / "calibration.jsonl", tmp_path)
    said = cocurve(*build_command(tmp_path, tmp_path / "H", "--stream"), code=FAILED).err
    assert ".safetensors" in said
    assert not (tmp_path / "H").exists()


# Inventory --------------------------------------------------------------------------------------


def test_inventory_reads_the_configuration_alone(place: Path, tmp_path: Path, cocurve: Run) -> None:
    config = shutil.copy(place / "model" / "config.json", tmp_path)  # no weights beside it
    units, groups = cl.enumerate_units(tiny_model(), GROUPS), ["--ffn-groups", GROUPS]
    found = json.loads(cocurve("inventory", "--config", config, *groups, "--json").out)
    assert found["class"] == "LlamaForCausalLM"
    assert found["units"] == len(units)
    assert found["removable_parameters"] == units.total_cost
    assert found["parameters"] == units.total_parameters
    for layer in found["layers"]:
        for kind in ("attention", "ffn"):
            mine = (units.layers == layer["layer"]) & (units.kinds == kind)
            assert layer[kind]["units"] == mine.sum()
            assert layer[kind]["parameters"] == units.costs[mine].sum()
    said = cocurve("inventory", place / "model", *groups).out
    assert f"M = {len(units)} units" in said
    assert "0 to 2" in said  # equal layers share a line


def test_inventory_of_a_pruned_folder_counts_what_stays(
    place: Path, tmp_path: Path, cocurve: Run
) -> None:
    model, _ = cl.load_model(place / "model", device="cpu")
    units = cl.enumerate_units(model, GROUPS)
    pruned = cl.prune(model, cl.Selection.from_pruned(units, [0, 7, 8]))
    cl.save_pruned(pruned, tmp_path / "smaller")
    for weights in (tmp_path / "smaller").glob("*.safetensors"):
        weights.write_bytes(b"")  # they are not read
    command = ["inventory", tmp_path / "smaller", "--ffn-groups", GROUPS, "--json"]
    found = json.loads(cocurve(*command).out)
    assert found["removable_parameters"] == cl.enumerate_units(pruned, GROUPS).total_cost
    assert found["layers"][0]["attention"]["units"] == 1


ROOT = Path(__file__).resolve().parents[2]
PAPER = {  # name: class, M, removable parameters; M as in the paper where it states one
    "Llama-3.2-3B": ("LlamaForCausalLM", 672, 2_818_572_288),
    "Llama-3.1-8B-Instruct": ("LlamaForCausalLM", 768, 6_979_321_856),
    "Mistral-7B-v0.1": ("MistralForCausalLM", 768, 6_979_321_856),
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


def test_every_model_of_the_paper_has_its_totals(cocurve: Run) -> None:
    printed = cocurve("inventory", "--paper").out.splitlines()
    for name, (kind, units, cost) in PAPER.items():
        row = f"| {name} | {kind} | {units:,} | {cost:,} |"
        assert [line for line in printed if line.startswith(row)], row
    assert len(printed) == 2 + len(PAPER)
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in printed)


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


# The lab ------------------------------------------------------------------------------------------


def test_notebooks_are_copied_and_changed_ones_stay(
    tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "02_lambda.ipynb").write_text("mine")
    opened: list[list[str]] = []
    monkeypatch.setattr(opening.subprocess, "run", lambda order, **_: opened.append(order) or done)
    done = subprocess.CompletedProcess([], 7)
    assert f"copied to {folder}" in cocurve("lab", folder, "--copy").out
    assert (folder / "02_lambda.ipynb").read_text() == "mine"
    source = ROOT / "notebooks"
    for name in ("01_build_H.ipynb", "explore_demo.html", "README.md"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert not (folder / "cocurve_studies").exists()
    assert not opened
    assert main(["lab", str(folder)]) == 7  # JupyterLab's own exit code
    assert opened[0][:4] == [sys.executable, "-m", "jupyterlab", str(folder / "01_build_H.ipynb")]


# Bad command lines ------------------------------------------------------------------------------

BAD = [  # the command, its exit code, and what stderr must name
    ("", USAGE, "VERB"),
    ("fly", USAGE, "'fly'"),
    ("build demo", USAGE, "--out"),
    ("build demo --out H --shard 3/2", USAGE, "3/2"),
    ("build demo --out H --shard half", USAGE, "'half'"),
    ("build demo --out H --positions some", USAGE, "some"),
    ("build demo --out H --checkpoint-seconds nan", FAILED, "nan"),
    ("build demo --out H --calibration no.jsonl", FAILED, "no.jsonl"),
    ("build demo --out H --shard 1/17", FAILED, "16"),
    ("build demo --out /dev/null", FAILED, "/dev/null"),
    ("build demo --out /dev/null/H", FAILED, "/dev/null"),
    ("build no-such/folder/here --out H", FAILED, "no-such/folder/here"),
    ("build demo --out H --threads 1000000", FAILED, "1,000,000"),
    *(
        (f"build demo --out H --device {name}", FAILED, f"'{name}'")
        for name in ("cuda:99", "hpu", "foo")
    ),
    ("merge nowhere", FAILED, "nowhere"),
    ("merge ~no-such-user/x", FAILED, "~no-such-user/x"),
    ("merge .", FAILED, "."),
    ("solve H --out p", USAGE, "--ratio"),
    ("solve H --ratio 0.2 --size 1GB --out p", USAGE, "--size"),
    ("solve nowhere --ratio 0.2 --out p", FAILED, "nowhere"),
    ("solve . --ratio 0.2 --out p", FAILED, "."),
    ("solve . --size 5MB --out p", FAILED, "--dtype"),
    ("solve . --ratio 0 --dtype float16 --out p", FAILED, "--dtype is float16"),
    ("prune demo nowhere --out f", FAILED, "nowhere"),
    ("prune demo p --out f --calibration no.jsonl", FAILED, "--refit"),
    ("export f --gguf g --dtype bf16", USAGE, "'bf16'"),
    ("export f --gguf /dev/null/g", FAILED, "/dev/null"),
    ("export nowhere --gguf g", FAILED, "nowhere"),
    ("evaluate demo --text no.jsonl", FAILED, "no.jsonl"),
    ("evaluate demo --text .", FAILED, ". is a folder"),
    ("evaluate demo --suite demo --report /dev/null/r", FAILED, "/dev/null"),
    ("evaluate demo --report r", FAILED, "--report"),
    ("evaluate demo --tasks x.jsonl", FAILED, "--tasks"),
    ("evaluate demo --suite local", FAILED, "--tasks"),
    ("evaluate demo --suite local --tasks no.jsonl", FAILED, "no.jsonl"),
    ("evaluate demo --data hub", FAILED, "--data"),
    ("evaluate demo --allow-code-execution", FAILED, "--allow-code-execution"),
    ("compress demo --ratio 0.2 --out H --stream", USAGE, "--stream"),
    ("inventory --config nowhere.json", FAILED, "nowhere.json"),
]


@pytest.mark.parametrize(("command", "code", "named"), BAD, ids=lambda v: str(v).replace("/", "|"))
def test_bad_command_lines_say_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cocurve: Run,
    command: str,
    code: int,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in cocurve(*command.split(), code=code).err
    assert not list(tmp_path.iterdir())


def test_a_long_path_is_not_repeated_whole(cocurve: Run) -> None:
    said = cocurve("evaluate", "/" + "x" * 5000, code=FAILED).err
    assert "/xxx" in said
    assert len(said) < 300


VERBS = ("inventory", "build", "merge", "solve", "search", "prune", "evaluate", "recover", "export")


@pytest.mark.parametrize("verb", ["", *VERBS, "lab", "paper"])
def test_help_explains_every_verb_with_an_example(verb: str, cocurve: Run) -> None:
    said = cocurve(*verb.split(), "--help").out
    assert f"  cocurve {verb or 'build'} " in said  # an example to copy
    assert len(said.splitlines()) > 12


# Nothing is overwritten -------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_exists_is_never_overwritten(
    place: Path, built: Path, tmp_path: Path, cocurve: Run
) -> None:
    mine, folder, other = tmp_path / "mine", tmp_path / "taken", tmp_path / "other.json"
    folder.mkdir()
    for file in (mine, folder / "mine"):
        file.write_text("mine")
    units = cl.enumerate_units(tiny_model(), GROUPS)
    other.write_text(cl.Selection.from_pruned(units, [3]).to_json())
    for command, out in (
        (["solve", built, "--ratio", "0.2", "--out"], mine),
        (["evaluate", "demo", "--suite", "demo", "--report"], mine),
        (["prune", place / "model", other, "--out"], folder),
    ):
        assert str(out) in cocurve(*command, out, code=FAILED).err
    assert mine.read_text() == "mine"
    assert contents(folder) == {"mine": b"mine"}


@pytest.fixture
def pruned(place: Path, tmp_path: Path) -> list[str]:
    """The command that made a pruned folder."""
    units = cl.enumerate_units(tiny_model(), GROUPS)
    (tmp_path / "plan.json").write_text(cl.Selection.from_pruned(units, [0, 7, 8]).to_json())
    command = ["prune", str(place / "model"), str(tmp_path / "plan.json")]
    command += ["--out", str(tmp_path / "smaller"), *CPU]
    assert main(command) == DONE
    return command


def into(command: list[str], out: Path) -> list[str]:
    """The command with another --out."""
    place = command.index("--out") + 1
    return [*command[:place], str(out), *command[place + 1 :]]


def test_a_folder_of_the_same_plan_is_the_same_only_for_model_and_dtype(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    before, other = contents(tmp_path / "smaller"), tiny_model()
    other.get_input_embeddings().weight.data[0] += 1
    write_model(tmp_path / "other", other)
    assert "already holds this plan" in cocurve(*pruned).out
    cocurve("prune", tmp_path / "other", *pruned[2:], code=FAILED)
    assert "bfloat16" in cocurve(*pruned, "--dtype", "bfloat16", code=FAILED).err
    assert contents(tmp_path / "smaller") == before
    evaluate = ["evaluate", tmp_path / "smaller", "--against", tmp_path / "other", *CPU]
    evaluate += ["--text", place / "held_out.jsonl", "--length", "20", "--sequences", "3"]
    cocurve(*evaluate, code=FAILED)
    assert "KL(" in cocurve(*evaluate, "--other-weights").out


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=["full", "forbidden"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_build_that_cannot_be_written_is_a_failure_that_says_what_is_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run,
    caplog: pytest.LogCaptureFixture, number: int, checkpointed: bool,
) -> None:  # fmt: skip
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    command = build_command(place, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cl.Curvature, "save", refuse)
        if not checkpointed:
            patch.setattr(build_module, "write_atomically", refuse)
        said = cocurve(*command, code=FAILED).err
    assert not list(tmp_path.glob("H_*.pkl"))
    assert (".ckpt" in said, "nothing keeps the 6" in said) == (checkpointed, not checkpointed)
    assert ("free some space" in caplog.text) is (number == errno.ENOSPC)
    assert os.strerror(number) in caplog.text
    if checkpointed:
        monkeypatch.setattr(features, "gram_matrix", None)  # the checkpoint holds all of it
        cocurve(*command)
        assert len(list(tmp_path.glob("H_*.pkl"))) == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("mine", "cocurve build"),
        ("H_model_0.ckpt", "resume"),
        ("H_model_0.shard-1-of-2.pkl", "cocurve merge"),
    ],
)
def test_a_folder_without_h_says_how_to_get_one(
    tmp_path: Path, cocurve: Run, name: str, advice: str
) -> None:
    (tmp_path / name).touch()
    solve = ["solve", tmp_path, "--ratio", "0.2", "--out", tmp_path / "p"]
    assert advice in cocurve(*solve, code=FAILED).err


# Prune ------------------------------------------------------------------------------------------


def half(folder: Path) -> tuple[Path, Path]:
    """A model whose files are bfloat16, and a plan of it."""
    model, plan = tiny_model(dtype=torch.bfloat16), folder / "plan.json"
    units = cl.enumerate_units(model, GROUPS)
    plan.write_text(cl.Selection.from_pruned(units, [0, 7, 8]).to_json())
    return write_model(folder / "half", model, max_shard_size="20KB"), plan


def test_pruning_keeps_the_dtype_of_the_files_and_loads_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    prune = ["prune", *half(tmp_path), "--out"]
    text = ["--text", place / "held_out.jsonl", "--length", "20", *CPU]
    cocurve(*prune, tmp_path / "verified", "--verify", *text)
    monkeypatch.setattr("cocurve_lab.cli.common.load_model", None)
    cocurve(*prune, tmp_path / "smaller")
    assert contents(tmp_path / "smaller") == contents(tmp_path / "verified")
    assert json.loads((tmp_path / "smaller" / MANIFEST).read_text())["dtype"] == "bfloat16"
    cocurve(*prune, tmp_path / "wide", "--dtype", "float32")
    assert cl.load_pruned(tmp_path / "wide").dtype == torch.float32


def test_a_published_mask_or_h_makes_a_smaller_model(
    place: Path, tmp_path: Path, cocurve: Run
) -> None:
    shape = Shape("tiny", 3, 32, 8, heads=4, kv_heads=2, width=42, groups=GROUPS)
    release, plan = tmp_path / "release", tmp_path / "plan.json"
    write_release(release, shape, (20,))
    cocurve("solve", release, "--ratio", "0.2", "--out", plan)
    solved = cl.solve_greedy(cl.Curvature.from_release(release), 0.2)
    published = cl.Selection.from_release(release, 0.2)
    for source, expected in ((plan, solved), (release / "r20", published)):
        out = tmp_path / source.name.partition(".")[0]
        cocurve("prune", place / "model", source, "--out", out)
        manifest = json.loads((out / MANIFEST).read_text())
        assert manifest["selection_fingerprint"] == expected.fingerprint


def test_pickled_weights_are_loaded_to_be_pruned(tmp_path: Path, cocurve: Run) -> None:
    model, plan = half(tmp_path)
    loaded, _ = cl.load_model(model, device="cpu", dtype="bfloat16")
    for file in model.glob("*.safetensors*"):
        file.unlink()
    torch.save(loaded.state_dict(), model / "pytorch_model.bin")
    cocurve("prune", model, plan, "--out", tmp_path / "smaller", *CPU, "--dtype", "bfloat16")
    assert cl.load_pruned(tmp_path / "smaller").num_parameters() < loaded.num_parameters()


@pytest.mark.parametrize("size", [None, -9], ids=["missing", "truncated"])
def test_a_damaged_model_is_a_sentence_and_nothing_is_written(
    tmp_path: Path, cocurve: Run, size: int | None
) -> None:
    model, plan = half(tmp_path)
    shard = sorted(model.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()[:size]
    shard.unlink()
    if size is not None:
        shard.write_bytes(content)
    said = cocurve("prune", model, plan, "--out", tmp_path / "smaller", code=FAILED).err
    assert "model-00002-of-" in said
    assert {path.name for path in tmp_path.iterdir()} == {"half", "plan.json"}


def test_a_folder_whose_weights_changed_is_not_the_same(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    verify = [*pruned, "--verify", "--text", place / "held_out.jsonl", "--length", "20"]
    assert "already holds this plan" in cocurve(*verify).out
    weights = tmp_path / "smaller" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in sorted(tensors) if "norm" in name)
    save_file(tensors | {name: 3 * tensors[name]}, weights, {"format": "pt"})
    cocurve(*verify, code=FAILED)


@pytest.mark.filterwarnings("always:the files of")
def test_ignored_weights_are_named_once_by_a_verb(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    """`prune --verify` opens the model on disk, and then loads it."""
    shutil.copytree(place / "model", tmp_path / "old")
    weights, name = tmp_path / "old" / "model.safetensors", "layers.0.rotary_emb.inv_freq"
    save_file(load_file(weights) | {name: torch.ones(2)}, weights, {"format": "pt"})
    prune = into(["prune", tmp_path / "old", *pruned[2:]], tmp_path / "again")
    text = ["--verify", "--text", place / "held_out.jsonl", "--length", "20"]
    assert cocurve(*prune, *text).err.count(name) == 1


def test_prune_refits_on_text(place: Path, pruned: list[str], tmp_path: Path, cocurve: Run) -> None:
    text = str(place / "held_out.jsonl")
    refit = ["--refit", "--calibration", text, "--calibration-sequences", "3", "--length", "20"]
    cocurve(*pruned, *refit, code=FAILED)  # this folder holds the plan without a refit
    nowhere = ["--refit", "--calibration", "nowhere.jsonl"]
    assert "nowhere.jsonl" in cocurve(*pruned, *nowhere, code=FAILED).err
    own = into(pruned, tmp_path / "refitted")
    assert "refitted on 3 rows" in cocurve(*own, *refit, "--verify", "--text", text).out
    loaded: Any = cl.load_pruned(tmp_path / "refitted")
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    rows = default_rows("other", tokenizer, 3, text, seq_len=20, positions_per_sequence="all")
    plan, quiet = plan_in(tmp_path / "plan.json"), RepairOptions(progress=False)
    expected = cl.repair(model, plan, rows, options=quiet).state_dict()
    assert loaded.cocurve_manifest["repair"]["sequences"] == 3
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert "already holds this plan" in cocurve(*own, *refit).out
    cocurve(*own, code=FAILED)


def test_prune_leaves_a_model_on_disk_to_verify_or_refit_it(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    pytest.importorskip("accelerate")
    text = ["--text", str(place / "held_out.jsonl"), "--length", "20"]
    refit = ["--refit", "--calibration", text[1], "--calibration-sequences", "3"]
    for wrong in ([], [*refit, "--verify"]):
        cocurve(*into(pruned, tmp_path / "wrong"), *text, "--stream", *wrong, code=FAILED)
    assert not (tmp_path / "wrong").exists()
    for verb in (["--verify"], refit):
        folders = [tmp_path / f"{how}{verb[0]}" for how in ("loaded", "streamed")]
        for folder, more in zip(folders, ([], ["--stream"]), strict=True):
            cocurve(*into(pruned, folder), *text, *verb, *more)
        assert contents(folders[0]) == contents(folders[1])
        again = cocurve(*into(pruned, folders[1]), *text, *verb, "--stream").out
        assert "already holds this plan" in again
    evaluate = ["evaluate", folders[1], "--against", place / "model", *text, "--sequences", "3"]
    found = [
        json.loads(cocurve(*evaluate, "--json", *CPU, *more).out) for more in ([], ["--stream"])
    ]
    assert found[0] == found[1]
    assert found[0]["kl"]["mean"] > 0


def test_recover_trains_and_goes_on(
    tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from transformers import Trainer

    model, _ = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [u.name for u in units if u.name.startswith("L2.ffn")])
    cl.save_pruned(cl.prune(model, plan), tmp_path / "smaller")
    out, state = tmp_path / "trained", tmp_path / "trained.state"
    command = ["recover", tmp_path / "smaller", "--against", "demo", "--out", out, *CPU]
    command += ["--sequences", "16", "--length", "64", "--held-out", "3", "--epochs", "2"]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", stop)
        said = cocurve(*command, code=INTERRUPTED).err
    assert str(state) in said
    assert "cocurve recover" in said
    assert not out.exists()
    assert "trained on 16 rows" in cocurve(*command).out
    assert not state.exists()
    trained: Any = cl.load_pruned(out)
    assert trained.cocurve_manifest["recovery"]["sequences"] == 16
    cocurve(*command, code=FAILED)


# Tokenizers and home folders --------------------------------------------------------------------

REMOTE = json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer_config.json", REMOTE), ("tokenizer.json", "{broken"), ("tokenizer.json", "{}")],
    ids=["code", "broken", "empty"],
)
def test_a_tokenizer_that_cannot_be_read_is_refused_without_a_question(
    place: Path, pruned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run,
    name: str, content: str,
) -> None:  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    smaller = tmp_path / "smaller"
    (smaller / "own.py").write_text("raise SystemExit('it was run')")
    (smaller / name).write_text(content)
    reseal(smaller)
    for command in (
        ["evaluate", smaller, "--text", place / "held_out.jsonl", *CPU],
        ["export", smaller, "--gguf", tmp_path / "g"],
    ):
        assert f"tokenizer of '{smaller}'" in cocurve(*command, code=FAILED).err
        assert not asked


def test_a_folder_without_a_tokenizer_asks_for_one(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    evaluate = ["evaluate", tmp_path / "smaller", "--text", place / "held_out.jsonl", *CPU]
    export = ["export", tmp_path / "smaller", "--gguf", tmp_path / "ids.gguf"]
    found = [
        json.loads(cocurve(*evaluate, "--json", *more).out)["perplexity"]
        for more in ([], ["--tokenizer", "demo"])
    ]
    assert found[0] == found[1]  # a folder with a tokenizer keeps to it
    for file in (tmp_path / "smaller").glob("tokenizer*"):
        file.unlink()
    assert "--tokenizer" in cocurve(*evaluate, code=FAILED).err
    cocurve(*evaluate, "--tokenizer", place / "model")
    assert "--no-tokenizer" in cocurve(*export, code=FAILED).err
    cocurve(*export, "--tokenizer", place / "model", code=FAILED)  # one of words, not of BPE
    cocurve(*export, "--no-tokenizer")


def test_the_home_folder_is_found_in_every_option(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    """The shell expands ~/H, but not --out=~/H."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(built)
    shutil.copytree(built, tmp_path / "H")
    cocurve("solve", "~/H", "--ratio", "0.3", "--out=~/plans/plan.json")
    pruned = cl.prune(tiny_model(), plan_in(tmp_path / "plans" / "plan.json"))
    cl.save_pruned(pruned, "~/smaller")
    assert cl.load_pruned("~/smaller").num_parameters() == pruned.num_parameters()
    assert (tmp_path / "smaller").is_dir()
    assert not (built / "~").exists()


# Hostile input ----------------------------------------------------------------------------------


def without_fingerprint(text: str) -> str:
    return text.replace('"dense_fingerprint"', '"other"')


@pytest.mark.parametrize(
    "spoil",
    [lambda text: "garbage", lambda text: "[]", without_fingerprint],
    ids=["garbage", "a list", "no fingerprint"],
)
def test_a_folder_with_another_manifest_is_refused(
    pruned: list[str], tmp_path: Path, cocurve: Run, spoil: Callable[[str], str]
) -> None:
    path = tmp_path / "smaller" / MANIFEST
    path.write_text(spoil(path.read_text()))
    before = contents(tmp_path / "smaller")
    assert "did not expect" not in cocurve(*pruned, code=FAILED).err
    assert contents(tmp_path / "smaller") == before


@pytest.mark.parametrize("payload", [b"\xff\xfe\0", b"[" * 200_000, b"{}"], ids=lambda p: p[:2])
def test_what_is_no_plan_is_refused_by_name(tmp_path: Path, cocurve: Run, payload: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(payload)
    said = cocurve("prune", "demo", path, "--out", tmp_path / "f", code=FAILED).err
    assert str(path) in said
    assert "did not expect" not in said


@pytest.mark.parametrize("verb", ["inventory", "prune"])
@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "64"}, {"num_hidden_layers": 10**7}, {"hidden_act": "nope"}, {"dtype": 7}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_hostile_model_is_a_sentence(
    place: Path, tmp_path: Path, cocurve: Run, verb: str, changes: dict[str, Any]
) -> None:
    model = shutil.copytree(place / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    units, plan = cl.enumerate_units(tiny_model(), GROUPS), tmp_path / "plan"
    plan.write_text(cl.Selection.from_pruned(units, [0]).to_json())
    rest = [plan, "--out", tmp_path / "out"] if verb == "prune" else []
    assert f"{verb}: the configuration of " in cocurve(verb, model, *rest, code=FAILED).err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"text": ' + "[" * 100_000, "line 1 of"),
        (json.dumps({"text": "w1 " * 4_000_000}), "12,000,000"),
        ('{"text": "\\ud800"}', "UTF-8"),
    ],
    ids=["deep", "long", "surrogate"],
)
def test_a_hostile_text_is_a_sentence(
    place: Path, tmp_path: Path, cocurve: Run, line: str, named: str
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(line)
    command = build_command(place, tmp_path / "H", "--calibration", str(text))
    assert named in cocurve(*command, code=FAILED).err


@pytest.mark.parametrize("name", ["m.shard-1-of-2", "m_x.shard-1-of-2", "m" * 250, "ä" * 120])
def test_h_of_a_model_of_any_name_is_found_again(
    place: Path, tmp_path: Path, cocurve: Run, name: str
) -> None:
    model, out = shutil.copytree(place / "model", tmp_path / name), tmp_path / "H"
    command = build_command(place, out)
    command[1] = str(model)
    for number in (1, 2):
        cocurve(*command, "--shard", f"{number}/2")
    for file in out.glob("H_*"):
        if "-of-2.pkl" not in file.name:
            file.unlink()  # what the second shard has merged
    cocurve("merge", out)
    cocurve("solve", out, "--ratio", "0.2", "--out", tmp_path / "plan")
    assert "nothing was rebuilt" in cocurve(*command).out


def test_the_file_of_h_stays_in_its_folder_whatever_the_model_is_called(tmp_path: Path) -> None:
    for name in ("../../elsewhere", "C:\\elsewhere", "", "/"):
        assert build_path(tmp_path, name, {}).resolve().parent == tmp_path.resolve()


def test_an_error_that_nobody_foresaw_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("first line\nsecond line")

    monkeypatch.setattr("cocurve_lab.models.loading.shapes_only", fail)
    monkeypatch.delenv("COCURVE_DEBUG", raising=False)
    said = cocurve("inventory", "demo", code=FAILED).err
    assert said.startswith("cocurve inventory: LookupError: first line second line.")
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
    place: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run,
    number: signal.Signals, background: bool,
) -> None:  # fmt: skip
    if background:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fixture puts it back
    before = [signal.getsignal(either) for either in (signal.SIGINT, signal.SIGTERM)]
    command = build_command(place, tmp_path / "my H")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, number)
        said = cocurve(*command, code=INTERRUPTED).err
    assert f"4 of {ROWS} sequences are kept" in said
    assert said[said.index("interrupted") :].count("\n") == 1
    assert "To resume: cocurve build " in said
    assert "--out '" in said  # quoted, ready to paste
    assert [signal.getsignal(either) for either in (signal.SIGINT, signal.SIGTERM)] == before
    cocurve(*command)
    assert np.array_equal(the_h_in(tmp_path / "my H").matrix, the_h_in(built).matrix)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_before_anything_is_done_leaves_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    interrupt_at(monkeypatch, 0, signal.SIGINT)
    said = cocurve(*build_command(place, tmp_path), code=INTERRUPTED).err
    assert "nothing is left" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("ctrl_c")
def test_a_build_with_another_setting_leaves_the_unfinished_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, signal.SIGINT)
        cocurve(*build_command(place, tmp_path), code=INTERRUPTED)
    (unfinished,) = tmp_path.glob("*.ckpt")
    cocurve(*build_command(place, tmp_path, "--top-r", "31"))
    assert unfinished.exists()
    cocurve(*build_command(place, tmp_path))  # goes on
    assert not unfinished.exists()


def test_a_log_file_gets_lines_and_no_carriage_returns(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    monkeypatch.setattr(progress, "SECONDS_APART", 0.0)
    said = cocurve(*build_command(place, tmp_path)).err
    assert "\r" not in said
    assert f"{ROWS * 18} of {ROWS * 18} ablations (100%)" in said
    assert " so far, " in said


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
    place: Path, built: Path, tmp_path: Path, cocurve: Run
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
    cocurve(*command)
    assert np.array_equal(the_h_in(tmp_path).matrix, the_h_in(built).matrix)
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.slow
def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cocurve_lab", "inventory", "demo", "--json"]
    package = {"PYTHONPATH": str(ROOT)}  # also where it is not installed
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | package
    )
    assert done.returncode == DONE, done.stderr
    assert json.loads(done.stdout)["units"] == 160
