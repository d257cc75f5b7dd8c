"""Seams: the places where an extension hooks into the core, which imports none of them.

An extension offers a function under the name of a seam; the core asks for it when it needs it. The
file behind it is imported at the first use, so that an unused extension costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HOMES: dict[str, str] = {}


def offer(seam: str, home: str) -> None:
    """Let `home`, such as "package.file:function", answer for a seam."""
    _HOMES[seam] = home


def is_offered(seam: str) -> bool:
    """Return whether an extension answers for a seam, without importing it."""
    return seam in _HOMES


def extension(seam: str) -> Callable[..., Any] | None:
    """Return what an extension offers for a seam, or None if no extension does."""
    if seam not in _HOMES:
        return None
    from importlib import import_module

    module, _, name = _HOMES[seam].partition(":")
    return getattr(import_module(module), name)


def require_extension(seam: str, what: str) -> Callable[..., Any]:
    """Return what an extension offers for a seam; InputError names `what` was asked for."""
    found = extension(seam)
    if found is None:
        from .errors import InputError

        raise InputError(f"{what} needs cocurve_lab.extensions, which is absent. Install it all.")
    return found
