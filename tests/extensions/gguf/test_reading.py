"""GGUF files as input: equal to what transformers reads, on every road, or refused."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import cocurve_lab as cl
from cocurve_lab.cli import DONE, FAILED, main
from cocurve_lab.extensions.gguf import reading
from cocurve_lab.models.identity import weight_marks
from helpers.bpe import SIZE, byte_level
from helpers.gguf_files import write_gguf, write_model
from helpers.tiny_models import full_logits, tiny_model

pytest.importorskip("gguf")
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
    assert cl.load_model(file, device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16


def test_its_model_is_pruned_on_every_road(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = cl.load_model(file, device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [0, len(units) - 1])
    (tmp_path / "plan.json").write_text(plan.to_json())
    memory = cl.load_pruned(cl.save_pruned(cl.prune(model, plan), tmp_path / "memory"))
    assert main(["inventory", str(file)]) == DONE
    assert f"M = {len(units)} units" in capsys.readouterr().out
    out = str(tmp_path / "disk")
    for place in (file, file.parent):
        assert main(["prune", str(place), str(tmp_path / "plan.json"), "--out", out]) == DONE
    assert weight_marks(cl.load_pruned(out)) == weight_marks(memory)
    ids = torch.arange(20)[None]
    with cl.ablate(model, plan):
        assert (full_logits(model, ids) - full_logits(memory, ids)).abs().max() < 1e-4


def test_what_it_is_not_for_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, named in (({"stream": True}, "stream"), ({"revision": "x"}, "revision")):
        with pytest.raises(cl.InputError, match=named):
            cl.load_model(file, device="cpu", **options)  # type: ignore[arg-type]
    for name in ("b.gguf", "part-00001-of-00002.gguf"):
        (file.parent / name).write_bytes(file.read_bytes())
    with pytest.raises(cl.InputError, match=r"a\.gguf, b\.gguf"):
        cl.load_model(file.parent)
    with pytest.raises(cl.InputError, match="--merge"):
        cl.load_model(file.parent / "part-00001-of-00002.gguf")
    content = file.read_bytes()
    for damage in (b"GGUF", content[:1000], content[:-1000], b"x" * 100):
        file.write_bytes(damage)
        assert main(["inventory", str(file)]) == FAILED or damage == content[:-1000]
        with pytest.raises(cl.InputError, match=r"a\.gguf"):
            cl.load_model(file)
    assert "a.gguf" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("family", "kind", "named"),
    [
        ("gemma2", "gemma2", "gemma2"),  # transformers leaves out its caps
        ("phi3", "phi3", "phi3"),  # and its window
        ("llama", "falcon", "falcon"),  # no family of the lab
        ("llama", "deci", "folder that it was made from"),
        ("qwen3", "openelm", "folder that it was made from"),
    ],
)
def test_other_files_are_refused_before_their_weights(
    family: str, kind: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    if kind in ("deci", "openelm"):
        cl.export_gguf(tiny_model(family, tie_word_embeddings=True), None, file)
    else:
        write_gguf(file, name=kind)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", pytest.fail)
    with pytest.raises((cl.InputError, cl.ArchitectureError), match=named):
        cl.load_model(file, device="cpu")


def test_an_array_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    key = struct.pack("<Q", 1) + b"a"
    array = struct.pack("<IIQ", 9, 0, 2**60)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
    with pytest.raises(cl.InputError, match="its header"):
        cl.load_model(file)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_one_sentence(
    file: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(reading, "find_spec", lambda n: None if n == package else find(n))
    with pytest.raises(cl.InputError, match=rf"needs {package}, .*'cocurve-lab\[gguf\]'"):
        cl.load_model(file)


def test_what_transformers_would_leave_out_is_refused(tmp_path: Path) -> None:
    """A bias that a Llama has no place for, and positions that are scaled."""

    def add_bias(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))

    def add_factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))

    def add_scaling(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")

    for change in (add_bias, add_factors, add_scaling):
        file = tmp_path / f"{change.__name__}.gguf"
        write_gguf(file, change)
        with pytest.raises(cl.InputError, match="leaves out"):
            cl.load_model(file)
