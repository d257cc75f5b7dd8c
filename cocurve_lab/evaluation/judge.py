"""The script that runs one program where it is confined, and records how it ended.

Standard library only, because inside there is nothing else. Standard input holds the token and the
source. The record has a fixed size: kind, token, detail. The token is known to the supervisor and,
while the program runs, to nothing that Python code can look into: see `judge`.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from types import ModuleType

TOKEN, DETAIL = 32, 300  # bytes
RECORD = 1 + TOKEN + DETAIL
PASSED, FAILED, CONFINED = b"P", b"F", b"C"


def judge(box: dict) -> None:
    """Run `box["code"]` in `box["space"]`, then write the record of a pass.

    The writer, its descriptor and the record leave the box before the program starts. From then on
    they lie only on this frame's evaluation stack: a program that walks the frames, the modules
    or the garbage collector's lists finds an empty box. Patching `os.write` changes nothing either.
    """
    run: Callable[..., bytes | None] = exec
    box.pop("write")(
        box.pop("record"),
        box.pop("passed") + (run(box.pop("code"), box.pop("space")) or b""),
    )


def fresh_main() -> dict:
    """Make an empty `__main__`, as a script of its own has, and return its namespace."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv[:] = [""]
    return module.__dict__


def failure(error: BaseException) -> bytes:
    """Make the record of a failure: its detail is the program's, for people to read."""
    try:
        detail = f"{type(error).__name__}: {error}"
    except BaseException:  # a __str__ that raises
        detail = type(error).__name__
    return record(FAILED, bytes(TOKEN), detail)


def record(kind: bytes, token: bytes, detail: str) -> bytes:
    """Lay out a record: `RECORD` bytes, the detail cut or filled with zeros."""
    text = detail.encode("utf-8", "replace")[:DETAIL]
    return kind + token + text.ljust(DETAIL, b"\0")


def guard() -> Callable[[str, tuple], None]:
    """Make the audit hook that keeps the judge's stack out of the program's sight.

    It confines nothing. It refuses lists of objects and frames, raw memory, and tracing, with
    which a program jumps over its own test.
    """
    refused = frozenset(
        [
            *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
            *("sys._current_frames", "sys._current_exceptions", "sys.remote_exec"),
            *("sys.settrace", "sys.monitoring.register_callback"),
        ]
    )  # a traceback of a refusal shows it, and nobody can change it

    def hook(event: str, args: tuple) -> None:
        if event in refused or event.startswith("ctypes."):
            raise PermissionError(f"{event} is refused")
        if event == "import":
            name = str(args[0]).rpartition(".")[2]
            if name.startswith(("_ctypes", "_test", "_xxtest", "_xxsub", "_interp")):
                raise ImportError(f"{name} is refused")  # so that a fallback works

    return hook


def no_trace(function: object) -> None:
    """Stand in for `sys.settrace`: taking a trace away, as doctest does, stays allowed."""
    if function is not None:
        raise PermissionError("sys.settrace is refused")


def run(given: list[bytes], handle: int) -> None:
    """Run the program in `given`, token and source in one, and end the process.

    The list is emptied, so that no frame of the caller keeps the token.
    """
    try:
        token, source = given[0][:TOKEN], given.pop()[TOKEN:]
        box = {
            "code": compile(source, "program", "exec", dont_inherit=True),
            "space": fresh_main(),
            "write": os.write,
            "record": handle,
            "passed": PASSED + token + bytes(DETAIL),
        }
        del token, source
        sys.settrace = no_trace
        sys.addaudithook(guard())
        judge(box)
    except BaseException as error:  # SystemExit too: a program that leaves early proved nothing
        os.write(handle, failure(error))
    os._exit(0)


def limit(seconds: int, memory: int, file: int, processes: int) -> None:
    """Set the kernel's limits of this process and its children."""
    import resource

    limits = {
        "AS": memory,
        "DATA": memory,
        "CPU": seconds,
        "FSIZE": file,
        "NPROC": processes,
        "NOFILE": 64,
        "CORE": 0,
    }
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def become(user: int) -> None:
    """Become a user that has no other process, so that a limit on processes counts only ours."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)  # which gives up every capability


def main() -> None:
    """Run `judge.py RECORD USER SECONDS MEMORY FILE PROCESSES`; USER 0 stays who it is."""
    handle, user, *limits = map(int, sys.argv[1:])
    limit(*limits)
    if user:
        become(user)
    given = [sys.stdin.buffer.read()]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # what was read cannot be read again
    os.close(null)
    os.write(handle, record(CONFINED, bytes(TOKEN), ""))
    run(given, handle)


if __name__ == "__main__":
    main()
