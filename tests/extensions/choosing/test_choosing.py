"""Choosing lambda and guards: against direct measurements, and against planted tables of KL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.choosing import racing
from cocurve_lab.extensions.choosing import settings as choosing
from cocurve_lab.extensions.choosing.racing import Fit
from cocurve_lab.extensions.choosing.settings import choose_guards
from cocurve_lab.measuring import risk
from cocurve_lab.measuring.risk import PlanTable
from cocurve_lab.solver.path import LambdaPath, Segment
from helpers.problems import gram_curvature, make_units, random_curvature
from helpers.tiny_models import GROUPS, naive_risk, tiny_model, tiny_text

QUIET = cl.ChoiceOptions(progress=False)
EVERYTHING = cl.ChoiceOptions(progress=False, stop_beyond=math.inf, max_candidates=10**6)
TEXT, TEST = tiny_text(32, seed=7), tiny_text(6, seed=8)
UNITS = make_units(8, 2, 8)
CURVATURE = random_curvature(UNITS, seed=1, shared=1.0)  # at 0.3: 16 segments, 12 sets


@cache
def real() -> tuple[PreTrainedModel, cl.Curvature]:
    """A tiny model and the H of four rows of it."""
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    return model, cl.estimate_curvature(model, units, tiny_text(4), 16, progress=False)


class Planted:
    """Stands in for `measure_plans`: KL of a plan on a row by a function, and what was asked.

    The loss on the text is 10 - KL, so that judging by it turns every order around.
    """

    def __init__(
        self, kl: Callable[[cl.Selection], np.ndarray], text: cl.CalibrationSet = TEXT
    ) -> None:
        self.kl = kl
        self.places = {mark: place for place, mark in enumerate(text.row_fingerprints)}
        self.asked: list[tuple[str, int]] = []

    def __call__(
        self, model: object, plans: Sequence[cl.Selection], text: cl.CalibrationSet, **_: Any
    ) -> PlanTable:
        rows = [self.places[mark] for mark in text.row_fingerprints]
        self.asked += [(plan.fingerprint, row) for plan in plans for row in rows]
        kl = np.array([self.kl(plan)[rows] for plan in plans])
        return PlanTable(tuple(plans), kl, nll=10 - kl)


def planted(
    monkeypatch: pytest.MonkeyPatch,
    kl: Callable[[cl.Selection], np.ndarray],
    text: cl.CalibrationSet = TEXT,
) -> Planted:
    fake = Planted(kl, text)
    monkeypatch.setattr(racing, "measure_plans", fake)
    return fake


def table_by_strength(means: dict[float, np.ndarray]) -> Callable[[cl.Selection], np.ndarray]:
    """KL [rows] by the lambda whose plan of CURVATURE it is; those plans must differ."""
    rows = {
        cl.solve_greedy(CURVATURE, 0.3, strength).fingerprint: values
        for strength, values in means.items()
    }
    assert len(rows) == len(means)
    return lambda plan: rows[plan.fingerprint]


def choose(candidates: Any = "path", options: cl.ChoiceOptions = QUIET, **more: Any) -> Any:
    """On CURVATURE and TEXT, where `measure_plans` is planted and no model is needed."""
    return cl.choose_interaction_strength(
        None, CURVATURE, 0.3, TEXT, candidates=candidates, options=options, **more
    )


def wave(seed: int, size: float = 1.0) -> np.ndarray:
    """Noise over the rows with mean exactly 0 and standard error exactly `size`."""
    noise = np.random.default_rng(seed).normal(size=len(TEXT))
    noise -= noise.mean()
    return noise * size * math.sqrt(len(TEXT)) / noise.std(ddof=1)


# The curve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidates", ["path", [1.0, 0.0, 0.5, 0.5]])
def test_the_curve_is_the_measured_risk_of_each_plan(candidates: Any) -> None:
    model, curvature = real()
    options = replace(EVERYTHING, first_rows=2)
    text = tiny_text(7, 20, 5, seed=7)
    choice = cl.choose_interaction_strength(
        model, curvature, 0.3, text, candidates=candidates, options=options
    )
    assert len(choice.candidates) > 1
    chosen = {}
    for candidate in choice.candidates:
        plan = candidate.selection
        assert candidate.kl == pytest.approx(cl.pruning_risk(model, plan, text), rel=1e-5)
        per_row = naive_risk(model, [plan.units[u] for u in plan.pruned], text)
        chosen[plan.fingerprint] = per_row
        assert candidate.standard_error == pytest.approx(
            per_row.std(ddof=1) / math.sqrt(7), rel=1e-3
        )
        assert (candidate.rows, candidate.stopped_early) == (7, False)
    least = min(chosen.values(), key=np.mean)
    assert choice.winner.kl == pytest.approx(least.mean(), rel=1e-5)
    for candidate in choice.candidates:
        gap = chosen[candidate.selection.fingerprint] - least
        assert candidate.difference == pytest.approx(gap.mean(), abs=1e-6)
        assert candidate.difference_error == pytest.approx(gap.std(ddof=1) / math.sqrt(7), abs=1e-6)
    assert choice.curve["kl"].tolist() == [candidate.kl for candidate in choice.candidates]
    errors = [candidate.difference_error for candidate in choice.candidates]
    assert choice.curve["difference_error"].tolist() == errors
    strengths = [c.selection.interaction_strength for c in choice.candidates]
    assert choice.curve["interaction_strength"].tolist() == strengths


def test_the_path_is_measured_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = planted(monkeypatch, lambda plan: np.ones(32) + 0.01 * len(plan) + wave(1))
    choice = choose(options=EVERYTHING)
    path = cl.lambda_path(CURVATURE, 0.3)
    assert len(choice.candidates) == path.distinct_sets > 5
    assert len(fake.asked) == len(set(fake.asked)) == 32 * path.distinct_sets
    assert choice.left_out == 0
    pieces = sorted(span for candidate in choice.candidates for span in candidate.intervals)
    assert [start for start, _ in pieces] == [segment.start for segment in path]
    assert [stop for _, stop in pieces] == [segment.stop for segment in path]
    for candidate in choice.candidates:
        for start, stop in candidate.intervals:
            middle = cl.solve_greedy(CURVATURE, 0.3, (start + stop) / 2)
            assert set(middle.pruned) == set(candidate.selection.pruned)
        made = cl.solve_greedy(CURVATURE, 0.3, candidate.selection.interaction_strength)
        assert made.pruned == candidate.selection.pruned
    starts = [candidate.intervals[0][0] for candidate in choice.candidates]
    assert starts == sorted(starts)
    assert choice.candidates[0].selection.interaction_strength == 0
    last = max(choice.candidates, key=lambda candidate: candidate.intervals[-1][1])
    assert last.intervals[0][1] == 1  # it does not come back, so it is made at exactly 1
    assert last.selection.interaction_strength == 1


def test_a_set_that_comes_back_is_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = (cl.solve_greedy(CURVATURE, 0.3, strength) for strength in (0.0, 1.0))
    other = cl.solve_greedy(CURVATURE, 0.3, 0.2)
    assert len({plan.fingerprint for plan in (zero, one, other)}) == 3
    parts = [
        Segment(0.0, 0.1, zero),
        Segment(0.1, 0.4, other),
        Segment(0.4, 0.5, zero),
        Segment(0.5, 1.0, one),
    ]
    monkeypatch.setattr(choosing, "lambda_path", lambda *_: LambdaPath(tuple(parts), 4, 0.3))
    planted(monkeypatch, lambda plan: wave(len(plan)) + 2)
    choice = choose()
    assert [c.intervals for c in choice.candidates] == [
        ((0.0, 0.1), (0.4, 0.5)),
        ((0.1, 0.4),),
        ((0.5, 1.0),),
    ]
    assert [c.selection.interaction_strength for c in choice.candidates] == [0, 0.2, 1]


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_a_truncated_path_keeps_its_ends_and_is_spread(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    planted(monkeypatch, lambda plan: wave(len(plan)) + 2)
    whole = [candidate.selection.fingerprint for candidate in choose(options=EVERYTHING).candidates]
    choice = choose(options=replace(QUIET, max_candidates=limit))
    places = [whole.index(candidate.selection.fingerprint) for candidate in choice.candidates]
    assert len(set(places)) == limit
    assert choice.left_out == len(whole) - limit
    for strength in (0.0, 1.0):
        assert whole.index(cl.solve_greedy(CURVATURE, 0.3, strength).fingerprint) in places
    assert np.diff([*sorted(places), len(whole)]).max() <= 2 * len(whole) / (limit - 1) + 1


def test_a_grid_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda plan: wave(len(plan)) + 2)
    grid = np.array([1.5, 0.0, 1e-9, 0.5])
    choice = choose(grid, replace(QUIET, max_candidates=2))
    assert [c.intervals for c in choice.candidates] == [
        ((0.0, 0.0), (1e-9, 1e-9)),  # one set, but nothing is claimed in between
        ((0.5, 0.5),),
        ((1.5, 1.5),),
    ]
    assert choice.left_out == 0


# The race -----------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 40), min_size=2, max_size=8),
    st.integers(0, 10**6),
    st.sampled_from([2, 3, 8, 32, 99]),
)
@settings(max_examples=60, deadline=None)
def test_stopping_early_loses_no_plan_that_is_close(
    gaps: list[float], seed: int, first_rows: int
) -> None:
    """With row-wise noise of size 1 in every plan, but 1000 shared by all, and gaps of any size."""
    rng = np.random.default_rng(seed)
    kl = 1e4 + 1e3 * rng.normal(size=32) + rng.uniform(-1, 1, (len(gaps), 32))
    kl += np.array(gaps)[:, None]
    plans = [
        racing.Contender(cl.Selection.from_pruned(UNITS, [number]), ((0.0, 0.0),), (cl.Guards(),))
        for number in range(len(gaps))
    ]
    by_plan = {plan.selection.fingerprint: row for plan, row in zip(plans, kl, strict=True)}
    fake = Planted(lambda plan: by_plan[plan.fingerprint])
    options = replace(QUIET, first_rows=first_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "measure_plans", fake)
        curve = racing.race_plans(None, plans, TEXT, options)  # type: ignore[arg-type]
    assert len(fake.asked) == len(set(fake.asked)) == sum(c.rows for c in curve)
    assert any(not candidate.stopped_early for candidate in curve)
    for candidate, row in zip(curve, kl, strict=True):
        assert candidate.stopped_early == (candidate.rows < 32)
        assert candidate.kl == pytest.approx(row[: candidate.rows].mean())
        if not candidate.stopped_early:
            continue
        # it really was that far behind some plan on the rows it was measured on
        behind = row[: candidate.rows] - kl[:, : candidate.rows]
        error = behind.std(axis=1, ddof=1) / math.sqrt(candidate.rows)
        assert (behind.mean(axis=1) > 4 * error * (1 - 1e-9)).any()


def test_the_true_winner_survives_a_bad_start_and_losers_save_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lambda 0.5 is ahead on the first 8 rows, within noise; 0.2 and 1 are hopeless throughout."""
    noise = np.tile([0.3, -0.3], 16)
    shared = 50 * wave(5)
    start = np.where(np.arange(32) < 8, -0.2, 0.1)
    table = {
        0.0: shared + 5,  # the true winner
        0.5: shared + 5 + start + noise,
        0.2: shared + 9 + noise,
        1.0: shared + 30 - noise,
    }
    assert table[0.5][:8].mean() < table[0.0][:8].mean()
    fake = planted(monkeypatch, table_by_strength(table))
    choice = choose(list(table))
    assert {c.selection.interaction_strength: c.rows for c in choice.candidates} == {
        0.0: 32,
        0.2: 8,
        0.5: 32,
        1.0: 8,
    }
    assert choice.interaction_strength == 0
    assert choice.curve["rows"].sum() == len(fake.asked) == 32 + 8 + 32 + 8
    assert choice.curve["stopped_early"].tolist() == [False, True, False, True]
    dropped = choice.candidates[1]
    assert dropped.stopped_early
    assert not dropped.tied
    gap = (table[0.2] - table[0.0])[:8]  # to the winner, over the rows both were measured on
    assert dropped.kl == pytest.approx(table[0.2][:8].mean())
    assert dropped.difference == pytest.approx(gap.mean())
    assert dropped.difference_error == pytest.approx(gap.std(ddof=1) / math.sqrt(8))
    full = choose(list(table), EVERYTHING)
    assert full.curve["rows"].sum() == 4 * 32
    assert full.best.pruned == choice.best.pruned


