"""The script that judges one program where both are confined, and records how it ended.

Standard library only, because inside there is nothing else. The record has a fixed size: kind,
token, detail.

A `Tested` program is judged apart: the test runs here, and its functions in a child, which was
forked before the test was read. The child has no handle of the record, and only plain values come
back from it. Standard input holds the test and the program.

Any other program runs here together with its test, so it can always be forged. It passes by a token
that, while it runs, nothing in Python shows: see `judge`. Standard input holds the record of a pass
and the source.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, BinaryIO

TOKEN, DETAIL = 32, 300  # bytes
RECORD = 1 + TOKEN + DETAIL
PASSED, FAILED, CONFINED, TOGETHER = b"P", b"F", b"C", b"T"
# what a value may be made of; all are immutable types, which no pickle can change
PLAIN: Any = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range)


# Apart --------------------------------------------------------------------------------------------


class Sent(pickle.Pickler):
    """Writes values; one of a subclass of a plain type becomes one of that type."""

    def reducer_override(self, value: Any) -> Any:
        kinds = (kind for kind in PLAIN if kind is not range and isinstance(value, kind))
        kind = None if type(value) in PLAIN else next(kinds, None)
        return NotImplemented if kind is None else (kind, (kind(value),))


class Received(pickle.Unpickler):
    """Reads values that a program sent, and makes objects of plain types only."""

    def find_class(self, module: str, name: str) -> type:
        found = {kind.__name__: kind for kind in PLAIN if module == "builtins"}
        if name not in found:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain type")
        return found[name]


def serve(asked: BinaryIO, answers: BinaryIO) -> None:
    """Run a program in the child, then call its functions as they are asked for."""
    space = fresh_main()

    def define(source: str) -> None:
        exec(compile(source, "program", "exec", dont_inherit=True), space)

    while True:
        name, args, kwargs = Received(asked).load()
        reply = io.BytesIO()
        try:
            called = space[name] if name else define
            Sent(reply).dump((True, called(*args, **kwargs)))
        except BaseException as error:
            reply = io.BytesIO(pickle.dumps((False, (type(error).__name__, words(error)))))
        answers.write(reply.getvalue())
        answers.flush()


class Unsendable(Exception):
    """The test passes a value to the program that only one interpreter can share."""


def asking(name: str, asked: BinaryIO, answers: BinaryIO) -> Callable[..., object]:
    """Make what calls the program's function of this name in the child; "" defines them."""

    def call(*args: object, **kwargs: object) -> object:
        sent = io.BytesIO()
        try:
            Sent(sent).dump((name, args, kwargs))
            Received(io.BytesIO(sent.getvalue())).load()
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise Unsendable(words(error)) from None
        asked.write(sent.getvalue())
        asked.flush()
        return answer(answers)

    return call


def answer(answers: BinaryIO) -> object:
    """Read what the child returns, or raise what it raises, where that is an error of Python's."""
    returned, value = Received(answers).load()
    if returned:
        return value
    kind: Any = getattr(builtins, value[0], None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration
    raise kind(value[1]) if known else RuntimeError(f"{value[0]}: {value[1]}")


def judge_apart() -> bytes:
    """Run the test on standard input against the functions of a program; return the record."""
    (asked, ask), (told, answers) = os.pipe(), os.pipe()
    if os.fork() == 0:  # before the test is read
        for handle in {*range(64)} - {asked, answers}:  # the record's too
            with suppress(OSError):
                os.close(handle)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so 0, 1 and 2
        serve(os.fdopen(asked, "rb"), os.fdopen(answers, "wb"))
    os.close(asked)
    os.close(answers)
    try:
        given, ends = json.loads(read_all()), (os.fdopen(ask, "wb"), os.fdopen(told, "rb"))
        asking("", *ends)(given["code"])
        space = fresh_main()
        space.update({name: asking(name, *ends) for name in given["functions"]})
        exec(compile(given["test"], "test", "exec", dont_inherit=True), space)
    except Unsendable as error:
        return record(TOGETHER, bytes(TOKEN), words(error))
    except BaseException as error:
        return failure(error)
    return record(PASSED, bytes(TOKEN), "")


# Together -----------------------------------------------------------------------------------------


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
    return record(
        FAILED, bytes(TOKEN), f"{type(error).__name__}: {words(error)}".removesuffix(": ")
    )


def words(error: BaseException) -> str:
    """Return the words of an error; none where its `__str__` raises."""
    try:
        return str(error)
    except BaseException:
        return ""


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


def judge_together(handle: int) -> None:
    """Run the program on standard input, and write the record of its end.

    The record of a pass is read into one object, so that freed memory does not show its token.
    """
    try:
        box = {"passed": os.read(0, RECORD), "record": handle, "write": os.write}
        box["code"] = compile(read_all(), "program", "exec", dont_inherit=True)
        box["space"] = fresh_main()
        sys.settrace = no_trace
        sys.addaudithook(guard())
        judge(box)
    except BaseException as error:  # SystemExit too: a program that leaves early proved nothing
        os.write(handle, failure(error))


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


def read_all() -> bytes:
    """Read the rest of standard input, and leave none to read again."""
    found = b"".join(iter(lambda: os.read(0, 1 << 16), b""))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return found


def main() -> None:
    """Run `judge.py RECORD USER APART SECONDS MEMORY FILE PROCESSES`; USER 0 stays who it is."""
    handle, user, apart, *limits = map(int, sys.argv[1:])
    limit(*limits)
    if user:
        become(user)
    os.write(handle, record(CONFINED, bytes(TOKEN), ""))
    if apart:
        os.write(handle, judge_apart())
    else:
        judge_together(handle)
    os._exit(0)


if __name__ == "__main__":
    main()
