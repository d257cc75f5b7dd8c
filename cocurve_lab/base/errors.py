"""The exceptions of the lab: a base class, and one class for each case a caller may want to catch.

Every message states the fact, the offending value and the next step, in that order.
"""

from __future__ import annotations

import errno
from typing import Any


class CocurveError(Exception):
    """Base class of every error this package raises on purpose."""


class InputError(CocurveError, ValueError):
    """An argument has a value the called function cannot use."""


class NoRoomError(InputError, OSError):
    """A disk is full, or will be; `errno` is that of a full disk."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC


class ArchitectureError(CocurveError):
    """The model's family, or the form of its weights, does not allow the operation."""


class MismatchError(CocurveError):
    """Two objects do not belong together, such as a model and a selection made on another."""


class FileFormatError(CocurveError):
    """A file is truncated, hostile, of another version, or of another format."""


class NumericalError(CocurveError):
    """A model or matrix gave unusable numbers: NaN, infinity, or a negative square."""


class EquivalenceError(CocurveError):
    """The pruned model does not compute what the masked model computes."""


class WorkerError(CocurveError):
    """The workers of a distributed build could not start, or all of them died."""


class InfeasibleError(CocurveError):
    """No plan, or no greedy plan, removes the requested share under the guards.

    Attributes:
        requested_ratio: the requested share of the removable cost, in [0, 1).
        reachable_ratio: the largest share that any plan can remove under the guards.
        stalled_ratio: the share at which greedy stopped; None if no plan reaches the request.
    """

    def __init__(
        self,
        message: str,
        *,
        requested_ratio: float,
        reachable_ratio: float,
        stalled_ratio: float | None = None,
    ) -> None:
        super().__init__(message)
        self.requested_ratio = requested_ratio
        self.reachable_ratio = reachable_ratio
        self.stalled_ratio = stalled_ratio


def one_line(error: BaseException) -> str:
    """Return the text of another package's error as one line, cut after 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def shown(value: Any) -> str:
    """Return the text of a value for a message, cut after 60 characters."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print larger ones
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
