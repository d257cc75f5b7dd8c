"""What a signal does before anything else is imported, so this file imports next to nothing."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def on_signals(handler: signal._HANDLER) -> None:
    """Let Ctrl-C and SIGTERM call a handler, unless they are ignored, as in a background job."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def leave(*_: object) -> None:
    """End the process at once: the handler of its first seconds."""
    try:
        os.write(2, b"cocurve: interrupted before anything was done; nothing is left behind.\n")
    finally:  # also with a closed stderr
        os._exit(INTERRUPTED)
