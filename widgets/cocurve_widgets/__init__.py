"""Instruments for notebooks: pruning plans, bridges, measured risk and text, live.

Names are imported on first use, so that one instrument does not need what another one draws with.
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
    "Measured": "session",
    "Session": "session",
    "export_html": "export",
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
