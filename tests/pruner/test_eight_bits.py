"""A saved folder in 8 bits: what transformers loads again, and what torchao's rounding is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import FileFormatError, InputError
from cocurve_lab.cli import FAILED, main
from cocurve_lab.extensions.gguf import eight_bits
from cocurve_lab.extensions.gguf.eight_bits import quantize_folder
from helpers.tiny_models import tiny_model
from helpers.wheels import installed

ROOT = Path(__file__).resolve().parents[2]
# in a process of its own, because torchao is not in the environment of the tests
_SCRIPT = """
import sys
import torch
import cocurve_lab as cl
from cocurve_lab.cli import main
from cocurve_lab.extensions.gguf.eight_bits import with_torchao_weights
from transformers import AutoModelForCausalLM

folder, out, kind = sys.argv[1:]
assert main(["quantize", folder, "--out", out, "--to", kind]) == 0
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
plain = cl.load_pruned(folder, device="cpu")
own = with_torchao_weights(plain, kind)
whole, largest = torch.arange(-128, 128.0), 127.5
if kind == "FP8":
    whole, largest = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), 448
    whole = whole[whole.isfinite()]
ids = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    loaded, copied, exact = (m(ids).logits for m in (again, own, plain))
    for name, module in plain.named_modules():  # the nearest of all numbers of a row, the slow way
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and module.weight.numel():
            step = module.weight.abs().amax(1, keepdim=True) / largest
            found = own.get_submodule(name).weight.dequantize()
            apart = (module.weight[..., None] - step[..., None] * whole).abs().amin(-1)
            assert (((found - module.weight).abs() - apart) / step).max() < 0.001, name
            assert apart.max() > 0, name
            module.weight.copy_(found)
    slow = plain(ids).logits
print(float((loaded - copied).abs().max()), float((copied - slow).abs().max()),
      float((copied - exact).abs().max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "INT8"), ("qwen3", "INT8"), ("qwen3", "FP8")]
)
def test_a_folder_with_uneven_and_empty_blocks(family: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=family == "qwen3")
    units = cl.enumerate_units(model, ffn_groups=4)
    lost = {(1, "attention"), (2, "ffn")}
    gone = [
        i
        for i, u in enumerate(units)
        if (u.layer, u.kind) in lost or (u.layer, u.kind, u.index) == (0, "ffn", 1)
    ]
    folder = cl.save_pruned(cl.prune(model, cl.Selection.from_pruned(units, gone)), tmp_path / "a")
    out = tmp_path / "b"
    paths = [str(ROOT), str(installed("torchao"))]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder), str(out), kind],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    again, slow, rounding = map(float, done.stdout.split()[-3:])
    print(f"loaded again {again:.1e}, the slow way {slow:.1e}, unrounded {rounding:.1e}")
    assert again == 0
    assert slow < rounding / 100
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "modeling_cocurve.py"} <= names


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"kind is 'int4'\. Use INT8 or FP8"):
        quantize_folder(tmp_path / "empty", tmp_path / "out", "int4")
    monkeypatch.setattr(eight_bits, "_settings", lambda _: None)
    (tmp_path / "empty").mkdir()
    with pytest.raises((FileFormatError, InputError), match="empty"):
        quantize_folder(tmp_path / "empty", tmp_path / "out")
    units = cl.enumerate_units(model := tiny_model(), ffn_groups=4)
    folder = cl.save_pruned(
        cl.prune(model, cl.Selection.from_pruned(units, [0, 5])), tmp_path / "a"
    )
    code = folder / "modeling_cocurve.py"
    code.write_text(code.read_text() + "\nprint('another')\n")
    with pytest.raises(InputError, match="not the modeling file of this version"):
        quantize_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_torchao(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert main(["quantize", str(tmp_path), "--out", str(tmp_path / "b")]) == FAILED
    assert "pip install cocurve-lab[quantize]" in capsys.readouterr().err
