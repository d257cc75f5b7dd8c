"""The guards that a lab opens with, and which of them to loosen where a target is out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..models.architectures import UNIT_KINDS
from ..models.units import UnitSet
from .guards import Guards, Rules

PROTECTED = ((12, 2), (5, 1))  # from so many layers on, so many stay whole at either end


def opening_guards(units: UnitSet) -> Guards:
    """Return the guards that sliders and notebooks open with: the paper's protection, without cap.

    Two layers at either end stay whole from 12 layers on, one from 5 layers on, none below. The
    verbs of the library have no guards unless they are given some.

    Example:
        >>> from cocurve_lab import enumerate_units, load_model, opening_guards
        >>> print(opening_guards(enumerate_units(load_model("demo")[0])))
        cap none protect 1/1
    """
    count = next((count for least, count in PROTECTED if units.num_layers >= least), 0)
    return Guards(protect_first=count, protect_last=count)


def remedy(rules: Rules, ask: str) -> str:
    """Suggest how to make the target reachable: by asking for less, or by looser guards.

    Where looser guards of one sort are not enough, all that are set are named. `ask` is the largest
    reachable target.
    """
    named = " or ".join(in_the_way(rules))
    named = named or " and ".join(dict(_without(rules.guards))) or "the guards"
    factor = rules.guards.layer_cap_factor
    if factor is None or rules.cap == 1:
        return f"Ask for {ask}, or loosen {named}."
    return f"Loosen {named}: the layer cap is {factor:g} x the ratio and shrinks with it."


def in_the_way(rules: Rules) -> list[str]:
    """Name each guard without which alone some plan reaches the target; else both ends together."""
    looser, guards = dict(_without(rules.guards)), rules.guards
    found = [name for name, free in looser.items() if _reaches(rules, free)]
    if not found and guards.protect_first and guards.protect_last:
        both = replace(guards, protect_first=0, protect_last=0)
        found = ["protect_first and protect_last"] * _reaches(rules, both)
    return found


def _without(guards: Guards) -> Iterator[tuple[str, Guards]]:
    """Guards with one of them dropped, by its name."""
    free: dict[str, Any] = {"layer_cap": None, "layer_cap_factor": None}
    free |= {"protect_first": 0, "protect_last": 0, "kinds": tuple(UNIT_KINDS)}
    for name, value in free.items():
        if getattr(guards, name) not in (value, None):
            yield name, replace(guards, **{name: value})


def _reaches(rules: Rules, guards: Guards) -> bool:
    """Whether some plan reaches the target under other guards."""
    excluded = np.flatnonzero(rules.excluded).tolist()
    others = Rules(rules.units, guards, rules.budget, rules.forced, excluded, portions=True)
    return bool(others.reachable()[0] >= rules.budget.needed)
