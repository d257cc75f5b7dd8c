"""The command line as a process: `cocurve`, or `python -m cocurve_lab`."""

import sys

from .base.interrupts import ignore, leave_at_once


def start() -> int:
    """Run the command line of this process and return its exit code."""
    leave_at_once()  # the imports of a verb take seconds
    from .cli import main

    try:
        return main()
    finally:
        ignore()


if __name__ == "__main__":
    sys.exit(start())
