"""GGUF files in fewer bits: what llama.cpp's quantizer makes of layers of different widths."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.base.errors import FileFormatError, InputError
from cocurve_lab.cli import DONE, FAILED, main
from cocurve_lab.extensions.gguf import quantizing
from cocurve_lab.extensions.gguf.gguf import export_gguf
from cocurve_lab.extensions.gguf.quantizing import quantize_gguf
from helpers.tiny_models import tiny_model
from helpers.wheels import installed

GGUFReader = pytest.importorskip("gguf").GGUFReader

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


@pytest.fixture
def quantizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's quantizer from the tests' own folder, seen by its process alone."""
    folder = str(installed("cyllama"))
    monkeypatch.setattr(quantizing.shutil, "which", lambda _: None)
    monkeypatch.setattr(quantizing, "find_spec", lambda _: object())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


def pruned_wide(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Rows of 256 in and out of the layer, but FFN widths of 512, 384 and 128 + 31."""
    model = tiny_model(family, **WIDE, **changes)
    units = cl.enumerate_units(model, ffn_groups=16)
    widths = {1: 12, 2: 4}
    gone = [
        i for i, u in enumerate(units) if u.kind == "ffn" and u.index >= widths.get(u.layer, 16)
    ]
    return cl.prune(model, cl.Selection.from_pruned(units, gone))


@pytest.mark.slow
@pytest.mark.usefixtures("quantizer")
def test_rows_of_other_lengths_fall_back_and_are_counted(tmp_path: Path) -> None:
    model = pruned_wide()
    whole = export_gguf(model, None, tmp_path / "whole.gguf", dtype="f32")
    small = quantize_gguf(whole.path, tmp_path / "small.gguf", "Q4_K_M")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(small.path).tensors}
    assert [kinds[f"blk.{layer}.ffn_gate.weight"] for layer in range(3)] == ["Q4_K"] * 3
    assert kinds["blk.0.ffn_down.weight"] in ("Q4_K", "Q6_K")
    others = [kinds[f"blk.{layer}.ffn_down.weight"] for layer in (1, 2)]  # 384 and 128 columns
    assert not any(kind.endswith("_K") for kind in others)
    assert small.notes[-1].startswith(f"2 of {len(kinds)} tensors have rows that are no multiple")
    assert all(kind in small.notes[-1] for kind in others)
    assert sum(small.tensors.values()) == len(kinds)
    assert small.bytes == small.path.stat().st_size < whole.bytes / 3
    assert small.dtype == "Q4_K_M"


@pytest.mark.usefixtures("quantizer")
def test_bad_input(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    with pytest.raises(InputError):
        quantize_gguf(source, tmp_path / "out.gguf", "Q9")
    with pytest.raises(InputError):
        quantize_gguf(source, tmp_path / "out.gguf", "Q8_0")
    with pytest.raises(InputError):
        quantize_gguf(source, tmp_path / "out.gguf")
    source.write_bytes(b"no model")
    with pytest.raises(InputError):
        quantize_gguf(source, source, overwrite=True)
    (tmp_path / "out.gguf").write_bytes(b"precious")
    with pytest.raises(InputError):
        quantize_gguf(source, tmp_path / "out.gguf")
    with pytest.raises(FileFormatError):
        quantize_gguf(source, tmp_path / "out.gguf", overwrite=True)
    assert (tmp_path / "out.gguf").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "source.gguf"]


def test_without_a_quantizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantizing.shutil, "which", lambda _: None)
    monkeypatch.setattr(quantizing, "find_spec", lambda _: None)
    with pytest.raises(InputError):
        quantize_gguf(tmp_path / "a", tmp_path / "b")


def test_the_program_is_called_with_the_name_of_the_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for llama-quantize that notes its arguments and copies the file."""
    program = tmp_path / "llama-quantize"
    program.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        f"open({str(tmp_path / 'said')!r}, 'w').write(sys.argv[3])\n"
        "shutil.copyfile(sys.argv[1], sys.argv[2])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    whole = export_gguf(tiny_model(), None, tmp_path / "whole.gguf", dtype="f32")
    copied = quantize_gguf(whole.path, tmp_path / "small.gguf", "Q5_K_S")
    assert (tmp_path / "said").read_text() == "Q5_K_S"
    assert copied.tensors == whole.tensors
    assert "other types: 23 F32" in copied.notes[-1]  # rows of 32 and 42 are no 256


@pytest.mark.slow
@pytest.mark.usefixtures("quantizer")
def test_the_command_quantizes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = cl.save_pruned(pruned_wide(), tmp_path / "small"), tmp_path / "out" / "m.gguf"
    command = ["export", str(folder), "--gguf", str(path), "--no-tokenizer", "--quantize"]
    assert main([*command, "Q3_K_M"]) == DONE
    assert "Q3_K" in capsys.readouterr().out
    assert [file.name for file in path.parent.iterdir()] == ["m.gguf"]
    assert main([*command, "Q4_K_M"]) == FAILED
    assert "not overwritten" in capsys.readouterr().err
    path.unlink()
    assert main([*command, "Q9"]) == FAILED
    assert "Use one of Q6_K" in capsys.readouterr().err
    assert main([*command, "Q4_K_M", "--dtype", "q8_0"]) == FAILED
    assert not path.exists()
