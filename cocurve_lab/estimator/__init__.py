"""TODO."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FILES = ("estimate",)


def __getattr__(name: str) -> Any:
    for file in _FILES:
        found = vars(import_module(f".{file}", __name__)).get(name)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
