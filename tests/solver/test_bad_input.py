"""What the solver refuses at its edge, the guards a lab opens with, and advice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.solver.solve import longest
from cocurve_lab.solver.targets import read_quantity
from helpers.problems import make_units, random_curvature

UNITS = make_units()
H = random_curvature(UNITS)
PLAN = cl.solve_greedy(H, 0.3)
NAN = math.nan
COSTS = cl.Target(ratio=0.3, costs=np.arange(1, 16))
Call = Callable[[], Any]


def each(call: Callable[[Any], Any], *values: Any) -> list[Call]:
    return [lambda value=value: call(value) for value in values]


CALLS: list[Call] = [
    *each(lambda r: cl.solve_greedy(H, r), 1, 1.5, -0.1, NAN, math.inf, "0.2", None, [0.2]),
    *each(lambda s: cl.solve_greedy(H, 0.2, s), -1.0, NAN, math.inf, "1", 0.2j),
    *each(
        lambda fields: cl.solve_greedy(H, 0.2, **fields),
        *({"include": [u]} for u in ("L9.ffn[0]", 15, -1, cl.Unit("ffn", 0, 0, 0, 11, 12))),
        *({"exclude": [u]} for u in ("L9.ffn[0]", 15)),
        {"include": ["L0.ffn[1]"], "exclude": ["L0.ffn[1]"]},
        {"include": ["L0.ffn[1]"], "guards": cl.Guards(protect_first=1)},
        {"include": ["L0.ffn[1]"], "guards": cl.Guards(kinds=("attention",))},
        {"include": ["L0.attention[0]", "L0.ffn[1]"], "guards": cl.Guards(layer_cap=0.3)},
        {"guards": cl.Guards(protect_last=1), "uniform": True},
    ),
    *each(
        lambda fields: cl.Guards(**fields),
        *({"layer_cap": cap} for cap in (0.0, 1.1, NAN, "0.5")),
        *({"layer_cap_factor": factor} for factor in (0.0, math.inf)),
        {"layer_cap": 0.5, "layer_cap_factor": 1.5},
        *({"protect_first": count} for count in (-1, 1.5)),
        *({"kinds": kinds} for kinds in ((), ("mlp",), 3)),
    ),
    lambda: cl.solve_greedy(H, cl.Target(ratio=0.2, costs=[1, 2, 3])),
    lambda: cl.solve_greedy(H, cl.Target(parameters="100")),  # of a model that is not known
    lambda: cl.solve_greedy(H, COSTS, uniform=True),
    lambda: cl.solve_greedy(random_curvature(cl.UnitSet(UNITS.units[:-1])), 0.2, uniform=True),
    lambda: longest(H, cl.Guards(), 0.8, interaction_strength=-1.0),
    *each(lambda m: cl.lambda_path(H, 0.3, maximum=m), -1.0, NAN, math.inf),
    *each(lambda at: cl.lambda_path(H, 0.3).at(at), -0.1, 1.1, NAN),
    *each(
        lambda fields: cl.Target(**fields),
        {},
        {"parameters": "6B", "size": "1 GB"},
        {"size": "12 GB"},
        {"kv_cache": "96 KiB"},
        {"size": "12 GB", "dtype": "int4"},
        {"parameters": "6B", "dtype": "bf16"},
        {"ratio": 0.2, "dtype": "bf16"},
        {"parameters": "6B", "costs": [1]},
        {"kv_cache": "96 KiB", "dtype": "bf16", "costs": [1]},
        {"ratio": 1.0},
        {"ratio": NAN},
    ),
    *each(
        lambda costs: cl.Target(ratio=0.2, costs=costs),
        *([1, -2], [1, math.inf], [1, NAN], [0, 0], ["a"], [[1]], [], [1e308], [True]),
    ),
    *each(
        lambda text: read_quantity(text, "parameters"),
        *("B", "six", "-1B", "0", "0.0001", "1,5B", "1.2.3", "6BB", "nan", "1e400", "12 G", ""),
        *(True, NAN, [6]),
    ),
    *each(
        lambda text: read_quantity(text, "size"),
        *("12 G", "12 Gi", "12B GB", "6 M", "-1 GB", "1,5 GB"),
    ),
    lambda: cl.kv_cache_costs(UNITS, "bf16"),  # costs that fit no head_dim
    *each(
        lambda of: of[0].prefix(of[1]),
        (PLAN, 0.4),
        (PLAN, cl.Target(ratio=0.1)),
        (cl.Selection.from_pruned(UNITS, [0, 1]), 0.0),
        (cl.solve_greedy(H, 0.3, guards=cl.Guards(layer_cap_factor=1.5)), 0.1),
        (cl.solve_greedy(H, 0.4, uniform=True), 0.1),
        (cl.solve_greedy(H, COSTS), 0.1),
    ),
    *each(PLAN.with_gains, [1.0], {PLAN.pruned[0]: 1.0}, {99: 1.0}, {0: 1.0}),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_it_is_refused(number: int) -> None:
    with pytest.raises(cl.InputError):
        CALLS[number]()


def test_units_of_another_set_are_refused() -> None:
    with pytest.raises(cl.MismatchError):
        cl.Selection.from_pruned(UNITS, [0], random_curvature(make_units(2)))


# The guards that a lab opens with, and the advice where a target is out of reach ------------------


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
