"""Confined runs of code that a model wrote, each in a process that can do as little as possible.

What confines is bubblewrap (`confinement.py`). `runner.py` runs one program inside. A program has
passed if its process ends with exit status 0 and has written a random token, which the runner
writes after the last line of the tests.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from ..base.arguments import as_float
from ..base.errors import InputError
from ..base.progress import Bar
from .confinement import bwrap, refusals
from .runner import WORDS

# what the report says of every pass@1
WORTH = (
    "programs ran in bubblewrap, without network; program and tests share an interpreter, so a "
    "program that is written to deceive can pass without solving its task"
)
RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: wall-clock time (and one second more of processor time).
        memory_bytes: address space of each process, and resident memory of all its processes
            together, which is looked at ten times a second.
        file_bytes: size of one file.
        processes: processes and threads at one time, itself included. Only the program's own
            count, whatever else runs (as an ordinary user, from Linux 5.14 on).
        folder_bytes: size of all its files together. Empty files and folders have no size: only
            time limits their number.
    """

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 8
    folder_bytes: int = 1 << 24

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not as_float(value, name) > 0:
                raise InputError(f"{name} is {value}. Give a limit above 0.")


@dataclass(frozen=True)
class Outcome:
    """The end of one program.

    Attributes:
        status: "passed" if it ran to its last line; "failed" if it raised or left early; "stopped"
            if it was ended for its time or memory.
        detail: the error, in at most 300 bytes of the program's own words, or the reason it was
            stopped.
    """

    status: Literal["passed", "failed", "stopped"]
    detail: str


def run_programs(
    programs: Sequence[str],
    *,
    allow_code_execution: bool = False,
    limits: Limits | None = None,
    progress: bool = True,
) -> list[Outcome]:
    """Run Python programs, each in a subprocess of its own, and say which ran to their last line.

    bubblewrap confines them: a program sees the standard library, an empty environment, an empty
    folder, and no network. Its output is discarded. Any error of one program is its outcome.

    A program and its tests share an interpreter: one that is written to deceive can pass without
    solving its task, for example by changing what its tests call.

    Args:
        programs: Python source, each with its tests at its end; one passes by running to its last
            line.
        allow_code_execution: must be True.
        limits: time, memory, files and processes; None takes the defaults of `Limits`.
        progress: show a progress bar.

    Returns:
        One outcome per program, in their order.
    """
    require_permission(allow_code_execution)
    limits = limits or Limits()
    require_confinement(limits)
    return [_run(each, limits) for each in Bar(programs, desc="programs", disable=not progress)]


def require_permission(allow_code_execution: bool) -> None:
    """Raise InputError unless the caller allowed code to be run."""
    if allow_code_execution is not True:
        raise InputError(
            "pass@1 runs code that the model wrote, and allow_code_execution is "
            f"{allow_code_execution!r}. Pass allow_code_execution=True to run it in a confined "
            "subprocess, or omit the code tasks."
        )


def require_confinement(limits: Limits | None = None) -> None:
    """Raise InputError where a program of one line does not run in bwrap within the limits."""
    problem = why_not_confined(limits)
    if problem is not None:
        raise InputError(
            f"{problem}, so no program that the model wrote is run. Install bubblewrap on Linux "
            "(apt-get install bubblewrap), or widen the limits."
        )


def why_not_confined(limits: Limits | None = None) -> str | None:
    """Return why no program can be run in bwrap here; None where one can."""
    if shutil.which("bwrap") is None:
        return "bwrap (bubblewrap) is not on the PATH"
    trial = _run("import heapq, math, re, string, collections", limits or Limits(seconds=30))
    if trial.status == "passed":
        return None
    return f"in bwrap (bubblewrap) a program of one import line {trial.status} ({trial.detail})"


def _run(program: str, limits: Limits) -> Outcome:
    token = secrets.token_hex(16).encode()
    # a user of root's whom nobody else is, so that one program's count of processes is its own
    user = 0 if os.geteuid() else (1 << 30) + secrets.randbelow(1 << 30)
    numbers = [
        user,
        int(limits.seconds) + 1,
        int(limits.memory_bytes),
        int(limits.file_bytes),
        int(limits.processes) + (0 if user else 1),  # one of bwrap's own, by the same user
    ]
    with (
        tempfile.TemporaryFile() as calls,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as said,  # a file, because the kernel limits its size
    ):
        calls.write(refusals())
        calls.seek(0)
        given.write(token + b"\n" + program.encode("utf-8", "surrogatepass"))
        given.seek(0)
        process = subprocess.Popen(
            [
                *bwrap(calls.fileno(), int(limits.folder_bytes), RUNNER),
                str(RUNNER),
                *map(str, numbers),
            ],
            stdin=given,
            stdout=said,
            stderr=subprocess.STDOUT,  # where bwrap says why it does not start
            pass_fds=[calls.fileno()],  # bwrap's own; all others are closed
            cwd="/",
        )
        reason = _watch(process, limits)
        said.seek(0)
        words = said.read(WORDS)
    if reason is not None:
        return Outcome("stopped", reason)
    if process.returncode == 0 and words == token:
        return Outcome("passed", "")
    return Outcome("failed", words.decode("utf-8", "replace") or "it left before its last line")


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> str | None:
    """Wait for the end, or bring it about; return why it was stopped, or None."""
    deadline = time.monotonic() + limits.seconds
    try:
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
                return None
            if _resident(process.pid) > limits.memory_bytes:
                return f"its processes together held more than {limits.memory_bytes} bytes"
        return f"no end within {limits.seconds:g} s"
    finally:
        process.kill()  # the others die with it (--die-with-parent)
        process.wait()


def _resident(number: int) -> int:
    """Bytes of memory that the processes inside hold; pages that they share count for each."""
    total = 0
    for part in psutil.Process(number).children(recursive=True):
        with suppress(psutil.Error):
            total += part.memory_info().rss
    return total
