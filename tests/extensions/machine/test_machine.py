"""Plans that suit a machine: every plan keeps its counts, and small cases equal brute force."""

from __future__ import annotations

import json
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.neighbors import Neighbors
from cocurve_lab.extensions.machine.portions import MachineRules
from cocurve_lab.solver.guards import FREE
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
            size = len(kept) if kind == "attention" else sum(units.costs[kept].tolist())
            left[kind] = size
        if left["attention"] % machine.tensor_parallel or left["ffn"] % machine.tensor_parallel:
            return False
        if left["ffn"] % machine.align:
            return False
        if machine.depth is not None and not all(whole.values()):
            return False
        if machine.depth == "layer" and (left["attention"] > 0) != (left["ffn"] > 0):
            return False
    return True


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
    most = sum(
        max(
            sum(SMALL[u].cost for u in chosen)
            for chosen in admissible(SMALL, layer, guards, machine)
        )
        for layer in range(2)
    )
    rules = MachineRules(SMALL, guards, ratio, machine=machine)
    assert rules.reachable() == most
    if ratio > most / SMALL.total_cost * (1 + 1e-9):
        with pytest.raises(cl.InfeasibleError) as raised:
            cl.solve_aligned(curvature, ratio, strength, guards, machine=machine)
        assert raised.value.stalled_ratio is None
        return
    try:
        plan = cl.solve_aligned(curvature, ratio, strength, guards, machine=machine)
    except cl.InfeasibleError:  # greedy stalls
        assert cap is not None
        return
    for layer in range(2):
        here = tuple(sorted(u for u in plan.pruned if SMALL[u].layer == layer))
        assert here in admissible(SMALL, layer, guards, machine)
    assert plan.realized_ratio >= ratio * (1 - 1e-9)
    again = cl.Selection.from_pruned(
        SMALL, plan.pruned, curvature, interaction_strength=strength, guards=guards
    )
    assert plan.predicted_risk == pytest.approx(again.predicted_risk)
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


def test_included_units_are_completed() -> None:
    curvature, machine = random_curvature(SMALL, 2), cl.Machine(tensor_parallel=2, align=16)
    chosen = ["L0.attention[3]", "L1.ffn[0]"]
    plan = cl.solve_aligned(curvature, 0.0, machine=machine, include=chosen)
    assert len(plan) == 4
    assert keeps(SMALL, plan.pruned, machine)
    others = [f"L0.attention[{i}]" for i in range(3)]
    with pytest.raises(cl.InputError):
        cl.solve_aligned(curvature, 0.0, machine=machine, include=chosen[:1], exclude=others)


def test_uniform_plans_keep_them() -> None:
    curvature, machine = random_curvature(SMALL, 3), cl.Machine(tensor_parallel=2, align=16)
    for ratio in (0.2, 0.4):
        plan = cl.solve_aligned(curvature, ratio, machine=machine, uniform=True)
        assert plan.made.uniform
        assert keeps(SMALL, plan.pruned, machine)


def test_a_search_on_text_keeps_them() -> None:
    curvature, machine = random_curvature(SMALL, 4), cl.Machine(tensor_parallel=2)
    plan = cl.solve_aligned(curvature, 0.4, machine=machine)
    draws, rng = Neighbors(plan, surrogate=curvature), np.random.default_rng(0)
    found = {draws.draw(plan.pruned, rng) for _ in range(40)}
    assert len(found) > 3
    for pruned in found:
        assert pruned is not None
        assert keeps(SMALL, tuple(pruned), machine)


def test_its_prefixes_are_refused() -> None:
    plan = cl.solve_aligned(random_curvature(SMALL), 0.4, machine=cl.Machine(depth="layer"))
    with pytest.raises(cl.InputError, match="depth='layer'"):
        plan.prefix(0.2)


@pytest.mark.parametrize("fields", [{"depth": "head"}, {"align": 0}, {"tensor_parallel": 1.5}])
def test_a_machine_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(cl.InputError):
        cl.Machine(**fields)


def test_units_that_do_not_divide_are_refused() -> None:
    curvature = random_curvature(make_units(2, 3, 4, ffn_cost=8))
    with pytest.raises(cl.InputError):
        cl.solve_aligned(curvature, 0.2, machine=cl.Machine(tensor_parallel=2))
    with pytest.raises(cl.InputError):
        cl.solve_aligned(curvature, 0.2, machine=cl.Machine(align=64))


def test_any_machine_gives_the_plan_of_algorithm_2() -> None:
    curvature = random_curvature(SMALL)
    plan = cl.solve_aligned(curvature, 0.4, 0.5, cl.Guards(layer_cap=0.8), machine=cl.Machine())
    assert plan.pruned == cl.solve_greedy(curvature, 0.4, 0.5, cl.Guards(layer_cap=0.8)).pruned


def test_files_name_it() -> None:
    curvature, machine = random_curvature(SMALL), cl.Machine(tensor_parallel=2, depth="block")
    plan = cl.solve_aligned(curvature, 0.4, machine=machine)
    again = cl.Selection.from_json(plan.to_json())
    assert again.made == plan.made
    assert again.guards == FREE
    assert again.made.rule == "aligned to tensor_parallel=2, depth='block'"
    assert "rule" not in json.loads(cl.solve_greedy(curvature, 0.4).to_json())
