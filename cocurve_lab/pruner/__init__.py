"""From a plan to a smaller model, in memory and on disk.

In reading order:

    slicing.py      which rows and columns of a projection stay
    cutting.py      `prune`: a smaller model
    equivalence.py  does it compute what the masked model computes
    manifest.py     the widths of a pruned model and the plan that made them
    saving.py       `save_pruned` and `load_pruned`
    folder.py       what transformers needs to read a saved folder without this library
    modeling_cocurve.py  the modelling file shipped beside the weights
    card.py         the model card

Imports `solver/`, `measuring/` and what lies below them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# this package was a module once: its names are still found here
_HOMES = {
    "cut": ".cutting",
    "prune": ".cutting",
    "require_prunable": ".cutting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
