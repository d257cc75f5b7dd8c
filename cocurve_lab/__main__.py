"""The command line as a process: `cocurve`, or `python -m cocurve_lab`."""

import os
import sys

from .cli import DONE, FAILED, main


def start() -> int:
    """Run the command line of this process and return its exit code."""
    code = main()
    try:
        print(end="", flush=True)  # nothing, where stdout was closed before the start
    except OSError as error:  # a full disk, or a reader that left
        if code == DONE:  # else `main` has told it
            print(f"cocurve: not all of the output was written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return FAILED
    return code


if __name__ == "__main__":
    sys.exit(start())
