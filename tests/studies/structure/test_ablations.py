"""The table of ablations, and greedy without costs against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from cocurve_studies.structure.ablations import plain_greedy, structure_table
from helpers.problems import make_units, random_curvature

UNITS = make_units(4, 2, 3)  # 20 units in 4 layers


def half_quadratic(curvature: Curvature, plan: Selection) -> float:
    s = plan.indicator.astype(float)
    return float(0.5 * s @ curvature.matrix @ s)


# Plain greedy -------------------------------------------------------------------------------------


def naive_plain(curvature: Curvature, ratio: float, strength: float, cap: float) -> list[int]:
    """Alg. 2 without the cost in the score, every marginal from scratch."""
    units, chosen = curvature.units, []
    while sum(units[u].cost for u in chosen) < ratio * units.total_cost - 1e-9:
        scores = {}
        for u, unit in enumerate(units):
            layer = [v for v, other in enumerate(units) if other.layer == unit.layer]
            gone = sum(units[v].cost for v in layer if v in chosen)
            if u in chosen or gone + unit.cost > cap * sum(units[v].cost for v in layer) + 1e-9:
                continue
            scores[u] = curvature.matrix[u, u] / 2 + strength * sum(
                curvature.matrix[u, v] for v in chosen
            )
        chosen.append(min(scores, key=lambda u: scores[u]))
    return chosen


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ratio=st.floats(0.05, 0.5),
    strength=st.sampled_from([0.0, 0.5, 1.0]),
    cap=st.sampled_from([0.75, 1.0]),
)
def test_plain_greedy_against_loops(seed: int, ratio: float, strength: float, cap: float) -> None:
    curvature, guards = random_curvature(UNITS, seed, shared=1.0), Guards(layer_cap=cap)
    plan = plain_greedy(curvature, ratio, strength, guards)
    assert list(plan.pruned) == naive_plain(curvature, ratio, strength, cap)
    assert plan.predicted_risk == pytest.approx(half_quadratic(curvature, plan))
    assert (plan.guards, plan.interaction_strength, plan.forced) == (guards, strength, 0)
    assert plan.realized_ratio >= ratio


def test_plain_greedy_ignores_cost_and_equals_greedy_where_costs_are_equal() -> None:
    units = make_units(1, 1, 2, attention_cost=1, ffn_cost=10)
    curvature = Curvature(np.diag([1.0, 2.0, 3.0]), units)
    assert plain_greedy(curvature, 0.4).pruned == (0, 1)  # cheapest marginal first
    assert solve_greedy(curvature, 0.4).pruned == (1,)  # 0.5 / 1 against 1 / 10 per parameter
    even = random_curvature(make_units(4, 2, 3, attention_cost=6, ffn_cost=6), 5)
    assert plain_greedy(even, 0.4).pruned == solve_greedy(even, 0.4).pruned


# The table ----------------------------------------------------------------------------------------


def test_the_table_has_every_row_of_the_study() -> None:
    curvature = random_curvature(UNITS, 6, shared=1.0)
    rows = structure_table(curvature, 0.2, guards=Guards(layer_cap=0.9))
    names = {(row["axis"], row["name"]): row for row in rows}
    assert len(names) == len(rows) == 9 + 3 + 4 + 3 + 2
    method = solve_greedy(curvature, 0.2, guards=Guards(layer_cap=0.9))
    firsts = dict(reversed(names))  # the first row of each axis
    assert list(firsts) == ["rule", "kinds", "sign", "reach", "structure"]
    for axis, first in firsts.items():
        assert names[axis, first]["selection"].fingerprint == method.fingerprint
    for row in rows:
        plan = row["selection"]
        assert plan is not None, row["note"]
        assert row["note"] == ""
        assert plan.predicted_risk == pytest.approx(half_quadratic(curvature, plan))
        assert plan.realized_ratio >= 0.2
    diagonal = solve_greedy(curvature, 0.2, 0.0, Guards(layer_cap=0.9))
    assert set(names["structure", "diagonal"]["selection"].pruned) == set(diagonal.pruned)
    assert {UNITS[u].kind for u in names["kinds", "FFN-only"]["selection"].pruned} == {"ffn"}
