"""Pruning onto disk: the same folder as in memory, in little memory, or nothing at all."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.big_models import on_disk
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.extensions.repairing import least_squares_refit
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.loading import keep_score_cap, shapes_only
from cocurve_lab.pruner.saving import open_pruned
from helpers.tiny_models import (
    EVERY_FAMILY,
    GROUPS,
    tiny_model,
    tiny_text,
    word_tokenizer,
)


def dense(folder: Path, family: str = "llama", heads: str = "gqa", **changes: Any) -> Any:
    """A folder, and the model that transformers loads from it in its own dtype."""
    tiny_model(family, heads, **changes).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    keep_score_cap(model)
    return model.eval().requires_grad_(False)


def ragged(model: PreTrainedModel, seed: int = 1) -> cl.Selection:
    """A plan with layers of every kind: uneven, without attention, without FFN, and with gains."""
    units, draw = cl.enumerate_units(model, GROUPS), random.Random(seed)
    gone = [
        unit.name
        for unit in units
        if draw.random() < 0.4 or (unit.layer, unit.kind) in ((1, "attention"), (2, "ffn"))
    ]
    left = [unit.name for unit in units if unit.kind == "ffn" and unit.name not in gone]
    gains = {units.index(name): gain for name, gain in zip(left, (1.25, 0.8), strict=False)}
    return cl.Selection.from_pruned(units, gone).with_gains(gains)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def differing(one: Path, other: Path) -> list[str]:
    mine, theirs = files(one), files(other)
    return [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "heads"), EVERY_FAMILY)
def test_every_file_is_that_of_a_model_cut_in_memory(
    family: str, heads: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = dense(tmp_path / "model", family, heads, dtype=dtype)
    plan, tokenizer = ragged(model), word_tokenizer()
    expected = cl.save_pruned(cl.prune(model, plan), tmp_path / "memory", tokenizer=tokenizer)
    stored = open_model(tmp_path / "model")
    for source, name in ((stored, "disk"), (model, "resident")):
        found = cl.prune(source, plan, out=tmp_path / name, tokenizer=tokenizer)
        assert differing(found, expected) == [], name
    # and neither model was changed
    again = cl.prune(stored, plan, out=tmp_path / "again", tokenizer=tokenizer)
    assert differing(again, expected) == []


def streamed(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    """The model of a folder, its layers left in files."""
    pytest.importorskip("accelerate")
    word_tokenizer().save_pretrained(folder)
    return cl.load_model(folder, stream=True, device="cpu", dtype=dtype)[0]


PRUNED = ["llama", "phi3", "gemma2", "gpt2", "opt_350m", "gpt_neox"]


@pytest.mark.parametrize("family", PRUNED)
def test_a_pruned_folder_is_streamed(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    changes = {"tie_word_embeddings": True} if family == "llama" else {}
    model = dense(tmp_path / "model", family, "mha", **changes)
    found, ids = cl.prune(model, ragged(model), out=tmp_path / "small"), tiny_text().input_ids
    for dtype in (None, "bfloat16"):
        whole = cl.load_pruned(found, device="cpu", dtype=dtype)
        own = cl.load_pruned(found, device="cpu", dtype=dtype, stream=True)
        for _ in range(2):
            assert torch.equal(own(ids).logits, whole(ids).logits)
        assert all(weight.is_meta for weight in describe(own).layers[1].parameters())
        assert own.get_input_embeddings().weight.dtype == whole.dtype
    plan = cl.Selection.from_pruned(cl.enumerate_units(own, GROUPS), [0])
    tables = [cl.measure_plans(m, [plan], tiny_text(), progress=False) for m in (own, whole)]
    assert np.array_equal(tables[0].kl, tables[1].kl)


def test_a_pruned_folder_that_vanishes_and_accelerate_that_lacks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    model = dense(tmp_path / "model")
    found = cl.prune(model, ragged(model), out=tmp_path / "small")
    own = cl.load_pruned(found, device="cpu", stream=True)
    with (found / "model.safetensors").open("r+b") as handle:
        handle.truncate(2000)
    with pytest.raises(cl.InputError):
        own(tiny_text().input_ids)
    monkeypatch.setattr("cocurve_lab.models.loading.find_spec", lambda _: None)
    found = cl.prune(model, ragged(model), out=tmp_path / "again")
    with pytest.raises(cl.InputError):
        cl.load_pruned(found, device="cpu", stream=True)
    assert cl.load_pruned(found, device="cpu").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", PRUNED)
def test_what_was_written_is_verified_before_it_is_there(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model", family, "mha", dtype=dtype)
    own = streamed(tmp_path / "model", str(dtype).removeprefix("torch."))
    plan, text = ragged(model), tiny_text()
    expected = cl.save_pruned(cl.prune(model, plan), tmp_path / "memory")
    for source, name in ((own, "disk"), (model, "resident")):
        found = cl.prune(source, plan, out=tmp_path / name, verify=text)
        assert differing(found, expected) == []
    small = cl.load_pruned(found, device="cpu", stream=True)
    assert cl.check_equivalence(own, small, plan, text) == cl.check_equivalence(
        model, cl.prune(model, plan), plan, text
    )
    original = on_disk._Weights.kept

    def spoiled(self: Any, name: str) -> Any:
        kept = original(self, name)
        return kept * 2 if name.endswith(("mlp.down_proj.weight", "fc2.weight")) else kept * 1.1

    monkeypatch.setattr(on_disk._Weights, "kept", spoiled)
    with pytest.raises(cl.FileFormatError, match="checksum"):
        cl.prune(own, plan, out=tmp_path / "spoiled", verify=text)
    assert not (tmp_path / "spoiled").exists()


REFITS = [(family, "stream") for family in ("llama", "phi3", "gemma2", "gpt2", "opt", "gpt_neox")]
REFITS += [("llama", "write"), ("opt_350m", "write"), ("llama", "dense"), ("gpt2", "dense")]


@pytest.mark.parametrize(("family", "target"), REFITS)
def test_a_streamed_model_is_refitted_like_one_in_memory(
    family: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model", family, "mha")
    plan, text, sequential = ragged(model), tiny_text(12, 24, seed=3), target != "dense"
    options = RepairOptions(progress=False)
    if target == "write":  # as behind a norm
        monkeypatch.setattr(least_squares_refit, "is_additive", lambda *_: False)
    repaired = cl.repair(model, plan, text, sequential=sequential, options=options)
    expected = cl.save_pruned(repaired, tmp_path / "memory")
    bare = cl.save_pruned(cl.prune(model, plan), tmp_path / "bare")
    assert "model.safetensors" in differing(bare, expected)
    for source, name in ((streamed(tmp_path / "model"), "disk"), (model, "resident")):
        found = cl.repair(
            *(source, plan, text), sequential=sequential, options=options, out=tmp_path / name
        )
        assert differing(found, expected) == [], name
    # and neither model was changed
    again = cl.prune(source, plan, out=tmp_path / "again")
    assert differing(again, bare) == []


def test_half_precision_and_the_reads_of_a_refit(tmp_path: Path) -> None:
    from cocurve_lab.models.layers import weights_of

    model = dense(tmp_path / "model", dtype=torch.bfloat16)
    own, text = streamed(tmp_path / "model", "bfloat16"), tiny_text(12, 24, seed=3)
    plan, quiet = ragged(model), RepairOptions(progress=False)
    expected = cl.save_pruned(cl.repair(model, plan, text, options=quiet), tmp_path / "memory")
    stream = weights_of(own)
    assert stream is not None
    own(text.input_ids[:1])
    cl.measure_plans(own, [plan], text, progress=False)  # what is checked once is checked now
    before, layer = stream.bytes_read, stream.bytes_present // 2
    found = cl.repair(own, plan, text, options=quiet, out=tmp_path / "disk")
    assert differing(found, expected) == []
    # the calls, the norms and the refit take a sweep each; what enters needs layer 0, and layer 1
    # is fetched meanwhile; over a gap the dense model runs ahead, and comes back
    assert stream.bytes_read - before == (3 + 2 + 3 + 3 + 2) * layer


def test_a_plan_with_nothing_to_refit_is_pruned(tmp_path: Path) -> None:
    model = dense(tmp_path / "model")
    units = cl.enumerate_units(model, GROUPS)
    # nothing stands before the gap
    plan = cl.Selection.from_pruned(units, [unit.name for unit in units if unit.layer == 0])
    found = cl.repair(model, plan, tiny_text(), out=tmp_path / "disk")
    assert differing(found, cl.prune(model, plan, out=tmp_path / "bare")) == []


def test_what_a_refit_onto_disk_does_not_do_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model")
    plan, text = ragged(model), tiny_text()
    with pytest.raises(cl.InputError):
        cl.repair(open_model(tmp_path / "model"), plan, text, out=tmp_path / "small")
    with pytest.raises(cl.InputError):
        cl.repair(model, plan, text, out=tmp_path / "model")
    reads_then(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        cl.repair(model, plan, text, out=tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    size = 4 * cl.prune(model, plan).num_parameters()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 60, free=size))
    with pytest.raises(cl.InputError):
        cl.repair(model, plan, text, out=tmp_path / "small")


def test_a_large_model_is_split_into_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    plan = ragged(model)
    monkeypatch.setattr(on_disk, "SHARD", "20KB")
    found = cl.prune(model, plan, out=tmp_path / "small")
    pruned = cl.prune(model, plan)
    pruned.save_pretrained(tmp_path / "expected", max_shard_size="20KB")
    name = "model.safetensors.index.json"
    index, expected = (json.loads((at / name).read_text()) for at in (found, tmp_path / "expected"))
    assert index["metadata"] == expected["metadata"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    assert len(set(index["weight_map"].values())) == len(list(found.glob("model-*"))) > 2
    for name, file in index["weight_map"].items():
        assert (found / file).stat().st_size < 30_000
        assert torch.equal(load_file(found / file)[name], pruned.state_dict()[name])
    loaded = cl.load_pruned(found).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in pruned.state_dict().items())


def test_weights_of_several_dtypes_keep_theirs(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.norm.to(torch.float64)
    plan = ragged(model)
    expected = cl.save_pruned(cl.prune(model, plan), tmp_path / "memory")
    found = cl.prune(model, plan, out=tmp_path / "disk")
    assert differing(found, expected) == []
    with safe_open(found / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.float64


def test_another_dtype_is_converted_before_the_cut(tmp_path: Path) -> None:
    half = dense(tmp_path / "model", dtype=torch.bfloat16)
    plan = ragged(half)
    expected = cl.save_pruned(cl.prune(half.float(), plan), tmp_path / "memory")
    found = cl.prune(open_model(tmp_path / "model", dtype="float32"), plan, out=tmp_path / "disk")
    assert differing(found, expected) == []


def test_a_second_round_is_recorded(tmp_path: Path) -> None:
    model = dense(tmp_path / "model")
    first = cl.prune(open_model(tmp_path / "model"), ragged(model), out=tmp_path / "first")
    loaded = cl.load_pruned(first)
    units = cl.enumerate_units(loaded, GROUPS)
    plan = cl.Selection.from_pruned(units, [1, 5])
    expected = cl.save_pruned(cl.prune(loaded, plan), tmp_path / "memory")
    found = cl.prune(open_pruned(first), plan, out=tmp_path / "disk")
    assert differing(found, expected) == []
    assert len(json.loads((found / "cocurve_manifest.json").read_text())["earlier_rounds"]) == 1


def test_a_head_in_the_files_is_kept_where_it_differs_from_the_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    dense(folder, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    plan = ragged(tiny_model())
    cl.prune(open_model(folder), plan, out=tmp_path / "equal")
    assert "lm_head.weight" not in load_file(tmp_path / "equal" / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors")
    cl.prune(open_model(folder), plan, out=tmp_path / "small")
    kept = load_file(tmp_path / "small" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(kept, weights["lm_head.weight"])


# What must leave nothing behind ------------------------------------------------------------------


def reads_then(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int = 5) -> None:
    """Let the writer meet an error after some weights."""
    original, count = on_disk._Weights.kept, [0]

    def kept(self: Any, name: str) -> Any:
        count[0] += 1
        if count[0] > after:
            raise error
        return original(self, name)

    monkeypatch.setattr(on_disk._Weights, "kept", kept)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), cl.InputError),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    error: BaseException,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = dense(tmp_path / "model")
    reads_then(monkeypatch, error)
    with pytest.raises(raised):
        cl.prune(open_model(tmp_path / "model"), ragged(model), out=tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_space_is_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model")
    plan = ragged(model)
    size = 4 * cl.prune(model, plan).num_parameters()
    reads_then(monkeypatch, AssertionError("a weight was read"), after=0)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 60, free=size - 1)
    )
    with pytest.raises(cl.InputError):
        cl.prune(open_model(tmp_path / "model"), plan, out=tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 60, free=size))
    with pytest.raises(AssertionError, match="a weight was read"):
        cl.prune(open_model(tmp_path / "model"), plan, out=tmp_path / "small")


@pytest.mark.parametrize("damage", ["truncated", "missing", "another shape"])
def test_files_that_change_under_a_streamed_model_are_told_and_nothing_is_left(
    tmp_path: Path, damage: str
) -> None:
    pytest.importorskip("accelerate")
    plan = ragged(dense(tmp_path / "model"))
    word_tokenizer().save_pretrained(tmp_path / "model")
    own, _ = cl.load_model(tmp_path / "model", device="cpu", stream=True)
    cl.pruning_risk(own, plan, tiny_text())  # what is checked once is checked before
    file = next((tmp_path / "model").glob("*.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing":
        file.unlink()
    else:
        save_file(load_file(file) | {name: torch.zeros(40, 32)}, file, {"format": "pt"})
    outs = [
        lambda: cl.prune(own, plan, out=tmp_path / "small"),
        lambda: cl.repair(own, plan, tiny_text(), out=tmp_path / "small"),
    ]
    if find_spec("gguf"):
        outs.append(lambda: cl.export_gguf(own, None, tmp_path / "small.gguf"))
    for write in outs:
        with pytest.raises(cl.InputError):
            write()
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_needs_the_model_in_memory_is_refused(tmp_path: Path) -> None:
    model = dense(tmp_path / "model")
    plan, call, before = ragged(model), cl.prune, files(tmp_path / "model")
    with pytest.raises(cl.InputError):  # other files are not replaced
        cl.prune(open_model(tmp_path / "model"), plan, out=tmp_path / "model")
    assert files(tmp_path / "model") == before
    with pytest.raises(cl.InputError):
        call(model, plan, out=tmp_path / "small", inplace=True)  # type: ignore[call-overload]
    with pytest.raises(cl.InputError):
        call(open_model(tmp_path / "model"), plan, out=tmp_path / "small", verify=tiny_text())
    with pytest.raises(cl.InputError):
        cl.prune(shapes_only(str(tmp_path / "model")), plan, out=tmp_path / "small")
    with pytest.raises(cl.MismatchError):
        cl.prune(open_model(tmp_path / "model"), ragged(tiny_model(layers=4)), out=tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Memory ------------------------------------------------------------------------------------------

LIMITED = """
import re, resource, sys
from importlib.util import find_spec
from pathlib import Path
import torch
import cocurve_lab as cl
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.models.weights import reader_of
from cocurve_lab.pruner.saving import open_pruned

