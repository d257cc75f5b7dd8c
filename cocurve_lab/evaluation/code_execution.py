"""Confined runs of code that a model wrote, each in a process that can do as little as possible.

What confines is bubblewrap (`confinement.py`). What judges is `judge.py` inside, by a record of
fixed size: any other reply is that program's own failure, and the rest goes on.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from ..base.arguments import as_float
from ..base.errors import CocurveError, InputError
from ..base.progress import Bar
from . import confinement as confining
from .confinement import BWRAP, require_confinement
from .judge import CONFINED, DETAIL, FAILED, PASSED, RECORD, TOGETHER, TOKEN

Status = Literal["passed", "failed", "stopped"]
BESIDE = "program and test ran in two processes, and only plain values crossed"
LIMITATION = (
    "program and test share an interpreter, so a program that knows the test, returns objects "
    "equal to everything, changes what the test calls, or reads its own raw memory can pass "
    "unearned"
)
_GRACE = 5.0  # seconds that the kernel may take to end what was killed
_LOOK = 0.1  # seconds between two looks at time and memory


class Tested(NamedTuple):
    """A program and its test, which run in two processes.

    The functions take and return plain values: numbers, texts, bytes, None, ranges, and lists,
    tuples, dicts and sets of them. What a function changes in its arguments stays with it.

    Attributes:
        code: the program's source.
        test: the test's source; it passes by running to its last line.
        functions: names in the test that call the program's functions.
    """

    code: str
    test: str
    functions: tuple[str, ...]


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
            if it was killed (time, memory, a signal).
        detail: the error, in at most 300 bytes of the program's own words, or the reason it was
            stopped.
        isolation: the means that confined it: "network", "files" and "processes".
        forgeable: program and test shared an interpreter, so a pass proves little.
    """

    status: Status
    detail: str
    isolation: dict[str, str]
    forgeable: bool = True


def run_programs(
    programs: Sequence[str | Tested],
    *,
    allow_code_execution: bool = False,
    limits: Limits | None = None,
    workers: int = 1,
    progress: bool = True,
) -> list[Outcome]:
    """Run Python programs, each in a subprocess of its own, and say which ran to their last line.

    bubblewrap confines them: a program sees the standard library, an empty environment, an empty
    folder, and no network. Its output is discarded. Any error of one program is its outcome.

    A `Tested` program runs beside its test, in a process of its own. A text holds its own test, and
    so does a `Tested` whose test passes a function or an object: such a program can pass unearned
    if it knows the test, returns objects equal to everything, changes what the test calls, or reads
    its own raw memory. Its outcome is `forgeable`.

    Args:
        programs: Python source, with its test apart or in it; one passes by running to its last
            line.
        allow_code_execution: must be True.
        limits: time, memory, files and processes; None takes the defaults of `Limits`.
        workers: programs at one time.
        progress: show a progress bar.

    Returns:
        One outcome per program, in their order.
    """
    require_permission(allow_code_execution)
    require_confinement()
    limits = limits or Limits()
    trial = _run("import heapq, math, re, string, collections", limits)
    if trial.status != "passed":
        raise CocurveError(
            f"a program of one import line {trial.status} in isolation ({trial.detail}), so "
            "nothing was scored. Make the interpreter readable, or widen the limits."
        )
    with ThreadPoolExecutor(workers) as pool:
        running = pool.map(lambda program: _run(program, limits), programs)
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


def _run(program: str | Tested, limits: Limits) -> Outcome:
    try:
        if isinstance(program, Tested):
            found = _in_bwrap(json.dumps(program._asdict()).encode(), limits, apart=True)
            if found is not None:
                return found
            program = f"{program.code}\n{program.test}"
        found = _in_bwrap(program.encode("utf-8", "surrogatepass"), limits, apart=False)
        assert found is not None
        return found
    except Exception as error:  # whatever one program caused, the others are still to be judged
        detail = f"it could not be judged ({type(error).__name__}: {error})"[:DETAIL]
        return Outcome("stopped", detail, {})


# bubblewrap -----------------------------------------------------------------------------------


def _in_bwrap(program: bytes, limits: Limits, *, apart: bool) -> Outcome | None:
    """Run one program; None if its test must share its interpreter, and was given apart."""
    token = bytes(TOKEN) if apart else secrets.token_bytes(TOKEN)
    passed = PASSED + token + bytes(DETAIL)
    judge = str(Path(__file__).with_name("judge.py"))
    reading, writing = os.pipe()
    try:
        with confining.filtered() as calls, tempfile.TemporaryFile() as given:
            confining.at_start(given, program if apart else passed + program)
            info, told = os.pipe()
            try:
                numbers = _numbers(limits, int(apart))
                process = subprocess.Popen(
                    [
                        *confining.bwrap(calls, int(limits.folder_bytes), (judge,), told),
                        *confining.interpreter(),
                        judge,
                        *map(str, (writing, confining.own_user(), *numbers)),
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
        return _outcome(_read(reading), passed, reason, forgeable=not apart)
    finally:
        os.close(reading)


def _numbers(limits: Limits, apart: int) -> list[int]:
    """Numbers as `judge.py` takes them; `apart` is 1 for a program beside its judge, else 0."""
    reaper = 1 if os.geteuid() else 0  # bwrap's own process inside, of the same user unless root
    return [
        apart,
        int(limits.seconds) + 1,
        int(limits.memory_bytes),
        int(limits.file_bytes),
        int(limits.processes) + reaper + apart,
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


# The verdict -----------------------------------------------------------------------------------


def _read(handle: int) -> bytes:
    """Take what fits two records and one byte; more is nobody's."""
    os.set_blocking(handle, False)
    try:
        return os.read(handle, 2 * RECORD + 1)
    except BlockingIOError:
        return b""


def _outcome(said: bytes, passed: bytes, reason: str | None, *, forgeable: bool) -> Outcome | None:
    """Judge by two records: one from before the program started, one from its end."""
    first, last = said[:RECORD], said[RECORD:]
    if len(first) < RECORD or not first.startswith(CONFINED):
        return Outcome("stopped", reason or "it could not be confined", {}, forgeable)
    if reason is not None:
        return Outcome("stopped", reason, BWRAP, forgeable)
    if secrets.compare_digest(last, passed):
        return Outcome("passed", "", BWRAP, forgeable)
    if not forgeable and last.startswith(TOGETHER):
        return None
    if len(last) == RECORD and last.startswith(FAILED):
        detail = last[1 + TOKEN :].rstrip(b"\0").decode("utf-8", "replace")
        return Outcome("failed", detail, BWRAP, forgeable)
    if last:
        return Outcome("failed", "it wrote where only its end is recorded", BWRAP, forgeable)
    return Outcome("stopped", "it was killed, or left before its last line", BWRAP, forgeable)
