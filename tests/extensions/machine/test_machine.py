"""Plans that suit a machine: every plan keeps its counts, and small cases equal brute force."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.neighbors import Neighbors
from cocurve_lab.extensions.machine.portions import MachineRules
from helpers.problems import make_units, random_curvature

SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)
SMALL = make_units(2, 4, 4, attention_cost=5, ffn_cost=8)  # per layer 4 heads, 4 x 8 channels
MACHINES = [
    cl.Machine(tensor_parallel=2),
    cl.Machine(tensor_parallel=4),
    cl.Machine(align=16),
    cl.Machine(align=32),
    cl.Machine(tensor_parallel=2, align=16),
    cl.Machine(depth="block"),
    cl.Machine(depth="layer"),
    cl.Machine(depth="block", tensor_parallel=2),
]


def keeps(units: cl.UnitSet, pruned: tuple[int, ...], machine: cl.Machine) -> bool:
    """The definition, from the columns that are left."""
    for layer in range(units.num_layers):
        left, whole = {}, {}
        for kind in ("attention", "ffn"):
            mine = [i for i, unit in enumerate(units) if (unit.layer, unit.kind) == (layer, kind)]
            kept = [i for i in mine if i not in pruned]
            whole[kind] = len(kept) in (0, len(mine))
            left[kind] = len(kept) if kind == "attention" else sum(units.costs[kept].tolist())
        ways = machine.tensor_parallel
        if left["attention"] % ways or left["ffn"] % ways or left["ffn"] % machine.align:
            return False
        if machine.depth is not None and not all(whole.values()):
            return False
        if machine.depth == "layer" and (left["attention"] > 0) != (left["ffn"] > 0):
            return False
    return True


def test_included_units_are_completed_and_uniform_plans_and_draws_keep_them() -> None:
    curvature, machine = random_curvature(SMALL, 2), cl.Machine(tensor_parallel=2, align=16)
    chosen = ["L0.attention[3]", "L1.ffn[0]"]
    completed = cl.solve_aligned(curvature, 0.0, machine=machine, include=chosen)
    assert len(completed) == 4
    uniform = cl.solve_aligned(curvature, 0.4, machine=machine, uniform=True)
    assert uniform.made.uniform
    plan = cl.solve_aligned(curvature, 0.4, machine=machine)
    draws, rng = Neighbors(plan, surrogate=curvature), np.random.default_rng(0)
    found = {tuple(draws.draw(plan.pruned, rng)) for _ in range(40)}
    assert len(found) > 3
    for pruned in (completed.pruned, uniform.pruned, *found):
        assert keeps(SMALL, pruned, machine)


PLAN = cl.solve_aligned(random_curvature(SMALL), 0.4, machine=cl.Machine(depth="layer"))


def of_three_heads(**machine: int) -> Any:
    curvature = random_curvature(make_units(2, 3, 4, ffn_cost=8))
    return cl.solve_aligned(curvature, 0.2, machine=cl.Machine(**machine))


def forced(**fields: Any) -> Any:
    machine = cl.Machine(tensor_parallel=2)
    return cl.solve_aligned(random_curvature(SMALL), 0.0, machine=machine, **fields)


@pytest.mark.parametrize(
    "call",
    [
        lambda: PLAN.prefix(0.2),
        *(
            lambda fields=fields: cl.Machine(**fields)
            for fields in ({"depth": "head"}, {"align": 0}, {"tensor_parallel": 1.5})
        ),
        lambda: of_three_heads(tensor_parallel=2),
        lambda: of_three_heads(align=64),
        lambda: forced(include=[3], exclude=[0, 1, 2]),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(call: Any) -> None:
    with pytest.raises(cl.InputError):
        call()


def subsets(units: cl.UnitSet) -> list[tuple[int, ...]]:
    every = range(len(units))
    return list(chain.from_iterable(combinations(every, size) for size in range(len(units) + 1)))


EVERY = subsets(make_units(1, 4, 4, attention_cost=5, ffn_cost=8))  # of one layer


def admissible(
    units: cl.UnitSet, layer: int, guards: cl.Guards, machine: cl.Machine
) -> list[tuple[int, ...]]:
    """All sets of a layer's units that guards and machine allow, by going through all."""
    low = layer * 8
    sets = [tuple(low + u for u in chosen) for chosen in EVERY]
    protected = layer < guards.protect_first
    cap = guards.cap_at(0.0) * sum(unit.cost for unit in units if unit.layer == layer)
    return [
        chosen
        for chosen in sets
        if keeps(units, chosen, machine)
        and sum(units[u].cost for u in chosen) <= cap * (1 + 1e-12)
        and not (protected and chosen)
    ]


