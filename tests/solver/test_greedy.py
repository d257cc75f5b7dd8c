"""Greedy against Alg. 2 written out the slow way, and feasibility against brute force."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.models.architectures import UNIT_KINDS
from cocurve_lab.solver.guards import reachable_ratio
from cocurve_lab.solver.solve import longest
from helpers.problems import allowed, llama_8b_units, make_units, naive_greedy, random_curvature
from helpers.seals import fields_of

SMALL = make_units()  # 15 units, layer cost 43, total 129
SETTINGS = settings(max_examples=150, derandomize=True, deadline=None)


def integer_curvature(units: cl.UnitSet, seed: int) -> cl.Curvature:
    """A Gram matrix of small integers: sums are exact, so exact ties really occur."""
    features = np.random.default_rng(seed).integers(-2, 3, size=(len(units), 4))
    return cl.Curvature((features @ features.T).astype(float), units)


guard_sets = st.builds(
    cl.Guards,
    layer_cap=st.sampled_from([None, 0.3, 0.5, 0.8]),
    protect_first=st.integers(0, 1),
    protect_last=st.integers(0, 1),
    kinds=st.sampled_from([("attention", "ffn"), ("ffn",), ("attention",)]),
)


# The algorithm ------------------------------------------------------------------------------------


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    exact=st.booleans(),
    ratio=st.floats(0, 0.95),
    strength=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    guards=guard_sets,
)
def test_equals_the_algorithm_word_for_word(
    seed: int, exact: bool, ratio: float, strength: float, guards: cl.Guards
) -> None:
    curvature = (integer_curvature if exact else random_curvature)(SMALL, seed)
    order = naive_greedy(curvature, ratio, strength, guards)
    if order is None:
        with pytest.raises(cl.InfeasibleError):
            cl.solve_greedy(curvature, ratio, strength, guards)
    else:
        assert cl.solve_greedy(curvature, ratio, strength, guards).pruned == tuple(order)


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    ratio=st.floats(0, 0.45),  # the six dearest units excluded leave 0.48
    chosen=st.lists(st.integers(0, 14), unique=True, max_size=6),
    cut=st.integers(0, 3),
)
def test_include_and_exclude_against_the_naive_loop(
    seed: int, ratio: float, chosen: list[int], cut: int
) -> None:
    include, exclude = tuple(chosen[:cut]), tuple(chosen[cut:])
    curvature = random_curvature(SMALL, seed)
    order = naive_greedy(curvature, ratio, include=include, exclude=exclude)
    assert order is not None
    plan = cl.solve_greedy(curvature, ratio, include=include, exclude=exclude)
    assert plan.pruned == tuple(order)
    assert plan.pruned[: len(include)] == include
    assert not set(exclude) & set(plan.pruned)


def test_a_kind_that_is_registered_later_may_be_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNIT_KINDS, "later", UNIT_KINDS["ffn"])
    units = cl.UnitSet((cl.Unit("ffn", 0, 0, 0, 1, 10), cl.Unit("later", 0, 0, 0, 1, 10)))
    plan = cl.solve_greedy(cl.Curvature(np.diag([2.0, 1.0]), units), 0.5)
    assert plan.pruned == (1,)
    assert cl.Selection.from_json(plan.to_json()).guards == cl.Guards()


# Risk, ratio, prefixes ----------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 0.3, 2.0])
def test_risk_and_objective_are_the_quadratic_forms(strength: float) -> None:
    curvature = random_curvature(SMALL, 5)
    plan = cl.solve_greedy(curvature, 0.5, strength)
    s = plan.indicator.astype(float)
    node = curvature.saliency @ s / 2
    edges = sum(curvature.matrix[u, v] for u, v in combinations(plan.pruned, 2))
    found = (plan.predicted_risk, plan.node_risk, plan.objective)
    assert found == pytest.approx((s @ curvature.matrix @ s / 2, node, node + strength * edges))
    assert plan.curvature_fingerprint == curvature.fingerprint


def test_exactly_reachable_ratios_and_caps_take_no_unit_too_many_or_few() -> None:
    ten, hundred = (random_curvature(make_units(1, 0, n, ffn_cost=1)) for n in (10, 100))
    for count in range(10):
        assert len(cl.solve_greedy(ten, count / 10)) == count
    guards = cl.Guards(layer_cap=0.29)  # 0.29 * 100 is 28.999999999999996
    assert len(cl.solve_greedy(hundred, 0.29, guards=guards)) == 29
    assert len(cl.solve_greedy(hundred, 0.07)) == 7  # 0.07 * 100 is above 7


@pytest.mark.parametrize("include", [(), ("L1.ffn[0]", "L0.attention[1]")])
def test_a_prefix_is_a_fresh_solve(include: tuple[str, ...]) -> None:
    curvature = random_curvature(SMALL, 9)
    settings = {"interaction_strength": 0.5, "guards": cl.Guards(layer_cap=0.8), "include": include}
    whole = cl.solve_greedy(curvature, 0.7, **settings)
    for ratio in np.linspace(0, 0.7, 71).tolist():
        cut, fresh = whole.prefix(ratio), cl.solve_greedy(curvature, ratio, **settings)
        for field in ("pruned", "predicted_risk", "requested_ratio"):
            assert getattr(cut, field) == getattr(fresh, field)


def test_a_selection_survives_json() -> None:
    guards = cl.Guards(layer_cap_factor=2.0, protect_first=1)
    plan = cl.solve_greedy(random_curvature(SMALL), 0.3, 0.5, guards, include=[7])
    again = cl.Selection.from_json(plan.to_json())
    for field in ("pruned", "guards", "predicted_risk", "fingerprint", "forced"):
        assert getattr(again, field) == getattr(plan, field)


BAD_FIELDS: dict[str, list[Any]] = {
    "requested_ratio": ["x", math.nan, True, 5, 0.9],
    "ordered": [1],
    "pruned": [[0.0], [True], 3, [99], [1, 1]],
    "node_terms": [[1.0], ["1"]],
    "edge_terms": [{}, [math.inf] * 4],
    "interaction_strength": ["1", 10**400, -2],
    # the last two are on an attention unit and on a pruned one
    "gains": [{"1": "2"}, [1], {"99": 1.0}, {"a": 1.0}, {"0": 1.5}, {"7": 1.5}],
    "curvature_fingerprint": [7],
    "forced": [1.0, -1, 99],
    "uniform": ["yes", True],
    "units": [[]],
    "units.units": [[["ffn", 0, 0, 0, 1]], [["head", 0, 0, 0, 1, 1]], [["ffn", 0, 0, 0, 1, 2**63]]],
    "units.ffn_groups": ["16"],
    "units.total_parameters": [-1, 10],
    "units.model_layers": [1.5, 1],
    "guards": [[], {"kinds": 3}, {"zzz": 3}],
    "guards.layer_cap": ["0.5"],
    "guards.layer_cap_factor": [math.inf],
    "guards.protect_first": [0.5],
    "guards.protect_last": [True],
    "target": [{"ratio": "x"}, {"parameters": "1k"}],
    "unknown": [1],
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_bad_field_of_a_file_is_a_file_format_error(field: str) -> None:
    units = dataclasses.replace(SMALL, total_parameters=5000)
    plan = cl.solve_greedy(cl.Curvature(random_curvature(SMALL).matrix, units), 0.3)
    *whole, name = field.split(".")
    for value in BAD_FIELDS[field]:
        content = fields_of(plan.to_json())
        (content[whole[0]] if whole else content)[name] = value
        if name == "pruned":
            content |= {"node_terms": None, "edge_terms": None}
        with pytest.raises(cl.FileFormatError):
            cl.Selection.from_json(json.dumps(content))


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "[]", "7", "{", "{}", '{"format": "cocurve-selection", "version": 1}'],
    ids=lambda text: text[:2],
)
def test_json_that_is_no_plan_is_a_file_format_error(text: str) -> None:
    with pytest.raises(cl.FileFormatError):
        cl.Selection.from_json(text)


# What cannot be done ------------------------------------------------------------------------------


def brute_force_reach(
    units: cl.UnitSet, guards: cl.Guards, ratio: float, exclude: list[int]
) -> float:
    """The largest realized ratio over all sets of units that keep to the guards."""
    free, best = [u for u in range(len(units)) if u not in exclude], 0
    for members in chain.from_iterable(combinations(free, n) for n in range(len(free) + 1)):
        others = ([i for i in members if i != u] for u in members)
        if all(map(lambda rest, u: allowed(units, rest, u, ratio, guards), others, members)):
            best = max(best, sum(units[u].cost for u in members))
    return best / units.total_cost


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    costs=st.lists(st.integers(1, 30), min_size=4, max_size=8),
    guards=guard_sets,
    excluded=st.integers(0, 3),
)
def test_reachable_ratio_is_the_best_of_all_plans(
    costs: list[int], guards: cl.Guards, excluded: int
) -> None:
    units = cl.UnitSet(
        tuple(
            cl.Unit(("attention", "ffn")[i % 2], i // 4, (i % 4) // 2, 0, 1, cost)
            for i, cost in sorted(enumerate(costs), key=lambda x: (x[0] // 4, x[0] % 2, x[0]))
        )
    )
    found = reachable_ratio(units, guards, 0.5, exclude=[excluded])
    assert found == brute_force_reach(units, guards, 0.5, [excluded])


def test_reachable_ratio_counts_forced_units() -> None:
    guards = cl.Guards(layer_cap=0.6)  # 25.8 of 43: the best is 5 + 5 + 11 = 21 or 11 + 11 = 22
    assert reachable_ratio(SMALL, guards, 0.5) == 66 / 129
    assert reachable_ratio(SMALL, guards, 0.5, include=[0]) == (21 + 22 + 22) / 129


def test_the_ceiling_of_llama_8b() -> None:
    """Cap 0.30 and protection 2/2 allow 26.25 % in the continuum, 26.08 % in whole units."""
    units = llama_8b_units()
    guards = cl.Guards(layer_cap=0.30, protect_first=2, protect_last=2)
    best = reachable_ratio(units, guards, 0.27)
    assert best == pytest.approx(28 / 32 * 124 / 416, rel=1e-12)
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.solve_greedy(random_curvature(units), 0.27, guards=guards)
    error = caught.value
    assert (error.requested_ratio, error.reachable_ratio, error.stalled_ratio) == (0.27, best, None)


def test_a_stall_of_greedy_is_told_from_an_impossible_ratio() -> None:
    units = cl.UnitSet(  # room for 4 of 7: attention alone (3) or both FFN groups (4)
        (
            cl.Unit("attention", 0, 0, 0, 3, 3),
            cl.Unit("ffn", 0, 0, 0, 2, 2),
            cl.Unit("ffn", 0, 1, 2, 4, 2),
        )
    )
    curvature = cl.Curvature(np.diag([1.0, 2.0, 2.0]), units)
    guards = cl.Guards(layer_cap=4 / 7)
    for ratio, stalled in ((0.5, 3 / 7), (0.6, None)):
        with pytest.raises(cl.InfeasibleError) as caught:
            cl.solve_greedy(curvature, ratio, guards=guards)
        assert (caught.value.stalled_ratio, caught.value.reachable_ratio) == (stalled, 4 / 7)
    # the way out that the message proposes
    assert cl.solve_greedy(curvature, 0.5, guards=guards, exclude=[0]).pruned == (1, 2)


@pytest.mark.parametrize("scale", [1, 10**6, 10**9])
def test_the_knapsack_of_a_few_units_is_exact(scale: int) -> None:
    """7, 11 and 13 (of 31) under half: 13 fits, 15 would be the cap."""
    costs = [7 * scale, 11 * scale, 13 * scale]
    units = cl.UnitSet(tuple(cl.Unit("ffn", 0, i, i, i + 1, cost) for i, cost in enumerate(costs)))
    assert reachable_ratio(units, cl.Guards(layer_cap=0.5), 0.1) == costs[2] / sum(costs)
    with pytest.raises(cl.InfeasibleError):
        cl.solve_greedy(cl.Curvature(np.eye(3), units), 0.45, guards=cl.Guards(layer_cap=0.5))


def test_where_only_a_bound_is_known_no_plan_is_promised() -> None:
    """Half of 1.5 each: 20 of 42 fit under 0.49, which is 0.476."""
    units = cl.UnitSet(tuple(cl.Unit("ffn", 0, i, i, i + 1, 4) for i in range(42)))
    costs = cl.Target(ratio=0.48, costs=[1.5] * 42)
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.solve_greedy(cl.Curvature(np.eye(42), units), costs, guards=cl.Guards(layer_cap=0.49))
    assert caught.value.stalled_ratio == pytest.approx(20 / 42)
    assert caught.value.reachable_ratio == pytest.approx(0.49)


@pytest.mark.parametrize(
    "guards", [cl.Guards(), cl.Guards(layer_cap=0.5), cl.Guards(protect_first=1)]
)
def test_the_longest_run_holds_every_plan(guards: cl.Guards) -> None:
    curvature = random_curvature(SMALL, seed=3)
    run = longest(curvature, guards, 0.8, interaction_strength=0.7)
    for ratio in (0.0, 0.2, 0.4):
        assert run.prefix(ratio).pruned == cl.solve_greedy(curvature, ratio, 0.7, guards).pruned
