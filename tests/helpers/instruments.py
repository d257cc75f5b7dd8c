"""An instrument without a browser: what its page would receive and send."""

from __future__ import annotations

from typing import Any


def received(instrument: Any, name: str) -> Any:
    """A value that only the page reads, as it is sent there."""
    return instrument.get_state([f"_{name}"])[f"_{name}"]


def say(instrument: Any, **content: Any) -> None:
    """A message of the page, such as a click."""
    instrument._handle_custom_msg(content, [])


def settle(instrument: Any) -> None:
    """Wait until the session's thread has nothing left to do."""
    assert instrument.session.worker.join(60)