def test_a_dropped_plan_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped for its first 8 rows although the others would have made it the best of all."""
    turn = np.where(np.arange(32) < 8, 1.0, -5.0)
    planted(monkeypatch, table_by_strength({0.0: np.full(32, 9.0), 1.0: 9 + turn}))
    choice = choose([0.0, 1.0])
    assert choice.winner.selection.interaction_strength == 0
    assert choice.candidates[1].stopped_early
    whole = choose([0.0, 1.0], EVERYTHING)
    assert whole.interaction_strength == 1


def test_a_dropped_plan_is_no_tie_with_a_winner_it_was_close_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0 is dropped against 0.5, yet on those rows it is as good as the later winner, 1."""
    early = np.arange(32) < 8
    noise = np.where(early, np.tile([3.0, -3.0], 16) + 0.9, -5.0)
    table = {0.0: np.full(32, 10.0), 0.5: np.full(32, 9.0), 1.0: 9 + noise}
    planted(monkeypatch, table_by_strength(table))
    choice = choose(list(table))
    dropped = choice.candidates[0]
    assert dropped.stopped_early
    assert dropped.difference < dropped.difference_error
    assert not dropped.tied
    assert choice.interaction_strength == 1


# The rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "strength"), [(0.99, 0.0), (1.01, 0.5)])
def test_ties_go_to_the_smallest_lambda(
    monkeypatch: pytest.MonkeyPatch, gap: float, strength: float
) -> None:
    """The winner is lambda 1; 0.5 is 0.3 paired errors behind it, 0 is just inside or outside."""
    shared = 9 + 30 * wave(1)  # far larger than the paired errors of 1
    table = {0.0: shared + gap + wave(2), 0.5: shared + 0.3 + wave(3), 1.0: shared}
    planted(monkeypatch, table_by_strength(table))
    choice = choose([1.0, 0.5, 0.0])
    assert choice.winner.selection.interaction_strength == 1
    assert choice.interaction_strength == choice.best.interaction_strength == strength
    behind = choice.candidates[0]
    assert behind.difference == pytest.approx(gap)
    assert behind.difference_error == pytest.approx(1)
    assert behind.standard_error > 20
    assert [candidate.tied for candidate in choice.candidates] == [gap < 1, True, True]
    planted(monkeypatch, lambda plan: np.ones(32))
    equal = choose()
    assert equal.interaction_strength == 0
    assert equal.gate == cl.redundancy_gate(CURVATURE, 0.3)


