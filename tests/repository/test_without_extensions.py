"""The core alone: without the folder of extensions the paper's flow still runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cocurve_lab"
FLOW = """
import sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import cocurve_lab as cl

folder = Path(sys.argv[1])
assert Path(cl.__file__).is_relative_to(folder)
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=42, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=97, max_position_embeddings=64,
)
model = LlamaForCausalLM(config).eval()
text = cl.CalibrationSet(torch.randint(0, 97, (3, 20)))
units = cl.enumerate_units(model, 4)
found = cl.estimate_curvature(model, units, text, 16, progress=False)
found = cl.Curvature.load(found.save(folder / "H.pkl"))
plan = cl.solve_greedy(found, 0.25)
assert cl.pruning_risk(model, plan, text) > 0
pruned = cl.prune(model, plan, verify=text)
again = cl.load_pruned(cl.save_pruned(pruned, folder / "small"), device="cpu")
assert torch.equal(again(text.input_ids).logits, pruned(text.input_ids).logits)
try:
    cl.prune(model, plan, out=folder / "streamed")
except cl.InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_flow_runs_without_the_extensions(tmp_path: Path) -> None:
    unwanted = shutil.ignore_patterns("extensions", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "cocurve_lab", ignore=unwanted)
    command = [sys.executable, "-c", FLOW, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "extensions" in done.stdout
