"""Builds of H on a model in memory, offloaded by accelerate and streamed from its files.

Random weights in two sizes. Every build runs in a process of its own, the three in turn, so that
the ratio of times is one of neighbors. Prints a Markdown table:

- time: of the build, divided by that of the model in memory in the same round; median and range.
- weights read: bytes fetched in the build for each row of text, in gigabytes. The check of the head
  that comes before the first row is not counted.
- peak memory: the most anonymous memory of the process during the build, beyond what it had when
  everything was imported. Files that are mapped into memory do not count; weights in memory do.

With --against, a model in memory is built by this checkout and by another one instead, in turn, at
several row lengths. It prints the time of this one over that of the other, and fails unless both
give the same bits of H. A checkout is made with `git worktree add OTHER COMMIT`; the commit before
layers were streamed is 1938841^.

    python tests/benchmarks/bench_streaming.py
    python tests/benchmarks/bench_streaming.py --quick     # for checking the script
    python tests/benchmarks/bench_streaming.py --against OTHER
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from helpers.tiny_models import word_tokenizer

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
COLUMNS = ("model", "weights", "way", "time", "weights read per row", "peak memory")
ROWS, TOKENS, GROUPS, TOP_R = 2, 32, 2, 64


def main() -> None:
    options = parser().parse_args()
    if options.child is not None:
        print(json.dumps(child(*options.child)))
        return
    if options.built is not None:
        print(json.dumps(built(*options.built)))
        return
    if options.against is not None:
        compare(options)
        return
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            weights = save(size, folder)
            rounds = [{way: measured(way, folder) for way in WAYS} for _ in range(options.repeats)]
        for way, words in WAYS.items():
            ratios = sorted(found[way]["s"] / found["resident"]["s"] for found in rounds)
            spread = f"{median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            read = {found[way]["read"] for found in rounds}
            assert len(read) == 1, read  # it does not depend on the round
            gigabytes = f"{read.pop() / ROWS / 1e9:.3f} GB" if way != "resident" else "none"
            peak = max(found[way]["peak"] for found in rounds)
            cells = (
                *(size, f"{weights / 1e6:.0f} MB", words),
                *("1" if way == "resident" else spread, gigabytes),
                f"{peak / 1e6:.0f} MB",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


def save(size: str, folder: str, tokens: int = TOKENS) -> int:
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
        max_position_embeddings=tokens,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return sum(weight.nbytes for weight in model.parameters())


def measured(way: str, folder: str) -> dict[str, float]:
    """What a process of its own measures: seconds of the build, bytes read, bytes of memory."""
    command = [sys.executable, __file__, "--child", way, folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(way: str, folder: str) -> dict[str, float]:
    import accelerate
    import psutil  # noqa: F401, imported now because a build would import it

    from cocurve_lab.models.architectures import describe
    from cocurve_lab.models.layers import source_of
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
    stream, layers = source_of(model), len(describe(model).layers)
    assert (stream is None) == (way == "resident")
    assert stream is None or len(stream.layers) == layers
    require_known_head(model, ids[:1, :8])
    read = 0 if stream is None else stream.bytes_read
    with Peak() as peak:
        begun = time.perf_counter()
        cl.estimate_curvature(model, units, cl.CalibrationSet(ids), TOP_R, progress=False)
        seconds = time.perf_counter() - begun
    read = 0 if stream is None else stream.bytes_read - read
    return {"s": seconds, "read": read, "peak": peak.most - before}


# Against another checkout -------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    """Print the time of this checkout over that of another, for each size and row length."""
    print("| model | tokens per row | new / old |\n|---|---|---|")
    here = Path(__file__).resolve().parents[2]
    places = {"new": here, "old": options.against.resolve()}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            save(size, folder, max(options.tokens))
            for tokens in options.tokens:
                ratios = []
                for round_ in range(options.repeats):
                    order = list(places) if round_ % 2 else list(places)[::-1]
                    found = {way: built_by(places[way], folder, tokens) for way in order}
                    assert found["new"]["H"] == found["old"]["H"], "the bits of H differ"
                    ratios.append(found["new"]["s"] / found["old"]["s"])
                ratios.sort()
                spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"| {size} | {tokens} | {spread} |", flush=True)


def built_by(checkout: Path, folder: str, tokens: int) -> dict[str, Any]:
    """What a process with the library of a checkout measures: seconds, and a mark of H."""
    if not (checkout / "cocurve_lab" / "__init__.py").is_file():
        raise SystemExit(f"{checkout} is no checkout of the lab: it has no cocurve_lab")
    command = [sys.executable, __file__, "--built", folder, str(tokens)]
    place = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=place)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["library"]).is_relative_to(checkout), found["library"]
    return found


def built(folder: str, tokens: str) -> dict[str, Any]:
    """The fastest of three builds; only with functions that both checkouts have."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, _ = cl.load_model(folder, device="cpu")
    units = cl.enumerate_units(model, GROUPS)
    ids = torch.randint(0, 97, (ROWS, int(tokens)), generator=torch.Generator().manual_seed(0))
    options = cl.BuildOptions(units_per_batch=8)  # the batch decides the last bits
    seconds, marks = [], set()
    for _ in range(4):  # the first one warms up
        begun = time.perf_counter()
        found = cl.estimate_curvature(
            model, units, cl.CalibrationSet(ids), TOP_R, progress=False, options=options
        )
        seconds.append(time.perf_counter() - begun)
        marks.add(hashlib.sha256(found.matrix.tobytes()).hexdigest())
    assert len(marks) == 1, "one process gave several H"
    return {"s": min(seconds[1:]), "H": marks.pop(), "library": cl.__file__}


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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--sizes", nargs="+", default=["23M", "176M"], choices=SIZES)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--against", metavar="OTHER", type=Path, help="another checkout")
    made.add_argument(
        "--tokens", nargs="+", type=int, default=[64, 128, 256], help="with --against"
    )
    made.add_argument("--quick", action="store_const", const=["tiny"], dest="sizes")
    made.add_argument("--built", nargs=2, metavar=("FOLDER", "TOKENS"), help=argparse.SUPPRESS)
    made.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    main()
