"""Saving and loading a pruned model, and folders one should not trust or that are not whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.base import atomic
from cocurve_lab.extensions.publishing.configuration import MODELING_FILE
from cocurve_lab.models.identity import MANIFEST, fingerprint_model
from helpers.builds import plan_of
from helpers.seals import reseal
from helpers.tiny_models import (
    bytes_in,
    full_logits,
    tiny_model,
    tiny_text,
    word_tokenizer,
    write_model,
)

UNEVEN = ["L0.attention[0]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]


def other_model() -> PreTrainedModel:
    """Another plan on the model of `folder`."""
    model = tiny_model()
    return cl.prune(model, plan_of(model, EVEN))


@pytest.mark.parametrize(
    ("family", "names", "tied"),
    [
        ("phi3", UNEVEN, True),
        ("qwen2", UNEVEN, False),
        ("llama", ["L0.attention[0]", "L0.attention[1]", "L2.ffn[0]"], True),
        ("llama", range(18), False),
    ],
)
def test_saving_and_loading(tmp_path: Path, family: str, names: Any, tied: bool) -> None:
    model, ids = tiny_model(family, tie_word_embeddings=tied), tiny_text(1).input_ids
    plan = plan_of(model, names)
    pruned = cl.prune(model, plan)
    loaded = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "small"))
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert loaded.num_parameters() == pruned.num_parameters()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(ids, **settings), pruned.generate(ids, **settings))
    cl.check_equivalence(model, loaded, plan, tiny_text(1))
    assert loaded.cocurve_manifest["pruned_units"] == [plan.units[i].name for i in plan.pruned]
    again = cl.load_pruned(cl.save_pruned(loaded, tmp_path / "again"))
    for found in (loaded, again):
        assert torch.equal(full_logits(found, ids), full_logits(pruned, ids))


def test_loading_in_another_precision(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.max_new_tokens = 7
    pruned = cl.prune(model, plan_of(model, UNEVEN))
    folder = cl.save_pruned(pruned, tmp_path / "small")
    half = cl.load_pruned(folder, dtype=torch.bfloat16)
    assert half.generation_config.max_new_tokens == 7
    frequencies, expected = (m.model.rotary_emb.inv_freq for m in (half, pruned))
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, expected)
    assert half.lm_head.weight.equal(pruned.lm_head.weight.bfloat16())
    back = cl.load_pruned(cl.save_pruned(half, tmp_path / "half"))
    assert {p.dtype for p in (*half.parameters(), *back.parameters())} == {torch.bfloat16}
    assert back.cocurve_manifest["dtype"] == "bfloat16"


def test_folders_are_not_overwritten_by_accident(folder: Path) -> None:
    (folder.parent / "notes").mkdir()
    (folder.parent / "notes" / "mine.txt").write_text("keep")
    (folder.parent / "file").write_text("keep")
    for taken in ("notes", "file"):
        for overwrite in (False, True):
            with pytest.raises(cl.InputError):
                cl.save_pruned(other_model(), folder.parent / taken, overwrite=overwrite)
    for model, place in ((other_model(), folder), (tiny_model(), folder.parent / "dense")):
        with pytest.raises(cl.InputError):
            cl.save_pruned(model, place)
    for tokenizer in (word_tokenizer(), None):  # a tokenizer's files are a save's own
        cl.save_pruned(other_model(), folder, tokenizer=tokenizer, overwrite=True)
    assert cl.load_pruned(folder).num_parameters() == other_model().num_parameters()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["file", "notes", "small"]
    (folder / "my_adapter").mkdir()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(cl.InputError):
        cl.save_pruned(other_model(), folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "keep"


EVEN = [f"L{layer}.{unit}" for layer in range(3) for unit in ("attention[0]", "ffn[0]")]


# What became of the weights since they were pruned -------------------------------------------


def saved_as(pruned: Any, folder: Path) -> tuple[dict[str, Any], str]:
    cl.save_pruned(pruned, folder)
    return json.loads((folder / MANIFEST).read_text()), (folder / "README.md").read_text()


@pytest.mark.parametrize("inplace", [True, False])
def test_the_manifest_names_the_weights_before_and_after(tmp_path: Path, inplace: bool) -> None:
    model = tiny_model()
    before = fingerprint_model(model)
    pruned: Any = cl.prune(model, plan_of(model, EVEN), inplace=inplace)
    manifest, card = saved_as(pruned, tmp_path / "small")
    assert manifest["dense_fingerprint"] == before != fingerprint_model(pruned)
    assert manifest["weights_fingerprint"] == pruned.cocurve_manifest["weights_fingerprint"]
    assert "nothing was trained after pruning" in card
    # read back, its configuration is another, its weights are not
    again, _ = saved_as(cl.load_pruned(tmp_path / "small"), tmp_path / "again")
    for each in (manifest, again):
        assert each["weights_since_pruning"] == "unchanged"


@pytest.mark.parametrize("read_back", [True, False])
def test_changed_weights_are_not_passed_off_as_those_of_the_plan(
    tmp_path: Path, read_back: bool
) -> None:
    model = tiny_model()
    pruned: Any = cl.prune(model, plan_of(model, UNEVEN))
    if read_back:
        pruned = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "first"))
    pruned.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1e-3
    manifest, card = saved_as(pruned, tmp_path / "trained")
    assert "nothing was trained" not in card
    assert "pruning_risk" not in card  # H predicts nothing of these weights
    again = cl.load_pruned(tmp_path / "trained")
    later, _ = saved_as(again, tmp_path / "later")
    half, _ = saved_as(again.to(torch.bfloat16), tmp_path / "half")
    assert {each["weights_since_pruning"] for each in (manifest, later, half)} == {"changed"}


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", True), ("float16", False)])
def test_a_model_is_saved_as_its_checkpoint_stores_it(
    tmp_path: Path, dtype: str, tied: bool
) -> None:
    dense = tiny_model(tie_word_embeddings=tied).to(getattr(torch, dtype))
    write_model(tmp_path / "dense", dense)
    model, _ = cl.load_model(tmp_path / "dense", device="cpu")
    pruned: Any = cl.prune(model, plan_of(model, UNEVEN))
    manifest, _ = saved_as(pruned, tmp_path / "small")
    assert pruned.dtype == torch.float32
    loaded: Any = cl.load_pruned(tmp_path / "small")
    weights = loaded.state_dict()
    for name, weight in pruned.state_dict().items():
        assert weights[name].dtype == getattr(torch, dtype)
        assert torch.equal(weights[name].float(), weight), name
    on_disk = cl.prune(dense, plan_of(dense, UNEVEN), out=tmp_path / "on disk")
    assert (on_disk / WEIGHTS).read_bytes() == (tmp_path / "small" / WEIGHTS).read_bytes()
    again, _ = saved_as(loaded, tmp_path / "again")
    for found in (manifest, again):
        assert (found["dtype"], found["weights_since_pruning"]) == (dtype, "unchanged")
    wide = cl.load_pruned(tmp_path / "small", dtype="float32")
    assert saved_as(wide, tmp_path / "wide")[0]["dtype"] == dtype
    # gains, and whatever else a narrow dtype cannot hold
    scaled = cl.prune(model, plan_of(model, UNEVEN, {"L0.ffn[2]": 1.25}))
    assert saved_as(scaled, tmp_path / "scaled")[0]["dtype"] == "float32"


@pytest.mark.parametrize("trained", [True, False])
def test_a_second_round_is_told(tmp_path: Path, trained: bool) -> None:
    model = tiny_model()
    pruned = cl.prune(model, plan_of(model, UNEVEN))
    once: Any = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "once"))
    once.lm_head.weight.data[0, 0] += trained
    manifest, _ = saved_as(cl.prune(once, plan_of(once, ["L0.ffn[1]"])), tmp_path / "twice")
    assert manifest["dense_fingerprint"] == fingerprint_model(once)
    (first,) = manifest["earlier_rounds"]
    assert first["pruned_units"] == UNEVEN
    assert first["dense_fingerprint"] == fingerprint_model(model)
    assert first["weights_since_pruning"] == ("changed" if trained else "unchanged")
    assert manifest["base_model"] == once.cocurve_manifest["base_model"]


# Folders one should not trust, or that are not whole --------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model()
    return cl.save_pruned(cl.prune(model, plan_of(model, UNEVEN)), tmp_path / "small")


def test_our_loader_runs_nothing_of_the_folder(folder: Path) -> None:
    (folder / MODELING_FILE).write_text("raise SystemExit('the folder was run')")
    edited(CONFIG, lambda c: c["auto_map"].update(AutoConfig="modeling_cocurve.Config"))(folder)
    reseal(folder)
    assert cl.load_pruned(folder).num_parameters() > 0


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def rewritten(name: str, change: Callable[[str], str]) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(change((folder / name).read_text()))


def layer(number: int, **widths: Any) -> Callable[[Path], None]:
    return edited(MANIFEST, lambda m: m["layers"][number].update(widths))


def reweighed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    from safetensors.torch import load_file, save_file

    def spoil(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return spoil


WEIGHTS, CONFIG = "model.safetensors", "config.json"
HOSTILE: list[Callable[[Path], Any]] = [
    lambda f: ((f / MANIFEST).unlink(), edited(CONFIG, lambda c: c.pop("per_layer_config"))(f)),
    *(rewritten(MANIFEST, lambda _, c=c: c) for c in ("{", "[]", "[" * 100_000)),
    rewritten(MANIFEST, lambda text: text[:-40]),
    lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\x00"),
    edited(MANIFEST, lambda m: m.update(version=9)),
    edited(MANIFEST, lambda m: m.update(format="gguf")),
    edited(MANIFEST, lambda m: m.pop("layers")),
    edited(MANIFEST, lambda m: m["layers"][1].pop("ffn_columns")),
    edited(MANIFEST, lambda m: m["layers"].pop()),
    *(edited(MANIFEST, lambda m, d=d: m.update(dtype=d)) for d in ("load", "nn", ["float32"])),
    layer(0, ffn_columns=999),
    layer(0, ffn_columns="42"),
    rewritten(MANIFEST, lambda t: t.replace('"ffn_columns": 42', '"ffn_columns": 1e400')),
    layer(0, attention_columns=9),
    layer(2, ffn_columns=40),
    lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-1000]),
    lambda f: (f / WEIGHTS).unlink(),
    reweighed(lambda w: w.update(stray=torch.zeros(2))),
    reweighed(lambda w: w.pop("lm_head.weight")),
    lambda f: (f / CONFIG).unlink(),
    edited(CONFIG, lambda c: c.update(model_type="../evil")),
    edited(CONFIG, lambda c: c.update(hidden_size="many")),
    edited(CONFIG, lambda c: c.update(hidden_act="nope")),
    edited(CONFIG, lambda c: c.update(num_hidden_layers=10**7)),
    edited(CONFIG, lambda c: c.update(_attn_implementation="org/kernel")),
    lambda f: (f / "generation_config.json").write_text("[1]"),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_hostile_folders_are_refused(folder: Path, case: int) -> None:
    HOSTILE[case](folder)
    reseal(folder)
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(folder)


@pytest.mark.parametrize("stage", ["card", "tokenizer", "configuration"])
def test_an_interrupted_save_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before, tokenizer = bytes_in(folder), word_tokenizer()
    place = {
        "card": "cocurve_lab.extensions.publishing.card.model_card",
        "tokenizer": "transformers.PreTrainedTokenizerFast.save_pretrained",
        "configuration": "cocurve_lab.extensions.publishing.configuration.write_configuration",
    }[stage]
    monkeypatch.setattr(place, interrupt)
    for target in (folder, folder.parent / "new"):
        with pytest.raises(KeyboardInterrupt):
            cl.save_pruned(other_model(), target, tokenizer=tokenizer, overwrite=True)
    assert bytes_in(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_rename_brings_the_old_model_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange two folders, where there are two renames."""
    before, rename = bytes_in(folder), Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.parent.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        cl.save_pruned(other_model(), folder, overwrite=True)
    assert bytes_in(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_working_directory_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = bytes_in(folder)
    for place in (".", folder):
        with pytest.raises(cl.InputError):
            cl.save_pruned(other_model(), place, overwrite=True)
    assert bytes_in(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert cl.load_pruned(cl.save_pruned(other_model(), "inside")).num_parameters() > 0


def test_a_link_stays_and_its_folder_is_replaced(folder: Path) -> None:
    link, other = folder.parent / "link", other_model()
    link.symlink_to(folder)
    assert cl.save_pruned(other, link, overwrite=True) == link
    assert link.is_symlink()
    assert cl.load_pruned(folder).num_parameters() == other.num_parameters()


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    earlier = os.umask(mask)
    try:
        folder = cl.save_pruned(other_model(), tmp_path / "small", tokenizer=word_tokenizer())
    finally:
        os.umask(earlier)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}
