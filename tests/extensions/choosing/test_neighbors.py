"""Plans near a plan: they keep the rules, and hold nothing superfluous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.neighbors import Neighbors
from cocurve_lab.extensions.interactions.measured import Interactions
from helpers.problems import gram_curvature, make_units, random_curvature

UNITS = make_units(6, 2, 4)
CURVATURE = random_curvature(UNITS, seed=2, shared=1.0)
GUARDS = [
    cl.Guards(),
    cl.Guards(layer_cap=0.5),
    cl.Guards(layer_cap_factor=1.5),
    cl.Guards(protect_first=1, protect_last=2),
    cl.Guards(layer_cap=0.6, kinds=("ffn",)),
]
LAYERS = [tuple(np.flatnonzero(UNITS.layers == layer).tolist()) for layer in range(6)]
CUSTOM = tuple(np.random.default_rng(5).integers(0, 9, len(UNITS)).tolist())


def of_layers(alone: Any, pool: Sequence[int] = range(6)) -> Interactions:
    """Layers that cost so much alone [6], without interactions."""
    alone = np.array([alone], float)
    own = alone[:, list(pool)]
    return Interactions(UNITS, tuple(LAYERS), tuple(pool), alone, own[:, :, None] + own[:, None])


def broken(plan: cl.Selection, start: cl.Selection, costs: np.ndarray, share: float) -> str:
    """The rule that a plan breaks, from the definitions; empty if none."""
    guards, layers, chosen = start.guards, UNITS.layers, list(plan.pruned)
    forced = start.pruned[: start.forced]
    removed, needed = costs[chosen].sum(), share * costs.sum() * (1 - 1e-12)
    gone = np.bincount(layers[chosen], costs[chosen], minlength=UNITS.num_layers)
    cap = guards.cap_at(share) * np.bincount(layers, costs) * (1 + 1e-12)
    inner = (layers >= guards.protect_first) & (layers < UNITS.num_layers - guards.protect_last)
    rules = {
        "a layer is over its cap": (gone <= cap).all(),
        "misses its target": removed >= needed,
        "has a superfluous unit": all(removed - costs[u] < needed for u in set(chosen) - {*forced}),
        "lost a forced unit": plan.pruned[: start.forced] == forced,
        "is of a kind that stays": all(guards.allows(UNITS[u].kind) for u in chosen),
        "has a unit that costs nothing": costs[chosen].all(),
        "has a unit of a protected layer": inner[chosen].all(),
    }
    return ", ".join(rule for rule, kept in rules.items() if not kept)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    guards=st.sampled_from(GUARDS),
    ratio=st.sampled_from([0.1, 0.2, 0.35]),
    guided=st.booleans(),
    custom=st.booleans(),
    included=st.booleans(),
    scales=st.booleans(),
)
def test_drawn_plans_keep_every_rule(
    seed: int,
    guards: cl.Guards,
    ratio: float,
    guided: bool,
    custom: bool,
    included: bool,
    scales: bool,
) -> None:
    goal: Any = cl.Target(ratio=ratio, costs=CUSTOM) if custom else ratio
    costs = np.array(CUSTOM) if custom else UNITS.costs
    include = [u for u in (14, 16) if included and costs[u]]
    try:
        start = cl.solve_greedy(CURVATURE, goal, guards=guards, include=include, exclude=[15])
    except (cl.InfeasibleError, cl.InputError):  # no such plan
        return
    parts = [of_layers([1, 2, 3, 4, 5, 6])] if scales else []
    surrogate = CURVATURE if guided else None
    around = Neighbors(start, [15], surrogate, random_share=0.2, scales=parts)
    rng, plan = np.random.default_rng(seed), start
    for _ in range(6):  # a walk, so that plans far from the start are reached too
        units = around.draw(plan.pruned, rng)
        if units is None:
            continue
        plan = around.selection(units)
        assert broken(plan, start, costs, ratio) == ""
        assert 15 not in plan.pruned
        for field in ("guards", "target", "forced"):
            assert getattr(plan.made, field) == getattr(start.made, field)
        assert cl.Selection.from_json(plan.to_json()).fingerprint == plan.fingerprint


@pytest.mark.parametrize("surrogate", [None, CURVATURE])
def test_a_uniform_plan_stays_uniform(surrogate: Any) -> None:
    start = cl.solve_greedy(CURVATURE, 0.3, uniform=True)
    around, rng = Neighbors(start, surrogate=surrogate), np.random.default_rng(0)
    draws = [around.draw(start.pruned, rng) or start.pruned for _ in range(30)]
    assert len(set(map(frozenset, draws))) > 10
    for plan in map(around.selection, draws):
        assert (plan.made.uniform, plan.pruned_cost) == (True, start.pruned_cost)
        cl.Selection.from_json(plan.to_json())  # refuses counts that differ between layers


def test_whole_layers_move_towards_those_that_cost_least() -> None:
    start = cl.Selection.from_pruned(UNITS, LAYERS[0] + LAYERS[1])
    around = Neighbors(start, random_share=0.0, scales=[of_layers([9, 8, 1, 2, 3, 4])])
    rng, counts = np.random.default_rng(0), np.zeros(6)
    for _ in range(200):
        units = around.draw(start.pruned, rng) or frozenset()
        whole = [layer for layer in range(6) if units.issuperset(LAYERS[layer])]
        counts[whole] += len(whole) == 2
    assert counts[2] == max(counts[2:]) > 10  # the cheapest enters most often
    assert counts[1] > counts[0]  # the worst leaves most often


def test_only_parts_of_the_pool_move_as_a_whole() -> None:
    start = cl.Selection.from_pruned(UNITS, LAYERS[0])
    around = Neighbors(start, scales=[of_layers([1, 1, 1, 1, 1, 1], [0, 3])])
    rng = np.random.default_rng(0)
    draws = [around.draw(start.pruned, rng) for _ in range(200)]
    whole = {n for units in draws for n in range(6) if units and units.issuperset(LAYERS[n])}
    assert whole == {3}


def test_the_marginals_of_guided_draws_are_those_of_the_surrogate() -> None:
    """Without noise the worst unit leaves and the best one enters, by the definition."""
    units = make_units(6, 2, 4, attention_cost=11)  # equal costs, so that one stands for one
    features = np.random.default_rng(0).normal(size=(36, 40))
    # unit 2 is the largest, but its edge to unit 14 makes it cheaper than unit 8
    features[[2, 8, 14, 21]] = 0.0
    features[2, :2], features[14, :2], features[8, 2], features[21, 3] = (-9, 2), (8, 0), 5, 1
    curvature = gram_curvature(units, features)
    start = cl.Selection.from_pruned(units, [2, 8, 14, 21], interaction_strength=0.7)
    around = Neighbors(start, surrogate=curvature, most=1, random_share=0.0)

    class Still:
        """A generator that takes the first place."""

        integers = staticmethod(lambda low, high: low)
        random = staticmethod(lambda: 1.0)
        exponential = staticmethod(lambda scale: 0.0)

    matrix = curvature.matrix

    def marginal(u: int, others: set[int]) -> float:
        return float(matrix[u, u] / 2 + 0.7 * sum(matrix[u, v] for v in others))

    chosen = set(start.pruned)
    out = max(chosen, key=lambda u: marginal(u, chosen - {u}))
    left = chosen - {out}
    assert out == 8
    enter = min(set(range(len(units))) - chosen, key=lambda u: marginal(u, left))
    assert around.draw(start.pruned, Still()) == left | {enter}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "gains", "exclude"),
    [
        *(
            ({"guards": guards}, {}, ())
            for guards in (cl.Guards(layer_cap=0.1), cl.Guards(protect_first=1))
        ),
        ({"requested_ratio": 0.9}, {}, ()),
        ({}, {9: 1.2}, ()),
        ({}, {}, (2,)),
    ],
)
def test_a_start_that_breaks_its_own_rules_is_refused(start: Any, gains: Any, exclude: Any) -> None:
    with pytest.raises(cl.InputError):
        Neighbors(cl.Selection.from_pruned(UNITS, [2, 3, 4], **start).with_gains(gains), exclude)


def test_a_surrogate_of_other_units_is_refused() -> None:
    with pytest.raises(cl.MismatchError):
        Neighbors(cl.Selection.from_pruned(UNITS, [2]), surrogate=random_curvature(make_units(5)))