def cut(place, out):
    model = open_model(place)
    units = cl.enumerate_units(model, 4)
    plan = cl.Selection.from_pruned(units, range(0, len(units), 3))
    cl.prune(model, plan.with_gains({4: 1.5}), out=out)
    small = open_pruned(out)
    if find_spec("gguf"):
        cl.export_gguf(small, None, f"{out}.gguf", dtype="q8_0")
    read = reader_of(small)
    names = [name for name in small.state_dict() if ".layers.1." in name]
    return sum(float(read(name).double().sum()) for name in names)

small, large, out, allowed = *map(Path, sys.argv[1:4]), int(sys.argv[4])
cut(small, out / "small")  # whatever is imported on first use
used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
try:
    torch.zeros(allowed + 2**20, dtype=torch.uint8)
except RuntimeError:
    pass
else:
    raise SystemExit("the limit does not hold")
print(cut(large, out / "large"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_a_model_four_times_the_memory_is_cut_and_read_again(tmp_path: Path) -> None:
    allowed = 40 * 2**20
    wide = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4000}
    model = tiny_model(layers=24, dtype=torch.bfloat16, **wide)
    size = 2 * model.num_parameters()
    assert size > 4 * allowed
    model.save_pretrained(tmp_path / "large")
    tiny_model().save_pretrained(tmp_path / "small")
    command = [sys.executable, "-c", LIMITED]
    paths = [str(tmp_path / name) for name in ("small", "large", "out")]
    # threads have stacks, which count
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [*command, *paths, str(allowed)], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    loaded = cl.load_pruned(tmp_path / "out" / "large")
    weights = [w for name, w in loaded.state_dict().items() if ".layers.1." in name]
    assert float(ran.stdout) == pytest.approx(sum(float(w.double().sum()) for w in weights))
    assert loaded.num_parameters() > model.num_parameters() / 2


@pytest.mark.parametrize("road", ["memory", "out", "disk"])
def test_a_head_of_its_own_survives_though_the_configuration_ties_it(
    road: str, tmp_path: Path
) -> None:
    separate = tiny_model("llama", tie_word_embeddings=False)
    separate.save_pretrained(tmp_path / "dense")
    word_tokenizer().save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    model, _ = cl.load_model(tmp_path / "dense", device="cpu")
    ids = torch.arange(12)[None]
    assert torch.allclose(model(ids).logits, separate(ids).logits)  # transformers reads both
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [0, 3])
    with cl.ablate(model, plan), torch.no_grad():
        expected = model(ids).logits
    if road == "memory":
        cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    else:
        dense = model if road == "out" else open_model(tmp_path / "dense")
        cl.prune(dense, plan, out=tmp_path / "small")

    def by_transformers(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

    for found in (cl.load_pruned(tmp_path / "small"), by_transformers(tmp_path / "small")):
        torch.testing.assert_close(found(ids).logits, expected)


def test_a_folder_keeps_what_goes_with_the_weights(tmp_path: Path) -> None:
    """On both roads, and also when it is pruned again."""
    dense = tmp_path / "dense"
    tiny_model().save_pretrained(dense)
    word_tokenizer().save_pretrained(dense)
    wanted = {"LICENSE", "USE_POLICY.md", "NOTICE.txt", "tokenizer.model"}
    for name in (*wanted, "notes.txt"):
        (dense / name).write_text(name)
    settings = json.loads((dense / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
    (dense / "tokenizer_config.json").write_text(json.dumps(settings))
    model, tokenizer = cl.load_model(dense, device="cpu")
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), ["L0.ffn[0]"])
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    cl.save_pruned(cl.prune(model, plan), memory, tokenizer=tokenizer)
    cl.prune(model, plan, out=disk, tokenizer=tokenizer)
    cl.save_pruned(cl.load_pruned(memory), memory, tokenizer=tokenizer, overwrite=True)
    for folder in (memory, disk):
        found = {path.name for path in folder.iterdir()}
        assert found >= wanted
        assert "notes.txt" not in found
        assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
        cl.load_pruned(folder)
    cl.save_pruned(cl.prune(model, plan), tmp_path / "alone")
    assert not (tmp_path / "alone" / "tokenizer.model").exists()
