"""The command line as a process: `cocurve`, or `python -m cocurve_lab`."""

import signal
import sys

from .base.first_signals import leave, on_signals


def start() -> int:
    """Run the command line of this process and return its exit code."""
    on_signals(leave)  # the imports of a verb take seconds
    from .cli import main

    try:
        return main()
    finally:
        on_signals(signal.SIG_IGN)  # only the interpreter's end is left


if __name__ == "__main__":
    sys.exit(start())
