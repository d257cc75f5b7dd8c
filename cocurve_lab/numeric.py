"""The one way in for numbers: whatever type they come in, they leave as Python int or float.

numpy keeps the type of what it is given: one half-precision ratio makes sums stop at 65,504, and
int64 wraps at 2^63 without a word. Python ints have no end, and Python floats are float64.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from .errors import InputError

EXACT = 2**53  # below this every whole number, and every sum of them, is exact in float64


def as_float(value: Any, name: str) -> float:
    """Return a number of any type as a Python float; beyond float64 it is infinite.

    Raises:
        InputError: text, a complex number, an array, or no number at all; names `name`.
    """
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


def as_int(value: Any, name: str) -> int:
    """Return a whole number from 0 up to 2^53 of any integer type as a Python int.

    Raises:
        InputError: not an integer, or not in that range; names `name`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(
            f"{name} is {shown(value)}, not a whole number. Give an integer."
        ) from None
    if number < 0:
        raise InputError(
            f"{name} is {shown(number)}, but a count cannot be negative. Give 0 or more."
        )
    if number >= EXACT:
        raise InputError(
            f"{name} is {shown(number)}; from 2^53 on float64 and the browser round such numbers. "
            "Give a smaller one."
        )
    return number


def shown(value: Any) -> str:
    """Return the text of a value for a message, cut after 60 characters."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print larger ones
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