# The lambda that fits -----------------------------------------------------------------------------


@given(st.integers(0, 200), st.floats(0, 1), st.floats(1e-6, 1e2))
@settings(max_examples=80, deadline=None)
def test_the_fitting_lambda_closes_the_gap(seed: int, strength: float, measured: float) -> None:
    """R_lambda(s) = 1/2 sum of H_uu + lambda E, summed here pair by pair, meets R(s) at 1 + b/E."""
    curvature = random_curvature(UNITS, seed)
    plan = cl.solve_greedy(curvature, 0.3, strength)
    numbers = (measured, 0.0, measured, 2, "kl", 0.0, 0.0, False)
    fit = racing.Candidate(plan, ((strength, strength),), (cl.Guards(),), *numbers).fit  # type: ignore[arg-type]
    matrix = curvature.matrix
    node = sum(matrix[u, u] / 2 for u in plan.pruned)
    edges = sum(matrix[u, v] for u in plan.pruned for v in plan.pruned if u < v)
    assert fit.edge_mass == pytest.approx(edges, rel=1e-9, abs=1e-12)
    assert fit.remainder == pytest.approx(measured - node - edges, rel=1e-9, abs=1e-12)
    for value in (0.0, 0.7, 3.0):  # the algebra of the appendix
        gap = node + value * edges - measured
        assert gap == pytest.approx((value - 1) * fit.edge_mass - fit.remainder, abs=1e-9)
    assert node + fit.interaction_strength * edges == pytest.approx(measured, rel=1e-6, abs=1e-9)
    assert plan.with_made(interaction_strength=fit.interaction_strength).objective == pytest.approx(
        measured, rel=1e-6, abs=1e-9
    )
    # the printed sign misses by twice the remainder
    assert node + fit.printed * edges == pytest.approx(measured - 2 * fit.remainder, abs=1e-6)


