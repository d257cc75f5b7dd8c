"""Confined runs of code that a model wrote, each in a process that can do as little as possible.

This protects the machine, not the score: a program that inspects its own interpreter could forge
the word that says the tests were passed. No program runs in the calling process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import CocurveError, InputError

Status = Literal["passed", "failed", "stopped"]
_GRACE = 5.0  # seconds the supervisor may take beyond the program's own
_VERDICT_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: wall-clock time (and one second more of processor time).
        memory_bytes: address space.
        file_bytes: size of one file; the folder it runs in is removed afterwards.
        processes: processes at one time, itself included.

    Raises:
        InputError: a limit is not above 0.
    """

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise InputError(f"{name} is {value}. Give a limit above 0.")


@dataclass(frozen=True)
class Outcome:
    """The end of one program.

    Attributes:
        status: "passed" if it ran to its last line; "failed" if it raised or left early; "stopped"
            if it was killed (time, memory, a signal).
        detail: the error, or the reason it was stopped.
        isolation: the means that confined it: "network" ("namespace", or "sockets refused by
            Python"), "files" ("landlock", "user nobody", or "refused by Python") and "processes"
            ("namespace" or "process group").
    """

    status: Status
    detail: str
    isolation: dict[str, str]


def run_programs(
    programs: Sequence[str],
    *,
    allow_code_execution: bool = False,
    limits: Limits | None = None,
    workers: int = 1,
    progress: bool = True,
) -> list[Outcome]:
    """Run Python programs, each in a subprocess of its own, and say which ran to their last line.

    A program sees the standard library only, an empty environment, an empty temporary folder, and
    no network. Its output is discarded. On Linux the kernel enforces this (namespaces, Landlock,
    resource limits); where it cannot, `Outcome.isolation` names the substitute.

    Args:
        programs: Python source; one passes by running to its last line.
        allow_code_execution: must be True.
        limits: time, memory, files and processes; None takes the defaults of `Limits`.
        workers: programs at one time.
        progress: show a progress bar.

    Returns:
        One outcome per program, in their order.

    Raises:
        InputError: `allow_code_execution` is not True, or the system is Windows.
        CocurveError: not even a program of one import line runs here; nothing was scored.
    """
    require_permission(allow_code_execution)
    if os.name != "posix":
        raise InputError("programs can be confined on Linux and macOS only. Use one of them.")
    from tqdm.auto import tqdm

    limits = limits or Limits()
    trial = _run("import heapq, math, re, string, collections", limits)
    if trial.status != "passed":
        raise CocurveError(
            f"a program of one import line {trial.status} in isolation ({trial.detail}), so "
            "nothing was scored. Make the interpreter readable, or widen the limits."
        )
    with ThreadPoolExecutor(workers) as pool:
        running = pool.map(lambda program: _run(program, limits), programs)
        bar = tqdm(running, desc="programs", total=len(programs), disable=not progress)
        return list(bar)


def require_permission(allow_code_execution: bool) -> None:
    """Raise InputError unless the caller allowed code to be run."""
    if allow_code_execution is not True:
        raise InputError(
            "pass@1 runs code that the model wrote, and allow_code_execution is "
            f"{allow_code_execution!r}. Pass allow_code_execution=True to run it in a confined "
            "subprocess, or omit the code tasks."
        )


def _run(program: str, limits: Limits) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="program_", ignore_cleanup_errors=True) as folder:
        if os.geteuid() == 0:
            os.chmod(folder, 0o777)  # inside, root becomes nobody
        password = secrets.token_hex(16)
        job = {
            "program": program,
            "password": password,
            "folder": folder,
            "readable": _readable(),
            **asdict(limits),
        }
        verdict, stopped = _supervised(job, folder, limits.seconds + _GRACE)
    return _outcome(verdict, password, stopped, limits)


def _supervised(job: dict[str, Any], folder: str, seconds: float) -> tuple[bytes, bool]:
    """Run the supervisor: the worker's words, and whether the supervisor had to be killed."""
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox.py"))]
    process = subprocess.Popen(
        [*command, str(writing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={},
        pass_fds=[writing],
        start_new_session=True,
    )
    os.close(writing)
    stopped = False
    try:
        process.communicate(json.dumps(job).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        stopped = True
    finally:
        _kill_group(process)
        os.set_blocking(reading, False)
        said = _read(reading)
        os.close(reading)
    return said, stopped


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, _VERDICT_BYTES)
    except BlockingIOError:
        return b""


def _outcome(verdict: bytes, password: str, stopped: bool, limits: Limits) -> Outcome:
    said: dict[str, Any] = {}
    for line in verdict.splitlines():
        try:
            said |= json.loads(line)
        except (ValueError, TypeError):
            continue  # not ours: the program may write to any handle it finds
    isolation = said.get("ready", {})
    if said.get("password") == password and not stopped:
        return Outcome("passed", "", isolation)
    if "error" in said:
        return Outcome("failed", str(said["error"]), isolation)
    if not isolation:
        return Outcome("stopped", "it could not be confined", {})
    return Outcome("stopped", f"no end within {limits.seconds:g} s, or killed", isolation)


def _readable() -> list[str]:
    """Folders a program may read: the interpreter, its library and the system's."""
    own = {sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    return sorted(own | {"/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom"})
