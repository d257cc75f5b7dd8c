"""Stock llama.cpp, to run exported files in: built once by pip, cached, run in a subprocess.

The environment of the tests is not touched: llama-cpp-python is installed into a folder of its own
and is seen by the subprocess alone. COCURVE_WHEELS says where the wheel is kept (default
~/.cache/cocurve-lab/wheels). Building it took 12 minutes on two cores with other work on them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

VERSION = "0.3.36"
WHEELS = Path(os.environ.get("COCURVE_WHEELS") or "~/.cache/cocurve-lab/wheels").expanduser()
_UNREACHABLE = ("No matching distribution", "Could not find a version", "connection", "timed out")
_SCRIPT = """
import json, sys
import numpy as np
from llama_cpp import Llama
job = json.load(sys.stdin)
cache = {} if job["cache"] == "f16" else {"type_k": 0, "type_v": 0}
model = Llama(job["path"], n_ctx=job["context"], n_threads=1, n_threads_batch=1, logits_all=True,
              verbose=False, **cache)
out = {}
for index, ids in enumerate(job["prompts"]):
    model.reset()
    model.eval(ids)
    out[f"logits{index}"] = np.array(model.scores[: len(ids)], dtype=np.float64)
    more = []
    for _ in range(job["greedy"]):
        more.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(more[-1:])
    out[f"greedy{index}"] = np.array(more, dtype=np.int64)
tokens = [model.tokenize(t.encode(), add_bos=True, special=False) for t in job["texts"]]
words = [model.create_completion(t, max_tokens=job["greedy"], temperature=0)["choices"][0]["text"]
         for t in job["continue"]]
out["said"] = json.dumps({"tokens": tokens, "texts": words})
np.savez(job["out"], **out)
"""


@dataclass(frozen=True)
class Answer:
    """What llama.cpp computed.

    Attributes:
        log_probabilities: of every next token, [T, V] float64 per prompt, nats.
        greedy: ids it continues each prompt with.
        tokens: ids of each text, with whatever the file says is added at its start.
        texts: its greedy continuations, as text.
    """

    log_probabilities: list[np.ndarray]
    greedy: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]


@dataclass(frozen=True)
class Job:
    """What to ask: `cache` is the type of the KV cache, "f32" or llama.cpp's default "f16"."""

    prompts: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    continued: Sequence[str] = ()
    greedy: int = 0
    context: int = 64
    cache: str = "f32"


def run_llama_cpp(path: Path, job: Job) -> Answer:
    """Load a GGUF file in stock llama.cpp and ask it; fails with its output if it cannot."""
    out = path.with_suffix(".npz")
    content = {
        "path": str(path),
        "out": str(out),
        "prompts": [list(map(int, ids)) for ids in job.prompts],
        "texts": list(job.texts),
        "continue": list(job.continued),
        "greedy": job.greedy,
        "context": job.context,
        "cache": job.cache,
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(content),
        env=os.environ | {"PYTHONPATH": str(installed())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"llama.cpp: exit {done.returncode}\n{done.stderr[-3000:]}"
    with np.load(out) as found:
        said = json.loads(str(found["said"]))
        logits = [found[f"logits{index}"] for index in range(len(job.prompts))]
        greedy = [found[f"greedy{index}"].tolist() for index in range(len(job.prompts))]
    return Answer([log_softmax(z) for z in logits], greedy, said["tokens"], said["texts"])


def largest_difference(answer: Answer, expected: list[np.ndarray]) -> float:
    """Of a log-probability, in nats; `expected` holds those of transformers, [T, V] per prompt."""
    pairs = zip(answer.log_probabilities, expected, strict=True)
    return max(float(np.abs(found - wanted).max()) for found, wanted in pairs)


def mean_kl(answer: Answer, expected: list[np.ndarray]) -> float:
    """KL(transformers || llama.cpp), nats per token."""
    found, wanted = np.concatenate(answer.log_probabilities), np.concatenate(expected)
    return float((np.exp(wanted) * (wanted - found)).sum(axis=-1).mean())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def installed() -> Path:
    """A folder with llama-cpp-python, built where it is not there yet; skips where it cannot be."""
    folder = WHEELS / f"llama-cpp-python-{VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
    if (folder / "llama_cpp").is_dir():
        return folder
    WHEELS.mkdir(parents=True, exist_ok=True)
    with open(WHEELS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the test processes builds, the others wait
        if not (folder / "llama_cpp").is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _pip("install", "--no-deps", "--target", str(partial), str(_wheel()), "diskcache")
            partial.rename(folder)
    return folder


def _wheel() -> Path:
    pattern = f"llama_cpp_python-{VERSION}-*.whl"
    if not list(WHEELS.glob(pattern)):
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("no C++ compiler to build llama.cpp with")
        _pip("wheel", "--no-deps", "-w", str(WHEELS), f"llama-cpp-python=={VERSION}")
    return next(WHEELS.glob(pattern))


def _pip(*arguments: str) -> None:
    flags = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    built = "Failed building wheel" not in done.stderr
    if done.returncode and built and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
