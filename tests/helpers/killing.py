"""Kill a process at each of its system calls that change files.

`python -m helpers.killing FOLDER` saves results of each kind over older ones. It forks a process
for each such call and kills it there, by ptrace. It prints, as JSON by kind, what lay under the
name after each kill, and what lay beside it after the next save.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
LIBC.ptrace.restype = ctypes.c_long
TRACEME, SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
EXITKILL, SYSGOOD = 0x100000, 1
# the calls by machine, in one order: None where the machine lacks one
CALLS = {
    "write": (1, 64), "pwrite64": (18, 68), "writev": (20, 66), "ftruncate": (77, 46),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "fsync": (74, 82),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "chmod": (90, None),
    "fchmodat": (268, 53), "flock": (73, 32), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "openat": (257, 56),
}  # fmt: skip
MACHINES = {"x86_64": 0, "aarch64": 1}
POKEUSER, ORIG_RAX, RAX = 6, 120, 80  # of x86_64
NEED_ROOM = {name for name in CALLS if not name.startswith(("unlink", "rmdir", "flock"))}
NEED_ROOM -= {"chmod", "fchmodat"}


class SyscallInfo(ctypes.Structure):
    """`struct ptrace_syscall_info` at the entry of a call."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


def ptrace(request: int, pid: int, address: int = 0, data: Any = None) -> int:
    found = int(LIBC.ptrace(request, pid, address, data))
    if found < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    return found


def changes_files(info: SyscallInfo, numbers: dict[int, str]) -> str | None:
    """The name of a call that changes files, at its entry; None for any other stop."""
    if info.op != 1:
        return None
    name = numbers.get(info.number)
    return None if name == "openat" and not info.arguments[2] & os.O_CREAT else name


def killed_at(
    step: Callable[[], Any], point: int, *, full: bool = False
) -> tuple[str | None, int, int]:
    """Run a step in a process of its own and kill it before its call number `point`.

    With `full`, that call fails instead, as on a full disk, where it is one that needs room.

    Returns the call's name (None if the step ended before it), the number of calls, and the exit
    code.
    """
    column = MACHINES[platform.machine()]
    numbers = {row[column]: name for name, row in CALLS.items() if row[column] is not None}
    child = os.fork()
    if child == 0:
        ptrace(TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        step()
        os._exit(0)
    os.waitpid(child, 0)
    ptrace(SETOPTIONS, child, 0, EXITKILL | SYSGOOD)
    seen, pending, info, hit = 0, 0, SyscallInfo(), None
    while True:
        ptrace(SYSCALL, child, 0, pending)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return hit, seen, os.waitstatus_to_exitcode(status)
        pending = 0 if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80 else os.WSTOPSIG(status)
        if pending:
            continue
        ptrace(GET_SYSCALL_INFO, child, ctypes.sizeof(info), ctypes.byref(info))
        name = changes_files(info, numbers)
        if name is None:
            continue
        if seen == point and full and name in NEED_ROOM:
            hit = name
            ptrace(POKEUSER, child, ORIG_RAX, -1)  # no such call
            ptrace(SYSCALL, child)
            os.waitpid(child, 0)
            ptrace(POKEUSER, child, RAX, -errno.ENOSPC)
        elif seen == point and not full:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return name, seen, -signal.SIGKILL
        seen += 1


def contents(path: Path) -> Any:
    """The bytes of a file, or of each file in a folder by name; None if there is neither."""
    if path.is_dir():
        return {
            str(file.relative_to(path)): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file()
        }
    return path.read_bytes() if path.exists() else None


def every_kill(
    place: Path, old: Callable[[], Any], new: Callable[[], Any], known: set[str], first: int = 0
) -> Any:
    """Kill `new` at each point from the first one on, over what `old` saved.

    `old` and `new` run here first: what they import late and compile is there before the forks.

    Returns a list of [call, what lay under the name, the same after cleaning, after the next save,
    names that are not known].
    """
    from cocurve_lab.base.atomic import clean

    here, before = place.parent, place.parent.with_name(f"{place.parent.name} before")
    states = {str(None): "nothing"}
    for name, save in (("new", new), ("old", old)):
        save()
        states[str(contents(place))] = name
    assert len(states) == 3
    shutil.copytree(here, before)
    found: list[list[Any]] = []
    while True:
        shutil.rmtree(here)
        shutil.copytree(before, here)
        name, _, code = killed_at(new, first + len(found))
        if name is None:
            assert code == 0, code
            return found
        after = []
        for step in (lambda: None, lambda: clean(here), new):
            step()
            after.append(states.get(str(contents(place)), "damaged"))
        strangers = sorted(path.name for path in here.iterdir() if path.name not in known)
        found.append([name, *after, strangers])


# What is saved ------------------------------------------------------------------------------------

KINDS = ("pkl", "checkpoint", "folder", "two renames")


def saves(kind: str, folder: Path) -> tuple[Path, Callable[[], Any], Callable[[], Any], set[str]]:
    """Return the place, the two saves, and the names that may lie there."""
    from cocurve_lab.base import atomic
    from helpers.problems import make_units, random_curvature

    if kind == "pkl":
        place = folder / "H.pkl"
        one, two = (random_curvature(make_units(), s) for s in (0, 1))
        return place, lambda: one.save(place), lambda: two.save(place), {place.name}
    if kind == "checkpoint":
        place = folder / "H.ckpt"

        def write(payload: bytes) -> None:
            atomic.write_atomically(place, payload, keep_previous=True)

        names = {place.name, f"{place.name}.previous"}
        return place, lambda: write(b"old" * 999), lambda: write(b"new" * 999), names
    if kind == "two renames":  # the last kind, so it stays so
        atomic._exchange = lambda one, other: False
    place = folder / "small"

    def fill(payload: bytes) -> None:
        with atomic.replacing_folder(place) as temporary:
            for name in ("one", "two"):
                (temporary / name).write_bytes(payload)

    return place, lambda: fill(b"old" * 999), lambda: fill(b"new" * 999), {place.name}


if __name__ == "__main__":
    kills = {kind: every_kill(*saves(kind, Path(sys.argv[1]) / kind)) for kind in KINDS[:-1]}
    # a folder is filled alike whether it is exchanged or renamed
    filled = [point[0] for point in kills["folder"]].index("renameat2")
    kills[KINDS[-1]] = every_kill(*saves(KINDS[-1], Path(sys.argv[1]) / KINDS[-1]), filled)
    json.dump(kills, sys.stdout)
