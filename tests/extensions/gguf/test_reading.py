"""GGUF files as input: equal to what transformers reads, on every road, or refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import cocurve_lab as cl
from cocurve_lab.cli import DONE, main
from cocurve_lab.models.identity import weight_marks
from helpers.bpe import SIZE, byte_level
from helpers.gguf_files import write_gguf, write_model
from helpers.tiny_models import full_logits, tiny_model, tiny_text

TEXT = "Two words:\n\n12 numbers,  3 of them"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(folder / "a.gguf")
    return folder / "a.gguf"


@pytest.mark.parametrize("place", ["the file", "its folder"])
def test_it_loads_as_transformers_reads_it(file: Path, place: str) -> None:
    model, tokenizer = cl.load_model(file if place == "the file" else file.parent, device="cpu")
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    assert weight_marks(model) == weight_marks(read)
    assert tokenizer(TEXT)["input_ids"] == byte_level("smollm")(TEXT)["input_ids"]
    assert not any(weight.requires_grad for weight in model.parameters())


def test_its_model_is_pruned_on_every_road(file: Path, tmp_path: Path) -> None:
    model, _ = cl.load_model(file, device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [0, len(units) - 1])
    (tmp_path / "plan.json").write_text(plan.to_json())
    memory = cl.load_pruned(cl.save_pruned(cl.prune(model, plan), tmp_path / "memory"))
    cl.check_equivalence(model, memory, plan, tiny_text(1, 20))
    for place in (file, file.parent):
        out = tmp_path / f"of {place.name}"
        assert main(["prune", str(place), str(tmp_path / "plan.json"), "--out", str(out)]) == DONE
        assert weight_marks(cl.load_pruned(out)) == weight_marks(memory)


@pytest.mark.parametrize("damage", [b"GGUF", 1000, -1000, b"x" * 100, b""], ids=str)
def test_damaged_files_are_refused(file: Path, damage: Any) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:damage] if isinstance(damage, int) else damage)
    with pytest.raises(cl.InputError):
        cl.load_model(file)


def test_what_it_is_not_for_is_refused(file: Path) -> None:
    for name in ("b.gguf", "part-00001-of-00002.gguf"):
        (file.parent / name).write_bytes(file.read_bytes())
    for place, options in (
        (file, {"stream": True}),
        (file, {"revision": "x"}),
        (file.parent, {}),  # which of its files?
        (file.parent / "part-00001-of-00002.gguf", {}),
    ):
        with pytest.raises(cl.InputError):
            cl.load_model(place, device="cpu", **options)


ROPE = {"rope_type": "default", "rope_theta": 5000.0}
READ: dict[str, dict[str, Any]] = {  # with settings that are not the defaults of their class
    "llama": {"rms_norm_eps": 1e-3},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "qwen3": {"head_dim": 128, "rms_norm_eps": 1e-3},  # which all of its models have
}


@pytest.mark.parametrize("family", READ)
def test_each_family_computes_what_the_source_does(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, "gqa", vocab_size=SIZE, rope_parameters=ROPE, **READ[family])
    write_model(tmp_path / "a.gguf", model)
    found, _ = cl.load_model(tmp_path / "a.gguf", device="cpu")
    ids = torch.arange(2, 26)[None]
    assert (full_logits(found, ids) - full_logits(model, ids)).abs().max() < 1e-5
    assert len(cl.enumerate_units(found)) == len(cl.enumerate_units(model))


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "falcon", "deci", "openelm"])
def test_other_files_are_refused_before_their_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers ignores caps and windows of two, one is no family, two are our own exports."""
    file, exported = tmp_path / "a.gguf", {"deci": "llama", "openelm": "qwen3"}
    if kind in exported:
        cl.export_gguf(tiny_model(exported[kind], tie_word_embeddings=True), None, file)
    else:
        write_gguf(file, name=kind)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", pytest.fail)
    with pytest.raises((cl.InputError, cl.ArchitectureError)):
        cl.load_model(file, device="cpu")


def test_an_array_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    key, array = struct.pack("<Q", 1) + b"a", struct.pack("<IIQ", 9, 0, 2**60)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
    with pytest.raises(cl.InputError):
        cl.load_model(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "change",
    [
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)),
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
        lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"),
    ],
    ids=["a bias", "factors", "scaled positions"],
)
def test_what_transformers_would_leave_out_is_refused(change: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", change)
    with pytest.raises(cl.InputError):
        cl.load_model(tmp_path / "a.gguf")
