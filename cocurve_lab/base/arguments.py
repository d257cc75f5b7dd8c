"""Normalize arguments: numbers of any type become Python int or float; errors name the argument.

numpy keeps the type of what it is given: sums of half-precision numbers stop at 65,504, and int64
wraps at 2^63 silently. Python ints are unbounded, and Python floats are float64.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np

from .errors import InputError, shown

T = TypeVar("T")
EXACT = 2**53  # below this every whole number, and every sum of them, is exact in float64


def as_float(value: Any, name: str) -> float:
    """Return a number of any type as a Python float; beyond float64 it is infinite."""
    # float() would read text, and would drop an imaginary part or a dimension
    if not isinstance(value, (str, bytes, np.complexfloating)) and not getattr(value, "ndim", 0):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            pass
    raise InputError(
        f"{name} is {shown(value)}, which is not a number. Give one number, such as 0.5."
    )


def as_int(value: Any, name: str, least: int = 0) -> int:
    """Return a whole number from `least` up to 2^53 of any integer type as a Python int."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(
            f"{name} is {shown(value)}, not a whole number. Give an integer."
        ) from None
    if number < least:
        raise InputError(f"{name} is {shown(number)}. Give {least} or more.")
    if number >= EXACT:
        raise InputError(
            f"{name} is {shown(number)}; from 2^53 on float64 and the browser round such numbers. "
            "Give a smaller one."
        )
    return number


def as_list(values: Iterable[T], name: str) -> list[T]:
    """Return a list of the values of any iterable."""
    try:
        return list(values)
    except TypeError:
        raise InputError(
            f"{name} is {shown(values)}, not a list or another iterable. Give a list."
        ) from None


def as_path(value: Any, name: str) -> Path:
    """Return a path, with `~` for the user's folder expanded."""
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(
            f"{name} is {shown(value)}, not a path. Give the name of a file or folder."
        )
    return Path(os.path.expanduser(value))


def require_type(value: Any, wanted: type, name: str) -> None:
    """Raise InputError, naming `name` and both types, unless a value is an instance of a class."""
    if not isinstance(value, wanted):
        makers = [f"{wanted.__name__}.{x}" for x in ("from_texts", "load") if hasattr(wanted, x)]
        made = f"; {' or '.join(makers)} returns one" if makers else ""
        raise InputError(f"{name} is a {type(value).__name__}. Give a {wanted.__name__}{made}.")


def require_choice(value: Any, choices: Any, name: str) -> None:
    """Raise InputError unless a value is one of a Literal's."""
    if value not in get_args(choices):
        raise InputError(f"{name} is {shown(value)}. Give one of {', '.join(get_args(choices))}.")


MOST_THREADS = 1024


def require_threads(value: Any, name: str) -> int:
    """Return a number of CPU threads from 1 to `MOST_THREADS` as a Python int."""
    threads = as_int(value, name, 1)
    if threads > MOST_THREADS:  # not the number of CPUs: the bits of H depend on it
        raise InputError(
            f"{name} is {threads:,}; torch ends the process when it cannot start that many. Give "
            f"at most {MOST_THREADS:,}."
        )
    return threads