def test_the_fit_of_planted_numbers() -> None:
    fit = Fit(measured_risk=0.5, standard_error=0.02, edge_mass=0.1, remainder=0.3)
    assert fit.interaction_strength == pytest.approx(4)
    assert fit.printed == pytest.approx(-2)
    assert fit.strength_error == pytest.approx(0.2)
    negative = replace(fit, edge_mass=-0.1)
    assert (negative.interaction_strength, negative.printed) == pytest.approx((-2, 4))
    assert negative.strength_error == pytest.approx(0.2)
    none = replace(fit, edge_mass=0.0)
    values = (none.interaction_strength, none.printed, none.strength_error)
    assert all(math.isnan(value) for value in values)


def test_the_fit_of_a_choice_is_that_of_its_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, table_by_strength({0.0: 9 + wave(1), 1.0: 4 + wave(2, 0.5)}))
    choice = choose([0.0, 1.0])
    best = cl.solve_greedy(CURVATURE, 0.3, 1.0)
    assert choice.fit.measured_risk == pytest.approx(4)
    assert choice.fit.standard_error == pytest.approx(0.5)
    assert choice.fit.remainder == pytest.approx(4 - CURVATURE.risk(best.pruned))
    expected = (4 - best.node_risk) / best.edge_risk  # type: ignore[operator]
    assert choice.fit.interaction_strength == pytest.approx(expected)
    row = choice.curve.iloc[1]
    assert choice.interaction_strength == row["interaction_strength"] == 1
    assert row["fitting_strength"] == choice.fit.interaction_strength
    assert row["fitting_strength_printed"] == pytest.approx(2 - expected)
    assert choice.curve["interaction_strength"].tolist() == [0, 1]


