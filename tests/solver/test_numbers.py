"""Numbers of any type: a plan reaches what was asked, or the call raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.solver.greedy import Greedy
from cocurve_lab.solver.guards import FREE, Rules
from cocurve_lab.solver.solve import longest
from cocurve_lab.solver.targets import Budget
from cocurve_lab.solver.uniform import EqualCounts
from helpers.problems import make_units, random_curvature

SMALL = make_units()  # 15 units, layer cost 43, total 129
# half precision ends at 65,504: these units cost 5 and 11 million
LARGE = make_units(attention_cost=5_000_000, ffn_cost=11_000_000)
CURVATURE = random_curvature(LARGE)
KINDS: tuple[Callable[[float], Any], ...] = (
    float, np.float16, np.float32, np.float64, np.longdouble, Fraction, Decimal,
    lambda value: np.array(value, np.float16),
)  # fmt: skip
SETTINGS = settings(max_examples=120, derandomize=True, deadline=None)


def gone(plan: cl.Selection, costs: Iterable[Any] | None = None) -> Fraction:
    """The share of the costs that a plan removes, in exact arithmetic."""
    exact = [Fraction(c) for c in (costs or [unit.cost for unit in plan.units])]
    return sum((exact[u] for u in plan.pruned), Fraction(0)) / sum(exact)


def asked(ratio: float) -> Fraction:
    """The share that a plan must reach; the solver stays a hair below it."""
    return Fraction(float(ratio)) * (1 - Fraction(1, 10**9))


# Ratios -------------------------------------------------------------------------------------------


@SETTINGS
@given(
    kind=st.sampled_from(KINDS),
    ratio=st.one_of(st.floats(0, 0.98), st.sampled_from([5e-324, 1e-300, 1e-12, 6e-8, 0.999])),
    strength=st.sampled_from([0.0, 0.3, 1.0, 1e300]),
    uniform=st.booleans(),
    size=st.sampled_from([1, 10**3, 10**7, 10**14, 2**61]),
)
def test_a_plan_of_any_ratio_reaches_it_or_raises(
    kind: Callable[[float], Any], ratio: float, strength: float, uniform: bool, size: int
) -> None:
    value = kind(ratio)
    with np.errstate(over="ignore"):
        try:
            units = make_units(attention_cost=5 * size, ffn_cost=11 * size)
            curvature = random_curvature(units)
            plans = [cl.solve_greedy(curvature, value, kind(strength), uniform=uniform)]
            if not uniform:
                path = cl.lambda_path(curvature, value, maximum=kind(min(strength, 1.0)))
                plans += [s.selection for s in path if s.selection is not None]
                plans.append(longest(curvature, FREE, 0.999, strength).prefix(value))
        except cl.CocurveError:
            return
    for plan in plans:
        assert gone(plan) >= asked(value)
        assert type(plan.requested_ratio) is float
        assert cl.Selection.from_json(plan.to_json()).pruned == plan.pruned


# Costs --------------------------------------------------------------------------------------------


fine = st.one_of(st.floats(1e-100, 1e100), st.integers(0, 2**80), st.integers(0, 200))
number = st.one_of(
    st.floats(),
    fine,
    st.sampled_from([0, 1, 2**53, 2**61, 2**62, 2**63, 2**64, 10**400, 1e308, 1e-308, 5e-324, 1.5]),
)


@SETTINGS
@given(
    given=st.one_of(
        st.lists(fine, min_size=15, max_size=15),
        st.lists(number, min_size=15, max_size=15),
        number.map(lambda cost: [cost] * 15),
        st.tuples(number, number).map(lambda two: [*two] * 7 + [two[0]]),
    ),
    dtype=st.sampled_from([None, np.float16, np.float32, np.int8, np.int64, np.uint64]),
    ratio=st.floats(0.001, 0.95),
)
def test_a_plan_in_any_costs_reaches_its_target_or_raises(
    given: list[Any], dtype: Any, ratio: float
) -> None:
    with np.errstate(all="ignore"):
        try:
            costs = given if dtype is None else list(np.array(given, dtype))
        except (OverflowError, TypeError, ValueError):
            return
        curvature = random_curvature(SMALL)
        try:
            plan = cl.solve_greedy(curvature, cl.Target(ratio=ratio, costs=costs))
        except cl.CocurveError:
            return
    exact = [Fraction(float(cost)) for cost in costs]
    assert gone(plan, exact) >= asked(ratio)
    assert len(set(plan.pruned)) == len(plan)
    again = cl.Selection.from_json(plan.to_json())
    assert again.made.target == plan.made.target


# Units --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [2**50, 2**64, 1.5, float("nan"), "7", None])
def test_unit_costs_are_whole_and_add_up_in_float64(cost: Any) -> None:
    with pytest.raises(cl.InputError):
        cl.UnitSet(tuple(cl.Unit("ffn", 0, i, i, i + 1, cost) for i in range(8)))


# The post-condition -------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", [0.0, float("nan"), 1e-300])
def test_a_wrong_budget_gives_no_plan(needed: float) -> None:
    greedy = Greedy(CURVATURE, Rules(LARGE, FREE, Budget(LARGE.costs, needed, 0.2)))
    with pytest.raises(cl.CocurveError):
        EqualCounts(greedy).solve(1.0)
    greedy.run(1.0)
    with pytest.raises(cl.NumericalError):
        greedy.selection()


def test_the_room_of_a_prefix_is_what_its_steps_left_to_the_bit() -> None:
    costs = np.random.default_rng(0).uniform(0.1, 9.0, len(LARGE))
    budget = Budget(costs, 0.6 * costs.sum(), 0.6)
    greedy = Greedy(CURVATURE, Rules(LARGE, cl.Guards(layer_cap=0.9), budget))
    greedy.run(1.0)
    assert len(greedy.order) > len(LARGE) / 3
    assert greedy.rules.room_after(greedy.order) == greedy.room
    assert greedy.rules.room_after(()) == greedy.rules.room


def test_a_run_that_stalled_has_no_prefix_beyond_its_end() -> None:
    run = longest(CURVATURE, cl.Guards(layer_cap=0.3), 0.6)
    assert run.prefix(run.realized_ratio).pruned == run.pruned
    with pytest.raises(cl.InputError):
        run.prefix(0.5)
