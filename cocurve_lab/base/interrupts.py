"""What Ctrl-C and SIGTERM may not tear apart: a few lines, and a program with its children."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager
from typing import TypeVar

from .errors import InputError


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM, where they interrupt, until the block is left.

    So a few lines are done together or not at all. A signal that is ignored stays ignored, and one
    that ends the process ends it.
    """
    # Python handles signals in the main thread only; elsewhere none can arrive
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    delayed = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in delayed:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in delayed.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


T = TypeVar("T")


def within(seconds: float, program: str, run: Callable[[], T]) -> T:
    """Return what another's program returns, or raise InputError if it takes too long.

    A program that did not end goes on in its thread; the process can end without it.
    """
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(run())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        raise InputError(
            f"{program} did not end within {seconds:g} s. Use one that you trust."
        ) from None
