"""Ctrl-C and SIGTERM: whenever one arrives, a verb ends with 130, or was done already.

While packages are imported, nothing is done yet, and the process ends at once: Python can lose an
exception that is raised inside an import. While a verb runs, KeyboardInterrupt is raised, so that
finished work is kept. After that, signals are ignored, because only the interpreter's end is left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .errors import CocurveError
from .first_signals import INTERRUPTED as INTERRUPTED
from .first_signals import leave

if TYPE_CHECKING:
    import subprocess

_PAUSE = 0.05  # seconds until a lost interrupt is raised again; at once it is lost again


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt inside the block for Ctrl-C and SIGTERM, again if lost or wrapped.

    Python prints and drops an exception in a `__del__` or a callback.
    """
    # only the main thread may set a handler
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: Any) -> None:
        # through the handler of Ctrl-C, so that `uninterrupted` delays SIGTERM too
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(number, frame)
        else:  # SIGINT is ignored, as in the background job of a script
            raise KeyboardInterrupt

    def again(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            report(lost)
            return
        main = threading.main_thread().ident or 0
        timers.append(threading.Timer(_PAUSE, signal.pthread_kill, (main, signal.SIGTERM)))
        timers[-1].start()

    timers: list[threading.Timer] = []
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, pass_on)
    if before[0] is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    report, sys.unraisablehook = sys.unraisablehook, again
    try:
        yield
    except Exception as error:
        # Python wraps what arrives while a class is made, and torch cannot leave what it was about
        # to enter; but an error of ours that an interrupt met while it ended the verb stays
        found: BaseException | None = error
        while found is not None and not isinstance(found, KeyboardInterrupt):
            ours = isinstance(found, (CocurveError, OSError))
            found = found.__cause__ or (None if ours else found.__context__)
        if found is None:
            raise
        raise found from None
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, signal.SIG_IGN if handler is leave else handler)
        sys.unraisablehook = report


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block is left, so that a few lines are done together or not at all."""
    # Python handles signals in the main thread only; elsewhere none can arrive. A background job of
    # a shell starts with Ctrl-C ignored, and it stays ignored.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[bool] = []
    old = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
    if came:
        raise KeyboardInterrupt


def run_child(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it wrote; whatever ends the wait ends it, too."""
    import subprocess  # the handlers should not wait for it

    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a group of its own, which is ended with its children
    ) as child:
        try:
            out, error = child.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
            child.wait()
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, error)
