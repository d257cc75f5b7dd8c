"""Waiting for what happens beside a test: in a page, a kernel, or another thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(
    read: Callable[[], Any], right: Callable[[Any], Any] = bool, seconds: float = 20
) -> Any:
    """What `read` gives, as soon as it is right."""
    end = time.monotonic() + seconds
    while not right(found := read()):
        assert time.monotonic() < end, f"after {seconds} s it still is {found!r}"
        time.sleep(0.01)
    return found
