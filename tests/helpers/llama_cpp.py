"""Stock llama.cpp, to run exported files in: a prebuilt wheel, in a subprocess.

cyllama is a thin wrapper of llama.cpp's own functions. It is fetched in seconds into a folder of
its own, which the subprocess alone sees (COCURVE_WHEELS, default ~/.cache/cocurve-lab/wheels);
version and hashes are those of .ci/apart.txt. Compiling llama.cpp took eleven minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

_SCRIPT = """
import json, sys
import numpy as np
from cyllama.llama import llama_cpp
job = json.load(sys.stdin)

class Model(llama_cpp.LlamaModel):  # this version asks the model for what its vocabulary knows
    n_vocab = property(lambda self: self.get_vocab().n_vocab)

settings = llama_cpp.LlamaContextParams()
settings.n_ctx = settings.n_batch = job["context"]
settings.n_threads = settings.n_threads_batch = 1
settings.flash_attn_type = 0  # off: with it log-probabilities were up to 5e-2 nats from float32's
settings.type_k = settings.type_v = {"f32": 0, "f16": 1}[job["cache"]]
model = Model(job["path"], llama_cpp.LlamaModelParams())
vocabulary = model.get_vocab()
context = llama_cpp.LlamaContext(model, settings)

def logits_of(ids, start=0):
    if not start:
        context.kv_cache_clear()
    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for place, token in enumerate(ids):
        batch.add(token, start + place, [0], True)
    context.decode(batch)
    return np.array([context.get_logits_ith(place) for place in range(len(ids))], dtype=np.float64)

def greedy(ids, last):
    for place in range(job["greedy"]):
        token = int(np.argmax(last))
        yield token
        last = logits_of([token], len(ids) + place)[-1]

def continued(text):
    ids, found = vocabulary.tokenize(text, True, True), []
    for token in greedy(ids, logits_of(ids)[-1]):
        if vocabulary.is_eog(token):
            break
        found.append(token)
    return vocabulary.detokenize(found)

out = {}
for index, ids in enumerate(job["prompts"]):
    out[f"logits{index}"] = logits_of(ids)
    out[f"greedy{index}"] = np.array(list(greedy(ids, out[f"logits{index}"][-1])), dtype=np.int64)
tokens = [vocabulary.tokenize(text, True, job["special"]) for text in job["texts"]]
texts = [continued(text) for text in job["continue"]]
out["said"] = json.dumps({"tokens": tokens, "texts": texts})
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
    """What to ask.

    Attributes:
        prompts, texts, continued: see `Answer`.
        greedy: ids to add.
        context: of the model.
        cache: type of the KV cache, "f32" or llama.cpp's default "f16".
        special: read special tokens from `texts`.
    """

    prompts: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    continued: Sequence[str] = ()
    greedy: int = 0
    context: int = 64
    cache: str = "f32"
    special: bool = False


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
        "special": job.special,
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(content),
        env=os.environ | {"PYTHONPATH": str(installed("cyllama"))},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
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


# Packages that the environment of the tests lacks, for subprocesses -------------------------------


LOCKED = Path(__file__).resolve().parents[2] / ".ci" / "apart.txt"
WHEELS = Path(os.environ.get("COCURVE_WHEELS") or "~/.cache/cocurve-lab/wheels").expanduser()
_UNREACHABLE = ("No matching distribution", "Could not find a version", "connection", "timed out")


def installed(name: str) -> Path:
    """A folder with a package, fetched where it is not there yet; skips where it cannot be."""
    found = re.search(rf"^{name}==(\S+) (?:.*\\\n)+.*$", LOCKED.read_text(), re.MULTILINE)
    assert found, f"{name} is not in {LOCKED}"
    requirement, version = found[0], found[1]
    folder = WHEELS / f"{name}-{version}-py{sys.version_info[0]}{sys.version_info[1]}"
    if (folder / name).is_dir():
        return folder
    WHEELS.mkdir(parents=True, exist_ok=True)
    with open(WHEELS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the test processes fetches it, the others wait
        if not (folder / name).is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _fetch(partial, name, requirement)
            partial.rename(folder)
    return folder


def _fetch(folder: Path, name: str, requirement: str) -> None:
    file = folder.with_suffix(".txt")
    file.write_text(requirement + "\n")  # pip reads hashes from files only
    options = ["--require-hashes", "--only-binary=:all:", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "-r", str(file)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
    )
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip(f"no wheel of {name} can be had: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
