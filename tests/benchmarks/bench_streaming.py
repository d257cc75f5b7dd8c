"""Builds of H on a model in memory, offloaded by accelerate and streamed from its files.

Random weights in two sizes. Every build runs in a process of its own, the three in turn, so that
the ratio of times is one of neighbors. Prints a Markdown table:

- time: of the build, divided by that of the model in memory in the same round; median and range.
- weights read: bytes fetched in the build for each row of text, in gigabytes. The check of the head
  that comes before the first row is not counted.
- peak memory: the most anonymous memory of the process during the build, beyond what it had when
  everything was imported. Files that are mapped into memory do not count; weights in memory do.

    python tests/benchmarks/bench_streaming.py
    python tests/benchmarks/bench_streaming.py --quick     # for checking the script
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from argparse import SUPPRESS
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from helpers.benchmarks import arguments, flag, head, in_turn, row, seconds, spread
from helpers.tiny_models import write_model

WAYS = {
    "resident": "in memory",
    "offloaded": "accelerate's `disk_offload`",
    "streamed": "`stream=True`",
}
SIZES = {  # layers, hidden size, FFN width
    "tiny": (3, 64, 176),
    "23M": (8, 512, 1408),
    "176M": (16, 1024, 2816),
}
ROWS, TOKENS, GROUPS, TOP_R = 2, 32, 2, 64


def main() -> None:
    hidden = {"nargs": 2, "help": SUPPRESS}
    options = arguments(
        __doc__,
        {"sizes": ["tiny"]},
        sizes=flag(["23M", "176M"], choices=SIZES),
        repeats=3,
        child=flag(**hidden),
    )
    if options.child is not None:
        print(json.dumps(child(*options.child)))
        return
    head("model", "weights", "way", "time", "weights read per row", "peak memory")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            weights = save(size, folder)
            found = in_turn({way: partial(measured, way, folder) for way in WAYS}, options.repeats)
        for way, words in WAYS.items():
            read = {one["read"] for one in found[way]}
            assert len(read) == 1, read  # it does not depend on the round
            row(
                *(size, f"{weights / 1e6:.0f} MB", words),
                "1" if way == "resident" else spread(ratios(found[way], found["resident"]), "x"),
                "none" if way == "resident" else f"{read.pop() / ROWS / 1e9:.3f} GB",
                f"{max(one['peak'] for one in found[way]) / 1e6:.0f} MB",
            )


def ratios(these: list[dict[str, Any]], those: list[dict[str, Any]]) -> list[float]:
    """Seconds over seconds, round by round."""
    return [one["s"] / other["s"] for one, other in zip(these, those, strict=True)]


def save(size: str, folder: str) -> int:
    """Save a random model in float32; return the bytes of its weights."""
    layers, hidden, width = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    model = LlamaForCausalLM(config)
    write_model(folder, model)
    return sum(weight.nbytes for weight in model.parameters())


def measured(way: str, folder: str) -> dict[str, Any]:
    """What a process of its own measures: seconds of the build, bytes read, bytes of memory."""
    command = [sys.executable, __file__, "--child", way, folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(way: str, folder: str) -> dict[str, float]:
    import accelerate
    import psutil  # noqa: F401, imported now because a build would import it

    from cocurve_lab.models.architectures import describe
    from cocurve_lab.models.layers import weights_of
    from cocurve_lab.models.runtime import require_known_head

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    before = anonymous()
    model, _ = cl.load_model(folder, device="cpu", stream=way == "streamed")
    for weight in model.parameters() if way == "resident" else ():
        weight.data = weight.data.clone()  # else it is a part of a mapped file
    if way == "offloaded":
        model = accelerate.disk_offload(model, tempfile.mkdtemp(dir=folder), torch.device("cpu"))
    units = cl.enumerate_units(model, GROUPS)
    ids = torch.randint(0, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    stream = None if way == "resident" else weights_of(model)
    assert stream is None or len(stream.layers) == len(describe(model).layers)
    require_known_head(model, ids[:1, :8])
    read = 0 if stream is None else stream.bytes_read
    inputs = (model, units, cl.CalibrationSet(ids), TOP_R)
    with Peak() as peak:
        took, _ = seconds(lambda: cl.estimate_curvature(*inputs, progress=False))
    read = 0 if stream is None else stream.bytes_read - read
    return {"s": took, "read": read, "peak": peak.most - before}


class Peak:
    """The most anonymous memory of this process while the context is open, in bytes."""

    def __enter__(self) -> Peak:
        self.most, self._over = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def anonymous() -> int:
    """Anonymous memory of this process in bytes, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
