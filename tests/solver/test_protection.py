"""The guards that a lab opens with, and the advice where a target is out of reach."""

from __future__ import annotations

import re

import pytest

import cocurve_lab as cl
from helpers.problems import make_units, random_curvature

CURVATURE = random_curvature(make_units(6, 2, 3), seed=2)  # a layer is a sixth of the cost


@pytest.mark.parametrize(
    ("layers", "kept"), [(1, 0), (4, 0), (5, 1), (11, 1), (12, 2), (32, 2), (80, 2)]
)
def test_deep_models_keep_two_layers_at_either_end(layers: int, kept: int) -> None:
    opening = cl.opening_guards(make_units(layers))
    assert opening == cl.Guards(protect_first=kept, protect_last=kept)
    assert cl.Guards() == cl.Guards(None, None, 0, 0)  # the default of every verb


@pytest.mark.parametrize(
    ("ratio", "guards", "named"),
    [
        (0.7, {"protect_first": 1, "protect_last": 1}, ["protect_first", "protect_last"]),
        (0.9, {"protect_first": 1, "protect_last": 1}, ["protect_first and protect_last"]),
        (0.5, {"layer_cap": 0.4, "protect_last": 1}, ["layer_cap"]),
        (0.5, {"layer_cap_factor": 0.5}, ["layer_cap_factor"]),
        (0.5, {"kinds": ("attention",), "protect_last": 1}, ["kinds"]),
    ],
    ids=str,
)
def test_the_guards_in_the_way_are_named(ratio: float, guards: dict, named: list[str]) -> None:
    """Those without which alone a plan exists; all of them where one is not enough."""
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.solve_greedy(CURVATURE, ratio, guards=cl.Guards(**guards))
    (told,) = re.findall(r"[Ll]oosen (.*?)(?:\.|: the layer cap is)", str(caught.value))
    assert told.split(" or ") == named
    for name in named if " and " not in named[0] else ():  # as it says, so it is
        kept = {key: value for key, value in guards.items() if key != name}
        assert cl.solve_greedy(CURVATURE, ratio, guards=cl.Guards(**kept))
