"""The system calls that a confined program is refused: BPF code that `bwrap --seccomp` takes.

The Python binding to libseccomp is not kept up, and the list is short, so the code is made here.
It refuses; it does not allow: a list of what every Python and libc may call would break with the
next release. Numbers: asm/unistd_64.h (x86-64) and asm-generic/unistd.h (aarch64) of Linux 6.1.
"""

from __future__ import annotations

import errno
import platform
import struct

from ..base.errors import InputError

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
