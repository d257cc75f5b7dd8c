"""The command line: a whole run in a folder, exit codes, nothing overwritten, nothing lost."""

from __future__ import annotations

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
from safetensors.torch import load_file

import cocurve_lab as cl
from cocurve_lab.cli import DONE, FAILED, INTERRUPTED, USAGE, VERBS, demo, files, main
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.extensions.texts.documents import default_rows
from cocurve_lab.models.identity import demo_folder
from cocurve_lab.solver.targets import flop_costs
from data.make import measure
from helpers.problems import interrupt_at
from helpers.tiny_models import GROUPS, bytes_in, tiny_model, write_model
from helpers.verbs import write_text

ROOT = Path(__file__).resolve().parents[2]
ROWS = 6
CUT = ["--length", "20", "--sequences", str(ROWS)]
CPU = ["--device", "cpu"]
Run = Callable[..., Any]


@pytest.fixture
def cocurve(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; check its exit code, and return what it wrote: `out` and `err`."""

    def run(*words: Any, code: int = DONE) -> Any:
        capsys.readouterr()
        found = main([str(word) for word in words])
        said = capsys.readouterr()
        assert found == code, said.err
        assert "Traceback" not in said.err
        return said

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer, and two texts beside it."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "model")
    write_text(folder / "calibration.jsonl", seed=0)
    write_text(folder / "held_out.jsonl", seed=1)
    return folder


def build_command(place: Path, out: Path, *more: str) -> list[str]:
    settings = ["--top-r", "32", "--ffn-groups", str(GROUPS), "--groups", "4", *CPU]
    text = ["--text", str(place / "calibration.jsonl"), *CUT, "--threads", "1"]
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


@pytest.fixture(scope="module")
def three_units() -> str:
    """A plan of the tiny model, as JSON."""
    return cl.Selection.from_pruned(cl.enumerate_units(tiny_model(), GROUPS), [0, 7, 8]).to_json()


@pytest.fixture
def pruned(place: Path, tmp_path: Path, three_units: str) -> list[str]:
    """The command that made a pruned folder, its --out last."""
    (tmp_path / "plan.json").write_text(three_units)
    command = ["prune", str(place / "model"), str(tmp_path / "plan.json"), *CPU]
    command += ["--out", str(tmp_path / "smaller")]
    assert main(command) == DONE
    return command


# Command lines ------------------------------------------------------------------------------------


def test_help_is_quick_and_names_every_verb() -> None:
    heavy = {"torch", "transformers", "pandas", "networkx"}
    program = (
        "import sys; from cocurve_lab.cli import main; code = main(['--help'])\n"
        f"sys.exit(code or ' '.join({heavy} & set(sys.modules)) or 0)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == DONE, done.stderr
    assert all(f"\n  {verb} " in done.stdout for verb in [*VERBS, "paper"])


BAD = [  # the command, its exit code, and what stderr must name
    ("", USAGE, "VERB"),
    ("fly", USAGE, "'fly'"),
    ("build demo", USAGE, "--out"),
    ("build demo --out H --shard 3/2", USAGE, "3/2"),
    ("build demo --out H --positions some", USAGE, "some"),
    ("build demo --out H --sequences 0", USAGE, "0"),
    ("build demo --out H --checkpoint-seconds nan", FAILED, "nan"),
    ("build demo --out H --text no.jsonl", FAILED, "no.jsonl"),
    ("build demo --out H --text .", FAILED, "."),
    ("build demo --out H --shard 1/17", FAILED, "16"),
    ("build demo --out /dev/null/H", FAILED, "/dev/null"),
    ("build no-such/folder/here --out H", FAILED, "no-such/folder/here"),
    ("build demo --out H --device cuda:99", FAILED, "'cuda:99'"),
    ("merge nowhere", FAILED, "nowhere"),
    ("merge .", FAILED, "."),
    ("solve H --out p", USAGE, "--ratio"),
    ("solve H --ratio 0.2 --size 1GB --out p", USAGE, "--size"),
    ("solve H --ratio 0.2 --out p --layer-cap 2", USAGE, "2"),
    ("solve nowhere --ratio 0.2 --out p", FAILED, "nowhere"),
    ("solve . --ratio 0.2 --out p", FAILED, "cocurve merge"),
    ("prune demo nowhere --out f", FAILED, "nowhere"),
    ("prune demo . --out f --stream", FAILED, "--stream"),
    ("export f --gguf g --dtype bf16", USAGE, "'bf16'"),
    ("export nowhere --gguf g", FAILED, "nowhere"),
    ("evaluate demo --suite demo --report /dev/null/r", FAILED, "/dev/null"),
    ("evaluate demo --report r", FAILED, "--suite"),
    ("evaluate demo --tasks x.jsonl", FAILED, "--tasks"),
    ("evaluate demo --suite local --tasks no.jsonl", FAILED, "no.jsonl"),
    ("evaluate demo --suite demo --chat --no-chat", USAGE, "--no-chat"),
    ("compress demo --ratio 0.2 --out H --stream", USAGE, "--stream"),
    ("inventory", FAILED, "MODEL"),
    ("inventory --config nowhere.json", FAILED, "nowhere.json"),
]


@pytest.mark.parametrize(("command", "code", "named"), BAD, ids=lambda v: str(v).replace("/", "|"))
def test_bad_command_lines_say_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run,
    command: str, code: int, named: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert named in cocurve(*command.split(), code=code).err
    assert not list(tmp_path.iterdir())


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


# H ------------------------------------------------------------------------------------------------


def test_two_shards_and_merge_are_one_build_and_a_notebook_finds_it(
    place: Path, built: Path, tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, shard in (("2", "2/2"), ("1", "1/2")):
        cocurve(*build_command(place, tmp_path / name, "--shard", shard))
    cocurve("merge", tmp_path / "1", code=FAILED)
    out = shutil.copytree(tmp_path / "2", tmp_path / "H")
    shutil.copytree(tmp_path / "1", out, dirs_exist_ok=True)
    cocurve("merge", out)
    whole, merged = the_h_in(built), the_h_in(out)
    assert np.array_equal(merged.group_grams, whole.group_grams)
    assert merged.fingerprint == whole.fingerprint
    monkeypatch.setattr(features, "gram_matrix", None)  # nothing may be built from here on
    before = bytes_in(out)
    for again in (["merge", out], build_command(place, out)):
        cocurve(*again)
        assert bytes_in(out) == before
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    rows = default_rows("", tokenizer, ROWS, place / "calibration.jsonl", seq_len=20)
    units, options = cl.enumerate_units(model, GROUPS), cl.BuildOptions(groups=4)
    found = cl.load_or_estimate(out, model, units, rows, 32, options=options)
    assert np.array_equal(found.matrix, whole.matrix)


@pytest.mark.parametrize("name", ["m.shard-1-of-2", "ä" * 120])
def test_h_of_a_model_of_any_name_is_found_again(
    place: Path, built: Path, tmp_path: Path, cocurve: Run, name: str
) -> None:
    model = shutil.copytree(place / "model", tmp_path / name)
    command = build_command(place, tmp_path / "H")
    cocurve(command[0], model, *command[2:])
    cocurve("solve", tmp_path / "H", "--ratio", "0.2", "--out", tmp_path / "plan")
    cocurve("solve", built, "--ratio", "0.2", "--out", tmp_path / "same")
    assert plan_in(tmp_path / "plan").pruned == plan_in(tmp_path / "same").pruned


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_says_how_to_go_on_and_does(
    place: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run,
    number: signal.Signals,
) -> None:  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    command = build_command(place, tmp_path / "my H")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, number)
        said = cocurve(*command, code=INTERRUPTED).err
    assert "cocurve build " in said
    assert signal.getsignal(signal.SIGTERM) == before
    cocurve(*command)
    assert np.array_equal(the_h_in(tmp_path / "my H").matrix, the_h_in(built).matrix)


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
    seen: list[Any] = []

    def refuse(workers: int, *, source: str | None, **_: Any) -> None:
        seen.append(source)
        raise cl.InputError("that is enough")

    monkeypatch.setattr("cocurve_lab.extensions.big_models.cluster.RayWorkers", refuse)
    monkeypatch.chdir(place)
    cocurve("build", model, "--out", tmp_path / "H", "--ray", "2", *more, code=FAILED)
    assert seen == [source and source.format(place=place)]


# Plans --------------------------------------------------------------------------------------------


def test_budgets_of_solve_reach_the_solver(built: Path, tmp_path: Path, cocurve: Run) -> None:
    curvature, h = the_h_in(built), next(built.glob("H_*.pkl"))
    total: Any = curvature.units.total_parameters
    wanted = int(0.8 * total)

    def solved(*options: Any) -> cl.Selection:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        for _ in range(2):
            cocurve("solve", h, *options, "--out", out)
        return plan_in(out)

    in_bytes = solved("--size", f"{2 * wanted} B", "--dtype", "bfloat16")
    for plan in (solved("--parameters", wanted), in_bytes):
        assert 0 < total - plan.pruned_cost <= wanted
    uniform = solved("--ratio", "0.2", "--lambda", "0", "--uniform")
    removed = np.bincount(uniform.units.layers[list(uniform.pruned)], minlength=3)
    assert len(set(removed.tolist())) == 1
    assert uniform.interaction_strength == 0
    gated = solved("--ratio", "0.2", "--gate").interaction_strength
    assert gated == cl.redundancy_gate(curvature).recommended
    machine = ["--tensor-parallel", "2", "--align", "2", "--depth", "block"]
    rule = solved("--ratio", "0.2", *machine).made.rule
    assert rule == "aligned to tensor_parallel=2, align=2, depth='block'"
    assert solved("--ratio", "0.2", "--protect-first", "1").guards == cl.Guards(protect_first=1)
    flops = solved("--ratio", "0.2", "--cost", "flops", "--context", "7")
    costs = flop_costs(curvature.units, 7)
    assert flops.pruned == cl.solve_greedy(curvature, cl.Target(ratio=0.2, costs=costs)).pruned
    cocurve("solve", h, "--parameters", wanted, "--cost", "flops", "--out", "n", code=FAILED)


@pytest.mark.usefixtures("ctrl_c")
def test_search_finds_the_plan_of_search_plan_also_after_an_interrupt(
    place: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    h, out = the_h_in(built), tmp_path / "found.json"
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    rows, held_out = cl.default_calibration(
        "", tokenizer, ROWS, 3, text_file=place / "calibration.jsonl", seq_len=20
    )
    start = cl.solve_greedy(h, 0.3, guards=cl.Guards(protect_first=1))
    expected = cl.search_plan(
        model, start, rows.rows(0, 4), held_out=held_out, evaluations=60, surrogate=h,
        progress=False,
    )  # fmt: skip
    (tmp_path / "plan.json").write_text(start.to_json())
    command = ["search", place / "model", built, "--text", place / "calibration.jsonl", *CUT]
    command += ["--rows", "4", "--held-out", "3", "--evaluations", "60", *CPU, "--out", out]
    command += ["--plan", tmp_path / "plan.json", "--checkpoint", tmp_path / "measured"]
    real, asked = cl.Selection.from_pruned, iter(range(10**6))

    def stopped(*arguments: Any, **more: Any) -> Any:
        if next(asked) == 5:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(cl.Selection, "from_pruned", stopped)
        assert "cocurve search " in cocurve(*command, code=INTERRUPTED).err
    assert not out.exists()
    cocurve(*command)
    assert plan_in(out).pruned == expected.selection.pruned
    assert plan_in(out).guards == start.guards
    assert list((tmp_path / "measured").iterdir())
    cocurve(*command, code=FAILED)  # not overwritten
    other = [*command[:-4], "--ratio", "0.3", "--lambda", "0", "--out", tmp_path / "other.json"]
    assert cocurve(*other).out


# A smaller model ----------------------------------------------------------------------------------


def test_from_h_to_a_smaller_model(place: Path, built: Path, tmp_path: Path, cocurve: Run) -> None:
    plan, smaller, dense = tmp_path / "plan.json", tmp_path / "smaller", place / "model"
    file = place / "held_out.jsonl"
    text = ["--text", file, "--length", "20", "--sequences", "3", *CPU]
    cocurve("solve", built, "--ratio", "0.3", "--out", plan)
    selection = plan_in(plan)
    assert selection.pruned == cl.solve_greedy(the_h_in(built), 0.3).pruned
    cocurve("prune", dense, plan, "--out", smaller, "--verify", *text)
    found = json.loads(cocurve("evaluate", smaller, "--against", dense, *text, "--json").out)
    model, tokenizer = cl.load_model(dense, device="cpu")
    cut: Any = {"num_sequences": 3, "seq_len": 20, "positions_per_sequence": "all"}
    rows = cl.CalibrationSet.from_file(file, tokenizer, **cut)
    assert found["kl"]["mean"] == pytest.approx(cl.pruning_risk(model, selection, rows), rel=1e-4)
    documents = [json.loads(line)["text"] for line in file.read_text().split("\n")]
    some = PerplexityOptions(tokens=60)  # as many as the rows have
    for name, one in (("perplexity", cl.load_pruned(smaller)), ("dense_perplexity", model)):
        expected = cl.perplexity(one, tokenizer, documents, options=some)
        assert found[name]["value"] == pytest.approx(expected.value, rel=1e-6)
    streamed = cocurve("evaluate", smaller, "--against", dense, *text, "--json", "--stream").out
    assert json.loads(streamed) == found
    inventory = ["inventory", smaller, "--ffn-groups", GROUPS]
    counted = json.loads(cocurve(*inventory, "--json").out)
    left = cl.enumerate_units(cl.load_pruned(smaller), GROUPS)
    assert counted["removable_parameters"] == left.total_cost


def test_nothing_is_overwritten_and_other_weights_are_told(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    before, other = bytes_in(tmp_path / "smaller"), tiny_model()
    other.get_input_embeddings().weight.data[0] += 1
    write_model(tmp_path / "other", other)
    cocurve(*pruned, code=FAILED)
    assert bytes_in(tmp_path / "smaller") == before
    text = ["--text", place / "held_out.jsonl", "--length", "20", "--sequences", "3"]
    evaluate = ["evaluate", tmp_path / "smaller", "--against", tmp_path / "other", *CPU, *text]
    cocurve(*evaluate, code=FAILED)
    cocurve(*evaluate, "--other-weights")


def test_pruning_keeps_the_dtype_of_the_files_and_loads_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run, three_units: str
) -> None:
    model = write_model(tmp_path / "half", tiny_model(dtype=torch.bfloat16), max_shard_size="20KB")
    (tmp_path / "plan.json").write_text(three_units)
    prune = ["prune", model, tmp_path / "plan.json", "--out"]
    text = ["--text", place / "held_out.jsonl", "--length", "20", *CPU]
    cocurve(*prune, tmp_path / "verified", "--verify", *text)
    with monkeypatch.context() as patch:
        patch.setattr("cocurve_lab.cli.common.load_model", None)
        cocurve(*prune, tmp_path / "smaller")
    assert bytes_in(tmp_path / "smaller") == bytes_in(tmp_path / "verified")
    assert cl.load_pruned(tmp_path / "smaller").config.dtype == torch.bfloat16
    file = write_model(tmp_path / "old") / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()  # such a model is loaded
    cocurve("prune", tmp_path / "old", tmp_path / "plan.json", "--out", tmp_path / "new", *CPU)
    assert cl.load_pruned(tmp_path / "new").config.dtype == torch.float32


def test_refits_are_those_of_repair_and_streaming_changes_nothing(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    text = ["--text", str(place / "held_out.jsonl"), "--length", "20", "--sequences", "3"]
    for wrong in ([], ["--refit", "--verify"]):
        cocurve(*pruned[:-1], tmp_path / "wrong", *text, "--stream", *wrong, code=FAILED)
    assert not (tmp_path / "wrong").exists()
    for verb in ("--verify", "--refit"):
        folders = [tmp_path / f"{how}{verb}" for how in ("loaded", "streamed")]
        for folder, more in zip(folders, ([], ["--stream"]), strict=True):
            cocurve(*pruned[:-1], folder, *text, verb, *more)
        assert bytes_in(folders[0]) == bytes_in(folders[1])
    model, tokenizer = cl.load_model(place / "model", device="cpu")
    rows = default_rows("", tokenizer, 3, place / "held_out.jsonl", seq_len=20)
    plan, quiet = plan_in(tmp_path / "plan.json"), RepairOptions(progress=False)
    expected = cl.repair(model, plan, rows, options=quiet).state_dict()
    weights = cl.load_pruned(folders[0]).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.filterwarnings("ignore:Text is split by llama.cpp")
def test_recover_trains_and_goes_on_and_export_writes_gguf(
    tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from gguf import GGUFReader
    from transformers import Trainer

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model, _ = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [u.name for u in units if u.name.startswith("L2.ffn")])
    (tmp_path / "plan").write_text(plan.to_json())
    cocurve("prune", "demo", tmp_path / "plan", "--out", tmp_path / "smaller")
    out, state = tmp_path / "trained", tmp_path / "trained.state"
    command = ["recover", tmp_path / "smaller", "--against", "demo", "--out", out, *CPU]
    command += ["--sequences", "16", "--length", "64", "--held-out", "3", "--epochs", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", stop)
        assert "cocurve recover" in cocurve(*command, code=INTERRUPTED).err
    assert state.exists()
    assert not out.exists()
    cocurve(*command)
    assert not state.exists()
    trained: Any = cl.load_pruned(out)
    assert trained.cocurve_manifest["recovery"]["sequences"] == 16
    cocurve(*command, code=FAILED)
    cocurve("export", out, "--gguf", tmp_path / "a.gguf")
    assert GGUFReader(tmp_path / "a.gguf").tensors
    before = (tmp_path / "a.gguf").read_bytes()
    cocurve("export", out, "--gguf", tmp_path / "a.gguf", code=FAILED)
    assert (tmp_path / "a.gguf").read_bytes() == before


def test_a_folder_without_a_tokenizer_asks_for_one(
    place: Path, pruned: list[str], tmp_path: Path, cocurve: Run
) -> None:
    evaluate = ["evaluate", tmp_path / "smaller", "--text", place / "held_out.jsonl", *CPU]
    export = ["export", tmp_path / "smaller", "--gguf", tmp_path / "ids.gguf"]
    own = cocurve(*evaluate, "--json", "--tokenizer", "demo").out
    assert own == cocurve(*evaluate, "--json").out  # a folder with a tokenizer keeps to it
    for file in (tmp_path / "smaller").glob("tokenizer*"):
        file.unlink()
    cocurve(*evaluate, code=FAILED)
    cocurve(*evaluate, "--tokenizer", place / "model")
    cocurve(*export, code=FAILED)
    cocurve(*export, "--tokenizer", place / "model", code=FAILED)  # one of words, not of BPE
    cocurve(*export, "--no-tokenizer")


def test_the_home_folder_is_found_in_every_option(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cocurve: Run
) -> None:
    """The shell expands ~/H, but not --out=~/H."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(built, tmp_path / "H")
    cocurve("solve", "~/H", "--ratio", "0.3", "--out=~/plans/plan.json")
    assert plan_in(tmp_path / "plans" / "plan.json").pruned


# What a model is, and the lab ---------------------------------------------------------------------

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
    """As printed, and as the README of the data shows them."""
    printed = cocurve("inventory", "--paper").out.splitlines()
    assert len(printed) == 2 + len(PAPER)
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in printed)
    for name, (kind, units, cost) in PAPER.items():
        row = f"| {name} | {kind} | {units:,} | {cost:,} |"
        assert [line for line in printed if line.startswith(row)], row


