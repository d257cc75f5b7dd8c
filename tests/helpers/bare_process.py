"""Runs bare.py, which reads saved folders in a process where cocurve_lab cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

BARE = Path(__file__).with_name("bare.py")


@torch.no_grad()
def save_expected(model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path) -> None:
    """Beside a folder, for bare.py: `inputs`, [N, T] each, and what `model` makes of them."""
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    made = model.generate(**inputs, **settings)
    logits = model(**inputs).logits
    save_file(inputs | {"logits": logits, "generated": made}, f"{folder}.expected.safetensors")


def run_bare(
    action: str, folders: list[Path], home: Path, timeout: float | None = 600
) -> dict[str, Any]:
    """What an action of bare.py saw of each folder, by name; fails with its output if it cannot.

    `home` stands in for the caches of the hub and is the working folder.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PY", "HF_"))}
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-I", str(BARE), action, *map(str, folders)],
        env=kept | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        cwd=home,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
