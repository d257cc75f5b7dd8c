"""Pruning onto disk: the same folder as in memory, in little memory, or nothing at all."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.big_models import on_disk
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import weight_marks
from cocurve_lab.models.loading import keep_score_cap, shapes_only
from cocurve_lab.models.weights import reader_of
from helpers.tiny_models import GROUPS, bytes_in, tiny_model, tiny_text, word_tokenizer, write_model

# every way in which a layer is laid out, in pairs with heads and dtype
EVERY_WAY = [
    ("llama", "mqa", torch.float32),
    ("mistral", "gqa", torch.bfloat16),
    ("phi3", "gqa", torch.float32),
    ("qwen3", "mha", torch.bfloat16),
    ("gemma2", "gqa", torch.bfloat16),
    ("gemma3_text", "mqa", torch.float32),
    ("olmo2", "gqa", torch.float32),
    ("gpt_neox", "mha", torch.bfloat16),
    ("gpt2", "mha", torch.float32),
    ("opt_350m", "mha", torch.bfloat16),
]


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


def without_layer(model: PreTrainedModel) -> cl.Selection:
    """A plan of a whole layer: what a refit changes before it is not cut."""
    units = cl.enumerate_units(model, GROUPS)
    return cl.Selection.from_pruned(units, [unit.name for unit in units if unit.layer == 1])


def differing(one: Path, other: Path) -> list[str]:
    mine, theirs = bytes_in(one), bytes_in(other)
    return [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]


@pytest.mark.parametrize(("family", "heads", "dtype"), EVERY_WAY)
def test_every_file_is_that_of_a_model_cut_in_memory(
    family: str, heads: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = dense(tmp_path / "model", family, heads, dtype=dtype)
    plan, tokenizer = ragged(model), word_tokenizer()
    expected = cl.save_pruned(cl.prune(model, plan), tmp_path / "memory", tokenizer=tokenizer)
    stored = open_model(tmp_path / "model")
    # the second cut of one source shows that the first did not change it
    for number, source in enumerate((stored, model, stored)):
        found = cl.prune(source, plan, out=tmp_path / str(number), tokenizer=tokenizer)
        assert differing(found, expected) == [], number


def streamed(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder, its layers left in files."""
    word_tokenizer().save_pretrained(folder)
    return cl.load_model(folder, stream=True, device="cpu", dtype=dtype)[0]


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt_350m"])
def test_a_pruned_folder_is_streamed(family: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True} if family == "llama" else {}
    model = dense(tmp_path / "model", family, "mha", **changes)
    found, ids = cl.prune(model, ragged(model), out=tmp_path / "small"), tiny_text().input_ids
    for dtype in (None, "bfloat16"):
        whole, own = (
            cl.load_pruned(found, device="cpu", dtype=dtype, stream=stream)
            for stream in (False, True)
        )
        for _ in range(2):
            assert torch.equal(own(ids).logits, whole(ids).logits)
        assert all(weight.is_meta for weight in describe(own).layers[1].parameters())
    plan = cl.Selection.from_pruned(cl.enumerate_units(own, GROUPS), [0])
    tables = [cl.measure_plans(m, [plan], tiny_text(), progress=False) for m in (own, whole)]
    assert np.array_equal(tables[0].kl, tables[1].kl)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("gemma2", torch.bfloat16), ("gpt2", torch.float32)],
)
def test_what_was_written_is_verified_before_it_is_there(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model", family, "mha", dtype=dtype)
    own, plan, text = streamed(tmp_path / "model", dtype), ragged(model), tiny_text()
    found = cl.prune(own, plan, out=tmp_path / "disk", verify=text)
    small = cl.load_pruned(found, device="cpu", stream=True)
    whole = cl.check_equivalence(model, cl.prune(model, plan), plan, text)
    assert cl.check_equivalence(own, small, plan, text) == whole
    original = on_disk._Weights.kept
    monkeypatch.setattr(on_disk._Weights, "kept", lambda self, name: original(self, name) * 2)
    with pytest.raises(cl.FileFormatError):
        cl.prune(own, plan, out=tmp_path / "spoiled", verify=text)
    assert not (tmp_path / "spoiled").exists()


@pytest.mark.parametrize(
    ("family", "plan_of", "sequential"),
    [
        *((family, ragged, True) for family in ("llama", "phi3", "gpt2", "opt", "opt_350m")),
        *(("gemma2", ragged, True), ("llama", ragged, False), ("llama", without_layer, True)),
    ],
)
def test_a_streamed_model_is_refitted_like_one_in_memory(
    family: str, plan_of: Any, sequential: bool, tmp_path: Path
) -> None:
    model = dense(tmp_path / "model", family, "mha")
    plan, text = plan_of(model), tiny_text(12, 24, seed=3)

    def refitted(source: PreTrainedModel, **out: Any) -> Any:
        return cl.repair(source, plan, text, sequential=sequential, options=QUIET, **out)

    expected = cl.save_pruned(refitted(model), tmp_path / "memory")
    bare = cl.save_pruned(cl.prune(model, plan), tmp_path / "bare")
    assert "model.safetensors" in differing(bare, expected)
    for source, name in ((streamed(tmp_path / "model"), "disk"), (model, "resident")):
        assert differing(refitted(source, out=tmp_path / name), expected) == [], name
    # and the model was not changed
    assert differing(cl.prune(model, plan, out=tmp_path / "again"), bare) == []


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
    assert len(set(index["weight_map"].values())) == len(list(found.glob("model-*"))) > 2
    for name, file in index["weight_map"].items():
        assert (found / file).stat().st_size < 30_000
        assert torch.equal(load_file(found / file)[name], pruned.state_dict()[name])
    assert weight_marks(cl.load_pruned(found)) == weight_marks(pruned)


def test_another_dtype_is_converted_before_the_cut(tmp_path: Path) -> None:
    half = dense(tmp_path / "model", dtype=torch.bfloat16)
    plan = ragged(half)
    expected = cl.save_pruned(cl.prune(half.float(), plan), tmp_path / "memory")
    found = cl.prune(open_model(tmp_path / "model", dtype="float32"), plan, out=tmp_path / "disk")
    assert differing(found, expected) == []


def test_weights_of_two_dtypes_keep_theirs(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.norm.to(torch.float64)
    plan = ragged(model)
    expected = cl.save_pruned(cl.prune(model, plan), tmp_path / "memory")
    found = cl.prune(model, plan, out=tmp_path / "disk")
    assert differing(found, expected) == []
    kept = load_file(found / WHOLE)
    assert torch.equal(kept["model.norm.weight"], model.model.norm.weight)
    assert kept["lm_head.weight"].dtype == torch.float32


def test_a_second_round_on_disk_is_that_of_memory(tmp_path: Path) -> None:
    model = dense(tmp_path / "model")
    first = cl.prune(open_model(tmp_path / "model"), ragged(model), out=tmp_path / "first")
    loaded = cl.load_pruned(first)
    plan = cl.Selection.from_pruned(cl.enumerate_units(loaded, GROUPS), [1, 5])
    expected = cl.save_pruned(cl.prune(loaded, plan), tmp_path / "memory")
    found = cl.prune(open_model(first), plan, out=tmp_path / "disk")
    assert differing(found, expected) == []
    assert len(json.loads((found / "cocurve_manifest.json").read_text())["earlier_rounds"]) == 1


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
@pytest.mark.parametrize("refitted", [False, True])
def test_a_write_that_fails_leaves_nothing(
    error: BaseException,
    raised: type[BaseException],
    refitted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, out = dense(tmp_path / "model"), tmp_path / "small"
    plan = ragged(model)
    calls = {
        False: lambda: cl.prune(open_model(tmp_path / "model"), plan, out=out),
        True: lambda: cl.repair(model, plan, tiny_text(), out=out),
    }
    reads_then(monkeypatch, error)
    with pytest.raises(raised):
        calls[refitted]()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_space_is_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model")
    plan = ragged(model)
    size = 4 * cl.prune(model, plan).num_parameters()
    reads_then(monkeypatch, AssertionError("a weight was read"), after=0)
    for free, error in ((size - 1, cl.InputError), (size, AssertionError)):
        usage = SimpleNamespace(total=1 << 60, free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        with pytest.raises(error):
            cl.prune(open_model(tmp_path / "model"), plan, out=tmp_path / "small")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(cl.InputError):  # a refit needs more
        cl.repair(model, plan, tiny_text(), out=tmp_path / "small")


@pytest.mark.parametrize("damage", ["truncated", "missing", "another shape"])
def test_files_that_change_under_a_streamed_model_are_told_and_nothing_is_left(
    tmp_path: Path, damage: str
) -> None:
    plan = ragged(dense(tmp_path / "model"))
    own = streamed(tmp_path / "model")
    cl.pruning_risk(own, plan, tiny_text())  # what is checked once is checked before
    file = next((tmp_path / "model").glob("*.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(save(load_file(file) | {name: torch.zeros(40, 32)}, {"format": "pt"}))
    for write in (
        lambda: cl.prune(own, plan, out=tmp_path / "small"),
        lambda: cl.repair(own, plan, tiny_text(), out=tmp_path / "small"),
        lambda: cl.export_gguf(own, None, tmp_path / "small.gguf"),
    ):
        with pytest.raises(cl.InputError):
            write()
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_needs_the_model_in_memory_is_refused(tmp_path: Path) -> None:
    model, out = dense(tmp_path / "model"), {"out": tmp_path / "small"}
    plan, before = ragged(model), bytes_in(tmp_path / "model")
    stored, text = open_model(tmp_path / "model"), tiny_text()
    for call, error in (
        (lambda: cl.prune(stored, plan, out=tmp_path / "model"), cl.InputError),
        (lambda: cl.repair(model, plan, text, out=tmp_path / "model"), cl.InputError),
        (lambda: cl.prune(model, plan, **out, inplace=True), cl.InputError),
        (lambda: cl.prune(stored, plan, **out, verify=text), cl.InputError),
        (lambda: cl.repair(stored, plan, text, **out), cl.InputError),
        (lambda: cl.prune(shapes_only(str(tmp_path / "model")), plan, **out), cl.InputError),
        (lambda: cl.prune(stored, ragged(tiny_model(layers=4)), **out), cl.MismatchError),
        (lambda: cl.prune(stored, plan), cl.InputError),
        (lambda: cl.repair(stored, plan, text), cl.InputError),
        (lambda: cl.pruning_risk(stored, plan, text), cl.InputError),
        (lambda: open_model(tmp_path / "nowhere"), cl.InputError),
    ):
        with pytest.raises(error):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert bytes_in(tmp_path / "model") == before


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["memory", "out", "disk"])
def test_a_head_of_its_own_survives_though_the_configuration_ties_it(
    road: str, tmp_path: Path
) -> None:
    separate = tiny_model("llama", tie_word_embeddings=False)
    write_model(tmp_path / "dense", separate)
    edit_json(tmp_path / "dense" / "config.json", tie_word_embeddings=True)
    model, _ = cl.load_model(tmp_path / "dense", device="cpu")
    ids = torch.arange(12)[None]
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [0, 3])
    with cl.ablate(separate, plan), torch.no_grad():
        expected = separate(ids).logits
    small = tmp_path / "small"
    if road == "memory":
        cl.save_pruned(cl.prune(model, plan), small)
    else:
        cl.prune(model if road == "out" else open_model(tmp_path / "dense"), plan, out=small)
    plain = AutoModelForCausalLM.from_pretrained(small, trust_remote_code=True).eval()
    for found in (cl.load_pruned(small), plain):
        torch.testing.assert_close(found(ids).logits, expected)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_keeps_what_goes_with_the_weights(tmp_path: Path) -> None:
    """On both roads, and also when it is pruned again."""
    dense = tmp_path / "dense"
    write_model(dense)
    wanted = {"LICENSE", "USE_POLICY.md", "NOTICE.txt", "tokenizer.model"}
    for name in (*wanted, "notes.txt"):
        (dense / name).write_text(name)
    own_code = {"AutoTokenizer": ["own.Own", None]}
    edit_json(dense / "tokenizer_config.json", auto_map=own_code)
    model, tokenizer = cl.load_model(dense, device="cpu")
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), ["L0.ffn[0]"])
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    cl.save_pruned(cl.prune(model, plan), memory, tokenizer=tokenizer)
    cl.prune(model, plan, out=disk, tokenizer=tokenizer)
    cl.save_pruned(cl.load_pruned(memory), memory, tokenizer=tokenizer, overwrite=True)
    for folder in (memory, disk):
        found = bytes_in(folder)
        assert found.keys() >= wanted
        assert "notes.txt" not in found
        assert b"auto_map" not in found["tokenizer_config.json"]
    cl.save_pruned(cl.prune(model, plan), tmp_path / "alone")
    assert not (tmp_path / "alone" / "tokenizer.model").exists()


QUIET = RepairOptions(progress=False)


# Weights that stay on disk: names in files, dtypes, and folders that are not whole --------------

UP = "model.layers.1.mlp.up_proj.weight"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def saved(folder: Path, family: str = "llama", heads: str = "gqa", **changes: Any) -> Path:
    tiny_model(family, heads, **changes).save_pretrained(folder, max_shard_size="40KB")
    return folder


def in_one_file(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Put the weights into one file, changed."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WHOLE)


def test_dtypes_are_the_stored_ones_unless_asked(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", dtype=torch.bfloat16)
    wide = open_model(folder, dtype="float32")
    assert torch.equal(reader_of(wide)(UP), reader_of(open_model(folder))(UP).float())
    assert {weight.dtype for weight in wide.parameters()} == {torch.float32}
    assert open_model("demo").dtype == torch.float32


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt"])
def test_names_of_old_checkpoints_are_understood(family: str, tmp_path: Path) -> None:
    """Without the prefix of the base model, and with buffers that are computed today."""
    model = tiny_model(family, "mha", tie_word_embeddings=True)
    folder = saved(tmp_path / "model", family, "mha", tie_word_embeddings=True)
    base = f"{model.base_model_prefix}."

    def as_of_old(weights: dict[str, Any]) -> None:
        for name in list(weights):
            weights[name.removeprefix(base)] = weights.pop(name)
        if family == "gpt2":
            weights["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        if family == "gpt_neox":
            weights["layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)

    in_one_file(folder, as_of_old)
    told = pytest.warns(UserWarning, match="ignored") if family != "opt" else nullcontext()
    with told:
        read = reader_of(open_model(folder))
    assert all(torch.equal(read(name), weight) for name, weight in model.state_dict().items())


def index(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return content


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def pointed(folder: Path, target: Any) -> None:
    content = index(folder)
    content["weight_map"][next(iter(content["weight_map"]))] = target
    (folder / INDEX).write_text(json.dumps(content))


BROKEN: dict[str, Callable[[Path], Any]] = {
    "a shard is missing": lambda f: shard(f).unlink(),
    "a truncated shard": lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-100]),
    "an empty shard": lambda f: shard(f).write_bytes(b""),
    "an index outside": lambda f: pointed(f, "../other/model.safetensors"),
    "an index of numbers": lambda f: pointed(f, 7),
    "a wrong shape": lambda f: in_one_file(f, lambda w: w.update({UP: w[UP][:-1]})),
    "another configuration": lambda f: edit_json(f / "config.json", intermediate_size=44),
    "a weight is missing": lambda f: in_one_file(f, lambda w: w.pop(UP)),
    "a weight too many": lambda f: in_one_file(
        f, lambda w: w.update({"model.layers.9.extra": torch.ones(1)})
    ),
    "quantized": lambda f: in_one_file(f, lambda w: w.update({UP: w[UP].to(torch.int8)})),
    "pickled": lambda f: [file.unlink() for file in f.glob("*.safetensors*")],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_not_whole_is_refused_before_anything_is_read(
    name: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model")
    word_tokenizer().save_pretrained(folder)
    BROKEN[name](folder)
    with pytest.raises(cl.InputError if "index" in name else cl.FileFormatError):
        open_model(folder)
    if name == "a weight too many":  # transformers leaves it out
        return
    for stream in (True, False):
        with pytest.raises(cl.CocurveError):
            cl.load_model(folder, device="cpu", stream=stream)


def test_a_whole_file_goes_before_an_index(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    content = (folder / INDEX).read_text()
    in_one_file(folder, lambda weights: weights[UP].fill_(3))
    (folder / INDEX).write_text(content)
    assert torch.equal(reader_of(open_model(folder))(UP), torch.full((42, 32), 3.0))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.state_dict()[UP], torch.full((42, 32), 3.0))
