"""How a program is confined: the kernel confines, and bubblewrap (`bwrap`) sets it up.

Nothing here reads what a program says. The filter of system calls is BPF code for `--seccomp`. The
Python binding to libseccomp is not kept up, and the list is short, so the code is made here. It is
a list of refused calls: one of all that Python and libc may call would break with the next release.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..base.errors import InputError

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
    Folders of packages are empty (except below /nix/store). There is no /proc, no /sys, and of /etc
    the linker's cache. What was written goes with the last process.

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
    for folder in packages(shown):
        command += ["--perms", "0555", "--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    return [*command, "--symlink", _PLACE, "/dev/shm", "--remount-ro", "/", "--chdir", _PLACE, "--"]


def packages(shown: Iterable[str]) -> list[str]:
    """Folders of installed packages below some paths."""
    names = ("*-packages", "python*/*-packages")
    found = {place for path in shown for name in names for place in Path(path).glob(name)}
    return sorted(str(place) for place in found if place.is_dir() and not place.is_symlink())


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


# The system calls that are refused ----------------------------------------------------------------
# numbers: asm/unistd_64.h (x86-64) and asm-generic/unistd.h (aarch64) of Linux 6.1
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name -> its number on x86-64, on aarch64; None where the call does not exist
REFUSED: dict[str, tuple[int, int | None]] = {
    # sockets: no Unix socket of the host, and none that a message could be addressed from
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # what lives in the kernel, outside of memory limits or of the program's own namespaces
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # parts of the kernel with a history of holes; io_uring also goes around this filter
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_CLONE, _SOCKETPAIR, _CLONE3 = (56, 220), (53, 199), (435, 435)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_STREAM = 1  # of a pair; a datagram socket of a pair could still send to a name

_LOAD, _EQUAL, _ATLEAST, _ANY, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data


def refusals(machine: str | None = None) -> bytes:
    """Make the filter: an array of struct sock_filter in the byte order of the machine.

    A refused call fails with EPERM; clone3 with ENOSYS, so that libc falls back to clone, whose
    flags can be checked. A call in another architecture's numbering kills the process.

    Args:
        machine: "x86_64" or "aarch64"; None takes this machine.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT:
        raise InputError(
            f"there is no list of system calls for {machine}, only for {', '.join(_AUDIT)}. Run "
            "pass@1 on one of them."
        )
    column = list(_AUDIT).index(machine)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # x32: the same calls under other numbers
        code += [(_ATLEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    code += [
        *((_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)),
        *((_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _FIRST)),
        *((_ANY, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _ERROR | errno.EPERM)),
        (_RETURN, 0, 0, _ALLOW),
        *((_EQUAL, 0, 4, _SOCKETPAIR[column]), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF)),
        *((_EQUAL, 1, 0, _STREAM), (_RETURN, 0, 0, _ERROR | errno.EPERM)),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
