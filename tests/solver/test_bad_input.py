"""What the solver refuses at its edge: one table of calls, and the error of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import InputError, MismatchError
from cocurve_lab.extensions.analysis.gains import solve_gains
from cocurve_lab.extensions.analysis.refinement import refine
from cocurve_lab.extensions.analysis.variants import edge_variant, measured_diagonal
from cocurve_lab.models.units import Unit, UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.path import lambda_path
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import longest, solve_greedy
from cocurve_lab.solver.targets import Target, kv_cache_costs, read_quantity
from helpers.problems import make_units, random_curvature

UNITS = make_units()
H = random_curvature(UNITS)
PLAN = solve_greedy(H, 0.3)
NAN = math.nan
RATIO: Any = Target(ratio=0.1)  # a prefix takes none


def of_units(**fields: Any) -> Callable[[], Any]:
    return lambda: solve_greedy(H, 0.2, **fields)


def of_target(**fields: Any) -> Callable[[], Any]:
    return lambda: Target(**fields)


BAD_GUARDS: list[dict[str, Any]] = [
    *({"layer_cap": cap} for cap in (0.0, 1.1, NAN, "0.5")),
    *({"layer_cap_factor": factor} for factor in (0.0, math.inf)),
    {"layer_cap": 0.5, "layer_cap_factor": 1.5},
    *({"protect_first": count} for count in (-1, 1.5)),
    *({"kinds": kinds} for kinds in ((), ("mlp",), 3)),
]
CALLS: list[Callable[[], Any]] = [
    *(lambda r=r: solve_greedy(H, r) for r in (1, 1.5, -0.1, NAN, math.inf, "0.2", None, [0.2])),
    *(lambda s=s: solve_greedy(H, 0.2, s) for s in (-1.0, NAN, math.inf, "1", 0.2j)),
    *(of_units(include=[u]) for u in ("L9.ffn[0]", 15, -1, Unit("ffn", 0, 0, 0, 11, 12))),
    *(of_units(exclude=[u]) for u in ("L9.ffn[0]", 15)),
    of_units(include=["L0.ffn[1]"], exclude=["L0.ffn[1]"]),
    of_units(include=["L0.ffn[1]"], guards=Guards(protect_first=1)),
    of_units(include=["L0.ffn[1]"], guards=Guards(kinds=("attention",))),
    of_units(include=["L0.attention[0]", "L0.ffn[1]"], guards=Guards(layer_cap=0.3)),
    lambda: solve_greedy(H, Target(ratio=0.2, costs=[1, 2, 3])),
    lambda: solve_greedy(H, Target(parameters="100")),  # of a model that is not known
    of_units(guards=Guards(protect_last=1), uniform=True),
    lambda: solve_greedy(H, Target(ratio=0.2, costs=np.arange(1, 16)), uniform=True),
    *(lambda m=m: lambda_path(H, 0.3, maximum=m) for m in (-1.0, NAN, math.inf)),
    *(lambda at=at: lambda_path(H, 0.3).at(at) for at in (-0.1, 1.1, NAN)),
    lambda: longest(H, Guards(), 0.8, interaction_strength=-1.0),
    *(lambda fields=fields: Guards(**fields) for fields in BAD_GUARDS),
    of_target(),
    of_target(parameters="6B", size="1 GB"),
    of_target(size="12 GB"),
    of_target(kv_cache="96 KiB"),
    of_target(size="12 GB", dtype="int4"),
    of_target(parameters="6B", dtype="bf16"),
    of_target(ratio=0.2, dtype="bf16"),
    of_target(parameters="6B", costs=[1]),
    of_target(kv_cache="96 KiB", dtype="bf16", costs=[1]),
    of_target(ratio=1.0),
    of_target(ratio=NAN),
    *(
        of_target(ratio=0.2, costs=costs)
        for costs in ([1, -2], [1, math.inf], [1, NAN], [0, 0], ["a"], [[1]], [], [1e308], [True])
    ),
    *(
        lambda text=text: read_quantity(text, "parameters")
        for text in (
            *["B", "six", "-1B", "0", "0.0001", "1,5B", "1.2.3", "6BB", "nan", "1e400"],
            "12 G",
            "",
            True,
            NAN,
            [6],
        )
    ),
    *(
        lambda text=text: read_quantity(text, "size")
        for text in ("12 G", "12 Gi", "12B GB", "6 M", "-1 GB", "1,5 GB")
    ),
    lambda: kv_cache_costs(UNITS, "bf16"),  # costs that fit no head_dim
    lambda: PLAN.prefix(0.4),
    lambda: Selection.from_pruned(UNITS, [0, 1]).prefix(0.0),
    lambda: solve_greedy(H, 0.3, guards=Guards(layer_cap_factor=1.5)).prefix(0.1),
    lambda: solve_greedy(H, 0.4, uniform=True).prefix(0.1),
    lambda: solve_greedy(H, Target(ratio=0.3, costs=np.arange(1, 16))).prefix(0.1),
    *(lambda g=g: PLAN.with_gains(g) for g in ([1.0], {PLAN.pruned[0]: 1.0}, {99: 1.0}, {0: 1.0})),
    *(lambda r=r: solve_gains(H, PLAN, ridge=r) for r in (-0.1, NAN, math.inf)),
    *(lambda c=c: solve_gains(H, PLAN, clip=c) for c in (0.0, -1.0, NAN)),
    lambda: edge_variant(H, "diagnal"),  # type: ignore[arg-type]
    lambda: edge_variant(H, reach="near"),  # type: ignore[arg-type]
    lambda: edge_variant(H, sign="positive"),  # type: ignore[arg-type]
    lambda: cl.redundancy_gate(H, ratio=1.0),
    lambda: measured_diagonal(H),  # without measured risks
    lambda: PLAN.prefix(RATIO),
    lambda: refine(Selection.from_pruned(UNITS, [0]), H),  # made at no lambda
    lambda: refine(PLAN, H, exclude=[PLAN.pruned[0]]),
    lambda: refine(solve_greedy(H, 0.4, uniform=True), H),
    *(lambda x=x: cl.risk_lower_bound(H, 0.2, interaction_strength=x) for x in (-0.1, 1.1, NAN)),
    lambda: solve_greedy(random_curvature(UnitSet(UNITS.units[:-1])), 0.2, uniform=True),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_it_is_refused_with_a_fact_and_a_remedy(number: int) -> None:
    with pytest.raises(InputError) as caught:
        CALLS[number]()
    assert str(caught.value).endswith(".")


def test_units_of_another_set_are_refused() -> None:
    other = random_curvature(make_units(2))
    for call in (
        lambda: refine(PLAN, other),
        lambda: solve_gains(other, PLAN),
        lambda: Selection.from_pruned(UNITS, [0], other),
    ):
        with pytest.raises(MismatchError):
            call()
