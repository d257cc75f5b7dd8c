"""What a verb prints never ends it: a closed pipe, a full disk, or a terminal without a sign."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PLAIN = {
    "±": "+-",
    "λ": "lambda",
    "−": "-",
    "×": "x",
    "…": "...",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "–": "-",
    "—": "-",
    "█": "#",
    "✓": "yes",
    "✗": "no",
    "“": '"',
    "”": '"',
    "’": "'",
}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace what an encoding lacks by plain characters, or by `?`."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in lacking), error.end


codecs.register_error("cocurve", _in_ascii)


class Steady:
    """A stream whose failures are the reader's: what cannot be written is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a reader that left, a full disk, a closed stream
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def steady_output() -> Iterator[None]:
    """Let nothing that is printed inside the block raise."""
    before = sys.stdout, sys.stderr
    # a stream that was closed before the start is None
    streams: list[Any] = [stream or open(os.devnull, "w") for stream in before]  # noqa: SIM115
    usual = [(s, s.errors) for s in streams if isinstance(s, io.TextIOWrapper)]
    for wrapper, _ in usual:
        wrapper.reconfigure(errors="cocurve")
    sys.stdout, sys.stderr = map(Steady, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for wrapper, errors in usual:
            with suppress(OSError, ValueError):
                wrapper.reconfigure(errors=errors)
        for stream in streams:
            try:
                stream.flush()
            except (OSError, ValueError):  # the interpreter flushes again when it ends
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
