"""Memory of builds, plans and cuts: what is estimated holds, and a quarter of the weights suffices.

Limits and peaks are a process's own, so each run has one. What is imported late, and the thread
that reads, are there before it starts. Files mapped into memory do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.models.identity import fingerprint_tensor
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits and counts like this"),
]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512}


def in_a_process(script: str, folder: Path, *more: str) -> str:
    """What a script prints on the model of a folder."""
    command = [sys.executable, "-c", script, str(Path(__file__).parents[2]), str(folder), *more]
    # glibc keeps freed blocks below a size that grows to 32 MB: much here, nothing of a real model
    place = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"}
    place["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(folder: Path, **changes: Any) -> PreTrainedModel:
    model = tiny_model("llama", "mqa", initializer_range=0.02, **SIZES, **changes)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return model


LIMITED = """
import resource, sys, tempfile
sys.path.insert(0, sys.argv[1])
import psutil, torch
import cocurve_lab as cl
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import fingerprint_tensor
from cocurve_lab.models.layers import present
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.pruner.saving import open_pruned
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer
torch.set_num_threads(1)
def measured(model, out):
    units = cl.enumerate_units(model, 1)
    plans = [cl.Selection.from_pruned(units, [at, at + 2]) for at in range(4)]
    curvature = cl.estimate_curvature(model, units, tiny_text(1, 17), 16, progress=False)
    found = cl.measure_plans(model, plans, tiny_text(1, 17)).mean
    small = describe(cl.load_pruned(cl.prune(model, plans[1], out=out), stream=True))
    with present(small, 1):
        marks = [fingerprint_tensor(w) for _, w in sorted(small.layers[1].named_parameters())]
    stored = open_model(model.config._name_or_path)
    cl.export_gguf(open_pruned(cl.prune(stored, plans[1], out=out + "2")), None, out + ".gguf")
    return float(curvature.matrix.trace()), found, marks
with tempfile.TemporaryDirectory() as folder:
    tiny_model("llama", "mqa").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    measured(cl.load_model(folder, device="cpu", stream=True)[0], folder + "/small")
taken, weights = psutil.Process().memory_info().data, int(sys.argv[4])
# transformers maps all files while it loads, which would count; nothing of them is mapped later
model, _ = cl.load_model(sys.argv[2], device="cpu", stream=True)
resource.setrlimit(resource.RLIMIT_DATA, (taken + weights // 4, resource.RLIM_INFINITY))
found = measured(model, sys.argv[3])
try:
    whole, _ = cl.load_model(sys.argv[2])
    copies = [weight.clone() for _, weight in sorted(whole.named_parameters())]
except Exception as error:
    print("too large:", type(error).__name__)
print("found", found[0], *found[1])
print("marks", *found[2])
"""


def test_a_model_four_times_larger_than_the_memory_goes_through(tmp_path: Path) -> None:
    """One row of H, KL of four plans, prune on both roads, a GGUF, and reload of one layer."""
    model = saved(tmp_path / "model", layers=48)  # 180 MB
    weights = sum(weight.nbytes for weight in model.parameters())
    said = in_a_process(LIMITED, tmp_path / "model", str(tmp_path / "small"), str(weights))
    assert "too large" in said
    found = [float(word) for word in said.split("found ")[1].split("marks")[0].split()]
    units, text = cl.enumerate_units(model, 1), tiny_text(1, 17)
    plans = [cl.Selection.from_pruned(units, [at, at + 2]) for at in range(4)]
    trace = cl.estimate_curvature(model, units, text, 16, progress=False).matrix.trace()
    expected = [trace, *cl.measure_plans(model, plans, text, progress=False).mean]
    assert np.allclose(found, expected, rtol=1e-5)
    layer: Any = cl.prune(model, plans[1]).get_submodule("model.layers.1")
    marks = [fingerprint_tensor(weight) for _, weight in sorted(layer.named_parameters())]
    assert said.split("marks ")[1].split() == marks
    written = (tmp_path / name / "model.safetensors" for name in ("small", "small2"))
    assert all(file.stat().st_size > weights / 2 for file in written)


WATCHED = """
import json, sys, tempfile, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import psutil, torch
import cocurve_lab as cl
from cocurve_lab.estimator.batches import Room
from cocurve_lab.models.architectures import describe
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer
torch.set_num_threads(1)
load = {"stream": False, "dtype": "float32", "attn_implementation": "sdpa"}
load |= json.loads(sys.argv[3])
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
def build(place, tokens):
    model, _ = cl.load_model(place, device="cpu", **load)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # else it is a part of a mapped file
    units, text = cl.enumerate_units(model, 4), tiny_text(1, tokens)
    found = cl.estimate_curvature(model, units, text, 256, progress=False)
    batch = found.provenance["runtime"]["units_per_batch"]
    block = len(units) if load["stream"] else 0
    needed = Room.of(describe(model), units, text, 256).needed(batch, block)
    return needed + sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
with tempfile.TemporaryDirectory() as folder:
    tiny_model("llama", "mqa").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    build(folder, 17)
before, most, over = anonymous(), [0], threading.Event()
def watch():
    while not over.wait(0.002):
        most[0] = max(most[0], anonymous() - before)
thread = threading.Thread(target=watch)
thread.start()
needed = build(sys.argv[2], 128)
over.set()
thread.join()
print(json.dumps([most[0], needed]))
"""


@pytest.mark.parametrize(
    "options",
    [{}, {"stream": True, "dtype": "bfloat16"}, {"attn_implementation": "eager"}],
    ids=str,
)
def test_a_build_keeps_within_its_estimate(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, layers=8, max_position_embeddings=128)
    said = in_a_process(WATCHED, tmp_path, json.dumps(options))
    most, needed = json.loads(said.splitlines()[-1])
    assert 0.4 * needed < most < 1.2 * needed, most / needed
