"""Quantities as people write them: "6B" parameters, "12 GB", "96 KiB"; and how wide a dtype is."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from .errors import InputError

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for end, base in (("b", 1000), ("ib", 1024))
}
_NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)")


class Quantity(NamedTuple):
    """An amount, whole, and the unit it was written in: its factor and its spelling.

    `whole` is the spelling of the unit of factor 1: " B", or none for things that are counted.
    """

    amount: int
    factor: int
    suffix: str
    whole: str

    def shown(self, amount: float) -> str:
        """Another amount in this unit, rounded up to three decimals; far below it, whole."""
        if 100 * amount < self.factor:
            return f"{math.ceil(amount):,}{self.whole}"
        number = math.ceil(Fraction(amount) / self.factor * 1000) / 1000
        return f"{number:,.3f}".rstrip("0").rstrip(".") + (self.suffix or self.whole)


def read_count(value: Any, what: str) -> Quantity:
    """Read a number of things: 6e9, "6B", "350M", "6,738,415,616".

    Raises:
        InputError: not a positive number with a unit of k, M, B or T; names `what`.
    """
    return _read(value, what, _COUNTS, 'k, M, B or T, as in "6B"', "")


def read_bytes(value: Any, what: str) -> Quantity:
    """Read a number of bytes: 1024, "12 GB" (10^9), "12 GiB" (2^30).

    Raises:
        InputError: not a positive number with a unit; "12 G" is one of two things and is refused.
    """
    return _read(value, what, _BYTES, "B, kB, MB, GB (10^9) or KiB, MiB, GiB (2^30)", " ")


def dtype_name(dtype: Any) -> str:
    """The key of ITEM_BYTES for a name, a short name (bf16) or a torch dtype.

    Raises:
        InputError: another dtype. Quantised formats carry scales, so bits alone would mislead.
    """
    name = str(dtype).removeprefix("torch.")
    name = _SHORT.get(name, "float8" if name.startswith("float8") else name)
    if name not in ITEM_BYTES:
        raise InputError(f"dtype is {str(dtype)!r}; choose from {', '.join(ITEM_BYTES)}.")
    return name


def _read(value: Any, what: str, table: dict[str, int], units: str, gap: str) -> Quantity:
    text = str(value).strip()
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))  # 1e-05 and 1e+20 are spelt in ways people do not write
    found = _NUMBER.fullmatch(text.lower())
    factor = table.get(found[2]) if found else None
    amount = int(Fraction(found[1].replace(",", "")) * factor) if found and factor else 0
    if not found or not factor or amount <= 0:
        raise InputError(
            f"{what} is {value!r}, which is no positive quantity. Write a number and one of "
            f"{units}."
        )
    suffix = text[len(text) - len(found[2]) :] if found[2] else ""
    return Quantity(amount, factor, gap + suffix if suffix else "", " B" if gap else "")