@SETTINGS
@given(
    seed=st.integers(0, 10**6),
    machine=st.sampled_from(MACHINES),
    cap=st.sampled_from([None, 0.3, 0.5, 0.62, 0.8]),
    first=st.integers(0, 1),
    ratio=st.floats(0, 0.95),
    strength=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_plan_keeps_them_and_what_can_go_is_exact(
    seed: int, machine: cl.Machine, cap: float | None, first: int, ratio: float, strength: float
) -> None:
    guards = cl.Guards(layer_cap=cap, protect_first=first)
    curvature = random_curvature(SMALL, seed, shared=0.8)
    allowed = [admissible(SMALL, layer, guards, machine) for layer in range(2)]
    most = sum(max(SMALL.costs[list(chosen)].sum() for chosen in sets) for sets in allowed)
    assert MachineRules(SMALL, guards, ratio, machine=machine).reachable() == most
    try:
        plan = cl.solve_aligned(curvature, ratio, strength, guards, machine=machine)
    except cl.InfeasibleError as error:
        plan, stalled = None, error.stalled_ratio
    if plan is None:
        impossible = ratio > most / SMALL.total_cost * (1 + 1e-9)
        assert impossible == (stalled is None)
        assert impossible or cap is not None  # greedy stalls
        return
    for layer, sets in enumerate(allowed):
        assert tuple(sorted(u for u in plan.pruned if SMALL[u].layer == layer)) in sets
    assert plan.realized_ratio >= ratio * (1 - 1e-9)
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))
    better = cl.refine(plan, curvature)
    assert keeps(SMALL, better.pruned, machine)
    assert better.objective <= plan.objective + 1e-15


def test_what_can_go_counts_what_must() -> None:
    """An included unit takes its portion, and so the room of others under the cap."""
    guards, machine = cl.Guards(layer_cap=0.62), cl.Machine(tensor_parallel=2)
    with pytest.raises(cl.InfeasibleError) as raised:
        cl.solve_aligned(random_curvature(SMALL), 0.6, 1.0, guards, machine=machine, include=[3])
    most = [
        max(sum(SMALL[u].cost for u in chosen) for chosen in sets if layer or 3 in chosen)
        for layer, sets in enumerate(admissible(SMALL, layer, guards, machine) for layer in (0, 1))
    ]
    assert raised.value.reachable_ratio == pytest.approx(sum(most) / SMALL.total_cost)


def by_hand(
    curvature: cl.Curvature, machine: cl.Machine, ratio: float, strength: float
) -> list[int]:
    """The greedy of portions from the objective alone, over all sets one portion larger."""
    H, units = curvature.matrix, curvature.units

    def objective(chosen: list[int]) -> float:
        block = H[np.ix_(chosen, chosen)]
        return float(0.5 * (np.trace(block) + strength * (block.sum() - np.trace(block))))

    def growth(now: list[int], u: int) -> float:
        return (objective([*now, u]) - objective(now)) / units[u].cost

    def fill(chosen: list[int], ids: list[int]) -> list[list[int]]:
        """The sets that one block can come to, growing by the unit that costs least."""
        sets, now = [], list(chosen)
        while left := [u for u in ids if u not in now]:
            now = [*now, min(left, key=lambda u: growth(now, u))]
            sets.append(now)
        return sets

    order: list[int] = []
    while sum(units[u].cost for u in order) < ratio * units.total_cost * (1 - 1e-12):
        best: tuple[float, list[int]] | None = None
        for layer in range(units.num_layers):
            ids = [i for i, unit in enumerate(units) if unit.layer == layer]
            blocks = [[i for i in ids if units[i].kind == kind] for kind in ("attention", "ffn")]
            for block in [ids] if machine.depth == "layer" else blocks:
                next_one = next(
                    (now for now in fill(order, block) if keeps(units, tuple(now), machine)), None
                )
                if next_one is None:
                    continue
                cost = sum(units[u].cost for u in next_one[len(order) :])
                score = (objective(next_one) - objective(order)) / cost
                if best is None or score < best[0]:
                    best = score, next_one
        assert best is not None
        order = best[1]
    return order


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_it_is_greedy_over_portions(machine: cl.Machine, strength: float) -> None:
    units = make_units(3, 4, 4, attention_cost=5, ffn_cost=8)
    for seed in range(8):
        curvature = random_curvature(units, seed, shared=0.8)
        plan = cl.solve_aligned(curvature, 0.5, strength, machine=machine)
        assert list(plan.pruned) == by_hand(curvature, machine, 0.5, strength)


def test_any_machine_gives_the_plan_of_algorithm_2() -> None:
    curvature, guards = random_curvature(SMALL), cl.Guards(layer_cap=0.8)
    plan = cl.solve_aligned(curvature, 0.4, 0.5, guards, machine=cl.Machine())
    assert plan.pruned == cl.solve_greedy(curvature, 0.4, 0.5, guards).pruned