# The report ---------------------------------------------------------------------------------------


def test_the_report_is_measured_on_its_own_rows() -> None:
    model, curvature = real()
    text = tiny_text(4, seed=9)
    choice = cl.choose_interaction_strength(
        model, curvature, 0.4, text, report_on=TEST, options=QUIET
    )
    assert list(choice.report) == ["best", "lambda 0", "lambda 1"]
    plans = {"best": choice.best} | {
        f"lambda {s:g}": cl.solve_greedy(curvature, 0.4, s) for s in (0.0, 1.0)
    }
    rows = {
        name: naive_risk(model, [plan.units[u] for u in plan.pruned], TEST)
        for name, plan in plans.items()
    }
    for name, entry in choice.report.items():
        gap = rows[name] - rows["best"]
        assert entry.selection.pruned == plans[name].pruned
        assert entry.kl == pytest.approx(rows[name].mean(), rel=1e-5)
        assert entry.difference == pytest.approx(gap.mean(), abs=1e-6)
        assert entry.difference_error == pytest.approx(gap.std(ddof=1) / 6**0.5, abs=1e-6)
    silent = cl.choose_interaction_strength(model, curvature, 0.4, text, options=QUIET)
    assert silent.report == {}


def test_a_finished_choice_is_read_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, curvature = real()
    text = tiny_text(6, seed=9)
    options = replace(EVERYTHING, first_rows=2, checkpoint=tmp_path / "kl")
    arguments: dict[str, Any] = {"report_on": TEST, "options": options}
    first = cl.choose_interaction_strength(model, curvature, 0.4, text, **arguments)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["kl.report", "kl.rows0-2", "kl.rows2-4", "kl.rows4-6"]

    def fail(*_: Any) -> None:
        raise AssertionError("a masked pass was made")

    monkeypatch.setattr(risk._Engine, "measure", fail)
    again = cl.choose_interaction_strength(model, curvature, 0.4, text, **arguments)
    assert again.curve.equals(first.curve)
    reports = [
        {name: entry.kl for name, entry in choice.report.items()} for choice in (again, first)
    ]
    assert reports[0] == reports[1]
    with pytest.raises(AssertionError, match="masked pass"):
        cl.choose_interaction_strength(model, curvature, 0.5, text, **arguments)


