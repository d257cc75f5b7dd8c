"""Edge variants against loops over the pairs, and their plans judged by the full H."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.variants import (
    Reach,
    Sign,
    Structure,
    measured_diagonal,
    solve_variant,
)
from helpers.problems import make_units, random_curvature

UNITS = make_units(4, 2, 3)  # 20 units in 4 layers


CURVATURE = random_curvature(UNITS)
SETTINGS = list(product(get_args(Structure), get_args(Reach), get_args(Sign), (True, False)))


def wild_curvature(units: cl.UnitSet, seed: int) -> cl.Curvature:
    """A symmetric matrix that is no Gram matrix: some correlations lie beyond 1."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(len(units), len(units)))
    matrix += matrix.T
    np.fill_diagonal(matrix, rng.uniform(0.1, 3.0, len(units)))
    return cl.Curvature(matrix, units)


def naive_entry(curvature: cl.Curvature, u: int, v: int, settings: tuple[Any, ...]) -> float:
    """Entry u, v of a variant, from the words of the paper alone."""
    structure, reach, sign, keep_diagonal = settings
    h, a, b = curvature.matrix, curvature.units[u], curvature.units[v]
    if u == v:
        return h[u, u] if keep_diagonal else 0.0
    kinds = {a.kind, b.kind}
    in_structure = {
        "full": True,
        "diagonal": False,
        "within_module": len(kinds) == 1,
        "attention": kinds == {"attention"},
        "cross": kinds == {"attention", "ffn"},
        "ffn": kinds == {"ffn"},
    }[structure]
    in_reach = abs(a.layer - b.layer) <= {"all": 99, "adjacent": 1, "within_layer": 0}[reach]
    if not (in_structure and in_reach):
        return 0.0
    limit = (h[u, u] * h[v, v]) ** 0.5
    return {
        "signed": h[u, v],
        "clipped": max(h[u, v], 0.0),
        "absolute": abs(h[u, v]),
        "correlation_clipped": min(max(h[u, v] / limit, -1.0), 1.0) * limit,
    }[sign]


@pytest.mark.parametrize("make", [random_curvature, wild_curvature])
def test_every_variant_is_what_loops_over_pairs_give(make: Any) -> None:
    curvature = make(UNITS, 3)
    size = len(UNITS)
    for choice in SETTINGS:
        variant = cl.edge_variant(curvature, *choice)
        expected = [
            [naive_entry(curvature, u, v, choice) for v in range(size)] for u in range(size)
        ]
        np.testing.assert_allclose(variant.matrix, expected, rtol=1e-13, atol=0)
        assert variant.units is curvature.units


def test_provenance_tells_every_step_and_group_grams_are_gone() -> None:
    curvature = random_curvature(UNITS, groups=4)
    once = cl.edge_variant(curvature, "ffn")
    twice = cl.edge_variant(once, reach="adjacent", keep_diagonal=False)
    assert once.group_grams is once.group_positions is once.group_risks is None
    assert twice.provenance["variant_of"] == curvature.fingerprint
    first = {"structure": "ffn", "reach": "all", "sign": "signed", "keep_diagonal": True}
    second = {"structure": "full", "reach": "adjacent", "sign": "signed", "keep_diagonal": False}
    assert twice.provenance["edge_variants"] == [first, second]
    assert twice.provenance["row_fingerprints"] == curvature.provenance["row_fingerprints"]
    with pytest.raises(cl.InputError):
        cl.Curvature.merge([once])


@pytest.mark.parametrize(
    "call",
    [
        lambda: cl.edge_variant(CURVATURE, "diagnal"),
        lambda: cl.edge_variant(CURVATURE, reach="near"),
        lambda: cl.edge_variant(CURVATURE, sign="positive"),
        lambda: measured_diagonal(CURVATURE),  # without measured risks
    ],
)
def test_bad_input_is_refused(call: Any) -> None:
    with pytest.raises(cl.InputError):
        call()


# Plans --------------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    choice=st.sampled_from(SETTINGS),
    ratio=st.floats(0.0, 0.6),
    strength=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_variant_changes_the_plan_never_its_predicted_risk(
    seed: int, choice: tuple[Any, ...], ratio: float, strength: float
) -> None:
    curvature, guards = random_curvature(UNITS, seed, shared=1.0), cl.Guards(protect_last=1)
    variant = cl.edge_variant(curvature, *choice)
    plan = solve_variant(curvature, variant, ratio, strength, guards)
    assert plan.pruned == cl.solve_greedy(variant, ratio, strength, guards).pruned
    assert (plan.guards, plan.interaction_strength) == (guards, strength)
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned), abs=1e-15)
    assert plan.curvature_fingerprint == curvature.fingerprint
    node = [curvature.matrix[u, u] / 2 for u in plan.pruned]
    edge = [sum(curvature.matrix[u, v] for v in plan.pruned[:k]) for k, u in enumerate(plan.pruned)]
    assert plan.terms.node == pytest.approx(node)
    assert plan.terms.edge == pytest.approx(edge, abs=1e-15)


# The measured diagonal ---------------------------------------------------------------------------


def test_the_measured_diagonal_prices_single_units_as_measured() -> None:
    curvature = random_curvature(make_units(), 3, groups=4)
    rng = np.random.default_rng(0)
    risks = curvature.group_risks * rng.uniform(1, 30, size=curvature.group_risks.shape[1])
    curvature = replace(curvature, groups=replace(curvature.groups, risks=risks))
    variant = measured_diagonal(curvature)
    assert variant.saliency / 2 == pytest.approx(curvature.single_unit_risk)
    np.testing.assert_allclose(variant.correlation(), curvature.correlation(), atol=1e-12)
    assert np.linalg.eigvalsh(variant.matrix).min() > -1e-12 * variant.saliency.max()
    assert variant.provenance["variant_of"] == curvature.fingerprint
    plan = solve_variant(curvature, variant, 0.3, 0.0)
    cheapest = np.argsort(curvature.single_unit_risk / curvature.units.costs, kind="stable")
    assert set(plan.pruned) == set(cheapest[: len(plan)].tolist())
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))
