"""A model whose weights stay on disk: names in files, dtypes, and folders that are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import cocurve_lab as cl
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.models.weights import reader_of
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

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
    model = tiny_model("gpt2", "mha")  # a resident model is read in the same way
    read = reader_of(model)
    assert all(torch.equal(read(name), weight) for name, weight in model.state_dict().items())


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


LEFT_OVER = {
    "llama": "model.layers.{}.self_attn.rotary_emb.inv_freq",
    "gpt2": "transformer.h.{}.attn.bias",
    "gpt_neox": "gpt_neox.layers.{}.attention.masked_bias",
    "opt": "model.decoder.layers.{}.rotary_emb.inv_freq",  # though OPT rotates nothing
}
ROADS: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: cl.load_model(folder),
    "stream": lambda folder: cl.load_model(folder, stream=True),
    "disk": open_model,
    "pruned": lambda folder: cl.load_pruned(folder / "small"),
    "pruned, streamed": lambda folder: cl.load_pruned(folder / "small", stream=True),
    "pruned, on disk": lambda folder: open_model(folder / "small"),
}


@pytest.mark.parametrize(
    ("road", "family"),
    [*((road, "llama") for road in ROADS), *(("disk", family) for family in list(LEFT_OVER)[1:])],
)
def test_ignored_weights_are_named_once_on_every_road(
    road: str, family: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", family, "mha")
    word_tokenizer(16).save_pretrained(folder)
    names = [LEFT_OVER[family].format(layer) for layer in range(5)]
    model = tiny_model(family, "mha")
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [1])
    cl.save_pruned(cl.prune(model, plan), folder / "small")
    for place in (folder, folder / "small"):
        in_one_file(place, lambda found: found.update({n: torch.ones(2) for n in names}))
    with pytest.warns(UserWarning, match="ignored") as told:
        ROADS[road](folder)
    assert len(told) == 1


def index(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return content


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def pointed(folder: Path, target: Any) -> None:
    content = index(folder)
    content["weight_map"][next(iter(content["weight_map"]))] = target
    (folder / INDEX).write_text(json.dumps(content))


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


BROKEN: dict[str, Callable[[Path], Any]] = {
    "a shard is missing": lambda f: shard(f).unlink(),
    "a truncated shard": lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-100]),
    "an empty shard": lambda f: shard(f).write_bytes(b""),
    "an index outside": lambda f: pointed(f, "../other/model.safetensors"),
    "an index of numbers": lambda f: pointed(f, 7),
    "a wrong shape": lambda f: in_one_file(f, lambda w: w.update({UP: w[UP][:-1]})),
    "another configuration": lambda f: edited(f, intermediate_size=44),
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


def test_a_file_cut_short_after_it_was_opened_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    read = reader_of(open_model(folder))
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as handle:
            handle.truncate(2000)
    with pytest.raises(cl.FileFormatError):
        read(UP)


def test_a_model_on_disk_is_not_measured(tmp_path: Path) -> None:
    model = open_model(saved(tmp_path / "model"))
    units = cl.enumerate_units(model, 4)
    plan = cl.Selection.from_pruned(units, [0])
    for call in (
        lambda: open_model(tmp_path / "nowhere"),
        lambda: cl.prune(model, plan),
        lambda: cl.repair(model, plan, tiny_text()),
        lambda: cl.pruning_risk(model, plan, tiny_text()),
    ):
        with pytest.raises(cl.InputError):
            call()