# Guards -------------------------------------------------------------------------------------------


def choose_from(caps: Any, protections: Any, ratio: float = 0.3, **more: Any) -> Any:
    return choose_guards(
        None,  # type: ignore[arg-type]
        CURVATURE,
        ratio,
        TEXT,
        layer_caps=caps,
        protections=protections,
        options=more.pop("options", QUIET),
        **more,
    )


def test_guards_of_any_maker_of_plans_are_chosen_by_the_same_rule() -> None:
    """A method that takes the last units allowed: the loosest guards that tie with the best."""
    model, curvature = real()
    text = tiny_text(4, seed=9)

    def last(guards: cl.Guards) -> cl.Selection:
        if guards.protect_last:
            short = {"requested_ratio": 0.3, "reachable_ratio": 0.2}
            raise cl.InfeasibleError("it takes the last units", **short)
        free = [u for u, unit in enumerate(curvature.units) if unit.layer >= guards.protect_first]
        return cl.Selection.from_pruned(
            curvature.units, free[-4:] if guards.layer_cap else free[:4]
        )

    choice = choose_guards(
        *(model, curvature, 0.3, text),
        layer_caps=(None, 0.8),
        protections=((0, 0), (1, 0), (1, 1)),
        make=last,
        options=EVERYTHING,
    )
    assert [entry.guards.protect_last for entry in choice.infeasible] == [1, 1]
    kl = [cl.pruning_risk(model, candidate.selection, text) for candidate in choice.candidates]
    assert len(kl) == 3  # both capped plans remove the same units
    assert [candidate.kl for candidate in choice.candidates] == pytest.approx(kl, 1e-5)
    assert set(choice.winner.selection.pruned) == set(
        choice.candidates[int(np.argmin(kl))].selection.pruned
    )
    assert choice.report == {}