def test_inventory_reads_the_configuration_alone(place: Path, tmp_path: Path, cocurve: Run) -> None:
    config = shutil.copy(place / "model" / "config.json", tmp_path)  # no weights beside it
    units = cl.enumerate_units(tiny_model(), GROUPS)
    found = json.loads(
        cocurve("inventory", "--config", config, "--ffn-groups", GROUPS, "--json").out
    )
    assert found["class"] == "LlamaForCausalLM"
    assert found["units"] == len(units)
    assert found["parameters"] == units.total_parameters
    for layer in found["layers"]:
        for kind in ("attention", "ffn"):
            mine = (units.layers == layer["layer"]) & (units.kinds == kind)
            assert layer[kind]["units"] == mine.sum()
            assert layer[kind]["parameters"] == units.costs[mine].sum()
    assert str(len(units)) in cocurve("inventory", place / "model", "--ffn-groups", GROUPS).out


def test_notebooks_are_copied_and_changed_ones_stay(
    tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "02_lambda.ipynb").write_text("mine")
    done, opened = subprocess.CompletedProcess([], 7), []
    monkeypatch.setattr(files.subprocess, "run", lambda order, **_: opened.append(order) or done)
    cocurve("lab", tmp_path, "--copy")
    assert (tmp_path / "02_lambda.ipynb").read_text() == "mine"
    for name in ("01_build_H.ipynb", "explore_demo.html", "README.md"):
        assert (tmp_path / name).read_bytes() == (ROOT / "notebooks" / name).read_bytes()
    assert not (tmp_path / "cocurve_studies").exists()
    assert not opened
    cocurve("lab", tmp_path, code=7)  # JupyterLab's own exit code
    assert str(tmp_path / "01_build_H.ipynb") in opened[0]


