"""How a program is confined: the kernel confines, and bubblewrap (`bwrap`) sets it up.
Nothing here reads what a program says.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..base.errors import InputError
from .system_calls import refusals

INSTALL = "apt-get install bubblewrap"
# what the report says, told before any program starts
BWRAP = {"network": "namespace", "files": "tmpfs", "processes": "namespace"}
_PLACE = "/tmp"  # of the program, inside


def require_confinement() -> None:
    """Raise InputError where a program of one line does not start in bwrap."""
    problem = why_not_confined()
    if problem is not None:
        raise InputError(
            f"{problem}, so no program that the model wrote is run. Install it on Linux: {INSTALL}."
        )


def why_not_confined() -> str | None:
    """Return why bwrap cannot be used here; None where it can."""
    if shutil.which("bwrap") is None:
        return "bwrap (bubblewrap) is not on the PATH"
    with filtered() as handle:
        command = [*bwrap(handle), *interpreter(), "-c", "pass"]
        try:
            done = subprocess.run(
                command, capture_output=True, pass_fds=[handle], timeout=30, cwd="/"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bwrap (bubblewrap) does not start here ({error})"
    if done.returncode == 0:
        return None
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = said[-1] if said else f"exit status {done.returncode}"
    return f"bwrap (bubblewrap) does not start here ({reason})"


@contextmanager
def filtered() -> Iterator[int]:
    """Open the filter of system calls: a descriptor that bwrap reads once."""
    with tempfile.TemporaryFile() as file:
        yield at_start(file, refusals())


def at_start(file: IO[bytes], content: bytes) -> int:
    """Write a file, go back to its start, return its descriptor."""
    file.write(content)
    file.seek(0)
    return file.fileno()


def bwrap(
    filter_handle: int,
    folder_bytes: int = 1 << 24,
    visible: tuple[str, ...] = (),
    info: int | None = None,
) -> list[str]:
    """Make the command line of bwrap, up to the program to start.

    Inside are the interpreter and the system's libraries, read-only, four devices, and a tmpfs.
    There is no /proc, no /sys, and of /etc the linker's cache. What was written goes with the last
    process.

    Args:
        filter_handle: descriptor of the filter of system calls.
        folder_bytes: size of the tmpfs, which is all that can be written.
        visible: more files to see, read-only, under their own paths.
        info: descriptor that bwrap writes JSON to, with the number of its first process.
    """
    command = ["bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    command += ["--setenv", "MALLOC_ARENA_MAX", "1"]  # one reserve of memory, not one per thread
    command += ["--hostname", "program", "--cap-drop", "ALL", "--seccomp", str(filter_handle)]
    if os.geteuid() == 0:  # judge.py uses them to become a user of its own, and has none after
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    if info is not None:
        command += ["--info-fd", str(info)]
    # first, because an interpreter may lie below it
    command += ["--size", str(folder_bytes), "--perms", "1777", "--tmpfs", _PLACE]
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    shown = [*readable(), *visible, *devices]
    # bwrap would close a folder to others that it makes for a file which they may not execute
    for folder in sorted({str(above) for path in shown for above in Path(path).parents} - {"/"}):
        if folder != _PLACE and folder not in shown:
            command += ["--perms", "0755", "--dir", folder]
    for path in shown:
        command += ["--dev-bind" if path in devices else "--ro-bind", path, path]
    for path in ("/lib", "/lib64"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    return [*command, "--symlink", _PLACE, "/dev/shm", "--remount-ro", "/", "--chdir", _PLACE, "--"]


def interpreter() -> list[str]:
    """Command that starts this Python without its environment, folder or packages."""
    return [os.path.realpath(sys.executable), "-I", "-S"]


def readable() -> list[str]:
    """Paths inside: this interpreter, its standard library and the system's libraries."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not a virtual environment
    base |= {"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}
    own = {os.path.realpath(sys.executable)}
    own |= {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    own |= {"/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/nix/store"}
    for prefix in {sys.base_prefix, sys.base_exec_prefix} - {"/usr"}:
        own.add(str(Path(prefix) / "lib"))
    there = {path for path in own if os.path.exists(path)}
    return sorted(p for p in there if not there & {str(above) for above in Path(p).parents})


def own_user() -> int:
    """For root, a user number that nobody else has, so that one program's count is its own."""
    return 0 if os.geteuid() else (1 << 30) + secrets.randbelow(1 << 30)
