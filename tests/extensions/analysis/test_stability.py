"""Stability of plans and convergence of a build, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.extensions.analysis.stability import StopWhenConverged
from helpers import builds
from helpers.builds import require_same_bits
from helpers.gaussian import UNITS
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text

# Stability --------------------------------------------------------------------------------------


def diagonal_groups(per_group: np.ndarray, units: cl.UnitSet) -> cl.Curvature:
    """H without edges from the saliencies [G, M] of groups of one position each."""
    grams = np.stack([np.diag(row) for row in per_group])
    return cl.Curvature(grams.mean(axis=0), units, {}, Groups(grams, np.ones(len(grams), np.int64)))


def test_stability_solves_on_the_resampled_groups() -> None:
    curvature = random_curvature(make_units(3, 2, 3), groups=5, positions=30)
    guards = cl.Guards(layer_cap=0.7, protect_first=1)
    found = cl.selection_stability(curvature, 0.3, 0.5, guards, draws=40, seed=9)
    counts = np.random.default_rng(9).multinomial(5, [0.2] * 5, size=40)
    times, overlaps = np.zeros(15), []
    for row in counts:
        groups = np.repeat(np.arange(5), row)
        total = curvature.group_grams[groups].sum(axis=0)
        matrix = total / curvature.group_positions[groups].sum()
        plan = cl.solve_greedy(cl.Curvature(matrix, curvature.units), 0.3, 0.5, guards)
        times[list(plan.pruned)] += 1
        shared = set(plan.pruned) & set(found.selection.pruned)
        overlaps.append(len(shared) / len({*plan.pruned, *found.selection.pruned}))
    np.testing.assert_allclose(found.frequency, times / 40)
    assert found.mean_overlap == pytest.approx(np.mean(overlaps))
    contested = tuple(np.flatnonzero((times > 4) & (times < 36)).tolist())
    assert found.contested() == contested != ()
    assert not found.trustworthy


def test_draws_on_which_greedy_stalls_are_counted_apart() -> None:
    """Costs 10, 5, 6 and room for 15: unit 1, then 0, is a plan; 1, then 2, leaves no room."""
    costs = enumerate((10, 5, 6))
    units = cl.UnitSet(
        tuple(cl.Unit("ffn", 0, i, 10 * i, 10 * i + cost, cost) for i, cost in costs)
    )
    saliency = np.tile([10.0, 1.0, 0.0], (16, 1))
    saliency[8:, 2] = 12.1
    curvature, guards = diagonal_groups(saliency, units), cl.Guards(layer_cap=15.5 / 21)
    found = cl.selection_stability(curvature, 15 / 21, 0.0, guards, draws=300)
    counts = np.random.default_rng(0).multinomial(16, [1 / 16] * 16, size=300)
    # H_uu / c_u is 1, 0.2 and H_22 / 6: unit 2 goes before unit 0 where H_22 is below 6
    stalls = int((12.1 * counts[:, 8:].sum(axis=1) / 16 < 6).sum())
    assert 60 < stalls < 180
    assert (found.infeasible, len(found.overlaps)) == (stalls, 300 - stalls)
    assert found.trustworthy
    assert found.frequency.tolist() == [1, 1, 0]


def test_empty_plans_overlap() -> None:
    empty = cl.selection_stability(random_curvature(UNITS, groups=4), 0.0, draws=3)
    assert empty.mean_overlap == 1
    assert not empty.frequency.any()


# Convergence ------------------------------------------------------------------------------------


def test_readout_is_what_its_words_say() -> None:
    curvature = random_curvature(make_units(3, 2, 3), groups=17, positions=400)
    found = cl.is_converged(curvature, 0.4, 0.5)
    plan = cl.solve_greedy(curvature, 0.4, 0.5)
    assert found.risk == pytest.approx(plan.predicted_risk)
    risk = cl.jackknife(curvature, lambda c: c.risk(plan.pruned))
    assert found.risk_error == pytest.approx(float(risk.standard_error) / plan.predicted_risk)
    relative = cl.jackknife(curvature, "saliency").standard_error / curvature.saliency
    assert found.saliency_error == pytest.approx(np.median(relative))
    halves = [
        cl.Curvature(
            curvature.group_grams[s::2].sum(axis=0) / curvature.group_positions[s::2].sum(),
            curvature.units,
        )
        for s in (0, 1)
    ]
    plans = [cl.solve_greedy(half, 0.4, 0.5).pruned for half in halves]
    home = sum(half.risk(pruned) for half, pruned in zip(halves, plans, strict=True))
    away = sum(half.risk(pruned) for half, pruned in zip(halves, plans[::-1], strict=True))
    assert found.optimism == pytest.approx((away / home - 1) / 2)
    one, two = map(set, plans)
    assert found.overlap == pytest.approx(len(one & two) / len(one | two))


def test_convergence_comes_with_text_and_needs_groups() -> None:
    much = random_curvature(UNITS, groups=16, positions=20_000)
    assert cl.is_converged(much)
    assert not cl.is_converged(much, tolerance=1e-4)
    for positions, groups in ((48, 16), (20_000, 15), (60, 1)):
        found = cl.is_converged(random_curvature(UNITS, groups=groups, positions=positions))
        assert not found.converged
    # of one group nothing can be said
    assert np.isnan([found.risk_error, found.saliency_error, found.optimism, found.overlap]).all()


def test_nothing_to_remove_and_nothing_to_lose_are_known_exactly() -> None:
    curvature = random_curvature(UNITS, groups=16, positions=20_000)
    empty = cl.is_converged(curvature, 0.0)
    assert (empty.risk, empty.risk_error, empty.optimism, empty.overlap) == (0, 0, 0, 1)
    silent = cl.is_converged(diagonal_groups(np.zeros((16, 6)), UNITS))
    assert (silent.risk, silent.risk_error, silent.saliency_error) == (0, 0, 0)


def test_a_build_stops_early_and_keeps_the_h_of_its_sequences() -> None:
    text = tiny_text(40, 16)
    stop = StopWhenConverged(0.3, tolerance=0.5, patience=3)
    stopped = build(text, on_sequence=stop)
    done = stopped.provenance["sequences_done"]
    assert 18 <= done < 40  # three looks with all 16 groups filled at the earliest
    assert [look.converged for _, look in stop.history[-3:]] == [True] * 3
    assert not all(look.converged for _, look in stop.history[-4:-1])
    assert stopped.provenance["complete"] is False
    require_same_bits(stopped, build(text.rows(0, done)))


def test_a_build_that_settles_at_its_last_sequence_is_complete() -> None:
    last = StopWhenConverged(tolerance=10.0, patience=3)
    whole = build(tiny_text(18, 12), on_sequence=last)
    assert last.history[-1][1].converged
    assert [done for done, _ in last.history] == list(range(1, 19))
    assert (whole.provenance["complete"], whole.provenance["events"]) == (True, [])


GROUPED = random_curvature(make_units(), groups=4)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: cl.selection_stability(GROUPED, 0.3, draws=0), cl.InputError),
        (lambda: cl.selection_stability(GROUPED, 1.0), cl.InputError),
        (
            lambda: cl.selection_stability(GROUPED, 0.9, guards=cl.Guards(layer_cap=0.5)),
            cl.InfeasibleError,
        ),
        (lambda: StopWhenConverged(ratio=1.0), cl.InputError),
        (lambda: StopWhenConverged(interaction_strength=-1), cl.InputError),
        (lambda: StopWhenConverged(patience=0), cl.InputError),
        (
            lambda: build(tiny_text(16, 12), groups=4, on_sequence=StopWhenConverged()),
            cl.InputError,
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def build(text: cl.CalibrationSet, checkpoint: Any = None, **options: Any) -> cl.Curvature:
    """H of a model of one layer, which takes milliseconds per row."""
    return builds.build(tiny_model(layers=1), text, 16, checkpoint=checkpoint, **options)
