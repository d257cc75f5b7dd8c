"""Instruments for notebooks: live pruning plans, bridges, measured risk, and text.

Names are imported on first use, so that one instrument does not need the plotting package of
another.

    session.py             the plan, unit and measured plans that instruments share; their thread
    instrument.py          the base of all instruments: errors, linking, code, files
    packing.py             H as the browser receives it
    still.py               what stays of an instrument in a saved notebook
    build_monitor.py       BuildMonitor: progress of a build (notebook 01)
    curvature_map.py       CurvatureMap: H as a picture to order, zoom and brush (01)
    damage.py              what plans break, measured while one looks
    by_hand.py             plans and pairs of units made by clicks
    solving.py             what LambdaExplorer solves on: the matrix, or the additive KL
    lambda_explorer.py     LambdaExplorer: drag lambda and see the plan change (02)
    bridge_explorer.py     BridgeExplorer: the graph of H and its bridge units (03)
    fidelity_points.py     FidelityScatter (04): points as rows, their names and statistics
    fidelity_measuring.py  measuring plans on the thread
    fidelity_scatter.py    FidelityScatter itself: predicted against measured KL
    generation_compare.py  GenerationCompare: dense and pruned text side by side (05)
    export.py              export_html: both explorers in one offline page

The JavaScript is in front/, one entry file per instrument and the shared parts in kit.js and
solver.js.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "LambdaExplorer": "lambda_explorer",
    "BridgeExplorer": "bridge_explorer",
    "BuildMonitor": "build_monitor",
    "CurvatureMap": "curvature_map",
    "FidelityScatter": "fidelity_scatter",
    "GenerationCompare": "generation_compare",
    "Measured": "session",
    "MeasuredPlan": "session",
    "Session": "session",
    "export_html": "export",
    "refresh_html": "export",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs the package {error.name}, which is not installed. Run "
            "`pip install 'cocurve-lab[lab]'`."
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
