"""Confined runs of code that a model wrote, each in a process that can do as little as possible.

What confines is bubblewrap (`confinement.py`). What judges is this side, by a record of fixed size
(`judge.py`): any other reply is that program's own failure, and the rest goes on.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from ..base.arguments import as_float
from ..base.errors import CocurveError, InputError
from ..base.progress import Bar
from . import confinement as confining
from .confinement import BWRAP, Confinement, require_confinement
from .judge import CONFINED, DETAIL, FAILED, PASSED, RECORD, TOKEN, WEAK

Status = Literal["passed", "failed", "stopped"]
LIMITATION = (
    "program and test share an interpreter, so a program that knows the test, returns objects "
    "equal to everything, changes what the test calls, or reads its own raw memory can pass "
    "unearned"
)
_GRACE = 5.0  # seconds the weak supervisor may take beyond the program's own
_LOOK = 0.1  # seconds between two looks at time and memory


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: wall-clock time (and one second more of processor time).
        memory_bytes: address space of each process, and resident memory of all its processes
            together, which is looked at ten times a second (confinement "bwrap").
        file_bytes: size of one file.
        processes: processes and threads at one time, itself included. With "bwrap" only the
            program's own count, whatever else runs (as an ordinary user, from Linux 5.14 on).
        folder_bytes: size of all its files together (confinement "bwrap"). Empty files and
            folders have no size: only time limits their number.

    Raises:
        InputError: a limit is not above 0.
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
            if it was killed (time, memory, a signal).
        detail: the error, in at most 300 bytes of the program's own words, or the reason it was
            stopped.
        isolation: the means that confined it, told before it started: "network" ("namespace", or
            "sockets refused by Python"), "files" ("tmpfs", "landlock", "user nobody", or "refused
            by Python") and "processes" ("namespace" or "process group").
        confinement: "bwrap" or "weak".
    """

    status: Status
    detail: str
    isolation: dict[str, str]
    confinement: Confinement = "bwrap"


def run_programs(
    programs: Sequence[str],
    *,
    allow_code_execution: bool = False,
    limits: Limits | None = None,
    workers: int = 1,
    progress: bool = True,
    confinement: Confinement = "bwrap",
) -> list[Outcome]:
    """Run Python programs, each in a subprocess of its own, and say which ran to their last line.

    A program sees the standard library only, an empty environment, an empty folder, and no
    network. Its output is discarded. Any error of one program is that program's outcome.

    Program and test share an interpreter. So a program that knows the test, returns objects equal
    to everything, changes what the test calls, or reads its own raw memory can pass unearned.

    Args:
        programs: Python source; one passes by running to its last line.
        allow_code_execution: must be True.
        limits: time, memory, files and processes; None takes the defaults of `Limits`.
        workers: programs at one time.
        progress: show a progress bar.
        confinement: "bwrap" has bubblewrap confine them: no network, no sockets, own namespaces, a
            tmpfs, no capabilities, a filter of system calls. "weak" needs nothing installed and
            takes the namespaces, Landlock and limits that it finds; Unix sockets with a path, the
            keyring and shared memory of the machine stay within reach.

    Returns:
        One outcome per program, in their order.

    Raises:
        InputError: `allow_code_execution` is not True; bwrap does not start here, and confinement
            is not "weak"; the system is Windows.
        CocurveError: not even a program of one import line runs here; nothing was scored.
    """
    require_permission(allow_code_execution)
    require_confinement(confinement)
    limits = limits or Limits()
    trial = _run("import heapq, math, re, string, collections", limits, confinement)
    if trial.status != "passed":
        raise CocurveError(
            f"a program of one import line {trial.status} in isolation ({trial.detail}), so "
            "nothing was scored. Make the interpreter readable, or widen the limits."
        )
    with ThreadPoolExecutor(workers) as pool:
        running = pool.map(lambda program: _run(program, limits, confinement), programs)
        bar = Bar(running, desc="programs", total=len(programs), disable=not progress)
        return list(bar)


