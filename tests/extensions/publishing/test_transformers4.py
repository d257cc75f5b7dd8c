"""Uniform folders in transformers 4: the logits and the tokens of the model that was saved.

`.ci/newest` puts transformers 4.57 into a folder of its own; without it nothing runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cocurve_lab as cl
from helpers.tiny_models import full_logits, tiny_model, tiny_text, word_tokenizer

OLDER = Path(__file__).resolve().parents[3] / ".venv-transformers4"
needs_older = pytest.mark.skipif(
    not OLDER.is_dir(), reason=f"{OLDER.name} with transformers 4 is not there: run `make newest`"
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5] * 2, "long_factor": [2.0, 3.0] * 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", LLAMA3 | {"original_max_position_embeddings": 16}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", LONG),
    "gemma3": ("gemma3_text", {}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
}
READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.save(model(torch.tensor(json.loads(sys.argv[1]))).logits, folder + "/logits.pt")
    words = AutoTokenizer.from_pretrained(folder)("w1 <more> w2")["input_ids"]
    print(json.dumps(words))
"""


def uniform(family: str, rope: dict[str, Any]) -> tuple[Any, cl.Selection]:
    """A model with rotary settings that no class has by default, and a plan for it."""
    model = tiny_model(family, "gqa")
    content = model.config.to_dict()
    whole = content["rope_parameters"].get("full_attention", content["rope_parameters"])
    whole |= {"rope_theta": 77777.0, **rope}
    if "type" in rope:
        del whole["rope_type"]
        content["original_max_position_embeddings"] = 16
    if "sliding_attention" in content["rope_parameters"]:
        content["rope_parameters"]["sliding_attention"]["rope_theta"] = 555.0
    config = type(model.config).from_dict(content)
    torch.manual_seed(0)
    model = type(model)(config).eval().requires_grad_(False)
    units = cl.enumerate_units(model, 4)
    return model, cl.Selection.from_pruned(units, [f"L{layer}.ffn[1]" for layer in range(3)])


@needs_older
def test_transformers_4_computes_the_same(tmp_path: Path) -> None:
    ids, tokenizer = tiny_text(2).input_ids, word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<more>"]})
    wanted: dict[str, Any] = {}
    for name, (family, rope) in CASES.items():
        model, plan = uniform(family, rope)
        small = cl.prune(model, plan)
        cl.save_pruned(small, tmp_path / name, tokenizer=tokenizer)
        wanted[name] = full_logits(small, ids)
        if name == "llama 3":
            cl.prune(model, plan, out=tmp_path / "on disk", tokenizer=tokenizer)
            wanted["on disk"] = wanted[name]
    folders = [str(tmp_path / name) for name in wanted]
    found = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(ids.tolist()), *folders],
        env=os.environ | {"PYTHONPATH": str(OLDER), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    for name, words in zip(wanted, found.stdout.splitlines(), strict=True):
        off = torch.load(tmp_path / name / "logits.pt") - wanted[name]
        assert off.abs().max() < 1e-4, name
        assert json.loads(words) == tokenizer("w1 <more> w2")["input_ids"], name
