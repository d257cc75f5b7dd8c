"""Running code that a model wrote, in a process of its own that can do as little as possible.

It protects the machine, not the score: a program that inspects its own interpreter could forge the
word that says the tests were passed. Nothing here is run in this process.
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
    """What one program may use.

    Attributes:
        seconds: of wall-clock time (and one more of processor time).
        memory_bytes: of address space.
        file_bytes: of one file; the folder it runs in is removed afterwards.
        processes: it may have at one time, itself included.
    """

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise InputError(f"{name} is {value}; a program needs more than nothing.")


@dataclass(frozen=True)
class Outcome:
    """How one program ended.

    Attributes:
        status: "passed" if it ran to its last line; "failed" if it raised or left early; "stopped"
            if it was killed (time, memory, a signal).
        detail: the error, or what stopped it.
        isolation: what held it: "network" ("namespace", or "sockets refused by Python"), "files"
            ("landlock", "user nobody", or "refused by Python") and "processes" ("namespace" or
            "process group").
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
    """Run Python programs, each in a subprocess of its own, and say which came to their end.

    A program sees the standard library only, an empty environment, an empty temporary folder, and
    no network; its output is thrown away. On Linux the kernel enforces this (namespaces, Landlock,
    resource limits); where it cannot, `Outcome.isolation` says what was used instead.

    Args:
        programs: Python source; one passes by running to its last line.
        allow_code_execution: must be True.
        limits: of time, memory, files and processes.
        workers: programs at one time.
        progress: show a bar.

    Raises:
        InputError: `allow_code_execution` is not True, or the system is Windows.
        CocurveError: not even a program that does nothing runs here; nothing was scored.
    """
    require_permission(allow_code_execution)
    if os.name != "posix":
        raise InputError("programs can be confined on Linux and macOS only; use one of them.")
    from tqdm.auto import tqdm

    limits = limits or Limits()
    trial = _run("import heapq, math, re, string, collections", limits)
    if trial.status != "passed":
        raise CocurveError(
            f"a program of one import line {trial.status} in isolation ({trial.detail}), so "
            "nothing was scored. Is the interpreter readable, and are the limits wide enough?"
        )
    with ThreadPoolExecutor(workers) as pool:
        running = pool.map(lambda program: _run(program, limits), programs)
        bar = tqdm(running, desc="programs", total=len(programs), disable=not progress)
        return list(bar)


def require_permission(allow_code_execution: bool) -> None:
    """Raise InputError unless the caller said that code may be run."""
    if allow_code_execution is not True:
        raise InputError(
            "pass@1 runs code that the model wrote, and allow_code_execution is "
            f"{allow_code_execution!r}. Pass allow_code_execution=True to run it in a confined "
            "subprocess, or leave the code tasks out."
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
    """What the worker said, and whether the supervisor itself had to be killed."""
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
            continue  # the program may write to any handle it finds
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