def require_permission(allow_code_execution: bool) -> None:
    """Raise InputError unless the caller allowed code to be run."""
    if allow_code_execution is not True:
        raise InputError(
            "pass@1 runs code that the model wrote, and allow_code_execution is "
            f"{allow_code_execution!r}. Pass allow_code_execution=True to run it in a confined "
            "subprocess, or omit the code tasks."
        )


def _run(program: str, limits: Limits, confinement: Confinement) -> Outcome:
    run = _in_bwrap if confinement == "bwrap" else _weakly
    try:
        return run(program.encode("utf-8", "surrogatepass"), limits)
    except Exception as error:  # whatever one program caused, the others are still to be judged
        detail = f"it could not be judged ({type(error).__name__}: {error})"[:DETAIL]
        return Outcome("stopped", detail, {}, confinement)


# bubblewrap -----------------------------------------------------------------------------------


def _in_bwrap(program: bytes, limits: Limits) -> Outcome:
    token = secrets.token_bytes(TOKEN)
    judge = str(Path(__file__).with_name("judge.py"))
    reading, writing = os.pipe()
    try:
        with confining.filtered() as calls, tempfile.TemporaryFile() as given:
            confining.at_start(given, token + program)
            info, told = os.pipe()
            try:
                process = subprocess.Popen(
                    [
                        *confining.bwrap(calls, int(limits.folder_bytes), (judge,), told),
                        *confining.interpreter(),
                        judge,
                        *map(str, (writing, confining.own_user(), *_numbers(limits))),
                    ],
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[calls, writing, told],
                    cwd="/",
                )
            except BaseException:
                os.close(info)
                raise
            finally:
                os.close(told)
                os.close(writing)
        reason = _watch(process, _first_process(info), limits)
        return _outcome(_read(reading), token, reason, BWRAP, "bwrap")
    finally:
        os.close(reading)


def _numbers(limits: Limits) -> list[int]:
    """Limits as `judge.py` takes them."""
    reaper = 1 if os.geteuid() else 0  # bwrap's own process inside, of the same user unless root
    return [
        int(limits.seconds) + 1,
        int(limits.memory_bytes),
        int(limits.file_bytes),
        int(limits.processes) + reaper,
    ]


def _first_process(info: int) -> psutil.Process | None:
    """The first process inside, as bwrap tells it; the others die with it."""
    with os.fdopen(info, "rb") as file, suppress(ValueError, KeyError, psutil.Error):
        return psutil.Process(json.loads(file.read())["child-pid"])
    return None


def _watch(
    process: subprocess.Popen[bytes], first: psutil.Process | None, limits: Limits
) -> str | None:
    """Wait for the end, or bring it about; why it was stopped, or None."""
    deadline = time.monotonic() + limits.seconds
    reason = None
    try:
        while reason is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, min(_LOOK, deadline - time.monotonic())))
                return None
            if time.monotonic() >= deadline:
                reason = f"no end within {limits.seconds:g} s"
            elif _resident(first) > limits.memory_bytes:
                reason = f"its processes together held more than {limits.memory_bytes} bytes"
        return reason
    finally:
        for part in (first, process):
            with suppress(psutil.Error, ProcessLookupError):
                if part is not None:
                    part.kill()
        process.wait()
        _wait_until_dead(first)


def _wait_until_dead(first: psutil.Process | None) -> None:
    """Wait for the first process, before whose end the kernel ends all others of the namespace.

    Its parent may be gone, and who inherits it may never ask for its status: a zombie is dead.
    """
    deadline = time.monotonic() + _GRACE
    with suppress(psutil.Error):
        while first is not None and first.is_running() and time.monotonic() < deadline:
            if first.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.002)


def _resident(first: psutil.Process | None) -> int:
    """Bytes of memory that the processes inside hold; pages that they share count for each."""
    total = 0
    with suppress(psutil.Error):
        for part in first.children(recursive=True) if first is not None else ():
            with suppress(psutil.Error):
                total += part.memory_info().rss
    return total


