"""The script inside the confinement: runs a program with its tests, then writes a token.

Standard library only, because inside there is nothing else. Standard input holds a line with the
token, then the source. Standard output gets the token after the last line of the source, or else
the words of the error that stopped it. What the program itself writes is discarded.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

WORDS = 300  # bytes of an error that are told


def limit(seconds: int, memory: int, file: int, processes: int) -> None:
    """Set the kernel's limits of this process and its children."""
    import resource  # not on Windows, where the rest of this package is imported too

    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: file,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def become(user: int) -> None:
    """Become a user that has no other process, so that a limit on processes counts only ours."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)  # which gives up every capability


def main() -> None:
    """Run `runner.py USER SECONDS MEMORY FILE PROCESSES`; USER 0 stays who it is."""
    user, seconds, memory, file, processes = map(int, sys.argv[1:])
    limit(seconds, memory, file, processes)
    if user:
        become(user)
    token, _, source = sys.stdin.buffer.read().partition(b"\n")
    verdict = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for handle in range(3):
        os.dup2(null, handle)
    sys.argv[:] = [""]
    sys.modules["__main__"] = main_module = ModuleType("__main__")  # a script's own, and empty
    try:
        exec(compile(source, "program", "exec", dont_inherit=True), vars(main_module))
    except BaseException as error:  # SystemExit too: a program that leaves early has not passed
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        os.write(verdict, words.encode("utf-8", "replace")[:WORDS])
        os._exit(1)
    os.write(verdict, token)
    os._exit(0)


if __name__ == "__main__":
    main()