def test_the_curve_of_guards_is_the_measured_risk_of_each_plan() -> None:
    model, curvature = real()
    text = tiny_text(4, seed=9)
    choice = choose_guards(
        model,
        curvature,
        0.3,
        text,
        layer_caps=(None, "1.5x", 0.8),
        protections=((0, 0), (1, 0)),
        interaction_strength=0.5,
        report_on=TEST,
        options=EVERYTHING,
    )
    assert len(choice.candidates) > 1
    for candidate in choice.candidates:
        assert candidate.kl == pytest.approx(
            cl.pruning_risk(model, candidate.selection, text), 1e-5
        )
        assert candidate.selection.interaction_strength == 0.5
        for guards in candidate.guards:
            made = cl.solve_greedy(curvature, 0.3, 0.5, guards)
            assert set(made.pruned) == set(candidate.selection.pruned)
    tried = [guards for candidate in choice.candidates for guards in candidate.guards]
    tried += [entry.guards for entry in choice.infeasible]
    assert sorted(map(repr, tried)) == sorted(
        repr(cl.Guards(**cap, protect_first=first))
        for cap in ({}, {"layer_cap_factor": 1.5}, {"layer_cap": 0.8})
        for first in (0, 1)
    )
    assert choice.report["best"].kl == pytest.approx(
        cl.pruning_risk(model, choice.best, TEST), 1e-5
    )
    assert choice.report["no guards"].selection.guards == cl.Guards()
    assert "release's guards" not in choice.report  # protects four of three layers: no plan


def test_guards_that_give_no_plan_are_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, lambda plan: np.ones(32))
    choice = choose_from((None, 0.3), ((0, 0), (2, 2)))
    # 0.3 of each layer leaves less than 0.3 in whole units; four open layers of eight likewise
    refused = {(e.guards.layer_cap, e.guards.protect_first): e for e in choice.infeasible}
    assert set(refused) == {(0.3, 0), (0.3, 2)}
    assert "under cap 0.3" in refused[0.3, 0].reason
    assert "the most that any plan reaches" in refused[0.3, 2].reason
    assert all("ratio 0.3 is out of reach" in entry.reason for entry in choice.infeasible)
    with pytest.raises(cl.InfeasibleError, match="out of reach") as caught:
        choose_from((0.1, 0.2), ((0, 0), (1, 1)))
    with pytest.raises(cl.InfeasibleError) as loosest:
        cl.solve_greedy(CURVATURE, 0.3, 1.0, cl.Guards(layer_cap=0.2))
    assert str(caught.value) == str(loosest.value)


@pytest.mark.parametrize(("gap", "protected"), [(0.9, 0), (1.1, 1), (3.0, 1)])
def test_ties_go_to_the_loosest_guards(
    monkeypatch: pytest.MonkeyPatch, gap: float, protected: int
) -> None:
    loose, tight = (
        cl.solve_greedy(CURVATURE, 0.3, 1.0, cl.Guards(protect_first=p)) for p in (0, 1)
    )
    rows = {loose.fingerprint: 9 + gap + wave(1), tight.fingerprint: np.full(32, 9.0)}
    assert len(rows) == 2
    planted(monkeypatch, lambda plan: rows[plan.fingerprint])
    choice = choose_from((None,), ((1, 0), (0, 0)))
    assert [candidate.guards[0].protect_first for candidate in choice.candidates] == [0, 1]
    assert choice.guards.protect_first == choice.best.guards.protect_first == protected
    assert choice.winner.guards[0].protect_first == 1


def test_guards_can_be_chosen_by_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    loose, tight = (
        cl.solve_greedy(CURVATURE, 0.3, 1.0, cl.Guards(protect_first=p)) for p in (0, 1)
    )
    rows = {loose.fingerprint: 6 + wave(1), tight.fingerprint: 9 + wave(2)}
    planted(monkeypatch, lambda plan: rows[plan.fingerprint])
    by_kl = choose_from((None,), ((0, 0), (1, 0)))
    by_loss = choose_from((None,), ((0, 0), (1, 0)), options=replace(QUIET, judge="nll"))
    assert (by_kl.guards.protect_first, by_loss.guards.protect_first) == (0, 1)
    assert by_loss.winner.judged == by_loss.winner.nll == pytest.approx(10 - by_loss.winner.kl)
    assert by_loss.curve["perplexity"][0] == math.exp(by_loss.candidates[0].nll)
    assert by_loss.candidates[0].difference > 0


def test_guards_that_do_not_bind_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = planted(monkeypatch, lambda plan: np.ones(32))
    choice = choose_from((1.0, None, "5x"), ((0, 0),))
    (only,) = choice.candidates
    assert len(only.guards) == 3
    assert len(fake.asked) == 32


