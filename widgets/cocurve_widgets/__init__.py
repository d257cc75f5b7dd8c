"""Instruments for notebooks: live pruning plans, bridges, measured risk, and text.

Names are imported on first use, so that one instrument does not need the plotting package of
another.

    session.py              the plan, unit and measured plans that instruments share; their thread
    instrument.py           the base of all instruments: errors, linking, files
    packing.py              H as the browser receives it
    lambda_explorer.py      drag lambda and see the plan change (notebook 02)
    bridge_explorer.py      the graph of H and its bridge units (03)
    fidelity_scatter.py     predicted against measured KL (04); with fidelity_figure, _controls,
                            _points (rows and names) and _measuring (on the thread)
    generation_compare.py   dense and pruned text side by side (05)
    build_monitor.py        progress of a build (01)
    export.py               the explorers in one HTML file
    front/                  the same in JavaScript
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
    "MeasuredPlan": "session",
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
