"""Matched pairs against brute force, and arms that differ in connectivity alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocurve_lab.base.errors import InfeasibleError, InputError, MismatchError
from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.variants import edge_variant
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from cocurve_studies.structure.matching import Matching, causal_arms, match_controls
from helpers.problems import make_units, random_curvature

# costs equal across kinds, so that kinds must tell apart, and unequal within FFN, as where the
# width does not divide
UNITS = UnitSet(
    tuple(
        replace(unit, cost=6) if (unit.kind, unit.index) == ("ffn", 0) else unit
        for unit in make_units(4, 2, 4, attention_cost=5, ffn_cost=5)
    )
)


def may_pair(curvature: Curvature, bridges: list[int], b: int, c: int, caliper: float) -> bool:
    """The rule of a pair, condition by condition."""
    mine, other = curvature.units[b], curvature.units[c]
    degree = [
        sum(abs(x) for v, x in enumerate(row) if v != u) for u, row in enumerate(curvature.matrix)
    ]
    gap = abs(math.log(curvature.matrix[b, b]) - math.log(curvature.matrix[c, c]))
    return (
        c not in bridges
        and (mine.kind, mine.cost) == (other.kind, other.cost)
        and gap <= caliper
        and degree[c] < degree[b]
    )


def best_assignment(curvature: Curvature, bridges: list[int], caliper: float) -> tuple[int, float]:
    """Most pairs, then least total distance, over every assignment there is."""
    logs = np.log(curvature.saliency)
    choices = [
        [c for c in range(len(curvature.units)) if may_pair(curvature, bridges, b, c, caliper)]
        for b in bridges
    ]

    def search(row: int, used: frozenset[int]) -> tuple[int, float]:
        if row == len(bridges):
            return 0, 0.0
        best = search(row + 1, used)
        for c in choices[row]:
            if c not in used:
                count, total = search(row + 1, used | {c})
                total += abs(logs[bridges[row]] - logs[c])
                best = min(best, (count - 1, total))
        return best

    return search(0, frozenset())


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    caliper=st.sampled_from([0.0, 0.1, 0.3, 1.0, 5.0]),
    count=st.integers(1, 5),
)
def test_the_assignment_is_the_best_of_all(seed: int, caliper: float, count: int) -> None:
    curvature = random_curvature(UNITS, seed, shared=1.0)
    bridges = np.random.default_rng(seed).choice(len(UNITS), count, replace=False).tolist()
    matching = match_controls(curvature, bridges, caliper)
    negative, total = best_assignment(curvature, bridges, caliper)
    assert len(matching) == -negative
    assert matching.distances.sum() == pytest.approx(total)
    for pair, distance in zip(matching.pairs, matching.distances, strict=True):
        assert may_pair(curvature, bridges, *pair, caliper)
        assert distance <= caliper
    assert len({*matching.bridges, *matching.controls}) == 2 * len(matching)
    assert sorted([*matching.bridges, *matching.unmatched]) == sorted(bridges)
    assert (np.diff(matching.distances) >= 0).all()


def test_a_tight_caliper_gives_fewer_pairs_and_never_a_bad_one() -> None:
    curvature = random_curvature(make_units(10, 4, 8), 0)
    bridges = bridge_units(curvature, connectivity_quantile=0.3)
    matchings = [match_controls(curvature, bridges, caliper) for caliper in (1.0, 0.2, 0.02, 0.0)]
    counts = [len(matching) for matching in matchings]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[3] == 0
    for matching in matchings[:3]:
        assert matching.distances.max() <= matching.caliper
        assert len(matching) + len(matching.unmatched) == len(bridges)


def flat(units: UnitSet, saliency: list[float]) -> Curvature:
    """A diagonal H with unit 0 tied to unit 1 and unit 2, less to the latter."""
    matrix = np.diag(saliency)
    matrix[0, 1] = matrix[1, 0] = 0.3
    matrix[0, 2] = matrix[2, 0] = 0.2
    return Curvature(matrix, units)


def test_one_pair_given_up_to_bring_another_closer_is_not_an_option() -> None:
    """Bridges at 1.00 and 1.10, controls at 1.02 and 0.92: only one crossing pairs both."""
    units = make_units(1, 0, 4, ffn_cost=3)
    matrix = np.diag([1.00, 1.10, 1.02, 0.92])
    matrix[0, 1] = matrix[1, 0] = 0.5
    matching = match_controls(Curvature(matrix, units), [0, 1], caliper=0.1)
    assert set(matching.pairs) == {(0, 3), (1, 2)}
    assert matching.pairs[0] == (1, 2)  # closest first
    alone = match_controls(Curvature(matrix, units), [0], caliper=0.1, exclude=[1])
    assert alone.pairs == ((0, 2),)


def test_every_unmatched_bridge_has_its_reason() -> None:
    units = make_units(2, 1, 3, attention_cost=5, ffn_cost=5)  # a0 f0 f1 f2 | a1 f0 f1 f2
    matrix = np.diag([1.0, 1.0, 1.0, 1.1, 9.0, 0.0, 40.0, 1.0])
    matrix[1, 2] = matrix[2, 1] = 0.5
    curvature = Curvature(matrix, units)

    def why(bridges: list[int], unit: int, caliper: float = 0.2, **more: Any) -> str:
        return match_controls(curvature, bridges, caliper, **more).unmatched[unit]

    assert why([1], 1, exclude=[1]) == "it is in exclude"
    assert why([1], 1, guards=Guards(protect_first=1)) == "the guards keep it"
    assert why([1], 1, guards=Guards(kinds=("attention",))) == "the guards keep it"
    assert "saliency is 0" in why([5], 5)
    assert why([0, 4], 0) == "no other free unit has its kind and cost"
    assert why([0], 0) == "the nearest unit of its kind and cost is 2.2 away in log saliency"
    assert why([3], 3) == "no unit within the caliper is less connected than it"
    matching = match_controls(curvature, [1, 2], 0.05)
    assert len(matching) == 1
    assert list(matching.unmatched.values()) == [
        "every control within the caliper went to another bridge"
    ]


def test_excluded_and_guarded_units_are_no_controls() -> None:
    units = make_units(2, 0, 3, ffn_cost=3)
    curvature = flat(units, [1.0, 1.0, 1.0, 1.01, 1.05, 1.1])
    assert match_controls(curvature, [0]).pairs == ((0, 1),)
    assert match_controls(curvature, ["L0.ffn[0]"], exclude=[1, "L0.ffn[2]"]).pairs == ((0, 3),)
    assert match_controls(curvature, [3, 0], guards=Guards(protect_last=1)).pairs == ((0, 1),)


def test_the_matching_reports_itself() -> None:
    units = make_units(2, 0, 3, ffn_cost=3)
    matching = match_controls(flat(units, [1.0, 1.0, 1.0, 1.01, 1.05, 1.1]), [0, 2])
    assert matching.pairs == ((0, 1), (2, 3))
    (_, worst) = matching.table.to_dict("records")
    assert matching.worst == worst
    assert (worst["bridge"], worst["control"]) == ("L0.ffn[2]", "L1.ffn[0]")
    assert (worst["kind"], worst["cost"], worst["control_connectivity"]) == ("ffn", 3, 0)
    assert worst["distance"] == pytest.approx(math.log(1.01))
    assert worst["bridge_connectivity"] == pytest.approx(0.2)
    assert matching.contrast.tolist() == [pytest.approx(0.5 / 0.3), math.inf]
    empty = match_controls(flat(units, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), [0])
    assert (len(empty), len(empty.table), empty.worst) == (0, 0, None)


def test_the_closest_pairs_of_a_matching() -> None:
    units = make_units(2, 0, 3, ffn_cost=3)
    matching = match_controls(flat(units, [1.0, 1.0, 1.0, 1.01, 1.05, 1.1]), [0, 2])
    one = matching.closest(1)
    assert one.pairs == ((0, 1),)
    assert one.unmatched == {2: "not among the 1 closest pairs"}
    assert one.distances.shape == (1,)
    for count in (0, 3):
        with pytest.raises(InputError):
            matching.closest(count)


# Arms ---------------------------------------------------------------------------------------------


def check_arms(curvature: Curvature, matching: Matching, a: Selection, b: Selection) -> None:
    """Everything the test promises, unit by unit."""
    units, k, guards = curvature.units, len(matching), a.guards
    assert (a.pruned[:k], b.pruned[:k]) == (matching.bridges, matching.controls)
    assert a.pruned[k:] == b.pruned[k:]
    bridges = {*matching.bridges, *matching.unmatched}
    assert not set(a.pruned[k:]) & {*bridges, *matching.controls}
    assert not bridges & set(b.pruned)
    assert len(set(a.pruned)) == len(a.pruned) == len(b.pruned)
    cost, total = sum(units[u].cost for u in a.pruned), sum(unit.cost for unit in units)
    assert cost == sum(units[u].cost for u in b.pruned)
    assert cost >= a.requested_ratio * total - 1e-9
    assert k == len(a) or cost - units[a.pruned[-1]].cost < a.requested_ratio * total
    for arm in (a, b):
        for layer in range(units.num_layers):
            inside = [u for u in range(len(units)) if units[u].layer == layer]
            gone = sum(units[u].cost for u in inside if u in arm.pruned)
            assert gone <= (guards.layer_cap or 1.0) * sum(units[u].cost for u in inside) + 1e-9
            assert gone == 0 or layer < units.num_layers - guards.protect_last
        s = arm.indicator.astype(float)
        assert arm.predicted_risk == pytest.approx(0.5 * s @ curvature.matrix @ s, abs=1e-15)
        assert (arm.forced, arm.ordered, arm.interaction_strength) == (k, True, None)


@pytest.mark.parametrize("fill", ["greedy", "diagonal", "random"])
@pytest.mark.parametrize("cap", [None, 0.6, 0.8])
def test_the_arms_differ_in_the_forced_units_alone(cap: float | None, fill: Any) -> None:
    units, guards = make_units(6, 2, 4), Guards(layer_cap=cap, protect_last=1)
    done = 0
    for seed in range(40):
        curvature, rng = random_curvature(units, seed), np.random.default_rng(seed)
        bridges, ratio = rng.choice(len(units), 4, replace=False).tolist(), rng.uniform(0.25, 0.45)
        matching = match_controls(curvature, bridges, 1.0, guards=guards)
        try:
            a, b = causal_arms(curvature, matching, ratio, guards, fill, seed)
        except (InputError, InfeasibleError):  # no pair, or a cap too tight for this draw
            continue
        assert (a.requested_ratio, b.guards) == (ratio, guards)
        check_arms(curvature, matching, a, b)
        done += 1
    assert done >= 20  # refusals are the exception


def planted(tie: float) -> Curvature:
    """16 equal units; unit 0 is tied to every unit of layers 2 and 3, which are the cheap ones."""
    units = make_units(4, 0, 4, ffn_cost=7)
    saliency = np.array([1.0] * 8 + [0.1] * 8)
    matrix = np.diag(saliency)
    matrix[0, 8:] = matrix[8:, 0] = tie
    return Curvature(matrix, units)


@pytest.mark.parametrize("fill", ["greedy", "diagonal", "random"])
def test_a_planted_bridge_harms_through_its_edges_only(fill: Any) -> None:
    curvature = planted(0.05)
    assert 0 in bridge_units(curvature, saliency_quantile=1.0)
    matching = match_controls(curvature, [0], exclude=range(2, 8))
    assert matching.pairs == ((0, 1),)
    a, b = causal_arms(curvature, matching, 0.4, fill=fill)
    cheap = [u for u in a.pruned[1:] if u >= 8]
    assert a.node_risk == b.node_risk
    assert a.edge_risk == pytest.approx(0.05 * len(cheap))
    assert b.edge_risk == 0
    assert len(cheap) >= 3
    blind = edge_variant(curvature, "diagonal")  # without edges there is nothing to find
    assert blind.risk(a.pruned) == blind.risk(b.pruned)


def test_the_greedy_fill_is_made_with_neither_set_in_it() -> None:
    """It is what the solver takes when both sets are excluded: no edge to them is seen."""
    curvature = random_curvature(make_units(6, 2, 4), 3, shared=1.0)
    matching = match_controls(curvature, bridge_units(curvature), caliper=1.0)
    assert len(matching) >= 2
    aside = [*matching.bridges, *matching.controls, *matching.unmatched]
    for fill, strength in (("greedy", 1.0), ("diagonal", 0.0)):
        a, _ = causal_arms(curvature, matching, 0.5, fill=fill)  # type: ignore[arg-type]
        order = a.pruned[len(matching) :]
        alone = solve_greedy(curvature, 0.5, strength, exclude=aside).pruned
        assert len(order) >= 2
        assert order == alone[: len(order)]


def test_the_random_fill_is_random_by_seed() -> None:
    curvature = random_curvature(make_units(6, 2, 4), 3)
    matching = match_controls(curvature, [0], caliper=5.0)
    plans = [causal_arms(curvature, matching, 0.5, fill="random", seed=s)[0] for s in (0, 0, 1, 2)]
    assert plans[0].pruned == plans[1].pruned
    assert len({plan.pruned for plan in plans}) == 3
    first = [
        causal_arms(curvature, matching, 0.1, fill="random", seed=s)[0].pruned[1]
        for s in range(300)
    ]
    # 10 attention units and 24 FFN groups are free; neither cost nor saliency decides
    assert len(set(first)) > 28
    attention = sum(curvature.units[u].kind == "attention" for u in first)
    assert abs(attention - 300 * 10 / 34) < 3 * math.sqrt(300 * 10 / 34 * 24 / 34)


def test_no_room_that_either_arm_lacks() -> None:
    """Cap 1/2 of layers of 4: the bridge takes layer 0, the control layer 1, the fill one each."""
    units = make_units(3, 0, 4, ffn_cost=1)
    matrix = np.diag([1.0, 0.1, 0.1, 0.1, 1.0, 0.1, 0.1, 0.1, 5.0, 5.0, 5.0, 5.0])
    matrix[0, 11] = matrix[11, 0] = 0.01
    curvature, guards = Curvature(matrix, units), Guards(layer_cap=0.5)
    matching = match_controls(curvature, [0])
    assert matching.pairs == ((0, 4),)
    a, b = causal_arms(curvature, matching, 0.4, guards)  # five units
    assert a.pruned == (0, 1, 5, 8, 9)
    assert b.pruned == (4, 1, 5, 8, 9)
    with pytest.raises(InfeasibleError, match=r"stalls at 41\.67%") as error:
        causal_arms(curvature, matching, 0.5, guards)
    # each arm alone could take two of every layer; only the shared list cannot
    assert error.value.reachable_ratio == 0.5
    assert error.value.stalled_ratio == pytest.approx(5 / 12)
    with pytest.raises(InfeasibleError) as error:
        causal_arms(curvature, matching, 0.6, guards)
    assert error.value.stalled_ratio is None


def test_forced_units_may_be_the_whole_plan_but_not_more() -> None:
    matrix = np.eye(100)
    matrix[:29, :29] += 0.01 * (1 - np.eye(29))
    curvature = Curvature(matrix, make_units(1, 0, 100, ffn_cost=1))
    matching = match_controls(curvature, range(29))
    a, b = causal_arms(curvature, matching, 0.29)  # 0.29 x 100 is 28.999999999999996
    assert (set(a.pruned), len(b)) == (set(range(29)), 29)
    with pytest.raises(InputError, match=r"29 forced units cost 29.00% .* above ratio 0.28"):
        causal_arms(curvature, matching, 0.28)
    assert len(causal_arms(curvature, matching.closest(2), 0.28)[0]) == 28


def test_unfair_matchings_are_refused() -> None:
    curvature = random_curvature(make_units(4, 2, 4), 0)
    matching = match_controls(curvature, [2, 3], caliper=9.0)
    assert len(matching) >= 1
    bridge, control = matching.pairs[0]
    cases = [
        (replace(matching, pairs=()), "no pair"),
        (replace(matching, pairs=((bridge, 0),)), "one kind and one cost"),
        (replace(matching, pairs=((bridge, bridge),)), "named twice"),
        (replace(matching, unmatched={control: "by hand"}), "is a bridge itself"),
    ]
    for unfair, message in cases:
        with pytest.raises(InputError, match=message):
            causal_arms(curvature, unfair, 0.4)
    with pytest.raises(InputError, match=r"fill is 'greed'\. Choose one of 'greedy'"):
        causal_arms(curvature, matching, 0.4, fill="greed")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ratio is 1"):
        causal_arms(curvature, matching, 1.0)
    with pytest.raises(MismatchError):
        causal_arms(random_curvature(make_units(3, 2, 4)), matching, 0.4)
    with pytest.raises(InputError, match="protected layer"):
        causal_arms(curvature, matching, 0.4, Guards(protect_first=2, protect_last=1))
