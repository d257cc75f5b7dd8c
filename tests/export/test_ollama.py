"""The Modelfile beside a GGUF file: only what means the same in Ollama."""

from __future__ import annotations

from pathlib import Path

import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import InputError
from cocurve_lab.cli import DONE, FAILED, main
from cocurve_lab.extensions.gguf.ollama import write_modelfile
from helpers.bpe import SIZE, byte_level
from helpers.tiny_models import tiny_model


def test_stops_and_sampling(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "small.gguf", byte_level("llama-bpe", bos=True)
    path.write_bytes(b"a model")
    model, vocabulary = tiny_model(vocab_size=SIZE), tokenizer.get_vocab()
    ordinary = next(i for i in vocabulary.values() if i not in tokenizer.added_tokens_decoder)
    tokenizer.add_special_tokens({"extra_special_tokens": ['<"end">', "<end\t>"]})
    added = tokenizer.convert_tokens_to_ids(['<"end">', "<end\t>"])
    model.generation_config.eos_token_id = [vocabulary["<|end|>"], ordinary, *added]
    written = write_modelfile(path, model, tokenizer)
    assert written == tmp_path / "small.Modelfile"
    assert written.read_text() == 'FROM ./small.gguf\nPARAMETER stop "<|end|>"\n'
    with pytest.raises(InputError, match="overwrite=True"):
        write_modelfile(path, model, tokenizer)
    settings = model.generation_config
    settings.do_sample, settings.temperature, settings.top_k = True, 0.6, 20
    write_modelfile(path, model, None, overwrite=True)
    assert written.read_text().splitlines() == [
        "FROM ./small.gguf",
        "PARAMETER temperature 0.6",
        "PARAMETER top_k 20",
    ]
    with pytest.raises(InputError, match="there is no file"):
        write_modelfile(tmp_path / "none.gguf", model, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    units = cl.enumerate_units(model := tiny_model(), ffn_groups=4)
    folder = cl.save_pruned(cl.prune(model, cl.Selection.from_pruned(units, [0])), tmp_path / "a")
    path = tmp_path / "m.gguf"
    command = ["export", str(folder), "--gguf", str(path), "--no-tokenizer", "--modelfile"]
    assert main(command) == DONE
    assert f"ollama create NAME -f {tmp_path / 'm.Modelfile'}" in capsys.readouterr().out
    assert (tmp_path / "m.Modelfile").read_text() == "FROM ./m.gguf\n"
    path.unlink()
    assert main(command) == FAILED
    assert "m.Modelfile exists" in capsys.readouterr().err
    assert not path.exists()
