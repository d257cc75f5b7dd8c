"""Plugs: typed places of the core where an extension puts an object; the core imports none of them.

A plug names the type of its object, so a type checker sees what is put in and how it is called. The
object is made where it is used, so that an extension that is not used imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .errors import InputError

T = TypeVar("T")


class Plug(Generic[T]):
    """Gives an object of one type: the core's own, until an extension puts in another."""

    def __init__(self, own: Callable[[], T]) -> None:
        self._make = own

    def put(self, make: Callable[[], T]) -> None:
        """Let `make` give the object from here on."""
        self._make = make

    def __call__(self) -> T:
        """Return the object."""
        return self._make()


def absent(what: str) -> Callable[[], Any]:
    """Return what a plug holds while its extension is not installed: a call that says so."""

    def make() -> Any:
        raise missing(what)

    return make


def missing(what: str) -> InputError:
    """Make the error for a feature whose extension is not installed."""
    return InputError(f"{what} needs cocurve_lab.extensions, which is absent. Install it all.")