# Without it ------------------------------------------------------------------------------------


def _weakly(program: bytes, limits: Limits) -> Outcome:
    folder = tempfile.mkdtemp(prefix="program_")
    reading, writing = os.pipe()
    try:
        if os.geteuid() == 0:
            os.chmod(folder, 0o777)  # inside, root becomes nobody
        token = secrets.token_bytes(TOKEN)
        job = {
            "given": (token + program).hex(),
            "folder": folder,
            "readable": _readable(),
            **asdict(limits),
        }
        stopped = _supervised(job, folder, writing, limits.seconds + _GRACE)
        said = _read(reading)
    finally:
        os.close(reading)
        _remove(folder)
    told = said[1 + TOKEN : 1 + TOKEN + len(WEAK)]  # before the program started
    isolation = {
        name: kinds[digit - ord("0")]
        for (name, kinds), digit in zip(WEAK.items(), told, strict=False)
        if 0 <= digit - ord("0") < len(kinds)
    }
    reason = f"no end within {limits.seconds:g} s" if stopped else None
    return _outcome(said, token, reason, isolation, "weak")


def _supervised(job: dict[str, object], folder: str, writing: int, seconds: float) -> bool:
    """Run the supervisor of `sandbox.py`, which closes `writing`; whether it had to be killed."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox.py"))]
    try:
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
    finally:
        os.close(writing)
    try:
        process.communicate(json.dumps(job).encode(), timeout=seconds)
        return process.returncode == 3  # it stopped the program in time
    except subprocess.TimeoutExpired:
        return True
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _remove(folder: str) -> None:
    """Remove what a program left, however deep: nested folders are moved up, links not followed.

    The program is dead, so nothing changes meanwhile. `shutil.rmtree` recurses, and in releases
    before Python 3.11.8 `tempfile` changes permissions through links (CVE-2023-6597).
    """
    waiting, number = [folder], 0
    with suppress(OSError):
        while waiting:
            place = waiting[-1]
            os.chmod(place, 0o700)
            inner = []
            for entry in list(os.scandir(place)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif place == folder:
                    inner.append(entry.path)
                else:
                    os.chmod(entry.path, 0o700)  # to be moved, a folder must be writable
                    number += 1
                    inner.append(f"{folder}/{folder[-8:]}-{number}")
                    os.rename(entry.path, inner[-1])
            if inner:
                waiting += inner
            else:
                os.rmdir(waiting.pop())


def _readable() -> list[str]:
    """Folders a weakly confined program may read: the interpreter, its library, the system's."""
    own = {sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    return sorted(own | {"/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom"})


# The verdict -----------------------------------------------------------------------------------


def _read(handle: int) -> bytes:
    """Take what fits two records and one byte; more is nobody's."""
    os.set_blocking(handle, False)
    try:
        return os.read(handle, 2 * RECORD + 1)
    except BlockingIOError:
        return b""


def _outcome(
    said: bytes, token: bytes, reason: str | None, isolation: dict[str, str], kind: Confinement
) -> Outcome:
    """Judge by two records: one from before the program started, one from its end."""
    first, last = said[:RECORD], said[RECORD:]
    if len(first) < RECORD or not first.startswith(CONFINED):
        return Outcome("stopped", reason or "it could not be confined", {}, kind)
    if reason is not None:
        return Outcome("stopped", reason, isolation, kind)
    if secrets.compare_digest(last, PASSED + token + bytes(DETAIL)):
        return Outcome("passed", "", isolation, kind)
    if len(last) == RECORD and last.startswith(FAILED):
        detail = last[1 + TOKEN :].rstrip(b"\0").decode("utf-8", "replace")
        return Outcome("failed", detail, isolation, kind)
    if last:
        return Outcome("failed", "it wrote where only its end is recorded", isolation, kind)
    return Outcome("stopped", "it was killed, or left before its last line", isolation, kind)
