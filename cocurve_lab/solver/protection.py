"""Default guards, and advice on which to relax where a target cannot be reached."""

from __future__ import annotations

from dataclasses import replace

from ..models.units import UnitSet
from .guards import FREE, Guards, Rules

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


def remedy(rules: Rules) -> str:
    """Suggest how to make the target reachable: by asking for less, or by looser guards.

    Where looser guards of one sort are not enough, all that are set are named.
    """
    named = " or ".join(in_the_way(rules)) or " and ".join(_given(rules.guards)) or "the guards"
    factor = rules.guards.layer_cap_factor
    if factor is None or rules.cap == 1:
        return f"Ask for less, or loosen {named}."
    return f"Loosen {named}: the layer cap is {factor:g} x the ratio and shrinks with it."


def in_the_way(rules: Rules) -> list[str]:
    """Name each guard without which alone some plan reaches the target; else both ends together."""
    given = _given(rules.guards)
    found = [name for name in given if _reaches(rules, name)]
    ends = ["protect_first", "protect_last"]
    if not found and set(ends) <= set(given) and _reaches(rules, *ends):
        found = [" and ".join(ends)]
    return found


def _given(guards: Guards) -> list[str]:
    """The names of the guards that are set."""
    return [name for name, value in vars(FREE).items() if getattr(guards, name) != value]


def _reaches(rules: Rules, *dropped: str) -> bool:
    """Whether some plan reaches the target without these guards."""
    free = {name: getattr(FREE, name) for name in dropped}
    return rules.under(replace(rules.guards, **free)).reachable() >= rules.budget.needed
