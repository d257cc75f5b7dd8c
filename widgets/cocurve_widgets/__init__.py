"""Instruments for notebooks: live pruning plans, bridges, measured risk, and text.

Names are imported on first use. session.py is what instruments share, instrument.py and traits.py
what they are made of; each of the others is an instrument or a part of one, as its first line says.
The JavaScript is in front/: kit.js and svg.js serve all, and a file imports what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "LambdaExplorer": "lambda_explorer",
    "BridgeExplorer": "bridge_explorer",
    "BuildMonitor": "build_monitor",
    "FidelityScatter": "fidelity_scatter",
    "GenerationCompare": "generation_compare",
    "MeasuredPlan": "session",
    "Session": "session",
    "export_html": "export",
    "refresh_html": "export",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
