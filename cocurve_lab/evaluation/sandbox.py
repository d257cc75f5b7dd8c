"""One program, confined without bubblewrap: the script of confinement "weak", never imported.

Standard library only. The first process supervises: it gives up the network and, where the system
allows, the view of other processes, then forks a worker. The worker gives up files, memory, time
and identity, and only then runs the program. The supervisor outlives it and kills what it left.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # a script with -I has no folder
import judge  # type: ignore[import-not-found]

sys.path.pop(0)

NEW_USER, NEW_NETWORK, NEW_PROCESSES = 0x10000000, 0x40000000, 0x20000000  # unshare
NOBODY = 65534
KEEP_CAPS, SET_NO_NEW_PRIVILEGES, SET_SUBREAPER = 8, 38, 36  # prctl
READ_ANYTHING = 2  # CAP_DAC_READ_SEARCH
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # numbers of the system calls
EXECUTE, READ_FILE, READ_FOLDER = 1, 4, 8  # file rights of Landlock


def supervise(job: dict, verdict: int) -> int:
    """Isolate, fork the worker, wait for it, leave nothing running; 3 if it was out of time."""
    libc = _libc()
    job["isolation"] = {"network": _leave_network(libc), "processes": "process group"}
    if libc is not None:
        libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)  # orphans come here, where they can be killed
        if libc.unshare(NEW_PROCESSES) == 0:  # all of a PID namespace dies with its first process
            job["isolation"]["processes"] = "namespace"
    worker = os.fork()
    if worker == 0:
        _work(job, verdict, libc)
        os._exit(1)
    os.close(verdict)
    deadline = time.monotonic() + job["seconds"]
    status = 3
    while time.monotonic() < deadline:
        if os.waitpid(worker, os.WNOHANG)[0]:
            status = 0
            break
        time.sleep(0.005)
    _kill_all(worker)
    return status


def _leave_network(libc: Any) -> str:
    """Enter an empty network; the Python of this machine may be older than os.unshare."""
    if libc is not None:
        if os.geteuid() == 0 and libc.unshare(NEW_NETWORK) == 0:
            return "namespace"
        if libc.unshare(NEW_USER | NEW_NETWORK) == 0:
            return "namespace"
    return "sockets refused by Python"


def _kill_all(worker: int) -> None:
    """Kill the worker, its group, and whatever else came to this subreaper."""
    for _ in range(200):
        for kill, target in ((os.killpg, worker), (os.kill, worker)):
            with suppress(OSError):  # gone already
                kill(target, signal.SIGKILL)
        for child in _children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def _work(job: dict, verdict: int, libc: Any) -> None:
    """Give up rights, say by what, and let the judge run the program."""
    os.setsid()  # a kill of its own group must not reach the supervisor
    isolation = job["isolation"]
    try:
        isolation["files"] = _give_up_rights(job, libc)
        _set_limits(job)
        if isolation["network"] != "namespace" or isolation["files"] != "landlock":
            sys.addaudithook(refuse(job["folder"], isolation["files"]))
        os.write(verdict, judge.record(judge.CONFINED, bytes(judge.TOKEN), _digits(isolation)))
    except BaseException:  # the supervisor outside misses the record, and says so
        os._exit(1)
    judge.run([bytes.fromhex(job.pop("given"))], verdict)


def _digits(isolation: dict) -> str:
    """One digit per means: its place in the supervisor's list."""
    return "".join(str(kinds.index(isolation[name])) for name, kinds in judge.WEAK.items())


def _give_up_rights(job: dict, libc: Any) -> str:
    """Become nobody where we are root, then see only the interpreter and one folder."""
    root = os.geteuid() == 0 and libc is not None
    if root:
        libc.prctl(KEEP_CAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        _keep_capability(libc, READ_ANYTHING)  # nobody may not see root's interpreter
    confined = libc is not None and _landlock(libc, job["folder"], job["readable"])
    if root and not confined:  # without Landlock the capability would open every file
        _keep_capability(libc, None)
    return "landlock" if confined else ("user nobody" if root else "refused by Python")


def _keep_capability(libc: Any, capability: int | None) -> None:
    mask = 0 if capability is None else 1 << capability
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0))


class _Rules(ctypes.Structure):
    _fields_ = [
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scope", ctypes.c_uint64),
    ]


class _Path(ctypes.Structure):  # the kernel's is packed; the same places, and it reads no padding
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def _landlock(libc: Any, folder: str, readable: list[str]) -> bool:
    """Read `readable`, write `folder`, touch nothing else; False where the kernel cannot."""
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    every = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    rules = _Rules(every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    handle = libc.syscall(LANDLOCK_CREATE, ctypes.byref(rules), size, 0)
    if handle < 0:
        return False
    for path, rights in [
        (folder, every),
        *((p, EXECUTE | READ_FILE | READ_FOLDER) for p in readable),
    ]:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= EXECUTE | READ_FILE
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _Path(rights, opened)
        libc.syscall(LANDLOCK_ADD, handle, 1, ctypes.byref(rule), 0)
        os.close(opened)
    libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    done = libc.syscall(LANDLOCK_RESTRICT, handle, 0) == 0
    os.close(handle)
    return done


def _set_limits(job: dict) -> None:
    seconds = int(job["seconds"]) + 1
    limits = {
        "AS": job["memory_bytes"],
        "DATA": job["memory_bytes"],
        "CPU": seconds,
        "FSIZE": job["file_bytes"],
        "NPROC": _own_processes() + job["processes"],  # the limit counts all of this user's
        "NOFILE": 64,
        "CORE": 0,
    }
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def _own_processes() -> int:
    """Processes and threads of this user that the system shows."""
    count = 0
    with suppress(OSError):  # Landlock hides /proc, or a process just ended
        for entry in os.listdir("/proc"):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry}/task"))
    return count


def refuse(folder: str, files: str) -> Callable[[str, tuple], None]:
    """An audit hook, which Python code cannot remove: no sockets, and no writing elsewhere.

    The last line of defence: native code does not pass through it.
    """
    inside = os.path.realpath(folder)
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, args: tuple) -> None:
        if event.startswith(("socket.", "ctypes.")):
            raise PermissionError(f"{event} is refused")
        if files != "refused by Python":
            return
        changing = event == "open" and isinstance(args[2], int) and args[2] & writes
        if changing or event in _CHANGES:
            for path in args[:1] if event == "open" else args[:2]:
                if isinstance(path, (str, bytes)):
                    real = os.path.realpath(os.fsdecode(path))
                    if os.path.commonpath([real, inside]) != inside:
                        raise PermissionError(f"{event} outside the folder is refused")
        elif event.startswith(("subprocess.", "os.exec", "os.posix_spawn", "os.system")):
            raise PermissionError(f"{event} is refused")

    return hook


_CHANGES = {f"os.{name}" for name in ("remove", "rename", "rmdir", "mkdir", "link", "symlink",
                                      "truncate", "chmod", "chown", "utime")}  # fmt: skip


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


if __name__ == "__main__":
    sys.exit(supervise(json.load(sys.stdin), int(sys.argv[1])))
