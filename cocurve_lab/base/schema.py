"""Validate what a file holds against a schema: a table of its fields and of their allowed values.

A file may come from anybody. A reader validates every field before it uses it; the error names the
field, its value, and the allowed values. Each reader compares its fields with each other itself.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .errors import FileFormatError, InputError, one_line, shown
from .files import MOST_JSON, read_regular

Test = Callable[[Any], bool]


class Field(NamedTuple):
    """What a field of a file may hold.

    Attributes:
        words: the allowed values, for the error.
        fits: whether a value is one of them.
        optional: whether the field may be missing.
    """

    words: str
    fits: Test
    optional: bool = False


Schema = Mapping[str, Field]


def require_fields(
    content: Any, schema: Schema, *, inside: str = "", others: bool = False
) -> dict[str, Any]:
    """Check an object read from a file, field by field, and return it.

    A FileFormatError has the fact alone as its message: `reading` adds the file and the remedy.

    `inside` names the object in the file, for the error; `others` allows further fields.
    """
    if not isinstance(content, dict):
        raise FileFormatError(f"{inside or 'its content'} is {shown(content)}, not an object")
    prefix = f"{inside}." if inside else ""
    for name, field in schema.items():
        if name not in content:
            if not field.optional:
                raise FileFormatError(f"{prefix}{name} is missing")
        elif not field.fits(content[name]):
            raise FileFormatError(f"{prefix}{name} is {told(content[name])}, not {field.words}")
    unknown = [name for name in content if name not in schema]
    if unknown and not others:
        raise FileFormatError(f"no field is called {shown(prefix + str(unknown[0]))}")
    return content


def optional(schema: Schema) -> dict[str, Field]:
    """The same fields, each of which may be missing."""
    return {name: field._replace(optional=True) for name, field in schema.items()}


def parse_json(text: str | bytes, *, nan: bool = False) -> Any:
    """Parse JSON of a file; the message of its FileFormatError is the fact alone.

    Python reads NaN, infinities, 1e400 and half a surrogate pair, which are no JSON or no text;
    here they are errors. With `nan`, as in tables, NaN and infinities are numbers.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        strict: Any = {} if nan else {"parse_float": _finite, "parse_constant": _finite}
        found = json.loads(text, **strict)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise FileFormatError("a text in it has half a surrogate pair, which is no UTF-8") from None
    except (TypeError, ValueError, RecursionError) as error:  # deep nesting exhausts the stack
        raise FileFormatError(f"it is not JSON ({one_line(error)})") from None


def read_json(path: str | os.PathLike[str], *, nan: bool = False) -> Any:
    """Read a JSON file of any origin, inside `reading`."""
    return parse_json(read_regular(path, MOST_JSON), nan=nan)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is no finite number")
    return value


def told(value: Any) -> str:
    """A value for a message: an array by its dtype and shape, others as text."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {list(value.shape)}"
    return shown(value) if isinstance(value, (str, bytes, int)) else shown(repr(value))[1:-1]


@contextmanager
def reading(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Turn the error of any part of a file into one FileFormatError: file, fact and remedy."""
    try:
        yield
    except (FileFormatError, InputError, LookupError, TypeError, ValueError) as error:
        if str(error).startswith(f"{path} "):  # it is complete: file, fact and remedy
            raise
        fact = f"it lacks {error}" if isinstance(error, LookupError) else str(error).rstrip(".")
        raise FileFormatError(f"{path}: {fact}. {remedy}") from None


# Tests of one value -------------------------------------------------------------------------------


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 that float64 holds exactly."""
    return type(value) is int and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Whether a value is a finite float64."""
    # not isinstance: true and false are int, but no numbers; 10**400 is int, but no float64
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, text, true, false or None: a cell of a table."""
    return value is None or isinstance(value, (bool, int, float, str))


def list_of(fits: Test) -> Test:
    """Test for a list of such values."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def dict_of(fits: Test) -> Test:
    """Test for an object of such values by name."""
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def or_none(fits: Test) -> Test:
    """Test for such a value or None."""
    return lambda value: value is None or fits(value)


def array_of(dtype: str, dimensions: int) -> Test:
    """Test for an array of a dtype and a number of dimensions, without NaN or infinity."""
    return lambda value: (
        isinstance(value, np.ndarray)
        and value.dtype.name == dtype
        and value.ndim == dimensions
        and bool(np.isfinite(value).all())
    )


COUNT = Field("a whole number from 0", is_count)
POSITIVE = Field("a whole number from 1", lambda value: is_count(value) and value > 0)
NUMBER = Field("a finite number", is_number)
SHARE = Field("a share from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
SECONDS = Field("seconds", lambda value: is_number(value) and value >= 0)
TEXT = Field("text", is_text)
FLAG = Field("true or false", lambda value: isinstance(value, bool))
OBJECT = Field("an object", is_object)
TEXTS = Field("a list of texts", list_of(is_text))


def nullable(field: Field) -> Field:
    """The same field, which may also be None."""
    return field._replace(words=f"{field.words}, or null", fits=or_none(field.fits))
