"""How a program is confined: the kernel confines, and bubblewrap (`bwrap`) sets it up.

Nothing here reads what a program says. The filter of system calls is BPF code for `--seccomp`. The
Python binding to libseccomp is not kept up, and the list is short, so the code is made here. It is
a list of refused calls: one of all that Python and libc may call would break with the next release.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from pathlib import Path

from ..base.errors import InputError

_PLACE = "/tmp"  # of the program, inside
# MALLOC_ARENA_MAX: one reserve of memory, not one per thread
_COMMAND = """
bwrap --die-with-parent --new-session --clearenv --setenv MALLOC_ARENA_MAX 1 --hostname program
--unshare-net --unshare-pid --unshare-ipc --unshare-uts --cap-drop ALL
"""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def bwrap(filter_handle: int, folder_bytes: int, visible: Path) -> list[str]:
    """Make the command line of bwrap, up to the arguments of the interpreter.

    Inside are the interpreter and the system's libraries, read-only, four devices, and a tmpfs.
    There is no /proc, no /sys, and of /etc the linker's cache. What was written goes with the last
    process.

    Args:
        filter_handle: descriptor of the filter of system calls, which bwrap reads and closes.
        folder_bytes: size of the tmpfs, which is all that can be written.
        visible: one more file to see, read-only, under its own path.
    """
    shown = [*readable(), str(visible)]
    # bwrap would close a folder to others that it makes for a file which they may not execute
    above = {str(folder) for path in (*shown, *_DEVICES) for folder in Path(path).parents}
    folders = sorted(above - {"/", _PLACE, *shown})
    # with these, root becomes a user of its own, who has none of them (runner.py)
    capabilities = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        *_COMMAND.split(),
        "--seccomp",
        str(filter_handle),
        *(capabilities if os.geteuid() == 0 else ["--unshare-user"]),
        # first, because an interpreter may lie below it
        *f"--size {folder_bytes} --perms 1777 --tmpfs {_PLACE}".split(),
        *(word for folder in folders for word in ("--perms", "0755", "--dir", folder)),
        *(word for path in shown for word in ("--ro-bind", path, path)),
        *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        *(word for path in ("/lib", "/lib64") for word in _library(path)),
        *f"--symlink {_PLACE} /dev/shm --remount-ro / --chdir {_PLACE} --".split(),
        # this Python without its environment, folder or packages
        os.path.realpath(sys.executable),
        "-I",
        "-S",
    ]


def _library(path: str) -> tuple[str, str, str]:
    """How a folder of the system's libraries is shown: as the link that it is, or read-only."""
    if os.path.islink(path):
        return "--symlink", os.readlink(path), path
    return "--ro-bind-try", path, path


def readable() -> list[str]:
    """Paths inside: this interpreter, its standard library and the system's libraries."""
    own = {
        os.path.realpath(sys.executable),
        os.path.dirname(os.__file__),
        os.path.join(sys.base_prefix, "lib"),
        os.path.join(sys.base_exec_prefix, "lib"),
        "/usr/lib",
        "/usr/lib64",
        "/etc/ld.so.cache",
        "/nix/store",
    }
    there = {path for path in own if os.path.exists(path)}
    return sorted(p for p in there if not there & {str(above) for above in Path(p).parents})


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
# calls that depend on what they are given
_JUDGED = {"clone": (56, 220), "socketpair": (53, 199), "clone3": (435, 435)}
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_STREAM = 1  # of a pair; a datagram socket of a pair could still send to a name

# operations, results, and offsets in struct seccomp_data
_LOAD, _EQUAL, _ATLEAST, _ANY, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24


def refusals(machine: str | None = None) -> bytes:
    """Make the filter: an array of struct sock_filter in the byte order of the machine.

    A refused call fails with EPERM; clone3 with ENOSYS, so that libc falls back to clone, whose
    flags can be checked. A call in another architecture's numbering kills the process.

    Args:
        machine: "x86_64" or "aarch64"; None takes this machine.
    """
    machine = machine or os.uname().machine
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
    for number in [numbers[column] for numbers in REFUSED.values()]:
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    code += [
        (_EQUAL, 0, 1, _JUDGED["clone3"][column]),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_EQUAL, 0, 4, _JUDGED["clone"][column]),
        (_LOAD, 0, 0, _FIRST),
        (_ANY, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, _JUDGED["socketpair"][column]),
        (_LOAD, 0, 0, _SECOND),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, _STREAM),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