# Bad input ----------------------------------------------------------------------------------------


def on_real(chooser: Any, held_out: cl.CalibrationSet, report_on: Any = None) -> Any:
    return chooser(*real(), 0.3, held_out, report_on=report_on)


SEEN = tiny_text(4)  # what `real` was built on
SHARED = [(SEEN, None), (SEEN, TEST), (TEST, SEEN), (TEST, TEST.rows(5, 6))]
BAD_GUARDS: list[tuple[Any, Any]] = [
    *(((), ((0, 0),)), ((None,), ())),
    *(((cap,), ((0, 0),)) for cap in (1.5, "-1x")),
    *(((None,), (protection,)) for protection in ((0, -1),)),
]
BAD_OPTIONS: list[dict[str, Any]] = [
    *({"max_candidates": 1}, {"first_rows": 1}, {"stop_beyond": 0.5}, {"stop_beyond": math.nan}),
    {"judge": "accuracy"},
]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (lambda c=candidates: choose(c), cl.InputError)
            for candidates in ("grid", [], [0.5, -0.1], [math.nan], [math.inf], ["a"])
        ),
        *((lambda g=guards: choose_from(*g), cl.InputError) for guards in BAD_GUARDS),
        *((lambda o=options: cl.ChoiceOptions(**o), cl.InputError) for options in BAD_OPTIONS),
        (
            lambda: cl.choose_interaction_strength(None, CURVATURE, 0.3, TEXT.rows(0, 1)),  # type: ignore[arg-type]
            cl.InputError,
        ),
        (
            lambda: cl.choose_interaction_strength(None, CURVATURE, 1.0, TEXT),  # type: ignore[arg-type]
            cl.InputError,
        ),
        (lambda: choose_from((None,), ((0, 0),), interaction_strength=-1.0), cl.InputError),
        # a curvature of other units than the model's
        (lambda: cl.choose_interaction_strength(real()[0], CURVATURE, 0.3, TEXT), cl.MismatchError),
        *(
            (lambda c=chooser, rows=rows: on_real(c, *rows), cl.MismatchError)
            for chooser in (cl.choose_interaction_strength, choose_guards)
            for rows in SHARED
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def stalling() -> tuple[cl.Curvature, cl.Guards]:
    """Room for 4 of 7 per layer: at lambda 0 cheap attention (3) blocks the FFN pair (2 + 2)."""
    units = cl.UnitSet(
        (
            cl.Unit("attention", 0, 0, 0, 3, 3),
            cl.Unit("ffn", 0, 0, 0, 2, 2),
            cl.Unit("ffn", 0, 1, 2, 4, 2),
            cl.Unit("ffn", 1, 0, 0, 4, 4),
            cl.Unit("ffn", 1, 1, 4, 7, 3),
        )
    )
    # layer 1 goes first; it is correlated with the attention unit
    features = np.array([[1.0, 0, 0], [0, 1.2, 0], [0, 0, 1.2], [0.9, 0, 0], [0, 9.0, 9.0]])
    return gram_curvature(units, features), cl.Guards(layer_cap=4 / 7)


def test_lambdas_at_which_greedy_stalls_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature, guards = stalling()
    planted(monkeypatch, lambda plan: np.ones(32))

    def chosen(candidates: Any) -> Any:
        return cl.choose_interaction_strength(
            None,  # type: ignore[arg-type]
            *(curvature, 0.55, TEXT, guards),
            candidates=candidates,
            options=QUIET,
        )

    for candidates in ("path", [0.0, 1.0]):
        choice = chosen(candidates)
        (stall,) = choice.infeasible
        assert "stalls at 50" in stall.reason
        assert stall.interval[0] == 0
        assert set(choice.best.pruned) == {1, 2, 3}
    with pytest.raises(cl.InfeasibleError):
        chosen([0.0, 0.01])