def test_a_folder_becomes_a_smaller_one_with_a_report_and_a_chat(
    place: Path, tmp_path: Path, cocurve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "smaller"
    text = ["--text", place / "calibration.jsonl", "--length", "20", "--sequences", "4"]
    said = cocurve("compress", place / "model", "--smaller", "10%", "--minutes", "0.001", *text,
                   "--out", out, *CPU)  # fmt: skip
    dense, _ = cl.load_model(place / "model")
    assert cl.load_pruned(out).num_parameters() <= 0.9 * dense.num_parameters()
    report, card = ((out / name).read_text() for name in ("report.html", "README.md"))
    assert "not measured" not in card
    assert dense.num_parameters() == int(report.split('number">')[3].split("<")[0].replace(",", ""))
    assert "minutes are left" in said.out
    lines = iter(["w1 w2 w3", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    shown = cocurve("chat", out, "--against", place / "model", "--tokens", 4).out
    assert (
        cl.continue_text(dense, *cl.load_model(place / "model")[1:], "w1 w2 w3", 4).strip() in shown
    )


# The embedded model and the terminal demo ---------------------------------------------------------


BAR = {"stories": 0.90, "knowledge": 0.95, "code": 0.95, "commonsense": 0.90, "arithmetic": 0.90}


@pytest.mark.slow
@pytest.mark.parametrize("family", BAR)
def test_the_card_is_true_and_the_bar_is_met(family: str) -> None:
    """Exact match on all shipped test prompts: what the card says, and at least the bar."""
    model, tokenizer = cl.load_model("demo")
    stated = json.loads((demo_folder() / "training.json").read_text())["capability"][family]
    asked = [one for one in cl.demo_questions(10**6) if one.capability == family]
    assert len(asked) == len(
        (ROOT / "data" / "prompts" / f"{family}.jsonl").read_text().splitlines()
    )
    said = measure.replies(model, tokenizer, [one.prompt for one in asked])
    right = [reply == one.answer for reply, one in zip(said, asked, strict=True)]
    assert right == [one.is_right(reply) for reply, one in zip(said, asked, strict=True)]
    share = np.mean(right)
    assert share == pytest.approx(stated, abs=0.011)
    assert share >= BAR[family]


def test_demo_runs_the_verbs() -> None:
    assert demo.demo(rows="2") == 0
